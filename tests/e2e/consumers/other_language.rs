//! A worker that was written from `docs/RECORD_FORMAT.md` alone, in another language, beside a gate
//! on one Redis.

use std::path::Path;
use std::time::Duration;

use oncegate::core::key::Scope;
use oncegate::redis::RedisStore;
use oncegate::{Completion, Entry, Gate, Key, Message, Origin};
use oncegate_testkit::{Redis, unique};
use serde_json::{Value, json};
use tokio::process::Command;

const LIMIT: Duration = Duration::from_secs(240);

/// The Python worker and the gate, on one scope.
struct Both {
    redis: Redis,
    scope: String,
    gate: Gate,
}

impl Both {
    async fn new() -> Self {
        let redis = Redis::shared().await;
        let scope = unique("python");
        let store = RedisStore::connect(redis.url()).await.unwrap();
        let gate = Gate::new(scope.as_str(), Key::json(["order_id"]), store)
            .lease(Duration::from_secs(60));
        Self { redis, scope, gate }
    }

    async fn python(&self, verb: &str, id: u32, more: &[&str]) -> Value {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let address = self
            .redis
            .url()
            .trim_start_matches("redis://")
            .trim_end_matches('/');
        let (host, port) = address.rsplit_once(':').unwrap();
        let key = Key::json(["order_id"])
            .compile(&Scope::new(&self.scope).unwrap())
            .unwrap();
        let key = key.derive("orders", &order(id)).unwrap();
        let mut command = Command::new("python3");
        command.arg(root.join("crates/oncegate-core/vectors/record.py"));
        command
            .args([host, port])
            .arg(root.join("lua"))
            .args([verb, key.as_str()])
            .args(more)
            .kill_on_drop(true);
        let output = tokio::time::timeout(LIMIT, command.output())
            .await
            .unwrap()
            .unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        serde_json::from_slice(&output.stdout).unwrap()
    }

    async fn enter(&self, id: u32) -> Entry {
        self.gate.enter(&order(id)).await.unwrap()
    }
}

fn order(id: u32) -> Message {
    let payload = format!(r#"{{"order_id":{id}}}"#);
    Message::new(
        "orders",
        Origin::Other("a test".into()),
        Some(payload.into()),
    )
}

// invariant: one-language-format
#[tokio::test]
async fn what_one_language_completes_the_other_gets_and_never_runs() {
    let both = Both::new().await;
    let run = ["30000", "3600000", r#""receipt from Python""#];
    let done = both.python("run", 1, &run).await;
    assert_eq!(
        (&done["verdict"], &done["attempt"], &done["held"]),
        (&"granted".into(), &1.into(), &true.into())
    );
    let Entry::Completed(stored) = both.enter(1).await else {
        panic!("it would run again")
    };
    assert_eq!(stored.decode::<String>().unwrap(), "receipt from Python");

    let Entry::Granted(lease) = both.enter(2).await else {
        panic!("not granted")
    };
    assert_eq!(
        lease.complete(&"receipt from Rust").await.unwrap(),
        Completion::Applied
    );
    let again = both.python("run", 2, &run).await;
    assert_eq!(
        again,
        json!({"verdict": "completed", "result": r#""receipt from Rust""#})
    );
    let record = both.python("read", 2, &[]).await;
    assert_eq!(
        (&record["state"], &record["encoding"]),
        (&"completed".into(), &1.into())
    );
}

// invariant: one-language-format
#[tokio::test]
async fn what_one_language_has_claimed_the_other_waits_for() {
    let both = Both::new().await;
    assert_eq!(
        both.python("claim", 1, &["60000"]).await["verdict"],
        "granted"
    );
    let Entry::Busy { retry_in } = both.enter(1).await else {
        panic!("two owners")
    };
    assert!(retry_in <= Duration::from_millis(60_001), "{retry_in:?}");

    let Entry::Granted(lease) = both.enter(2).await else {
        panic!("not granted")
    };
    let busy = both.python("claim", 2, &["60000"]).await;
    assert_eq!(busy["verdict"], "busy");
    let record = both.python("read", 2, &[]).await;
    assert_eq!(
        (&record["state"], &record["attempt"]),
        (&"pending".into(), &1.into())
    );
    lease
        .release(Duration::ZERO, true, "the bank is closed")
        .await;
    let record = both.python("read", 2, &[]).await;
    assert_eq!(
        (&record["attempts"], &record["reason"]),
        (&1.into(), &"the bank is closed".into())
    );

    let Entry::Granted(lease) = both.enter(3).await else {
        panic!("not granted")
    };
    assert_eq!(lease.fail("no such account").await, Completion::Applied);
    let failed = both.python("claim", 3, &["60000"]).await;
    assert_eq!(
        failed,
        json!({"verdict": "failed", "handed_over": false, "reason": "no such account"})
    );
    assert_eq!(both.python("read", 4, &[]).await["state"], "absent");
}
