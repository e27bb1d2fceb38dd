//! Handlers with planted bugs, each of which a trial must find, and right handlers, in which it
//! must find nothing.
//!
//! `ONCEGATE_SEEDS=n` runs the right handlers with so many seeds (8 by default), `ONCEGATE_SEED=n`
//! everything with this seed.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

#[path = "catalogue/billing.rs"]
mod billing;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::{Attempt, Failure, Key, Message};
use oncegate_testing::{Defect, Downstream, Fault, Finding, Form, Trial, Verdict, What, report};
use serde_json::{Value, json};

use billing::{Billing, Way};

fn samples() -> Vec<Value> {
    let mut samples: Vec<Value> = (1..=6).map(|id| order(id, "EUR")).collect();
    // The same order in another currency is another event.
    samples.push(order(6, "USD"));
    samples
}

fn order(id: u32, currency: &str) -> Value {
    let sent_at = format!("2026-11-23T10:00:{id:02}Z");
    json!({ "order_id": format!("o-{id:04}"), "amount": 10.5, "currency": currency, "sent_at": sent_at })
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} must be a number"))
    })
}

/// Runs a trial on paused time.
fn tried(way: Way, key: Key, seed: u64) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let trial = Trial::new(move |bank| Billing::new(way, bank))
        .key(key)
        .messages(samples())
        .volatile(["sent_at"])
        .seed(seed);
    runtime
        .block_on(trial.run())
        .unwrap_or_else(|error| panic!("seed {seed}: {error}"))
}

fn right_key() -> Key {
    Key::json(["order_id", "currency"])
}

/// The seed of this run; printed, so that a failure can be repeated.
fn seed() -> u64 {
    let seed = number("ONCEGATE_SEED").unwrap_or_else(oncegate_testing::random_seed);
    println!("seed {seed}");
    seed
}

#[track_caller]
fn finds(way: Way, key: Key, expected: &[Defect]) {
    let seed = seed();
    let verdict = tried(way, key, seed);
    let found = verdict.defects();
    assert!(
        !found.is_empty(),
        "seed {seed}: nothing is found in {way:?}"
    );
    let named = expected.iter().any(|defect| found.contains(defect));
    assert!(
        named,
        "seed {seed}: {way:?} must show one of {expected:?}, and showed\n{verdict}"
    );
    for finding in &verdict.findings {
        assert!(
            !finding.timeline.is_empty(),
            "seed {seed}: {:?}",
            finding.violation
        );
    }
}

macro_rules! planted {
    ($($name:ident: $way:ident => $($defect:ident)|+;)+) => {
        /// The planted bugs, by the names of their tests, with the defects that may be named.
        const PLANTED: &[(&str, Way, &[Defect])] =
            &[$((stringify!($name), Way::$way, &[$(Defect::$defect),+])),+];

        $(
        #[test]
        fn $name() {
            finds(Way::$way, right_key(), &[$(Defect::$defect),+]);
        }
        )+
    };
}

