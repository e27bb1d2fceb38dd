//! Messages that their worker cannot do yet, and wants later.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::Stage;
use super::raw::{Answer, RawWorker};

/// How often each message is wanted later: more often than the attempts that it has.
const POLLS: u32 = 6;
const MESSAGES: usize = 60;

/// The flags under which a message that had failed as often would be a dead letter, and the breaker
/// open.
const STRICT: [&str; 4] = ["--set", "max_attempts=2", "--set", "ordering=unordered"];

/// Every job is asked for again and again until it is done. As failures these would be three
/// hundred, of sixty keys.
// invariant: later-counted
#[tokio::test]
async fn a_worker_that_polls_uses_up_no_attempt_and_opens_no_breaker() {
    let stage = Stage::with_orders(MESSAGES).await;
    let polls: Mutex<BTreeMap<String, u32>> = Mutex::default();
    let worker = RawWorker::start(move |asked| {
        let mut polls = polls.lock().unwrap();
        let polled = polls.entry(asked.body.clone()).or_default();
        *polled += 1;
        if *polled <= POLLS {
            Answer::status(
                200,
                "oncegate-outcome: later\r\nretry-after: 0\r\n",
                "the job is not done",
            )
        } else {
            Answer::status(200, "", "done")
        }
    })
    .await;
    stage
        .consume(&[&["--handler", &worker.url()][..], &STRICT].concat())
        .await;
    let mut runs: BTreeMap<String, Vec<(u32, bool)>> = BTreeMap::new();
    for asked in worker.asked() {
        runs.entry(asked.body.clone())
            .or_default()
            .push((asked.attempt(), asked.recovered()));
    }
    assert_eq!(runs.len(), MESSAGES);
    for (message, runs) in runs {
        assert_eq!(
            runs,
            [(1, false); POLLS as usize + 1],
            "{message}: it is its first attempt each time"
        );
    }
    assert!(!stage.log().contains("circuit breaker"), "{}", stage.log());
    assert!(stage.letters().await.is_empty());
}

#[tokio::test]
async fn a_stdio_worker_gets_a_message_again_after_the_delay_it_names() {
    let stage = Stage::with_orders(1).await;
    let command = stage.python(
        r#"
import json, sys, time
print(json.dumps({"type": "ready", "v": 1}), flush=True)
calls = 0
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] != "message":
        continue
    calls += 1
    with open(sys.argv[1], "a") as ledger:
        ledger.write(json.dumps([message["attempt"], time.monotonic()]) + "\n")
    answer = {"outcome": "later", "delay_ms": 1500, "reason": "not ready"} if calls < 4 else {"outcome": "complete"}
    print(json.dumps({"id": message["id"], **answer}), flush=True)
"#,
    );
    stage
        .consume(&[&["--handler-exec", &command][..], &STRICT].concat())
        .await;
    let runs: Vec<(u32, f64)> = stage.noted();
    assert_eq!(
        runs.iter().map(|(attempt, _)| *attempt).collect::<Vec<_>>(),
        [1; 4]
    );
    assert!(
        runs.windows(2).all(|pair| pair[1].1 - pair[0].1 >= 1.5),
        "not before its delay: {runs:?}"
    );
    assert!(stage.letters().await.is_empty());
}

/// A message waits in its retry topic for longer than the longest back-off: its delay is no
/// retry's.
#[tokio::test]
async fn a_delay_beyond_the_backoff_goes_uncut_to_a_retry_topic() {
    const DELAY: Duration = Duration::from_secs(3);
    let stage = Stage::with_orders(1).await;
    let later = stage.kafka.new_topic("run-later", 1).await;
    let times: std::sync::Arc<Mutex<Vec<Instant>>> = Default::default();
    let seen = std::sync::Arc::clone(&times);
    let worker = RawWorker::start(move |asked| {
        let mut times = seen.lock().unwrap();
        times.push(Instant::now());
        assert_eq!(asked.attempt(), 1);
        match times.len() {
            1 => Answer::status(202, "oncegate-outcome: later\r\nretry-after: 3\r\n", ""),
            _ => Answer::status(200, "", ""),
        }
    })
    .await;
    let set = |setting: &str| format!("--set=consumer.{}.{setting}", stage.scope);
    let topic = format!("{later}=3s");
    let beyond = set("source.kafka.retry_beyond=1s");
    let backoff = set("backoff.most=200ms");
    let flags = [
        "--handler",
        &worker.url(),
        "--retry-topic",
        &topic,
        &beyond,
        &backoff,
    ];
    let running = stage.start(&[&flags[..], &STRICT].concat());
    stage.until_consumed(&running.group).await;
    let limit = super::LIMIT;
    oncegate_testkit::until("the second run", limit, async || {
        match times.lock().unwrap()[..] {
            [first, second] if second - first >= DELAY => Ok(()),
            ref other => Err(format!("{other:?}\n{}", stage.log())),
        }
    })
    .await;
    running.stop().await;
    assert_eq!(
        stage.kafka.read_all(&later).await.len(),
        1,
        "it waited elsewhere"
    );
    assert!(stage.letters().await.is_empty());
}
