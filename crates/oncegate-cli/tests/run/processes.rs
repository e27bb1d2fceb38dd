//! Commands as people write them, and what workers leave behind, without a server.

mod probes;

use std::fs::File;

use oncegate_testkit::{process, until};

use super::orphans::runs;
use super::stdin::{Feed, order};
use super::{LIMIT, program};

/// Charges: notes the order and how the attempt began.
const CHARGE: &str = r#"printf '%s %s\n' "$(cut -d'"' -f4)" "$ONCEGATE_RECOVERED" >>ledger"#;

fn three_orders() -> Feed {
    Feed::of(&[&order("A-1"), &order("A-2"), &order("A-3")])
}

/// Runs the command for one order. Returns what came out, and how often each word was noted.
async fn charged_by(command: &str) -> (String, Vec<String>) {
    let feed = Feed::of(&[&order("A-1")]);
    std::fs::create_dir(feed.path("folder")).unwrap();
    let ended = feed
        .run(&[
            "--handler-command",
            command,
            "--set",
            "max_attempts=1",
            "--dead-letters",
            "dead",
        ])
        .await;
    assert_eq!(ended.code, Some(0), "{command}: {ended:?}");
    (ended.out, feed.ledger())
}

#[tokio::test]
async fn a_command_is_the_text_of_a_shell_whole() {
    for command in [
        "true; echo charged >>ledger",
        "true && echo charged >>ledger",
        "true\necho charged >>ledger",
        "cd folder && echo charged >>../ledger",
        "WORD=charged sh -c 'echo $WORD >>ledger'",
        "{ echo charged >>ledger; }",
        "if true; then echo charged >>ledger; fi",
        "echo charged | cat >>ledger",
        "# a comment\necho charged >>ledger # and one more",
    ] {
        let (out, ledger) = charged_by(command).await;
        assert_eq!(ledger, ["charged"], "{command}");
        assert!(out.contains("1 handled"), "{command}: {out}");
    }
}

#[tokio::test]
async fn the_exit_status_is_that_of_the_whole_text() {
    for (command, became) in [
        ("true; exit 65", "1 dead letter"),
        ("false; true", "1 handled"),
        ("false && echo charged >>ledger", "1 dead letter"),
        ("sh -c 'exit 3'; exit 0", "1 handled"),
        ("exit 65; true", "1 dead letter"),
    ] {
        let (out, ledger) = charged_by(command).await;
        assert!(out.contains(became), "{command}: {out}");
        assert!(ledger.is_empty(), "{command}: {ledger:?}");
    }
}

/// A worker on standard streams that a text makes ready first.
#[tokio::test]
async fn a_worker_on_streams_may_be_made_ready_by_a_text() {
    let feed = three_orders();
    let worker = r#"
import json, os, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    open("../ledger", "a").write(os.environ["WORD"] + "\n")
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;
    std::fs::create_dir(feed.path("folder")).unwrap();
    std::fs::write(feed.path("folder/worker.py"), worker).unwrap();
    let ended = feed
        .run(&[
            "--handler-exec",
            "cd folder; export WORD=charged; python3 worker.py",
        ])
        .await;
    assert_eq!((ended.code, feed.ledger().len()), (Some(0), 3), "{ended:?}");
}

/// A worker whose input ends is done by itself, and not replaced.
#[tokio::test]
async fn the_end_of_a_run_is_no_restart_of_its_worker() {
    let feed = three_orders();
    let worker = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "outcome": "complete"}), flush=True)
open("ledger", "a").write("ended by itself\n")
"#;
    std::fs::write(feed.path("worker.py"), worker).unwrap();
    let ended = feed.run(&["--handler-exec", "python3 worker.py"]).await;
    assert_eq!(
        (ended.code, feed.ledger()),
        (Some(0), vec!["ended by itself".to_owned()]),
        "{ended:?}"
    );
    assert!(!ended.err.contains("has ended"), "{}", ended.err);
}

/// The timeout reaches every process of a text, before the next attempt begins.
#[tokio::test]
async fn a_timeout_ends_what_a_text_has_started() {
    let feed = Feed::of(&[&order("A-1")]);
    feed.close_gate();
    let command = r#"echo $ONCEGATE_ATTEMPT >>ledger; [ "$ONCEGATE_ATTEMPT" = 1 ] || exit 0; sh -c 'echo $$ >part; read x <gate'; true"#;
    let ended = feed
        .run(&[
            "--handler-command",
            command,
            "--timeout",
            "3s",
            "--lease",
            "1s",
        ])
        .await;
    assert_eq!(
        (ended.code, feed.ledger()),
        (Some(0), vec!["1".to_owned(), "2".to_owned()]),
        "{ended:?}"
    );
    assert!(
        !runs(feed.read("part").trim().parse().unwrap()),
        "it is killed with its group"
    );
}

