//! Workers that are killed in the middle of their work.

use std::time::Duration;

use oncegate_testkit::{LoopbackPort, Process, process, until};

use super::{LIMIT, Stage, example};

const ORDERS: usize = 40;

/// Every order is charged, and the second charge of one is explained by a kill.
fn nothing_is_lost(stage: &Stage, kills: usize) {
    let effects = stage.effects();
    assert_eq!(effects.len(), ORDERS, "{effects:?}\n{}", stage.log());
    let second = effects.values().map(|count| count - 1).sum::<usize>();
    assert!(
        second <= kills,
        "{second} second effects by {kills} kills: {effects:?}"
    );
}

#[tokio::test]
async fn a_worker_on_standard_streams_that_kills_itself_loses_nothing() {
    let stage = Stage::with_orders(ORDERS).await;
    // It dies once after an effect and before its answer, and once before an effect.
    let script = r#"
import json, os, signal, sys
def die_once(name):
    if not os.path.exists(name):
        open(name, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["type"] != "message": continue
    order = json.loads(message["payload"])["order_id"]
    if order == "A-3": die_once(sys.argv[1] + ".before")
    with open(sys.argv[1], "a") as ledger: ledger.write(order + "\n")
    if order == "A-7": die_once(sys.argv[1] + ".after")
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
        .consume(&["--handler-exec", &command, "--lease", "1s"])
        .await;
    nothing_is_lost(&stage, 1);
    assert_eq!(
        stage.effects()["A-7"],
        2,
        "the first effect happened and was not recorded"
    );
    assert!(stage.letters().await.is_empty());
}

/// SIGKILL for an HTTP worker of the examples while it works, and a new one in its place.
// invariant: worker-replay
#[tokio::test]
async fn a_worker_behind_http_that_is_killed_loses_nothing() {
    let stage = Stage::with_orders(ORDERS).await;
    let port = LoopbackPort::reserve();
    let start = || {
        let mut command = process::bound_to_parent("python3", "KILL");
        command
            .arg(example("python/worker_http.py"))
            .arg(port.number().to_string())
            .arg(stage.path("ledger"));
        Process::spawn_logged("worker", command, &stage.path("worker.log"))
    };
    let mut worker = start();
    let url = format!("http://127.0.0.1:{}/", port.number());
    let running = stage.start(&["--handler", &url, "--lease", "1s", "--concurrency", "1"]);
    until("the first effects", LIMIT, async || {
        if stage.effects().len() >= 3 {
            Ok(())
        } else {
            Err(stage.log())
        }
    })
    .await;
    worker.kill();
    let _worker = start();
    stage.until_consumed(&running.group).await;
    running.stop().await;
    nothing_is_lost(&stage, 1);
    assert!(stage.letters().await.is_empty());
}

/// SIGKILL for oncegate itself: its worker sees the end of its input, and another process goes on.
// invariant: worker-replay
#[tokio::test]
async fn killing_oncegate_loses_nothing_and_leaves_no_worker_behind() {
    let stage = Stage::with_orders(ORDERS).await;
    let pids = stage.path("pids");
    let script = format!(
        "echo $$ >>'{}'; exec python3 '{}' '{}'",
        pids.display(),
        example("python/worker_stdio.py"),
        stage.path("ledger").display()
    );
    let path = stage.path("worker.sh");
    std::fs::write(&path, script).unwrap();
    let command = format!("sh '{}'", path.display());
    let flags = [
        "--handler-exec",
        &command,
        "--lease",
        "1s",
        "--property",
        "session.timeout.ms=6000",
    ];
    let mut first = stage.start_in(&stage.scope, &flags);
    until("the first effect", LIMIT, async || {
        if stage.effects().is_empty() {
            Err(stage.log())
        } else {
            Ok(())
        }
    })
    .await;
    first.process.kill();
    let second = stage.start_in(&stage.scope, &flags);
    stage.until_consumed(&second.group).await;
    second.stop().await;
    nothing_is_lost(&stage, 1);
    for pid in std::fs::read_to_string(pids).unwrap().lines() {
        let listed = std::path::PathBuf::from(format!("/proc/{pid}/cmdline"));
        until(
            "the workers to be gone",
            Duration::from_secs(30),
            async || {
                let line = std::fs::read_to_string(&listed).unwrap_or_default();
                if line.contains("worker_stdio") {
                    Err(line)
                } else {
                    Ok(())
                }
            },
        )
        .await;
    }
}
