//! A queue, and a configuration in a file.

use oncegate_testkit::{Process, Redis, Sqs, process, unique, until};

use super::{LIMIT, example};

#[tokio::test]
async fn a_queue_is_worked_off_and_repeats_have_no_second_effect() {
    let sqs = Sqs::shared().await;
    let redis = Redis::shared().await;
    let dir = tempfile::tempdir().unwrap();
    let queue = sqs.new_queue("run").await;
    let dead = sqs.new_queue("run-dead").await;
    let ledger = dir.path().join("ledger");
    let log = dir.path().join("log");
    let file = dir.path().join("oncegate.toml");
    let config = format!(
        r#"version = 1
[store]
url = {url:?}
[status]
listen = "off"
[defaults]
lease = "2s"
concurrency = 4
[consumer.{scope}]
source = {{ sqs = {{ queue = {queue:?}, wait = "1s", visibility = "5s" }} }}
key = {{ json = ["order_id"] }}
handler = {{ exec = ["python3", {worker:?}, {ledger:?}], workers = 2 }}
dead_letters = {{ sqs = {dead:?} }}
"#,
        url = redis.url(),
        scope = unique("run"),
        queue = queue.url(),
        dead = dead.url(),
        worker = example("python/worker_stdio.py"),
    );
    std::fs::write(&file, config).unwrap();
    let orders = || (0..30).map(|n| format!(r#"{{"order_id":"A-{n}"}}"#));
    queue.send(orders()).await;
    queue.send(["{not json"]).await;

    let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
    command.args(["run", "--config"]).arg(&file);
    command.envs([
        ("AWS_ACCESS_KEY_ID", "none"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ]);
    let mut running = Process::spawn_logged("oncegate run", command, &log);
    queue.until_empty().await;
    let effects = std::fs::read_to_string(&ledger).unwrap();
    assert_eq!(effects.lines().count(), 30);
    queue.send(orders()).await;
    queue.until_empty().await;
    assert_eq!(
        std::fs::read_to_string(&ledger).unwrap(),
        effects,
        "a second effect"
    );
    until(
        "the bad message to be with the dead letters",
        LIMIT,
        async || match dead.depth().await.total() {
            1 => Ok(()),
            other => Err(format!("{other} letters")),
        },
    )
    .await;
    running.signal("TERM");
    assert_eq!(
        running.end_within(LIMIT).await.code(),
        Some(0),
        "{}",
        std::fs::read_to_string(&log).unwrap()
    );
}
