//! Kills in the middle of `oncegate replay --run`.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};

use oncegate_testkit::{Process, until};
use serde_json::Value;

use super::{LIMIT, Stage, name, order, until_charged};

/// What was interrupted runs when it is wanted, and the worker is told that its effect may have
/// happened.
async fn until_overdue_are_handled(stage: &Stage, journal: &[&str], orders: usize) {
    until(
        "the interrupted ones to be overdue and handled",
        LIMIT,
        async || {
            let ended = stage
                .repair(&[journal, &["--overdue", "--json"]].concat())
                .await;
            let document = ended.with(0).json();
            let rest = stage.replay(&["--json"]).await.json();
            match rest["completed"].as_u64() {
                Some(completed) if completed == orders as u64 => Ok(()),
                _ => Err(format!("{document}\n{rest}")),
            }
        },
    )
    .await;
}

/// SIGKILL in the middle, again and again. `ONCEGATE_KILLS` sets how often.
// invariant: replay-run-kills
#[tokio::test]
async fn after_kills_in_the_middle_no_effect_is_too_many() {
    let kills: usize = std::env::var("ONCEGATE_KILLS").map_or(12, |kills| kills.parse().unwrap());
    let seed = RandomState::new().hash_one(kills);
    println!("seed {seed}");
    let stage = Stage::with([]).await;
    let orders = 40 * kills + 100;
    stage
        .kafka
        .produce(
            &stage.topic,
            (0..orders).map(|n| order(&name(n))).collect::<Vec<_>>(),
        )
        .await;
    let done: Vec<String> = (0..orders).step_by(10).map(name).collect();
    stage.complete(done.clone()).await;
    let journal = stage.path("state/oncegate/journal.jsonl");
    let journal = ["--journal", journal.to_str().unwrap()];
    // So slowly that a kill always comes in the middle.
    let arguments = [&stage.repair_arguments()[..], &["--rate", "40"], &journal].concat();
    for kill in 0..kills {
        let log = stage.path("oncegate.log");
        let mut running =
            Process::spawn_logged("oncegate replay", stage.replay_command(&arguments), &log);
        let further = 1 + (seed.rotate_left(u32::try_from(kill % 64).unwrap()) % 10) as usize;
        until_charged(&stage, stage.charged().len() + further).await;
        running.kill();
        // An effect that another process can see was announced before.
        stage.each_charge_is_in_the_journal().await;
    }
    let origins = stage.origins().await;
    let done_origins: BTreeSet<&str> = done
        .iter()
        .flat_map(|id| &origins[id])
        .map(String::as_str)
        .collect();
    // Only what has no record runs, so nothing that a kill has interrupted runs again.
    stage.repair(&journal).await.with(0);
    assert!(
        stage.charged().values().all(|count| *count == 1),
        "{:?}",
        stage.charged()
    );
    until_overdue_are_handled(&stage, &journal, orders).await;
    let expected = (0..orders)
        .map(name)
        .filter(|id| !done.contains(id))
        .map(|id| (id, 1));
    assert_eq!(
        stage.charged(),
        expected.collect(),
        "each has its effect once"
    );
    stage.each_charge_is_in_the_journal().await;
    let replayed = stage.replayed();
    assert!(
        replayed
            .iter()
            .all(|entry| entry["by"] == "ada" && entry["reason"] == "INC-73")
    );
    assert!(
        replayed.len() >= orders - done.len(),
        "one for each run, and for each that a kill interrupted"
    );
    let of_done: Vec<&Value> = replayed
        .iter()
        .filter(|entry| done_origins.contains(entry["origin"].as_str().unwrap()))
        .collect();
    assert!(
        of_done.is_empty(),
        "what had a record does not run: {of_done:?}"
    );
}
