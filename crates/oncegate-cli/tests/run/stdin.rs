//! Standard input as a source, over SQLite: no server runs here.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use oncegate_testkit::{Process, process, until};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{LIMIT, program};

/// Notes each call in the ledger; the order A-2 then waits at the gate, if there is one.
const WORKER: &str = r#"
id=$(cut -d'"' -f4)
printf '%s %s\n' "$id" "$ONCEGATE_RECOVERED" >>ledger
if [ "$id" = A-2 ] && [ -p gate ]; then cat gate >/dev/null; fi
printf 'charged %s' "$id"
"#;

/// A folder with an input, the records of a scope, and a ledger of what the worker did.
pub(super) struct Feed {
    dir: TempDir,
}

/// What a run gave.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) code: Option<i32>,
    pub(super) out: String,
    pub(super) err: String,
}

impl Feed {
    pub(super) fn of(lines: &[&str]) -> Self {
        let feed = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        std::fs::write(feed.path("worker.sh"), WORKER).unwrap();
        std::fs::write(feed.path("input"), lines.join("\n")).unwrap();
        feed
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(super) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// A worker that has the order A-2 waits until [`open_gate`](Self::open_gate).
    pub(super) fn close_gate(&self) {
        assert!(
            Command::new("mkfifo")
                .arg(self.path("gate"))
                .status()
                .unwrap()
                .success()
        );
    }

    /// Lets the worker go on that waits at the gate.
    pub(super) fn open_gate(&self) {
        // It waits until the worker reads: what is written before is lost when this end is closed.
        File::options()
            .write(true)
            .open(self.path("gate"))
            .unwrap()
            .write_all(b"\n")
            .unwrap();
    }

    pub(super) fn start(&self, stdin: impl Into<Stdio>, flags: &[&str]) -> Process {
        self.start_by(process::bound_to_parent(program(), "KILL"), stdin, flags)
    }

    /// Starts by this command, whose last argument is the program.
    pub(super) fn start_by(
        &self,
        mut command: Command,
        stdin: impl Into<Stdio>,
        flags: &[&str],
    ) -> Process {
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        command.args(["run", "--source", "stdin", "--scope", "billing"]);
        if !flags.contains(&"--key") {
            command.args(["--key", "order_id"]);
        }
        if !flags.iter().any(|flag| flag.starts_with("--handler")) {
            command.args(["--handler-command", "sh worker.sh"]);
        }
        command.args(["--store", "sqlite:records.db"]).args(flags);
        let file = |name: &str| File::create(self.path(name)).unwrap();
        command.current_dir(self.dir.path());
        command.stdin(stdin).stdout(file("out")).stderr(file("err"));
        Process::spawn("oncegate run", command)
    }

    /// Starts with the input.
    pub(super) fn start_on_input(&self, flags: &[&str]) -> Process {
        self.start(File::open(self.path("input")).unwrap(), flags)
    }

    pub(super) async fn end(&self, mut process: Process) -> Ended {
        let code = process.end_within(LIMIT).await.code();
        Ended {
            code,
            out: self.read("out"),
            err: self.read("err"),
        }
    }

    /// Feeds the whole input.
    pub(super) async fn run(&self, flags: &[&str]) -> Ended {
        self.end(self.start_on_input(flags)).await
    }

    /// The calls of the worker: the order, and whether it was recovered.
    pub(super) fn ledger(&self) -> Vec<String> {
        self.read("ledger").lines().map(str::to_owned).collect()
    }

    pub(super) async fn until_in_ledger(&self, call: &str) {
        until(call, LIMIT, async || {
            if self.ledger().iter().any(|noted| noted == call) {
                Ok(())
            } else {
                Err(format!("{:?}\n{}", self.ledger(), self.read("err")))
            }
        })
        .await;
    }
}

impl Feed {
    /// Waits until the record of this order is completed.
    async fn until_completed(&self, id: &str) {
        std::fs::write(self.path("asked"), order(id)).unwrap();
        until("a completed record", LIMIT, async || {
            let mut inspect = Command::new(program());
            inspect.current_dir(self.dir.path()).args([
                "inspect",
                "--store",
                "sqlite:records.db",
                "--scope",
                "billing",
                "--key",
                "order_id",
                "--route",
                "stdin",
                "--json",
                "asked",
            ]);
            let said = String::from_utf8(inspect.output().unwrap().stdout).unwrap();
            match said.contains(r#""state": "completed""#) {
                true => Ok(()),
                false => Err(said),
            }
        })
        .await;
    }
}

pub(super) fn order(id: &str) -> String {
    format!(r#"{{"order_id":"{id}"}}"#)
}

/// The settings of a run, beside which its records are.
const SETTINGS: &str = r#"
[store]
url = "sqlite:once.db"
[consumer.billing]
source = { stdin = {} }
key = "order_id"
handler = { command = "cat" }
dead_letters = { file = "dead.jsonl" }
"#;

#[tokio::test]
async fn records_are_beside_the_settings_in_any_folder() {
    let feed = Feed::of(&[r#"{"order_id":"A-1"}"#, "no JSON"]);
    std::fs::write(feed.path("oncegate.toml"), SETTINGS).unwrap();
    let other = tempfile::tempdir().unwrap();
    let mut answers = Vec::new();
    for (folder, config) in [
        (feed.dir.path(), PathBuf::from("oncegate.toml")),
        (other.path(), feed.path("oncegate.toml")),
    ] {
        let mut command = process::bound_to_parent(env!("CARGO_BIN_EXE_oncegate"), "KILL");
        command
            .args(["run", "--json", "--config"])
            .arg(config)
            .current_dir(folder);
        command.stdin(File::open(feed.path("input")).unwrap());
        command.stdout(File::create(feed.path("out")).unwrap());
        command.stderr(File::create(feed.path("err")).unwrap());
        let ended = feed.end(Process::spawn("oncegate run", command)).await;
        assert_eq!(ended.code, Some(0), "{ended:?}");
        answers.push(ended);
    }
    let completed = |ended: &Ended| {
        serde_json::from_str::<Value>(&ended.out).unwrap()["consumers"][0]["duplicates"].clone()
    };
    assert_eq!(
        (completed(&answers[0]), completed(&answers[1])),
        (json!(0), json!(1)),
        "{answers:?}"
    );
    let path = feed.path("once.db").display().to_string();
    let made = |ended: &Ended| {
        ended
            .err
            .lines()
            .any(|line| line.contains("WARN") && line.contains(&path))
    };
    assert!(made(&answers[0]) && !made(&answers[1]), "{answers:?}");
    assert!(
        answers[1].err.contains(&path),
        "the log names the store: {answers:?}"
    );
    assert_eq!(
        std::fs::read_dir(other.path()).unwrap().count(),
        0,
        "no file is made elsewhere"
    );
}

// invariant: line-of-standard-input
#[tokio::test]
async fn an_order_in_three_spellings_is_charged_once_and_again_never() {
    let feed = Feed::of(&[
        r#"{"order_id":"A-1","amount":10}"#,
        r#"{"order_id": "A-1", "amount": 10.00}"#,
        "",
        r#"{"order_id":"A-1","amount":1e1,"sent_at":"later"}"#,
        r#"{"order":"A-2"}"#,
    ]);
    let flags = ["--key", "order_id,amount", "--dead-letters", "dead.jsonl"];
    let first = feed.run(&flags).await;
    assert_eq!(
        (first.code, feed.ledger()),
        (Some(0), vec!["A-1 0".to_owned()]),
        "{first:?}"
    );
    assert_eq!(
        first.out,
        "billing: 4 messages, 1 handled, 2 duplicates, 1 dead letter\n"
    );
    let letter: Value = serde_json::from_str(&feed.read("dead.jsonl")).unwrap();
    let parts = [&letter["payload"], &letter["cause"], &letter["origin"]];
    assert_eq!(
        parts,
        [
            &json!(r#"{"order":"A-2"}"#),
            &json!("bad_key"),
            &json!("stdin:5")
        ]
    );

    let second = feed.run(&[&flags[..], &["--json"]].concat()).await;
    assert_eq!(
        (second.code, feed.ledger().len()),
        (Some(0), 1),
        "{second:?}"
    );
    let answer: Value = serde_json::from_str(&second.out).unwrap();
    let of_billing = json!({
        "consumer": "billing", "complete": true, "lines_read": 5, "messages": 4, "handled": 0, "duplicates": 3,
        "dead_letters": 1, "given_up_before": 0, "retries": 0, "unfinished_lines": [],
    });
    assert_eq!(
        answer,
        json!({ "schema": "oncegate.run/1", "consumers": [of_billing] })
    );
    assert!(
        !second.err.contains("status page"),
        "it needs no port: {}",
        second.err
    );
}

// invariant: line-of-standard-input
#[tokio::test]
async fn after_a_kill_the_same_input_runs_only_the_rest() {
    let feed = Feed::of(&[&order("A-1"), &order("A-2"), &order("A-3")]);
    feed.close_gate();
    let flags = ["--concurrency", "1", "--lease", "1s"];
    let mut process = feed.start_on_input(&flags);
    feed.until_in_ledger("A-2 0").await;
    // The next handler may begin while the record of the one before is written.
    feed.until_completed("A-1").await;
    process.kill();
    std::fs::remove_file(feed.path("gate")).unwrap();
    let ended = feed.run(&flags).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.out, "billing: 3 messages, 2 handled, 1 duplicate\n");
    let mut ledger = feed.ledger();
    ledger.sort();
    assert_eq!(
        ledger,
        ["A-1 0", "A-2 0", "A-2 1", "A-3 0"],
        "what the kill cut off is recovered"
    );
}

// invariant: line-of-standard-input
#[tokio::test]
async fn a_stop_names_the_unfinished_lines_and_a_rerun_runs_only_them() {
    let feed = Feed::of(&[&order("A-1"), &order("A-2"), &order("A-3"), &order("A-4")]);
    feed.close_gate();
    let mut process = feed.start_on_input(&["--concurrency", "1"]);
    feed.until_in_ledger("A-2 0").await;
    process.signal("TERM");
    until("the log to report the stop", LIMIT, async || {
        if feed.read("err").contains("stopping") {
            Ok(())
        } else {
            Err(feed.read("err"))
        }
    })
    .await;
    feed.open_gate();
    let ended = feed.end(process).await;
    assert_eq!(
        ended.code,
        Some(130),
        "a script must not go on as if all were done: {ended:?}"
    );
    assert!(
        ended.err.contains("of those lines 3 to 4 are unfinished"),
        "{}",
        ended.err
    );
    assert_eq!(
        ended.out,
        "billing: 4 messages, 2 handled, 0 duplicates, 2 unfinished messages\n"
    );

    std::fs::remove_file(feed.path("gate")).unwrap();
    let rest = feed.run(&[]).await;
    assert_eq!(
        (rest.code, rest.out.as_str()),
        (Some(0), "billing: 4 messages, 2 handled, 2 duplicates\n")
    );
    let mut ledger = feed.ledger();
    ledger.sort();
    assert_eq!(
        ledger,
        ["A-1 0", "A-2 0", "A-3 0", "A-4 0"],
        "each ran once"
    );
}

#[tokio::test]
async fn a_line_is_handled_before_the_input_ends() {
    let feed = Feed::of(&[]);
    let mut process = feed.start(Stdio::piped(), &[]);
    let mut input = process.child().stdin.take().unwrap();
    writeln!(input, "{}", order("A-1")).unwrap();
    feed.until_in_ledger("A-1 0").await;
    // The last line needs no line feed.
    write!(input, "{}", order("A-3")).unwrap();
    drop(input);
    let ended = feed.end(process).await;
    assert_eq!((ended.code, feed.ledger().len()), (Some(0), 2), "{ended:?}");
}

#[tokio::test]
async fn a_stop_waits_for_no_more_input_and_is_not_taken_for_its_end() {
    let feed = Feed::of(&[]);
    let mut process = feed.start(Stdio::piped(), &[]);
    let mut input = process.child().stdin.take().unwrap();
    writeln!(input, "{}", order("A-1")).unwrap();
    feed.until_in_ledger("A-1 0").await;
    process.signal("INT");
    let ended = feed.end(process).await;
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert!(
        ended
            .err
            .contains("standard input is not finished: line 1 was read;"),
        "{}",
        ended.err
    );
    drop(input);
}

#[tokio::test]
async fn failed_attempts_are_repeated_before_the_end() {
    let feed = Feed::of(&[&order("A-1")]);
    let script = "n=$ONCEGATE_ATTEMPT; echo \"$n\" >>ledger; [ \"$n\" -ge 3 ] || exit 75";
    std::fs::write(feed.path("worker.sh"), script).unwrap();
    let ended = feed.run(&["--json"]).await;
    assert_eq!(
        (ended.code, feed.ledger()),
        (Some(0), ["1", "2", "3"].map(str::to_owned).into()),
        "{ended:?}"
    );
    let answer: Value = serde_json::from_str(&ended.out).unwrap();
    assert_eq!(
        (
            &answer["consumers"][0]["handled"],
            &answer["consumers"][0]["retries"]
        ),
        (&json!(1), &json!(2))
    );
}

#[tokio::test]
async fn bad_input_without_dead_letters_ends_the_run_at_a_named_line() {
    let feed = Feed::of(&["{}"]);
    let ended = feed.run(&[]).await;
    assert_eq!(ended.code, Some(65), "{ended:?}");
    assert!(
        ended.err.contains("stdin:1") && ended.out.contains("1 unfinished message"),
        "{ended:?}"
    );
    assert!(
        ended.err.contains("of those line 1 is unfinished"),
        "{}",
        ended.err
    );

    std::fs::write(feed.path("input"), vec![b'x'; 17 << 20]).unwrap();
    let ended = feed.run(&[]).await;
    assert_eq!(ended.code, Some(65), "{ended:?}");
    assert!(
        ended.err.contains("line 1 has more than 16777216 bytes"),
        "{}",
        ended.err
    );
}

#[tokio::test]
async fn lines_with_the_route_of_a_topic_have_the_keys_of_the_topic() {
    let feed = Feed::of(&[&order("A-1")]);
    let route = ["--set", "consumer.billing.source.stdin.route=orders"];
    for (flags, handled) in [(&route[..], 1), (&[], 1), (&route[..], 0)] {
        let ended = feed.run(flags).await;
        assert!(
            ended.out.contains(&format!("{handled} handled")),
            "{flags:?}: {ended:?}"
        );
    }
}

#[tokio::test]
async fn a_line_that_was_given_up_before_is_no_duplicate() {
    let feed = Feed::of(&[&order("A-1"), &order("A-2")]);
    let flags = [
        "--handler-command",
        "grep -q A-1 || exit 65",
        "--dead-letters",
        "dead.jsonl",
    ];
    let first = feed.run(&flags).await;
    assert_eq!(
        first.out, "billing: 2 messages, 1 handled, 0 duplicates, 1 dead letter\n",
        "{first:?}"
    );
    let again = feed.run(&flags).await;
    assert_eq!(
        again.out, "billing: 2 messages, 0 handled, 1 duplicate, 1 given up before\n",
        "{again:?}"
    );
    assert_eq!(feed.read("dead.jsonl").lines().count(), 1);
}
