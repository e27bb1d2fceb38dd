//! Commands in the folder of a configuration, which need no flag there.

use super::{Beside, ORDER, billing, completed};

/// The configuration, with all that one of the commands here needs.
fn shop() -> Beside {
    let large = "large_results = \"results\"\n";
    let outbox = "[outbox.shop]\nkafka = { brokers = \"127.0.0.1:1\" }\n";
    let folder = Beside::new(&[billing().as_str(), large, outbox].concat());
    std::fs::create_dir(folder.path().join("results")).unwrap();
    folder
}

#[tokio::test]
async fn each_command_finds_the_configuration_of_its_folder() {
    let folder = shop();
    let key = completed(folder.path()).await;
    folder.oncegate(&["check"], b"").await.ended(0);
    let explained = folder.oncegate(&["key", "--json"], ORDER).await;
    assert_eq!(explained.ended(0).json()["store_key"], key);
    let swept = folder.oncegate(&["sweep", "--dry-run"], b"").await;
    assert_eq!(swept.ended(0).line("scope"), "scope billing");
    assert!(swept.line("results").ends_with("results"), "{swept:?}");
    let waiting = folder.oncegate(&["outbox", "status"], b"").await;
    assert_eq!(waiting.ended(1).line("outbox"), "outbox shop");
    for (obstacle, words) in [
        ("loss", "scope billing is not halted"),
        ("dead-letters", "no consumer of scope billing"),
    ] {
        folder
            .oncegate(&["accept", obstacle, "--dry-run"], b"")
            .await
            .ended(1)
            .says(words);
    }
    folder
        .oncegate(&["migrate", "--dry-run"], b"")
        .await
        .ended(78)
        .says("only postgres://");
}

#[tokio::test]
async fn a_folder_without_a_configuration_is_told_so() {
    let folder = shop();
    std::fs::remove_file(&folder.file).unwrap();
    for arguments in [
        &["check"][..],
        &["topics", "create", "--dry-run"],
        &["accept", "loss", "--dry-run"],
        &["sweep", "--dry-run"],
        &["outbox", "status"],
        &["key"],
        &["migrate", "--dry-run"],
    ] {
        let answer = folder.oncegate(arguments, b"{}").await;
        answer.ended(2).says("--config");
    }
}
