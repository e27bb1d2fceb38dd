//! Workers that answer wrongly once: what happens to the message, and what the next attempt gets.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_testkit::until;

use super::raw::{Answer, Asked, RawWorker};
use super::{LIMIT, Stage};

/// What a worker does at the first attempt of a message that names it.
fn first_answer(how: &str) -> Answer {
    match how {
        "503" | "504" => Answer::status(how.parse().unwrap(), "", "no upstream"),
        "own-503" => Answer::status(503, "oncegate-outcome: retry\r\n", "not now"),
        "404" | "401" | "429" | "500" => Answer::status(
            how.parse().unwrap(),
            if how == "429" {
                "retry-after: 0\r\n"
            } else {
                ""
            },
            "not now",
        ),
        "redirect" => Answer::status(307, "location: /elsewhere\r\n", ""),
        "garbage" => Answer::Bytes("charged, thank you\r\n\r\n".to_owned()),
        "half" => Answer::Bytes("HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nhalf".to_owned()),
        "nothing" => Answer::Bytes(String::new()),
        "silence" => Answer::Silence,
        "refused" => Answer::status(
            422,
            "content-type: application/problem+json\r\n",
            r#"{"title":"No such account"}"#,
        ),
        "says-retry" => Answer::status(200, "oncegate-outcome: retry\r\n", ""),
        other => panic!("{other} is no way to misbehave"),
    }
}

const TRIED_AGAIN: [&str; 7] = [
    "404",
    "401",
    "429",
    "own-503",
    "500",
    "redirect",
    "says-retry",
];
const UNKNOWN: [&str; 6] = ["garbage", "half", "nothing", "silence", "503", "504"];

/// What the body names.
fn how(asked: &Asked) -> String {
    serde_json::from_str::<serde_json::Value>(&asked.body).unwrap()["how"]
        .as_str()
        .unwrap()
        .to_owned()
}

