//! `oncegate worker-test`, against workers that keep the protocol and workers that break it.

use std::path::Path;

use oncegate_testkit::{LoopbackPort, Process, process};
use tempfile::TempDir;

use super::libraries::Libraries;
use super::{Answer, oncegate};

const ORDER: &[u8] = br#"{"order_id":"A-7"}"#;

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../examples/workers")
        .join(name);
    path.canonicalize().unwrap().to_str().unwrap().to_owned()
}

async fn worker_test(flags: &[&str]) -> Answer {
    oncegate(&[&["worker-test", "--json"], flags].concat(), ORDER).await
}

/// The names of the checks, and of those that failed.
fn checks(answer: &Answer) -> (Vec<String>, Vec<String>) {
    let document = answer.json();
    let checks = document["checks"].as_array().expect("a list").clone();
    let name = |check: &serde_json::Value| check["name"].as_str().unwrap().to_owned();
    for check in &checks {
        assert_eq!(
            check["ok"] == false,
            check["fix"].is_string(),
            "what fails has a fix: {check}"
        );
    }
    let failed = checks
        .iter()
        .filter(|check| check["ok"] == false)
        .map(name)
        .collect();
    (checks.iter().map(name).collect(), failed)
}

fn failed(answer: &Answer) -> Vec<String> {
    checks(answer.ended(1)).1
}

async fn http_worker(program: &str, script: &str, dir: &TempDir) -> (Process, String) {
    let port = LoopbackPort::reserve();
    let number = port.number().to_string();
    let mut command = process::bound_to_parent(program, "KILL");
    command
        .arg(example(script))
        .arg(&number)
        .arg(dir.path().join("ledger"));
    let worker = Process::spawn_logged(script, command, &dir.path().join("worker.log"));
    (worker, format!("http://127.0.0.1:{number}/charge"))
}

#[tokio::test]
async fn the_examples_pass_over_http() {
    for (program, script) in [
        ("python3", "python/worker_http.py"),
        ("node", "node/worker_http.js"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (_worker, url) = http_worker(program, script, &dir).await;
        let answer = worker_test(&["--handler", &url]).await;
        let (all, failed) = checks(answer.ended(0));
        assert_eq!(
            (failed.len(), answer.json()["schema"].as_str()),
            (0, Some("oncegate.worker-test/1"))
        );
        assert_eq!(
            all,
            [
                "ready",
                "completes",
                "repeats",
                "garbage",
                "after-garbage",
                "cancelled"
            ]
        );
        let ledger = std::fs::read_to_string(dir.path().join("ledger")).unwrap();
        assert!(
            ledger.lines().count() >= 4 && ledger.lines().all(|line| line == "A-7"),
            "{ledger}"
        );
    }
}

#[tokio::test]
async fn the_examples_pass_on_standard_streams() {
    let libraries = Libraries::new();
    for worker in [
        format!("python3 '{}'", example("python/worker_stdio.py")),
        format!("node '{}'", example("node/worker_stdio.js")),
        libraries.python(example("python/worker.py").as_ref()),
        libraries.node(example("node/worker.js").as_ref()),
        libraries.python(example("python/batch.py").as_ref()),
        libraries.node(example("node/batch.js").as_ref()),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let command = format!("{worker} '{}'", dir.path().join("ledger").display());
        let answer = worker_test(&["--handler-exec", &command]).await;
        let (all, _) = checks(answer.ended(0));
        let ends = ["end-of-input", "sigterm"];
        let talk = [
            "ready",
            "completes",
            "repeats",
            "garbage",
            "after-garbage",
            "cancelled",
        ];
        assert_eq!(all, [&talk[..], &ends].concat());
    }
}

#[tokio::test]
async fn a_command_passes_by_its_exit_codes() {
    let good = "sh -c 'grep -q order_id || exit 65'";
    let answer = worker_test(&["--handler-command", good]).await;
    assert_eq!(
        checks(answer.ended(0)).0,
        ["ready", "completes", "repeats", "garbage", "after-garbage"]
    );
    let killed = "sh -c 'grep -q order_id || kill -s KILL $$'";
    assert_eq!(
        failed(&worker_test(&["--handler-command", killed]).await),
        ["garbage"]
    );
    let refuses = worker_test(&["--handler-command", "false"]).await;
    assert_eq!(failed(&refuses), ["completes"]);
    let text = oncegate(&["worker-test", "--handler-command", "false"], ORDER).await;
    assert!(
        text.ended(1)
            .line("FAILED")
            .starts_with("FAILED completes the payload: retry"),
        "{text:?}"
    );
    assert!(
        text.out.contains("fix: answer the payload with 2xx"),
        "{text:?}"
    );
}

/// A worker in Python: what it does at the start, and with each message.
fn script(dir: &TempDir, begin: &str, each: &str) -> String {
    let path = dir.path().join("worker.py");
    let text = format!(
        "import json, signal, sys, time\ndef say(**line): print(json.dumps(line), flush=True)\n{begin}\n\
         for line in sys.stdin:\n    message = json.loads(line)\n    if message['type'] != 'message': continue\n    {each}\n"
    );
    std::fs::write(&path, text).unwrap();
    format!("python3 '{}'", path.display())
}

const READY: &str = "say(type='ready', v=1)";
const DONE: &str = "say(id=message['id'], outcome='complete')";

#[tokio::test]
async fn each_way_to_break_the_protocol_of_standard_streams_is_named() {
    let parses = format!("json.loads(message.get('payload', '')); {DONE}");
    let once =
        format!("say(id=message['id'], outcome='retry') if message['recovered'] else {DONE}");
    let deaf = format!("signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}");
    let cases = [
        ("pass", DONE, "ready"),
        ("print('hello')", DONE, "ready"),
        ("say(type='ready', v=2)", DONE, "ready"),
        (READY, "say(id='another', outcome='complete')", "completes"),
        (READY, "print('charging')", "completes"),
        (READY, &once, "repeats"),
        (READY, &parses, "garbage"),
        (&deaf, DONE, "sigterm"),
        (
            "import atexit, os; atexit.register(lambda: os._exit(3)); say(type='ready', v=1)",
            DONE,
            "end-of-input",
        ),
    ];
    for (begin, each, expected) in cases {
        let dir = tempfile::tempdir().unwrap();
        let command = script(&dir, begin, each);
        let answer = worker_test(&["--handler-exec", &command, "--patience", "5s"]).await;
        assert_eq!(failed(&answer), [expected], "{begin} | {each}\n{answer:?}");
    }
}

#[tokio::test]
async fn no_worker_is_a_failed_check_and_no_payload_a_usage_error() {
    let absent = worker_test(&["--handler", "http://127.0.0.1:1/", "--patience", "1s"]).await;
    assert_eq!(failed(&absent), ["ready"]);
    oncegate(&["worker-test"], ORDER)
        .await
        .ended(2)
        .says("--handler");
    oncegate(&["worker-test", "--handler", "http://elsewhere/"], ORDER)
        .await
        .ended(78)
        .says("https://");
}
