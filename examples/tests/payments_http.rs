//! The HTTP payments example as its users run it.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that cannot go on has failed")]

use std::path::PathBuf;
use std::process::Command;

#[test]
fn it_proves_itself() {
    // Cargo builds a package's examples before it runs its tests, in a folder next to theirs.
    let tests: PathBuf = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let program = tests.parent().unwrap().join("examples").join("payments_http");
    let output = Command::new(program).arg("--json").output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    let scenes: serde_json::Value = serde_json::from_str(&text).expect("the proof is JSON");
    let scenes = scenes.as_array().unwrap();
    assert_eq!(scenes.len(), 5);
    for scene in scenes {
        assert_eq!((&scene["holds"], &scene["charges"]), (&true.into(), &1.into()), "{scene}");
    }
}