planted! {
    a_handler_without_a_downstream_key_is_found: WithoutKey => NoDownstreamKey;
    a_downstream_key_of_the_attempt_is_found: WithKeyOfAttempt => ChangingDownstreamKey;
    a_downstream_key_of_the_position_is_found: WithKeyOfPosition => ChangingDownstreamKey;
    the_attempt_in_the_body_is_found: WithAttemptInBody => ChangingBody;
    a_random_downstream_key_is_found: WithRandomKey => ChangingDownstreamKey;
    one_downstream_key_for_two_steps_is_found: WithOneKeyForTwoSteps => SharedDownstreamKey;
    one_downstream_key_for_all_messages_is_found: WithOneKeyForAll => SharedDownstreamKey;
    swallowed_errors_are_found: SwallowsErrors => SwallowedError;
    no_answer_that_is_taken_for_success_is_found: TakesNoAnswerForSuccess => SwallowedError;
    giving_up_too_early_is_found: GivesUp => GaveUp;
    a_mark_before_the_effect_is_found: MarksBeforeEffect => MarkedBeforeEffect;
    an_answer_before_the_effect_is_found: AnswersBeforeEffect => AnsweredTooEarly;
    an_effect_for_a_result_that_does_not_decode_is_found: ChargesDuplicatesThatItCannotRead => EffectInDuplicate;
    an_effect_in_the_hook_for_duplicates_is_found: ChargesDuplicates => EffectInDuplicate;
    random_results_are_found: ReturnsRandomResults => DifferentResults;
    fields_of_the_message_before_are_found: UsesFieldsOfTheMessageBefore => LostEffect | ChangingDownstreamKey;
    retries_in_place_without_a_key_are_found: RetriesInPlaceWithoutKey => NoDownstreamKey;
    dependence_on_the_order_is_found: SkipsOlderOrders => LostEffect | MarkedBeforeEffect;
    a_handler_that_hangs_is_found: HangsAfterAnError => Unfinished | DoesNotStop;
    state_that_runs_share_is_found: KeepsOneOrderForAll => LostEffect | ChangingDownstreamKey | MarkedBeforeEffect;
    two_steps_without_keys_are_found: ChargesInPartsWithoutKeys => NoDownstreamKey;
    an_effect_after_a_cancellation_is_found: DoesNotReturnAfterCancel => EffectAfterCancel | NoDownstreamKey;
    an_effect_that_is_undone_after_a_cancellation_is_found: UndoesWhatWasCancelled => UnexpectedEffect;
}

// invariant: planted-bugs-found
#[test]
fn a_key_without_the_currency_is_found() {
    finds(Way::Right, Key::json(["order_id"]), &[Defect::KeyTooNarrow]);
}

// invariant: planted-bugs-found
#[test]
fn a_key_with_a_timestamp_is_found() {
    finds(
        Way::Right,
        Key::json(["order_id", "currency", "sent_at"]),
        &[Defect::KeyTooWide],
    );
}

// invariant: planted-bugs-found
#[test]
fn a_key_whose_field_does_not_exist_is_found() {
    finds(Way::Right, Key::json(["order_number"]), &[Defect::NoKey]);
}

/// Handles every second order without its effect.
fn tried_with_losses(seed: u64) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let orders = (1..=6).map(|id| json!({ "order_id": format!("o-{id}"), "number": id }));
    let trial = Trial::new(move |bank: Downstream| {
        move |message: Message, attempt: Attempt| {
            let bank = bank.clone();
            async move {
                let order: Value = message.json()?;
                if order["number"]
                    .as_u64()
                    .is_some_and(|number| number % 2 == 1)
                {
                    return Ok("charged".to_owned());
                }
                let body = json!({ "order": order["order_id"] });
                let key = attempt.idempotency_key("charge");
                let answer = bank.effect(&body).idempotency_key(&key).send().await?;
                Ok::<_, Failure>(answer["receipt"].to_string())
            }
        }
    })
    .key(Key::json(["order_id"]))
    .messages(orders);
    runtime.block_on(trial.seed(seed).run()).unwrap()
}

// invariant: planted-bugs-found
#[test]
fn an_effect_that_is_lost_without_a_fault_is_the_only_finding() {
    let seed = seed();
    let verdict = tried_with_losses(seed);
    assert_eq!(
        verdict.defects(),
        BTreeSet::from([Defect::LostEffect]),
        "seed {seed}: {verdict}"
    );
    let finding = verdict.roots().next().unwrap();
    assert_eq!(finding.round, 0, "seed {seed}: {finding:#?}");
}

/// Runs the trial of a handler that takes 3 s for each of 40 orders, in a minute of paused time.
fn tried_slowly(with_key: bool) -> Verdict {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let orders = (1..=40).map(|id| json!({ "order_id": format!("o-{id:04}") }));
    let trial = Trial::new(move |bank: Downstream| {
        move |message: Message, attempt: Attempt| {
            let bank = bank.clone();
            async move {
                tokio::time::sleep(Duration::from_secs(3)).await;
                let key = attempt.idempotency_key("charge");
                let order: Value = message.json()?;
                let request = bank.effect(&order);
                let request = if with_key {
                    request.idempotency_key(&key)
                } else {
                    request
                };
                Ok::<_, Failure>(request.send().await?["receipt"].to_string())
            }
        }
    })
    .key(Key::json(["order_id"]))
    .messages(orders)
    .parallel(4);
    runtime
        .block_on(trial.seed(seed()).for_time(Duration::from_secs(60)).run())
        .unwrap()
}

