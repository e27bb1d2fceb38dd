//! The signals that shells, systemd and Kubernetes send: the table in docs/RUN.md, without a
//! server.

use std::process::Stdio;

use oncegate_testkit::{Process, process, until};

use super::stdin::{Feed, order};
use super::{LIMIT, program};

/// A run whose worker has the order A-2, and waits at the gate.
async fn in_mid_effect() -> (Feed, Process) {
    let feed = Feed::of(&[&order("A-2")]);
    feed.close_gate();
    let process = feed.start_on_input(&[]);
    feed.until_in_ledger("A-2 0").await;
    (feed, process)
}

async fn until_logged(feed: &Feed, words: &str) {
    until(words, LIMIT, async || {
        if feed.read("err").contains(words) {
            Ok(())
        } else {
            Err(feed.read("err"))
        }
    })
    .await;
}

/// Lets the effect end. It has happened once, and its record is complete.
async fn ends_well(feed: Feed, process: Process) {
    feed.open_gate();
    let ended = feed.end(process).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    std::fs::remove_file(feed.path("gate")).unwrap();
    let again = feed.run(&[]).await;
    assert_eq!(
        again.out, "billing: 1 message, 0 handled, 1 duplicate\n",
        "{again:?}"
    );
    assert_eq!(feed.ledger(), ["A-2 0"]);
}

/// SIGTERM: systemd, Kubernetes, Docker; SIGINT and SIGQUIT: keys of a terminal; SIGHUP: its end.
#[tokio::test]
async fn each_signal_to_stop_lets_an_effect_end() {
    for signal in ["TERM", "INT", "HUP", "QUIT"] {
        let (feed, mut process) = in_mid_effect().await;
        process.signal(signal);
        until_logged(&feed, "stopping").await;
        ends_well(feed, process).await;
    }
}

#[tokio::test]
async fn signals_without_a_meaning_change_nothing() {
    let (feed, mut process) = in_mid_effect().await;
    for signal in ["USR1", "USR2"] {
        process.signal(signal);
        until_logged(&feed, &format!("SIG{signal} has no meaning here")).await;
    }
    ends_well(feed, process).await;
}

/// `timeout` sends SIGTERM to its child and to its group; systemd with `SendSIGHUP` sends SIGHUP
/// after SIGTERM.
#[tokio::test]
async fn two_signals_at_once_are_one_request() {
    let (feed, mut process) = in_mid_effect().await;
    for signal in ["TERM", "TERM", "HUP"] {
        process.signal(signal);
    }
    until_logged(&feed, "stopping").await;
    ends_well(feed, process).await;
}

/// A terminal's Ctrl-Z, and `fg`.
#[tokio::test]
async fn a_suspended_run_goes_on() {
    let (feed, mut process) = in_mid_effect().await;
    process.signal("STOP");
    process.signal("CONT");
    ends_well(feed, process).await;
}

#[tokio::test]
async fn nohup_keeps_a_run_when_its_terminal_ends() {
    let feed = Feed::of(&[&order("A-2")]);
    feed.close_gate();
    let mut ignoring = process::bound_to_parent("sh", "KILL");
    ignoring
        .args(["-c", r#"trap "" HUP; exec "$@""#, "sh"])
        .arg(program());
    let mut process = feed.start_by(
        ignoring,
        std::fs::File::open(feed.path("input")).unwrap(),
        &[],
    );
    feed.until_in_ledger("A-2 0").await;
    process.signal("HUP");
    // A later signal that is logged shows that the first one was not.
    process.signal("USR1");
    until_logged(&feed, "SIGUSR1 has no meaning here").await;
    assert!(
        !feed.read("err").contains("stopping"),
        "{}",
        feed.read("err")
    );
    ends_well(feed, process).await;
}

/// The signals that a process handles, as bits.
fn handled(id: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigCgt:"))
        .unwrap_or("0");
    u64::from_str_radix(mask.trim(), 16).unwrap()
}

#[tokio::test]
async fn a_stop_at_the_start_is_orderly() {
    const TERM: u64 = 1 << 14;
    let feed = Feed::of(&[&order("A-1")]);
    let mut process = feed.start(Stdio::piped(), &[]);
    until("signals to be handled", LIMIT, async || {
        match handled(process.id()) & TERM {
            0 => Err(feed.read("err")),
            _ => Ok(()),
        }
    })
    .await;
    process.signal("TERM");
    let _input = process.child().stdin.take();
    let ended = feed.end(process).await;
    assert_eq!(
        ended.code,
        Some(130),
        "nothing of its input was handled: {ended:?}"
    );
    assert!(feed.ledger().is_empty());
}

/// A worker that is still starting ends by the end of its input, and not by SIGKILL.
#[tokio::test]
async fn a_stop_at_the_start_lets_workers_end() {
    let feed = Feed::of(&[&order("A-1")]);
    let worker = r#"
echo started >>ledger
until [ -e go ]; do sleep 0.02; done
cat >/dev/null
echo ended >>ledger
"#;
    std::fs::write(feed.path("worker.sh"), worker).unwrap();
    let mut process = feed.start_on_input(&["--handler-exec", "sh worker.sh"]);
    feed.until_in_ledger("started").await;
    process.signal("TERM");
    until_logged(&feed, "stopping").await;
    std::fs::write(feed.path("go"), "").unwrap();
    let ended = feed.end(process).await;
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(feed.ledger(), ["started", "ended"], "{ended:?}");
    assert!(!ended.err.contains("restarting"), "{}", ended.err);
}
