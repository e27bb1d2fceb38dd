//! Large results in a folder, and in S3.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod folder;
mod kill;
mod s3;

use std::time::Duration;

use bytes::Bytes;
use oncegate::core::key::Scope;
use oncegate::results::{ObjectResults, ResultStore, Sweep};
use oncegate::{Completion, Entry, Gate, Key, MemoryStore, Message, Origin};
use oncegate_testkit::unique;

const DAY: Duration = Duration::from_secs(86_400);

fn message(id: u64) -> Message {
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(format!(r#"{{"id":{id}}}"#).into()),
    )
}

/// Completes the message with a result of a million characters that no other message has, and
/// returns it.
async fn complete(gate: &Gate, id: u64) -> String {
    let Entry::Granted(lease) = gate.enter(&message(id)).await.unwrap() else {
        panic!("{id} is new")
    };
    let result = unique("receipt").chars().cycle().take(1_000_000).collect();
    assert_eq!(lease.complete(&result).await.unwrap(), Completion::Applied);
    result
}

/// What a duplicate gets.
async fn answer(gate: &Gate, id: u64) -> Result<String, String> {
    match gate.enter(&message(id)).await.unwrap() {
        Entry::Completed(stored) => stored.decode().map_err(|error| error.to_string()),
        other => panic!("{id} is completed, but the gate returns {other:?}"),
    }
}

/// What every result store must do.
async fn conforms(results: &ObjectResults) {
    let scope = unique("results");
    let name = format!("{scope}/ab/abcd.0123");
    assert_eq!(results.get(&name, 10).await.unwrap(), None);
    for _ in 0..2 {
        results
            .put(&name, Bytes::from_static(b"12345"))
            .await
            .unwrap();
        assert_eq!(
            results.get(&name, 10).await.unwrap().as_deref(),
            Some(&b"12345"[..])
        );
    }
    assert_eq!(
        results.get(&name, 5).await.unwrap().as_deref(),
        Some(&b"12345"[..])
    );
    assert_eq!(
        results.get(&name, 4).await.unwrap(),
        None,
        "larger than was asked for"
    );
    let large: Bytes = (0..=u8::MAX).cycle().take(8 << 20).collect();
    for (bytes, end) in [
        (Bytes::new(), "e"),
        (Bytes::from_static(&[0]), "z"),
        (large, "l"),
    ] {
        let name = format!("{name}{end}");
        results.put(&name, bytes.clone()).await.unwrap();
        assert!(
            results.get(&name, bytes.len() as u64).await.unwrap() == Some(bytes),
            "{end} came back changed"
        );
    }
    // Scopes may be spelt like this; they must not lead out of the store.
    for scope in [".", "..", "..."] {
        let name = format!("{scope}/ab/abcd.{}", unique("x"));
        results
            .put(&name, Bytes::from_static(b"dots"))
            .await
            .unwrap();
        assert_eq!(
            results.get(&name, 10).await.unwrap().as_deref(),
            Some(&b"dots"[..]),
            "{scope}"
        );
        let swept = results
            .sweep(&Scope::new(scope).unwrap(), DAY, Sweep::Delete)
            .await
            .unwrap();
        assert_eq!((swept.over, swept.kept >= 1), (0, true), "{scope}");
    }
}

/// A gate over a store in memory, with these results.
fn gate(scope: &str, results: ObjectResults) -> Gate {
    Gate::new(scope, Key::json(["id"]), MemoryStore::new())
        .retention(DAY)
        .large_results(results)
}
