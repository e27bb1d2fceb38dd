//! The journal of the SQL stores, compared with the changes that the rules make.

use std::time::Duration;

use fastrand::Rng;
use oncegate::journal::JournalEntry;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::{FencingToken, Record, Recovery, State, Token, TokenTag};
use oncegate_core::rules::{Operation, ReleaseCause};
use oncegate_core::store::Store;
use oncegate_testkit::Client;

use crate::journal::{HOUR, apply, execute};
use crate::place::Place;

/// The state of a record in a word, its owner, and `true` if it is handed over.
fn owner(record: &Record) -> (&'static str, Vec<u8>, bool) {
    match &record.state {
        State::Pending { token, .. } => ("pending", token.as_bytes().to_vec(), false),
        State::Released { by, .. } => ("released", by.0.to_vec(), false),
        State::Completed { by, .. } => ("completed", by.0.to_vec(), false),
        State::Failed {
            by, handed_over, ..
        } => ("failed", by.0.to_vec(), *handed_over),
    }
}

/// The run of an owner with this tag.
fn run(tag: &[u8]) -> Option<String> {
    (tag != TokenTag::NONE.0).then(|| tag.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns whether a record was reopened and not claimed since.
fn is_reopened(record: &Record) -> bool {
    matches!(
        record.state,
        State::Released {
            by: TokenTag::NONE,
            ..
        }
    )
}

/// The entry that a change of a record must have made, without time and name; `None` if none.
fn expected(key: &StoreKey, before: Option<&Record>, after: &Record) -> Option<JournalEntry> {
    let (word, bytes, _) = owner(after);
    if before.map(owner) == Some(owner(after)) {
        return None;
    }
    let mut entry = JournalEntry {
        key: Some(key.to_string()),
        event: word.to_owned(),
        run: run(&bytes[..4]),
        ..JournalEntry::default()
    };
    match &after.state {
        State::Pending {
            attempt,
            recovery,
            fencing_token,
            ..
        } => {
            let reopened = before.is_some_and(is_reopened);
            entry.event = "claimed".to_owned();
            entry.attempt = Some(u32::from(*attempt));
            entry.fencing_token = fencing_token.map(|FencingToken(number)| number);
            entry.reason = match recovery {
                Recovery::Takeover => Some("takeover".to_owned()),
                Recovery::None | Recovery::Earlier => reopened.then(|| "reopened".to_owned()),
            };
        }
        State::Released {
            by,
            attempt,
            fencing_token,
            reason,
            ..
        } => {
            if *by == TokenTag::NONE {
                entry.event = "reopened".to_owned();
            }
            entry.attempt = Some(u32::from(*attempt)).filter(|attempt| *attempt > 0);
            entry.fencing_token = fencing_token.map(|FencingToken(number)| number);
            entry.reason = Some(reason.clone());
        }
        State::Completed { .. } => {}
        State::Failed {
            attempt,
            handed_over,
            reason,
            ..
        } => {
            if *handed_over {
                entry.event = "handed_over".to_owned();
            }
            entry.attempt = Some(u32::from(*attempt)).filter(|attempt| *attempt > 0);
            entry.reason = Some(reason.clone());
        }
    }
    // The end of a run has the attempt and the fencing token of its claim.
    if let Some(State::Pending {
        token,
        attempt,
        fencing_token,
        ..
    }) = before.map(|before| &before.state)
        && token.tag().0[..] == bytes[..4]
    {
        entry.attempt = Some(u32::from(*attempt));
        entry.fencing_token = fencing_token.map(|FencingToken(number)| number);
    }
    Some(entry)
}

fn any_operation(rng: &mut Rng, record: Option<&Record>) -> Operation {
    let token = Token::from_bits(u128::from(rng.u32(1..4)) << 96 | 7);
    let lease = HOUR / 2;
    let retention = HOUR * 5 / 2;
    let result = b"result".to_vec().into();
    let reason = "why".to_owned();
    match (rng.u8(..10), record) {
        (0..4, _) => Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: rng.bool(),
            longest_lease: Duration::MAX,
        },
        (4, _) => Operation::Extend { token, lease },
        (5, _) => Operation::Complete {
            token,
            fingerprint: None,
            result,
            retention,
        },
        (6, _) => Operation::Release {
            token,
            delay: HOUR * rng.u32(..2) / 2,
            end: [
                ReleaseCause::Failed,
                ReleaseCause::Interrupted,
                ReleaseCause::NotStarted,
            ][rng.usize(..3)],
            reason,
        },
        (7, _) => Operation::Fail {
            token,
            reason,
            retention,
        },
        (8, Some(record)) => Operation::Reopen {
            expected: record.clone(),
        },
        _ => Operation::HandOver { by: token.tag() },
    }
}

async fn read(store: &dyn Store, key: &StoreKey) -> Option<Record> {
    store
        .read(vec![key.clone()])
        .await
        .remove(0)
        .unwrap()
        .map(|snapshot| snapshot.record)
}

// invariant: journal-in-transaction
#[tokio::test(flavor = "multi_thread")]
async fn every_change_of_state_has_its_entry_and_nothing_else_has_one() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    // A server waits for its disk at each of them.
    for (client, steps) in [(Client::Sqlite, 6_000), (Client::TokioPostgres, 250)] {
        let place = Place::patiently_journaled(client).await;
        let mut rng = Rng::with_seed(seed);
        let key = StoreKey::new(
            &Scope::new(&place.scope).unwrap(),
            Digest::from_bytes([7; 16]),
        );
        let mut told = Vec::new();
        let mut reached = std::collections::BTreeSet::new();
        for step in 0..steps {
            if rng.u8(..4) == 0 {
                place.pass(&key, HOUR).await;
            }
            let before = read(&*place.store, &key).await;
            let operation = any_operation(&mut rng, before.as_ref());
            apply(&*place.store, &key, operation.clone()).await;
            let after = read(&*place.store, &key).await;
            let entry = after
                .as_ref()
                .and_then(|after| expected(&key, before.as_ref(), after));
            let mut entries = place.history(&key).await;
            for entry in &mut entries {
                entry.at_ms = 0;
                entry.by = None;
            }
            // An expired record, and with it its journal, is removed at once or by the purge.
            if before.is_none() && !entries.starts_with(&told) {
                told.clear();
            }
            // A run that completes once more after its retention has an entry already, if its row
            // is still there.
            let again = |last: &JournalEntry| {
                before.is_none()
                    && entry.as_ref().is_some_and(|entry| {
                        entry.event == "completed"
                            && (&last.event, &last.run) == (&entry.event, &entry.run)
                    })
            };
            let said = told.last().is_some_and(again) && entries.len() == told.len();
            told.extend(entry.iter().filter(|_| !said).cloned());
            assert_eq!(
                entries, told,
                "seed {seed}, {client}, step {step}: {operation:?}\n{before:?}\n{after:?}"
            );
            reached.extend(entry.map(|entry| (entry.event, entry.reason)));
            if told.len() > 20 {
                told.clear();
                let purged = format!("DELETE FROM {} WHERE key = '{key}'", table(client));
                execute(&place, &purged).await;
                assert_eq!(
                    place.history(&key).await,
                    [],
                    "{client}: they go with their record"
                );
            }
        }
        // Claimed in three ways, and every end.
        assert!(
            reached.len() >= if client == Client::Sqlite { 8 } else { 5 },
            "seed {seed}, {client}: {reached:?}"
        );
    }
}

fn table(client: Client) -> &'static str {
    if client == Client::Sqlite {
        "records"
    } else {
        "oncegate_records"
    }
}
