//! Workers on standard streams that stop answering.

use oncegate_testkit::until;

use super::{LIMIT, Stage};

/// It sleeps on the first message that any process of it gets, and records what each was given.
const SLEEPS_ONCE: &str = r#"
import json, os, signal, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] != "message": continue
    order = json.loads(message["payload"])["order_id"]
    first = not os.path.exists(sys.argv[1])
    with open(sys.argv[1], "a") as ledger:
        ledger.write(json.dumps([order, message["attempt"], message["recovered"], os.getpid()]) + "\n")
    while first: signal.pause()
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;

type Given = (String, u32, bool, u32);

// invariant: worker-hangs
#[tokio::test]
async fn a_hung_worker_is_replaced_and_only_its_message_is_unknown() {
    let stage = Stage::with_orders(4).await;
    let command = stage.python(SLEEPS_ONCE);
    let flags = [
        "--handler-exec",
        &command,
        "--lease",
        "1s",
        "--timeout",
        "3s",
        "--set",
        "max_attempts=2",
    ];
    stage.consume(&flags).await;
    assert!(
        stage.letters().await.is_empty(),
        "{:?}\n{}",
        stage.letters().await,
        stage.log()
    );
    let given: Vec<Given> = stage.noted();
    let (hung, _, _, first_process) = given[0].clone();
    let mut others: Vec<&Given> = given.iter().filter(|(order, ..)| *order != hung).collect();
    others.sort();
    assert_eq!(others.len(), 3, "{given:?}");
    assert!(
        others
            .iter()
            .all(|(_, attempt, recovered, _)| (*attempt, *recovered) == (1, false)),
        "what the hung process never had is new: {given:?}"
    );
    let of_hung: Vec<(u32, bool)> = given
        .iter()
        .filter(|given| given.0 == hung)
        .map(|given| (given.1, given.2))
        .collect();
    assert_eq!(of_hung, [(1, false), (2, true)], "{given:?}");
    assert!(
        given.iter().skip(1).all(|given| given.3 != first_process),
        "another process: {given:?}"
    );
    assert!(
        stage
            .log()
            .contains("within 800ms after the message was cancelled"),
        "{}",
        stage.log()
    );
}

/// The process that hangs is gone before another gets the message, also without a `timeout`: here
/// the record is deleted while the worker has the message.
#[tokio::test]
async fn without_its_record_a_message_recovers_after_its_first_run() {
    let stage = Stage::with_orders(1).await;
    let command = stage.python(SLEEPS_ONCE);
    let flags = [
        "--handler-exec",
        &command,
        "--workers",
        "2",
        "--lease",
        "3s",
    ];
    let running = stage.start(&flags);
    until("the worker to have the message", LIMIT, async || {
        if stage.noted::<Given>().is_empty() {
            Err(stage.log())
        } else {
            Ok(())
        }
    })
    .await;
    // The record of the check of the Redis user's rights may still be among them.
    assert!(stage.redis.delete_records(&stage.scope).await >= 1);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    let given: Vec<Given> = stage.noted();
    let told: Vec<(u32, bool)> = given.iter().map(|given| (given.1, given.2)).collect();
    assert_eq!(told, [(1, false), (1, true)], "{given:?}\n{}", stage.log());
    assert!(
        stage.log().contains("no longer owns the record"),
        "{}",
        stage.log()
    );
    assert!(
        !stage.log().contains("no heartbeat was confirmed"),
        "{}",
        stage.log()
    );
    let killed = "after the message was cancelled";
    let unknown = "the outcome of an attempt is unknown";
    let at = |words: &str| {
        stage
            .log()
            .find(words)
            .unwrap_or_else(|| panic!("{words}: {}", stage.log()))
    };
    assert!(at(killed) > 0 && at(unknown) > 0);
}

/// A worker whose first process ends with its first message. The second process is not ready before
/// the test lets it.
const ENDS_ONCE: &str = r#"
import json, os, signal, sys, time
base = sys.argv[1]
if os.path.exists(base + ".started"):
    while not os.path.exists(base + ".go"): time.sleep(0.02)
open(base + ".started", "w").close()
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] != "message": continue
    order = json.loads(message["payload"])["order_id"]
    if not os.path.exists(base + ".go"):
        open(base + ".died", "w").write(order)
        os.kill(os.getpid(), signal.SIGKILL)
    with open(base, "a") as ledger:
        ledger.write(json.dumps([order, message["attempt"], message["recovered"], os.getpid()]) + "\n")
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;

/// While every worker hangs, nothing else is claimed: what waits is not counted and not recovered.
// invariant: worker-hangs
#[tokio::test]
async fn messages_that_wait_for_a_worker_are_not_counted() {
    let stage = Stage::with_orders(3).await;
    let command = stage.python(ENDS_ONCE);
    let max_run = format!("consumer.{}.max_run=1s", stage.scope);
    let flags = [
        "--handler-exec",
        &command,
        "--lease",
        "1s",
        "--set",
        "max_attempts=2",
        "--set",
        &max_run,
        "--set",
        "ordering=unordered",
    ];
    let running = stage.start(&flags);
    until(
        "messages to be given back unseen, three times",
        LIMIT,
        async || {
            let log = stage.log();
            if log.matches("before the worker had the message").count() >= 3 {
                Ok(())
            } else {
                Err(log)
            }
        },
    )
    .await;
    std::fs::write(stage.path("ledger.go"), "").unwrap();
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert!(
        stage.letters().await.is_empty(),
        "{:?}\n{}",
        stage.letters().await,
        stage.log()
    );
    let died = std::fs::read_to_string(stage.path("ledger.died")).unwrap();
    let mut given: Vec<Given> = stage.noted();
    given.sort();
    assert_eq!(given.len(), 3, "{given:?}");
    for (order, attempt, recovered, _) in &given {
        let expected = if *order == died {
            (2, true)
        } else {
            (1, false)
        };
        assert_eq!(
            (*attempt, *recovered),
            expected,
            "{order} of {given:?}, {died} killed its process"
        );
    }
}