// invariant: planted-bugs-found, right-handlers-clean
#[test]
fn most_faults_of_a_slow_handler_are_tried() {
    let right = tried_slowly(true);
    assert!(
        right.is_clean() && right.is_complete(),
        "{right}\n{:?} of {:?}",
        right.untried(),
        right.faults
    );
    assert!(
        tried_slowly(false)
            .defects()
            .contains(&Defect::NoDownstreamKey)
    );
}

#[test]
fn faults_that_did_not_begin_are_named_and_prevent_success() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let trial = Trial::new(|bank| Billing::new(Way::Right, bank))
        .key(right_key())
        .messages(samples())
        .volatile(["sent_at"]);
    let verdict = runtime
        .block_on(trial.seed(seed()).rounds(2).run())
        .unwrap();
    assert!(verdict.is_clean() && !verdict.is_complete(), "{verdict}");
    assert!(
        verdict.untried().contains(&Fault::Freeze) && verdict.untried().len() >= 18,
        "{verdict}"
    );
    assert!(verdict.to_string().contains("freeze"), "{verdict}");
}

#[test]
fn a_handler_that_does_not_know_the_witness_is_an_error() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    let error = runtime
        .block_on(
            Trial::new(|_| async |_: Message, _: Attempt| Ok::<(), Failure>(()))
                .key(right_key())
                .messages(samples())
                .run(),
        )
        .unwrap_err();
    assert!(error.to_string().contains("no call arrived"), "{error}");
}

#[test]
fn a_finding_has_only_the_faults_and_samples_that_it_needs() {
    shorter_findings(seed());
    // How often a shorter history shows the defect depends on the schedules, so it is looked at in
    // those of one seed.
    let (several, fewer, alone) = shorter_findings(1);
    println!(
        "of {several} findings {fewer} have fewer faults than their rounds, {alone} their own sample alone"
    );
    // A kill during the call for one sample may be the reason for the double effect of another.
    assert!(
        alone * 2 > several && fewer * 2 > several,
        "{alone} and {fewer} of {several}"
    );
}

/// Returns how many findings the rounds of this seed have, how many of them need fewer faults than
/// their rounds have, and how many need their own sample alone.
fn shorter_findings(seed: u64) -> (usize, usize, usize) {
    let mut several = 0;
    let mut fewer = 0;
    let mut alone = 0;
    for round in 23..39 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let trial = Trial::new(|bank| Billing::new(Way::WithoutKey, bank))
            .key(right_key())
            .messages(samples())
            .volatile(["sent_at"]);
        let verdict = runtime
            .block_on(trial.seed(seed).only_round(round).run())
            .unwrap();
        for finding in &verdict.findings {
            let schedule = oncegate_testing::Schedule::new(
                seed,
                round,
                samples().len(),
                &oncegate_testing::Fault::ALL,
            );
            let mut of_finding = [finding.faults.clone(), finding.left_out.clone()].concat();
            let mut of_round = schedule.faults;
            of_finding.sort();
            of_round.sort();
            assert_eq!(
                of_finding, of_round,
                "seed {seed}, round {round}: each fault is needed or left out"
            );
            several += 1;
            fewer += usize::from(!finding.left_out.is_empty());
            alone += usize::from(
                finding.only_samples == finding.violation.sample.into_iter().collect::<Vec<_>>(),
            );
            let sent = finding.timeline.iter().filter(|event| {
                matches!(
                    event.what,
                    What::Produced {
                        form: Form::Original,
                        ..
                    }
                )
            });
            assert_eq!(sent.count(), 1, "{finding:#?}");
        }
    }
    (several, fewer, alone)
}