/// A command that has its effect, and leaves a process behind that holds its streams until the test
/// ends it.
fn leaves_behind(ends_by: &str) -> String {
    format!("{CHARGE}\nsh -c 'echo $$ >>left; read x <gate' &\necho charged\n{ends_by}")
}

/// The processes that were left behind.
fn left(feed: &Feed) -> Vec<u32> {
    feed.read("left")
        .lines()
        .map(|pid| pid.parse().unwrap())
        .collect()
}

#[tokio::test]
async fn a_process_left_behind_does_not_hide_an_exit() {
    for limits in [&[][..], &["--timeout", "5s", "--lease", "2s"]] {
        let feed = three_orders();
        feed.close_gate();
        std::fs::write(feed.path("worker.sh"), leaves_behind("exit 0")).unwrap();
        let ended = feed.run(limits).await;
        assert_eq!(
            ended.out, "billing: 3 messages, 3 handled, 0 duplicates\n",
            "{ended:?}"
        );
        let mut ledger = feed.ledger();
        ledger.sort();
        assert_eq!(ledger, ["A-1 0", "A-2 0", "A-3 0"], "each has run once");
        // What a command that is done leaves behind is its own.
        until("three processes to be left", LIMIT, async || {
            match left(&feed) {
                left if left.len() == 3 => Ok(()),
                left => Err(format!("{left:?}")),
            }
        })
        .await;
        assert!(left(&feed).into_iter().all(runs), "they are left alone");
        let _gate = File::options()
            .read(true)
            .write(true)
            .open(feed.path("gate"))
            .unwrap();
        for _ in 0..3 {
            feed.open_gate();
        }
    }
}

#[tokio::test]
async fn what_a_failed_command_leaves_behind_ends_first() {
    let feed = Feed::of(&[&order("A-1")]);
    feed.close_gate();
    // The next attempt must not run beside a part of this one.
    let script = r#"
[ "$ONCEGATE_ATTEMPT" = 1 ] || { if grep -q '^State:.[RSD]' "/proc/$(cat left)/status"; then echo beside; else echo alone; fi >>ledger; exit 0; }
sh -c 'echo $$ >left; : >>started; read x <gate' &
until [ -e started ]; do sleep 0.02; done
exit 1
"#;
    std::fs::write(feed.path("worker.sh"), script).unwrap();
    let ended = feed.run(&[]).await;
    assert_eq!(
        (ended.code, feed.ledger()),
        (Some(0), vec!["alone".to_owned()]),
        "{ended:?}"
    );
}

/// The output that came before the end counts, however much it is and whatever process holds the
/// pipe.
#[tokio::test]
async fn what_was_written_before_the_exit_is_the_result() {
    let feed = Feed::of(&[&order("A-1")]);
    feed.close_gate();
    let script = "sh -c ': >>started; read x <gate' &\nuntil [ -e started ]; do sleep 0.02; done\n\
                  head -c 60000 /dev/zero | tr '\\0' x\necho no such account | head -c 4\nexit 65";
    std::fs::write(feed.path("worker.sh"), script).unwrap();
    let ended = feed.run(&["--dead-letters", "dead.jsonl"]).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        feed.read("dead.jsonl")
            .contains("the command ended with code 65: xxxx"),
        "{ended:?}"
    );
}

#[tokio::test]
async fn a_worker_that_ends_is_noticed_though_its_pipes_are_held() {
    let feed = Feed::of(&[&order("A-1"), &order("A-2")]);
    feed.close_gate();
    // Its first process answers one message, leaves a process behind in another session, and dies
    // with the next.
    let worker = r#"
import json, os, subprocess, sys
first = not os.path.exists("left")
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    with open("ledger", "a") as ledger: ledger.write("%s %d\n" % (json.loads(message["payload"])["order_id"], message["recovered"]))
    if first:
        left = subprocess.Popen(["sh", "-c", "read x <gate"], start_new_session=True)
        with open("left", "w") as file: file.write("%d\n" % left.pid)
        print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
        os._exit(3)
    print(json.dumps({"id": message["id"], "outcome": "complete"}), flush=True)
"#;
    std::fs::write(feed.path("worker.py"), worker).unwrap();
    let ended = feed
        .run(&[
            "--handler-exec",
            "python3 worker.py",
            "--concurrency",
            "1",
            "--lease",
            "1s",
        ])
        .await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let orders: Vec<String> = feed
        .ledger()
        .iter()
        .map(|noted| noted[..3].to_owned())
        .collect();
    assert_eq!(
        orders,
        ["A-1", "A-2"],
        "the answer before the exit counts: {}",
        ended.err
    );
    feed.open_gate();
}

