#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::time::SystemTime;

use super::*;
use oncegate_runtime::dead_letter_reader::Letter;
use oncegate_runtime::dead_letters::DeadLetter;
use oncegate_runtime::{Completion, Entry, Gate, MemoryStore};

const SCOPE: &str = "billing";
const STEP: &str = "charge";

fn key() -> Key {
    Key::json(["id"])
}

fn message(offset: i64, payload: impl Into<String>) -> Message {
    let origin = Origin::Kafka {
        topic: "orders".into(),
        partition: 3,
        offset,
    };
    Message::new("orders", origin, Some(payload.into().into()))
}

fn order(id: i64) -> Message {
    message(id, format!(r#"{{"id": {id}}}"#))
}

fn letter_of(message: &Message, key: Option<String>, cause: DeadLetterCause) -> StoredDeadLetter {
    let letter = DeadLetter {
        message: message.clone(),
        scope: SCOPE.to_owned(),
        key,
        cause,
        reason: String::new(),
        attempts: 1,
        first_failed_at: None,
        failed_at: SystemTime::now(),
    };
    let place = Origin::Kafka {
        topic: "dead".into(),
        partition: 0,
        offset: 0,
    };
    StoredDeadLetter {
        place,
        what: Letter::Known(letter),
    }
}

/// Completes the message, and returns the idempotency key of its effect.
async fn handle(gate: &Gate, message: &Message) -> String {
    let Entry::Granted(lease) = gate.enter(message).await.unwrap() else {
        panic!("not granted")
    };
    let key = lease.attempt().idempotency_key(STEP);
    assert_eq!(lease.complete(&()).await.unwrap(), Completion::Applied);
    key
}

fn audit(store: &Arc<MemoryStore>) -> Audit {
    Audit::new(SCOPE, key(), Arc::clone(store)).step(STEP)
}

async fn open(audit: Audit) -> OpenAudit {
    audit.open(tempfile::tempfile().unwrap()).await.unwrap()
}

/// (kind, origin, effects) of the findings.
fn found(report: &AuditReport) -> Vec<(AuditVerdict, &str, u64)> {
    report
        .findings
        .iter()
        .map(|finding| (finding.verdict, finding.origin.as_str(), finding.effects))
        .collect()
}

/// Handles all events but the lost ones. Returns their effects: two of those that are planted
/// twice, and none of the silent ones.
async fn handle_all(
    gate: &Gate,
    events: i64,
    [lost, twice, silent]: &[Vec<i64>; 3],
) -> Vec<String> {
    let mut effects = Vec::new();
    for id in 0..events {
        if lost.contains(&id) {
            continue;
        }
        let effect = handle(gate, &order(id)).await;
        let times = if twice.contains(&id) {
            2
        } else {
            usize::from(!silent.contains(&id))
        };
        effects.extend(std::iter::repeat_n(effect, times));
    }
    effects
}

/// Asserts that the findings with this verdict are exactly the events with these ids.
fn assert_found(report: &AuditReport, verdict: AuditVerdict, ids: &[i64]) {
    let findings = report
        .findings
        .iter()
        .filter(|finding| finding.verdict == verdict);
    assert!(
        findings
            .clone()
            .all(|finding| finding.key.is_some() && finding.messages == 2)
    );
    let origins: Vec<String> = findings.map(|finding| finding.origin.clone()).collect();
    let planted: Vec<String> = ids.iter().map(|id| format!("orders/3@{id}")).collect();
    assert_eq!(origins, planted, "{verdict:?}");
}

// invariant: audit-finds-what-was-planted
#[tokio::test]
async fn planted_losses_and_doubles_are_found_and_nothing_else_is() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let store = Arc::new(MemoryStore::new());
    let gate = Gate::new(SCOPE, key(), Arc::clone(&store));
    const EVENTS: i64 = 3_000;
    let mut places: Vec<i64> = (0..EVENTS).collect();
    random.shuffle(&mut places);
    let mut planted = [0..5, 5..10, 10..15].map(|planted| places[planted].to_vec());
    planted.iter_mut().for_each(|ids| ids.sort_unstable());
    let mut effects = handle_all(&gate, EVENTS, &planted).await;
    effects.extend(["0".repeat(32), "no key at all".to_owned()]);
    random.shuffle(&mut effects);

    let mut audit = open(audit(&store)).await;
    for id in 0..EVENTS {
        // Each comes twice; the second time later in the partition, with another spelling of its
        // key.
        let again = message(EVENTS + id, format!(r#"{{"id": {id}.0, "again": true}}"#));
        audit.add_messages(vec![order(id), again]).await.unwrap();
    }
    audit
        .add_effects(effects.iter().map(String::as_str))
        .await
        .unwrap();
    let report = audit.finish().await.unwrap();
    assert_eq!(
        (report.messages, report.events),
        (2 * EVENTS as u64, EVENTS as u64)
    );
    assert_eq!(report.effects, effects.len() as u64);
    assert_eq!(
        (
            report.lost,
            report.doubled,
            report.without_effect,
            report.unexplained
        ),
        (5, 5, 5, 2)
    );
    assert_eq!((report.ok, report.found()), (EVENTS as u64 - 15, 17));
    let [lost, twice, silent] = planted;
    assert_found(&report, AuditVerdict::Lost, &lost);
    assert_found(&report, AuditVerdict::Doubled, &twice);
    assert_found(&report, AuditVerdict::WithoutEffect, &silent);
    let strays: Vec<_> = report
        .findings
        .iter()
        .filter(|one| one.verdict == AuditVerdict::Unexplained)
        .collect();
    assert!(
        strays
            .iter()
            .all(|stray| stray.origin.starts_with("effect ") && stray.key.is_none())
    );
    assert_eq!(
        strays
            .iter()
            .filter(|stray| stray.idempotency_key.is_some())
            .count(),
        1
    );
}

#[tokio::test]
async fn dead_letters_explain_messages_by_their_key_or_their_position() {
    let store = Arc::new(MemoryStore::new());
    let gate = Gate::new(SCOPE, key(), Arc::clone(&store)).fingerprint(FingerprintSpec::payload());
    handle(&gate, &order(1)).await;
    let given_up = order(2);
    let bad = message(10, "{");
    let worse = message(11, "{");
    let other = message(20, r#"{"id": 1, "amount": 2}"#);
    let another = message(21, r#"{"id": 1, "amount": 2}"#);
    let letters = vec![
        letter_of(
            &given_up,
            Some(gate_key(&given_up)),
            DeadLetterCause::Permanent,
        ),
        letter_of(&bad, None, DeadLetterCause::BadKey),
        letter_of(&other, Some(gate_key(&order(1))), DeadLetterCause::Mismatch),
    ];
    let audit = audit(&store).fingerprint(FingerprintSpec::payload());
    let mut audit = open(audit).await;
    audit
        .add_messages(vec![order(1), given_up, bad, worse, other, another])
        .await
        .unwrap();
    audit.add_dead_letters(letters).await.unwrap();
    let report = audit.finish().await.unwrap();
    assert_eq!(
        (report.events, report.ok, report.dead_lettered, report.lost),
        (6, 1, 3, 2)
    );
    let lost = [
        (AuditVerdict::Lost, "orders/3@11", 0),
        (AuditVerdict::Lost, "orders/3@21", 0),
    ];
    assert_eq!(found(&report), lost);
    assert!(
        report.findings.iter().all(|finding| finding.key.is_none()),
        "the key is that of another message"
    );
}

/// The store key of a message.
fn gate_key(message: &Message) -> String {
    let key = key().compile(&Scope::new(SCOPE).unwrap()).unwrap();
    key.derive(message.route(), message).unwrap().to_string()
}

#[tokio::test]
async fn what_is_not_acknowledged_is_not_lost_yet() {
    let store = Arc::new(MemoryStore::new());
    for (audit, lost) in [
        (audit(&store), 10),
        (audit(&store).committed("orders", 3, 4), 4),
        (audit(&store).committed("orders", 2, 4), 0),
    ] {
        let mut audit = open(audit).await;
        audit
            .add_messages((0..10).map(order).collect())
            .await
            .unwrap();
        let report = audit.finish().await.unwrap();
        assert_eq!((report.lost, report.in_flight), (lost, 10 - lost));
    }
}

#[tokio::test]
async fn the_first_findings_are_kept_and_all_are_counted() {
    let store = Arc::new(MemoryStore::new());
    let mut audit = open(audit(&store).findings_most(3)).await;
    audit
        .add_messages((0..100).map(order).collect())
        .await
        .unwrap();
    let report = audit.finish().await.unwrap();
    assert_eq!(report.lost, 100);
    let first = [0, 1, 2].map(|offset| format!("orders/3@{offset}"));
    assert_eq!(
        report
            .findings
            .iter()
            .map(|finding| finding.origin.clone())
            .collect::<Vec<_>>(),
        first
    );
}

#[tokio::test]
async fn messages_of_queues_are_refused() {
    let store = Arc::new(MemoryStore::new());
    let mut audit = open(audit(&store)).await;
    let origin = Origin::Queue {
        queue: "orders".into(),
        id: "7".into(),
    };
    audit
        .add_messages(vec![Message::new("orders", origin, None)])
        .await
        .unwrap();
    let error = audit.finish().await.unwrap_err().to_string();
    assert!(
        error.contains("orders") && error.contains("Kafka"),
        "{error}"
    );
}

#[test]
fn idempotency_keys_are_recognised_however_they_are_spelt() {
    let bits = idempotency_bits("billing:x", STEP);
    let text = oncegate_runtime::attempt::uuid(bits);
    for spelt in [
        text.clone(),
        text.to_uppercase(),
        text.replace('-', ""),
        format!(" \"{text}\"\r"),
    ] {
        assert_eq!(parse_uuid(&spelt), Some(bits), "{spelt}");
    }
    for other in [
        "",
        "7",
        "order 7",
        &text[1..],
        &format!("{text}0"),
        &text.replace('8', "x"),
    ] {
        assert_eq!(parse_uuid(other), None, "{other}");
    }
}
