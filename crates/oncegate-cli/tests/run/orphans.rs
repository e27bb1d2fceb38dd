//! What becomes of workers when oncegate ends, and when its whole process group is signalled.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use oncegate_testkit::{unique, until};

use super::{LIMIT, Stage};

/// It ignores the end of its input and every signal that can be ignored, while it has a message.
const STUBBORN: &str = r#"
import json, os, signal, sys
for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(ignored, signal.SIG_IGN)
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    with open(sys.argv[1], "a") as ledger: ledger.write(f"{os.getpid()}\n")
    while True: signal.pause()
"#;

/// Whether the process runs. One that its parent has not waited for is still listed, as a zombie.
pub(super) fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

async fn until_has_message(stage: &Stage) -> u32 {
    until("a worker to have a message", LIMIT, async || {
        if stage.noted::<u32>().is_empty() {
            Err(stage.log())
        } else {
            Ok(())
        }
    })
    .await;
    stage.noted::<u32>()[0]
}

async fn ends_with_oncegate(stage: &Stage, flags: &[&str]) {
    let mut running = stage.start(flags);
    let worker = until_has_message(stage).await;
    assert!(runs(worker));
    running.process.kill();
    until("the worker to be gone", LIMIT, async || {
        if runs(worker) {
            Err(stage.log())
        } else {
            Ok(())
        }
    })
    .await;
}

// invariant: worker-outlives
#[tokio::test]
async fn a_worker_that_has_a_message_dies_with_oncegate() {
    let stage = Stage::with_orders(1).await;
    let command = stage.python(STUBBORN);
    ends_with_oncegate(&stage, &["--handler-exec", &command]).await;
}

// invariant: worker-outlives
#[tokio::test]
async fn a_command_that_has_a_message_dies_with_oncegate() {
    let stage = Stage::with_orders(1).await;
    let command = stage.python(STUBBORN);
    ends_with_oncegate(&stage, &["--handler-command", &command]).await;
}

/// A thread of the runtime may end long before the process does; workers are bound to the process.
#[tokio::test]
async fn a_worker_outlives_the_threads_of_the_runtime() {
    let stage = Stage::with_orders(1).await;
    let command = stage.python(STUBBORN);
    let mut running = stage.start(&["--handler-exec", &command]);
    let worker = until_has_message(&stage).await;
    let parent_thread = |pid: u32| {
        let tasks = format!("/proc/{}/task", running.process.id());
        let threads = std::fs::read_dir(tasks)
            .unwrap()
            .map(|task| task.unwrap().path());
        let children =
            |task: &Path| std::fs::read_to_string(task.join("children")).unwrap_or_default();
        let found = threads.into_iter().find(|task| {
            children(task)
                .split_whitespace()
                .any(|child| child == pid.to_string())
        });
        std::fs::read_to_string(found.expect("a thread has started it").join("comm")).unwrap()
    };
    assert_eq!(parent_thread(worker).trim(), "oncegate-spawn");
    running.process.kill();
}

/// What a terminal does at Ctrl-C, and `KillMode=control-group` of systemd.
// invariant: worker-outlives
#[tokio::test]
async fn a_process_group_signal_lets_workers_end_their_messages() {
    for signal in ["INT", "TERM"] {
        let stage = Stage::with_orders(1).await;
        // As most programs do, it ends at once by either signal.
        let script = r#"
import json, os, sys, time
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    with open(sys.argv[1], "a") as ledger: ledger.write(f"{message['attempt']}\n")
    while not os.path.exists(sys.argv[1] + ".go"): time.sleep(0.02)
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;
        let command = stage.python(script);
        let group = unique("run");
        let mut oncegate = stage.command(&group, &["--handler-exec", &command]);
        oncegate.process_group(0);
        let mut running = stage.spawn(&group, oncegate);
        until_has_message(&stage).await;
        let everyone = format!("-{}", running.process.id());
        let sent = Command::new("sh")
            .args(["-c", "kill -s \"$1\" -- \"$2\"", "kill", signal, &everyone])
            .status();
        assert!(sent.unwrap().success());
        stage.until_logged("stopping").await;
        std::fs::write(stage.path("ledger.go"), "").unwrap();
        assert_eq!(
            running.process.end_within(LIMIT).await.code(),
            Some(0),
            "{}",
            stage.log()
        );
        stage.until_consumed(&group).await;
        assert_eq!(stage.noted::<u32>(), [1], "{signal}: {}", stage.log());
    }
}