// invariant: worker-answer-truncated
#[tokio::test]
async fn each_answer_becomes_what_is_documented() {
    let all: Vec<&str> = TRIED_AGAIN
        .into_iter()
        .chain(UNKNOWN)
        .chain(["refused"])
        .collect();
    let stage = Stage::with(all.iter().map(|how| format!(r#"{{"how":"{how}"}}"#))).await;
    let worker = RawWorker::start(|asked| match (how(asked).as_str(), asked.attempt()) {
        ("refused", _) => first_answer("refused"),
        (how, 1) => first_answer(how),
        _ => Answer::status(200, "", "done"),
    })
    .await;
    let flags = [
        "--key",
        "how",
        "--lease",
        "1s",
        "--timeout",
        "3s",
        "--set",
        "ordering=unordered",
    ];
    stage
        .consume(&[&["--handler", &worker.url()][..], &flags].concat())
        .await;

    let mut attempts: BTreeMap<String, Vec<(u32, bool)>> = BTreeMap::new();
    let mut keys: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for asked in worker.asked() {
        assert_eq!(asked.path, "/handle", "a redirect was followed");
        attempts
            .entry(how(&asked))
            .or_default()
            .push((asked.attempt(), asked.recovered()));
        keys.entry(how(&asked))
            .or_default()
            .push(asked.headers["idempotency-key"].clone());
    }
    for how in TRIED_AGAIN {
        assert_eq!(
            attempts[how],
            [(1, false), (2, false)],
            "{how}: it was answered, so nothing is unknown"
        );
    }
    for how in UNKNOWN {
        assert_eq!(
            attempts[how],
            [(1, false), (2, true)],
            "{how}: the outcome is unknown"
        );
    }
    assert_eq!(attempts["refused"], [(1, false)]);
    let letters = stage.letters().await;
    let [(payload, reason)] = &letters[..] else {
        panic!("{letters:?}")
    };
    assert_eq!(payload, r#"{"how":"refused"}"#);
    assert!(
        reason.ends_with("the worker answers 422 Unprocessable Entity: No such account"),
        "{letters:?}"
    );
    for keys in keys.values() {
        assert!(
            keys.iter().all(|key| *key == keys[0]),
            "every attempt has the same key"
        );
    }
    let different: std::collections::BTreeSet<&String> =
        keys.values().map(|keys| &keys[0]).collect();
    assert_eq!(different.len(), all.len());
}

/// Nothing of the payload or of the key's fields may be in the log.
#[tokio::test]
async fn nothing_runs_before_readiness_and_no_payload_is_logged() {
    let stage = Stage::with_orders(3).await;
    let port = oncegate_testkit::LoopbackPort::reserve();
    let handler = format!("http://127.0.0.1:{}/", port.number());
    let ready = format!("handler.ready_url=http://127.0.0.1:{}/ready", port.number());
    let running = stage.start(&["--handler", &handler, "--set", &ready]);
    until(
        "the log to report that the worker is not ready",
        LIMIT,
        async || {
            if stage.log().contains("not ready yet") {
                Ok(())
            } else {
                Err(stage.log())
            }
        },
    )
    .await;
    assert_eq!(
        stage
            .kafka
            .committed_offsets(&running.group, &stage.topic)
            .await
            .len(),
        0
    );
    let worker = RawWorker::start_at(&format!("127.0.0.1:{}", port.number()), |_| {
        Answer::status(200, "", "")
    })
    .await;
    stage.until_consumed(&running.group).await;
    running.stop().await;
    let asked = worker.asked();
    assert_eq!(asked[0].path, "/ready", "asked first");
    assert_eq!(asked.iter().filter(|asked| asked.path == "/").count(), 3);
    assert!(!stage.log().contains("A-1"), "{}", stage.log());
}

#[tokio::test]
async fn stdio_workers_that_damage_an_answer_are_started_again() {
    let stage = Stage::with_orders(4).await;
    // The first process damages its answer; the second answers too much for another message.
    let script = r#"
import json, os, sys
def say(line): print(line, flush=True)
say(json.dumps({"type": "ready", "v": 1}))
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] != "message": continue
    first = not os.path.exists(sys.argv[1])
    with open(sys.argv[1], "a") as log:
        log.write(json.dumps([json.loads(message["payload"])["order_id"], message["attempt"], message["recovered"]]) + "\n")
    answer = json.dumps({"id": message["id"], "outcome": "complete"})
    if not first: say(json.dumps({"id": "no such id", "outcome": "complete"}))
    say(answer.replace('"id"', '"id').replace(message["id"], "") if first else answer)
"#;
    let path = stage.path("worker.py");
    std::fs::write(&path, script).unwrap();
    let command = format!(
        "python3 '{}' '{}'",
        path.display(),
        stage.path("ledger").display()
    );
    stage
        .consume(&["--handler-exec", &command, "--lease", "2s"])
        .await;
    let told: Vec<(String, u32, bool)> = std::fs::read_to_string(stage.path("ledger"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (first, _, _) = &told[0];
    assert!(
        told.contains(&(first.clone(), 2, true)),
        "its next attempt is marked: {told:?}"
    );
    assert_eq!(told.len(), 5, "{told:?}");
    assert!(
        stage
            .log()
            .contains("is no JSON; only the protocol belongs there"),
        "the line is named: {}",
        stage.log()
    );
}

#[tokio::test]
async fn a_late_worker_is_told_to_cancel_and_its_answer_is_ignored() {
    let stage = Stage::with_orders(1).await;
    let script = r#"
import json, sys
log = open(sys.argv[1], "a", buffering=1)
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    log.write(message["type"] + "\n")
    if message["type"] == "cancel":
        print(json.dumps({"id": message["id"], "outcome": "dead-letter", "reason": "too late"}), flush=True)
    elif message["attempt"] > 1:
        print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;
    let path = stage.path("worker.py");
    std::fs::write(&path, script).unwrap();
    let command = format!(
        "python3 '{}' '{}'",
        path.display(),
        stage.path("ledger").display()
    );
    stage
        .consume(&[
            "--handler-exec",
            &command,
            "--lease",
            "1s",
            "--timeout",
            "3s",
        ])
        .await;
    let told = std::fs::read_to_string(stage.path("ledger")).unwrap();
    assert_eq!(told, "message\ncancel\nmessage\n");
    assert!(
        stage.letters().await.is_empty(),
        "the late answer was taken for one"
    );
}

#[tokio::test]
async fn commands_say_by_their_exit_code_what_became_of_the_message() {
    let stage = Stage::with(
        ["ok", "tempfail", "dataerr", "other", "signal"].map(|how| format!(r#"{{"how":"{how}"}}"#)),
    )
    .await;
    let script = r#"
how=$(cut -d'"' -f4)
echo "$how $ONCEGATE_ATTEMPT $ONCEGATE_RECOVERED" >>"$1"
[ "$how" = dataerr ] && { echo 'no such account'; exit 65; }
[ "$ONCEGATE_ATTEMPT" -gt 1 ] && exit 0
case $how in tempfail) exit 75;; other) exit 3;; signal) kill -s KILL $$;; esac
"#;
    let path = stage.path("work.sh");
    std::fs::write(&path, script).unwrap();
    let command = format!(
        "sh '{}' '{}'",
        path.display(),
        stage.path("ledger").display()
    );
    stage
        .consume(&[
            "--handler-command",
            &command,
            "--key",
            "how",
            "--lease",
            "1s",
        ])
        .await;
    let mut told: Vec<String> = stage.effects().into_keys().collect();
    told.sort();
    let expected = [
        "dataerr 1 0",
        "ok 1 0",
        "other 1 0",
        "other 2 0",
        "signal 1 0",
        "signal 2 1",
        "tempfail 1 0",
        "tempfail 2 0",
    ];
    assert_eq!(told, expected);
    let letters = stage.letters().await;
    assert_eq!(letters.len(), 1);
    assert!(letters[0].1.contains("no such account"), "{letters:?}");
}

/// The wait that a worker asks for is kept, for it alone.
#[tokio::test]
async fn a_retry_after_is_waited_for() {
    let stage = Stage::with_orders(1).await;
    let worker = RawWorker::start(|asked| match asked.attempt() {
        1 => Answer::status(429, "retry-after: 2\r\n", ""),
        _ => Answer::status(200, "", ""),
    })
    .await;
    let started = Instant::now();
    stage.consume(&["--handler", &worker.url()]).await;
    assert!(started.elapsed() >= Duration::from_secs(2));
    assert_eq!(worker.asked().len(), 2);
}

/// The limit concerns every message. The waits of a circuit breaker that double (1, 2, 4 … 30 s)
/// would let the work wait for long after the limit is lifted.
#[tokio::test]
async fn when_a_limit_on_requests_is_lifted_the_work_goes_on() {
    const RETRY_AFTER: Duration = Duration::from_secs(2);
    const ORDERS: usize = 200;
    const PROBES: usize = 10;
    let stage = Stage::with_orders(ORDERS).await;
    let times: Arc<Mutex<Vec<(Instant, bool)>>> = Arc::default();
    // Before the handler is paused, any number of messages fail; from then on, one probes at a
    // time.
    let noted = Arc::clone(&times);
    let log = stage.path("oncegate.log");
    let probes = AtomicUsize::new(0);
    let worker = RawWorker::start(move |_| {
        let is_paused = std::fs::read_to_string(&log)
            .unwrap_or_default()
            .contains("the handler is paused");
        let limited = !is_paused || probes.fetch_add(1, SeqCst) < PROBES;
        noted.lock().unwrap().push((Instant::now(), limited));
        if limited {
            Answer::status(429, "retry-after: 2\r\n", "")
        } else {
            Answer::status(200, "", "")
        }
    })
    .await;
    stage
        .consume(&[
            "--handler",
            &worker.url(),
            "--set",
            "max_attempts=3",
            "--set",
            "ordering=unordered",
        ])
        .await;
    assert!(stage.letters().await.is_empty(), "{}", stage.log());
    let times = times.lock().unwrap();
    let (limited, done): (Vec<(Instant, bool)>, Vec<_>) =
        times.iter().copied().partition(|(_, limited)| *limited);
    assert_eq!(done.len(), ORDERS, "each is done once");
    // In the middle, so that a machine that stops for a while does not matter.
    let middle = |mut spans: Vec<Duration>| {
        spans.sort();
        spans[spans.len() / 2]
    };
    let last = limited.last().unwrap().0;
    let probes = &limited[limited.len() - PROBES..];
    let between = middle(
        probes
            .windows(2)
            .map(|pair| pair[1].0 - pair[0].0)
            .collect(),
    );
    assert!(
        between <= 2 * RETRY_AFTER,
        "{between:?} between two probes: {}",
        stage.log()
    );
    let done = middle(done.iter().map(|(at, _)| *at - last).collect());
    assert!(
        done <= 4 * RETRY_AFTER,
        "{done:?} until half of the work was done: {}",
        stage.log()
    );
}

/// What a worker says ends up in headers, and from there in terminals.
#[tokio::test]
async fn a_dead_letter_reason_is_one_line_and_changes_no_direction() {
    let stage = Stage::with_orders(1).await;
    let worker = RawWorker::start(|_| {
        Answer::status(422, "", "no account\nfor \u{202e}gpj.exe\u{2066}\u{1b}[2J")
    })
    .await;
    stage.consume(&["--handler", &worker.url()]).await;
    let letters = stage.letters().await;
    assert_eq!(letters.len(), 1);
    assert!(
        letters[0]
            .1
            .ends_with("the worker answers 422 Unprocessable Entity: no account for gpj.exe[2J"),
        "{letters:?}"
    );
    assert!(
        !letters[0]
            .1
            .contains(|c: char| c.is_control() || c == '\u{202e}'),
        "{letters:?}"
    );
}