/// What does not exist is no outage, so a supervisor must not try it for ever.
#[tokio::test]
async fn a_worker_that_does_not_exist_ends_the_run_at_once() {
    for (flag, command, named) in [
        (
            "--handler-exec",
            "pyhton3 worker.py",
            "no program \"pyhton3\" in PATH",
        ),
        (
            "--handler-exec",
            "python3 forgotten.py",
            "no file \"forgotten.py\" in /",
        ),
        ("--handler-exec", "./worker", "no file \"./worker\" in /"),
        (
            "--handler-exec",
            "true; no-such-program",
            "(exit status: 127): sh: 1: no-such-program: not found",
        ),
        (
            "--handler-command",
            "sh charge.sh",
            "no file \"charge.sh\" in /",
        ),
        (
            "--handler-command",
            "charge",
            "no program \"charge\" in PATH",
        ),
    ] {
        let feed = three_orders();
        let ended = feed.run(&[flag, command]).await;
        assert_eq!(ended.code, Some(78), "{command}: {ended:?}");
        let advice = format!("change `handler.{}`", flag.trim_start_matches("--handler-"));
        assert!(
            ended.err.contains(named) && ended.err.contains(&advice),
            "{command}: {}",
            ended.err
        );
    }
}

#[tokio::test]
async fn a_worker_that_ends_before_it_is_ready_ends_the_run() {
    let feed = three_orders();
    std::fs::write(feed.path("worker.py"), "import no_such_module\n").unwrap();
    let ended = feed
        .run(&[
            "--handler-exec",
            "python3 worker.py",
            "--set",
            "start_patience=1s",
        ])
        .await;
    assert_eq!(ended.code, Some(69), "{ended:?}");
    let why = "(exit status: 1): ModuleNotFoundError: No module named 'no_such_module'";
    assert!(
        ended.err.contains("not ready within 1s (`start_patience`)"),
        "{}",
        ended.err
    );
    assert!(
        ended
            .err
            .contains(&format!("why=\"it ended before it was ready {why}\"")),
        "{}",
        ended.err
    );
}

/// The status and the last line of standard error are in the log and in the dead letter.
#[tokio::test]
async fn a_dead_letter_says_how_the_worker_has_ended() {
    let worker = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
sys.stdin.readline()
sys.exit("the licence has expired")
"#;
    let limits = [
        "--set",
        "max_attempts=1",
        "--lease",
        "1s",
        "--dead-letters",
        "dead.jsonl",
    ];
    for (flags, why) in [
        (
            ["--handler-exec", "python3 worker.py"],
            "(exit status: 1): the licence has expired",
        ),
        (
            ["--handler-command", "echo no licence >&2; exit 7"],
            "the command ended with code 7: no licence",
        ),
        (
            ["--handler-command", "echo no licence >&2; kill -9 $$"],
            "(signal: 9 (SIGKILL)): no licence",
        ),
    ] {
        let feed = Feed::of(&[&order("A-1")]);
        std::fs::write(feed.path("worker.py"), worker).unwrap();
        let ended = feed.run(&[&flags[..], &limits].concat()).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let letter = feed.read("dead.jsonl");
        assert!(letter.contains(why), "{flags:?}: {letter}\n{}", ended.err);
    }
}

/// What oncegate needs for itself is none of the worker's business.
#[tokio::test]
async fn a_worker_gets_no_secret_of_oncegate() {
    let feed = Feed::of(&[&order("A-1")]);
    // An outbox that no command of this test uses.
    let file = r#"
[outbox.shop.kafka]
brokers = "127.0.0.1:1"
properties = { "sasl.password" = { env = "THE_TOKEN" } }
"#;
    std::fs::write(feed.path("file.toml"), file).unwrap();
    for (flag, worker) in [
        ("--handler-command", "env >>environment"),
        (
            "--handler-exec",
            "env >>environment; exec python3 worker.py",
        ),
    ] {
        let answers = r#"
import json, sys
print(json.dumps({"type": "ready", "v": 1}), flush=True)
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "outcome": "complete"}), flush=True)
"#;
        std::fs::write(feed.path("worker.py"), answers).unwrap();
        let mut command = process::bound_to_parent("env", "KILL");
        command.args([
            "ONCEGATE_CONSUMER__BILLING__LEASE=40s",
            "THE_TOKEN=hunter2",
            "OF_THE_WORKER=kept",
        ]);
        command.arg(program());
        let input = File::open(feed.path("input")).unwrap();
        let ended = feed
            .end(feed.start_by(command, input, &[flag, worker, "--config", "file.toml"]))
            .await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let environment = feed.read("environment");
        assert!(
            !environment.contains("ONCEGATE_CONSUMER__BILLING__LEASE"),
            "{environment}"
        );
        assert!(!environment.contains("hunter2"), "{environment}");
        assert!(environment.contains("OF_THE_WORKER=kept"), "{environment}");
        std::fs::remove_file(feed.path("environment")).unwrap();
        std::fs::remove_file(feed.path("records.db")).unwrap();
    }
}
