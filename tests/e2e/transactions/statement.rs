//! The published statement against the rules.

use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use oncegate::postgres::PostgresStore;
use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::{FencingToken, Record, Recovery, State, StoreTime, TAIL, Token};
use oncegate_core::rules::{Operation, Reply, apply};
use oncegate_core::store::Store as _;
use oncegate_core::testing::fingerprint;
use oncegate_testkit::{Postgres, unique};

use crate::place::postgres_store;

const RECORDS: u64 = 400;
const HOUR: Duration = Duration::from_secs(3_600);

/// A record of any state, by one of two tokens; `expires_at` is its expiry.
fn any_record(rng: &mut Rng, tokens: [Token; 2]) -> Record {
    let token = tokens[rng.usize(..2)];
    let attempt = rng.u8(1..=255);
    let fencing_token = rng.bool().then_some(FencingToken(17));
    let reason = "why".to_owned();
    let state = match rng.u8(..6) {
        0..3 => {
            let recovery = [Recovery::None, Recovery::Earlier, Recovery::Takeover][rng.usize(..3)];
            State::Pending {
                token,
                attempt,
                recovery,
                fencing_token,
            }
        }
        3 => State::Released {
            by: token.tag(),
            attempt,
            recovery: [Recovery::None, Recovery::Earlier, Recovery::Takeover][rng.usize(..3)],
            fencing_token,
            reason,
        },
        4 => State::Completed {
            by: token.tag(),
            result: Bytes::from_static(b"first"),
        },
        _ => State::Failed {
            by: token.tag(),
            attempt,
            handed_over: rng.bool(),
            reason,
        },
    };
    // A lease that is over, one that is not; nothing near the border, which real time would move.
    let left = [TAIL / 2, TAIL + HOUR][rng.usize(..2)];
    let fingerprint = rng.bool().then(|| fingerprint(1, rng.u8(..)));
    Record {
        expires_at: StoreTime::default() + left,
        fingerprint,
        state,
    }
}

fn key(scope: &Scope, number: u64) -> StoreKey {
    StoreKey::new(scope, Digest::from_bytes(u128::from(number).to_be_bytes()))
}

/// Runs the published statement. Returns the number of rows that it has changed.
async fn complete(client: &tokio_postgres::Client, key: &StoreKey, token: Token) -> u64 {
    let key = key.as_str();
    let token = token.as_bytes().as_slice();
    let result = b"result".as_slice();
    let retention_ms = 3_600_000_i64;
    client
        .execute(
            PostgresStore::complete_sql(),
            &[&key, &token, &result, &retention_ms],
        )
        .await
        .unwrap()
}

// invariant: complete-statement
#[tokio::test]
async fn the_statement_completes_exactly_what_the_rules_complete() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let postgres = Postgres::shared().await;
    let store = postgres_store(postgres.url()).await;
    let client = postgres.connection().await;
    let scope = Scope::new(unique("statement")).unwrap();
    // They share a tag, which must not be enough.
    let tokens = [Token::from_bits(1 << 100), Token::from_bits(1 << 100 | 1)];
    let planted: Vec<_> = (0..RECORDS)
        .map(|number| (key(&scope, number), any_record(&mut rng, tokens)))
        .collect();
    store.plant(&planted).await.unwrap();
    // Some have expired since.
    let expired: Vec<_> = planted
        .iter()
        .filter(|_| rng.u8(..8) == 0)
        .map(|(key, _)| (key.clone(), TAIL * 2))
        .collect();
    store.pass(&expired).await.unwrap();

    let keys: Vec<StoreKey> = planted
        .iter()
        .map(|(key, _)| key.clone())
        .chain([key(&scope, RECORDS)])
        .collect();
    let mut reached = [0; 2];
    for key in keys {
        let before = store.read(vec![key.clone()]).await.remove(0).unwrap();
        let changed = complete(&client, &key, tokens[0]).await;
        let after = store.read(vec![key.clone()]).await.remove(0).unwrap();

        let complete = Operation::Complete {
            token: tokens[0],
            fingerprint: None,
            result: Bytes::from_static(b"result"),
            retention: HOUR,
        };
        let (now, record) = match before.clone() {
            Some(snapshot) => (snapshot.now, Some(snapshot.record)),
            None => (StoreTime::default(), None),
        };
        let (expected, reply) = apply(now, record.clone(), &complete);
        // Completed within a transaction is only what was not completed before, and was there.
        let completes = reply == Reply::Applied { recreated: false } && expected != record;
        assert_eq!(changed, u64::from(completes), "seed {seed}, {before:?}");
        let expected = if completes { expected } else { record };
        match (after, expected) {
            (None, None) => {}
            (Some(after), Some(expected)) => {
                assert_eq!(
                    (&after.record.state, after.record.fingerprint),
                    (&expected.state, expected.fingerprint)
                );
                let off = after
                    .record
                    .expires_at
                    .millis()
                    .abs_diff(expected.expires_at.millis());
                assert!(off < 600_000, "seed {seed}: {off} ms");
            }
            differ => panic!("seed {seed}: {differ:?}"),
        }
        reached[usize::from(completes)] += 1;
    }
    assert!(reached.iter().all(|count| *count > 20), "{reached:?}");
}
