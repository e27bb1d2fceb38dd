//! `oncegate generate`.

use super::oncegate;

#[tokio::test]
async fn shells_and_readers_of_manuals_know_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = oncegate(&["generate", "completions", shell], b"").await;
        assert!(
            script.ended(0).out.contains("dead-letters") && script.out.contains("redrive"),
            "{shell}"
        );
    }
    let page = oncegate(&["generate", "man"], b"").await;
    assert!(page.ended(0).out.contains(".TH oncegate 1"), "{page:?}");
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("man1");
    let pages = oncegate(
        &[
            "generate",
            "man",
            "--folder",
            folder.to_str().expect("text"),
        ],
        b"",
    )
    .await;
    assert_eq!(pages.ended(0).out, "");
    for page in [
        "oncegate.1",
        "oncegate-replay.1",
        "oncegate-dead-letters-redrive.1",
    ] {
        assert!(folder.join(page).is_file(), "{page}");
    }
}
