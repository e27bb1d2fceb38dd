//! `oncegate sweep`.

use std::fs::File;
use std::time::{Duration, SystemTime};

use oncegate::results::ObjectResults;
use oncegate::{Completion, Entry, Gate, Key, MemoryStore, Message, Origin};

#[cfg(feature = "s3")]
use super::command;
use super::oncegate;

#[tokio::test]
async fn results_that_are_over_are_counted_and_then_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let results = ObjectResults::folder(folder.path()).unwrap();
    let gate = Gate::new("billing", Key::json(["id"]), MemoryStore::new()).large_results(results);
    for id in 1..=2 {
        let payload = format!(r#"{{"id":{id}}}"#);
        let message = Message::new(
            "orders",
            Origin::Other("a test".into()),
            Some(payload.into()),
        );
        let Entry::Granted(lease) = gate.enter(&message).await.unwrap() else {
            panic!("{id} is new")
        };
        assert_eq!(
            lease.complete(&"4111".repeat(50_000)).await.unwrap(),
            Completion::Applied
        );
    }
    let shards = std::fs::read_dir(folder.path().join("billing"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let old = shards
        .filter(|path| path.is_dir())
        .map(|shard| shard.read_dir().unwrap().next().unwrap().unwrap().path());
    let old = old.min().unwrap();
    let then = SystemTime::now() - Duration::from_secs(10 * 86_400);
    File::options()
        .write(true)
        .open(&old)
        .unwrap()
        .set_modified(then)
        .unwrap();

    let place = folder.path().to_str().unwrap();
    let sweep = async |more: &[&str]| {
        let fixed = [
            "sweep",
            "--results",
            place,
            "--scope",
            "billing",
            "--older-than",
            "9d",
        ];
        oncegate(&[&fixed[..], more].concat(), b"").await
    };
    let counted = sweep(&["--dry-run"]).await;
    assert_eq!(
        counted.ended(0).line("would be deleted"),
        "would be deleted 1"
    );
    assert!(old.exists());
    let deleted = sweep(&["--json"]).await.ended(0).json();
    assert_eq!(
        (&deleted["over"], &deleted["over_bytes"]),
        (&1.into(), &200_003.into())
    );
    // The other one, and the marker that a gate was opened.
    assert_eq!(deleted["kept"], 2);
    assert!(!old.exists());
    assert_eq!(sweep(&[]).await.ended(0).line("deleted"), "deleted 0");
}

#[tokio::test]
async fn places_that_cannot_be_swept() {
    let arguments = |place| {
        [
            "sweep",
            "--results",
            place,
            "--scope",
            "billing",
            "--older-than",
            "9d",
        ]
    };
    oncegate(&arguments("/no/such/folder"), b"")
        .await
        .ended(69)
        .says("/no/such/folder");
    oncegate(&arguments("gs://bucket"), b"")
        .await
        .ended(78)
        .says("known are a folder");
    assert!(!std::path::Path::new("/no/such/folder").exists());
}

#[cfg(feature = "s3")]
#[tokio::test]
async fn a_bucket_is_swept_with_what_the_environment_says() {
    let server = oncegate_testkit::MotoServer::start().await;
    let bucket = oncegate_testkit::Bucket::create(server.endpoint()).await;
    bucket.write("results/billing/ab/fresh", b"fresh").await;
    bucket
        .write("elsewhere/billing/ab/other", b"not below the prefix")
        .await;
    let place = format!("s3://{}/results", bucket.name());
    let arguments = [
        "sweep",
        "--results",
        &place,
        "--scope",
        "billing",
        "--older-than",
        "9d",
        "--json",
    ];
    let environment = [
        ("AWS_ENDPOINT_URL", server.endpoint()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", "anybody"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ];
    let output = command(&arguments)
        .envs(environment)
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["kept"], &found["over"]), (&1.into(), &0.into()));
    assert_eq!(found["dry_run"], false);
    let objects = [
        "elsewhere/billing/ab/other",
        "results/billing/ab/fresh",
        "results/billing/clock",
    ];
    assert_eq!(bucket.objects().await, objects);
}