// invariant: right-handlers-clean
#[test]
fn nothing_is_found_in_right_handlers() {
    let (first, seeds) = match number("ONCEGATE_SEED") {
        Some(seed) => (seed, 1),
        None => (
            fastrand::u64(..u64::MAX / 2),
            number("ONCEGATE_TRIALS").unwrap_or(3),
        ),
    };
    println!("seeds {first} to {}", first + seeds);
    let faults = Arc::new(Mutex::new(BTreeSet::new()));
    for seed in first..first + seeds {
        for way in [Way::Right, Way::RightWithTwoSteps, Way::RightAndImpatient] {
            let verdict = tried(way, right_key(), seed);
            let shown = verdict
                .findings
                .iter()
                .map(|finding| format!("{finding:#?}"))
                .collect::<String>();
            assert!(
                verdict.is_clean(),
                "seed {seed}: {way:?}\n{verdict}\n{shown}"
            );
            assert_eq!(verdict.unassigned, 0, "seed {seed}: {way:?}");
            faults.lock().unwrap().extend(verdict.faults.into_keys());
        }
    }
    // A trial that did not meet its faults proves nothing about them.
    assert_eq!(
        faults.lock().unwrap().len(),
        oncegate_testing::Fault::ALL.len()
    );
}

/// The planted bugs with a finding of each, by one seed, so that they are the same every time.
fn catalogue() -> Vec<(String, Finding)> {
    const SEED: u64 = 7;
    let keys: [(&str, Key, &[Defect]); 3] = [
        (
            "a_key_without_the_currency_is_found",
            Key::json(["order_id"]),
            &[Defect::KeyTooNarrow],
        ),
        (
            "a_key_with_a_timestamp_is_found",
            Key::json(["order_id", "currency", "sent_at"]),
            &[Defect::KeyTooWide],
        ),
        (
            "a_key_whose_field_does_not_exist_is_found",
            Key::json(["order_number"]),
            &[Defect::NoKey],
        ),
    ];
    let handlers = PLANTED
        .iter()
        .map(|(name, way, expected)| (*name, *way, right_key(), *expected));
    let all = handlers.chain(keys.map(|(name, key, expected)| (name, Way::Right, key, expected)));
    all.map(|(name, way, key, expected)| {
        let findings = tried(way, key, SEED).findings;
        let finding = expected
            .iter()
            .find_map(|defect| {
                findings
                    .iter()
                    .find(|finding| finding.violation.defect == *defect)
            })
            .cloned();
        let title = name
            .trim_end_matches("_is_found")
            .trim_end_matches("_are_found")
            .replace('_', " ");
        (
            title,
            finding.unwrap_or_else(|| panic!("{name}: {findings:#?}")),
        )
    })
    .collect()
}

/// The titles and the sentences of the judge on a page, without the numbers of samples and
/// repetitions.
fn sentences(page: &str) -> Vec<String> {
    page.lines()
        .filter(|line| line.starts_with("<h2>") || line.starts_with("<p><strong>"))
        .map(|line| line.replace(|c: char| c.is_ascii_digit(), "#"))
        .collect()
}

/// `scripts/prove-catalogue` writes the page by this test. Behind the entries of Rust it has those
/// of workers, which a test of `oncegate prove` adds.
#[test]
fn the_published_catalogue_says_what_the_judge_says() {
    let catalogue = catalogue();
    let page = report::catalogue(
        catalogue
            .iter()
            .map(|(title, finding)| (title.as_str(), finding)),
    );
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/prove/catalogue.html"
    );
    if std::env::var_os("ONCEGATE_WRITE_CATALOGUE").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let published = std::fs::read_to_string(path).unwrap();
    let of_rust = published
        .split("<h1 id=\"workers\">")
        .next()
        .unwrap_or_default();
    assert_eq!(
        sentences(of_rust),
        sentences(&page),
        "scripts/prove-catalogue brings it up to date"
    );
}
