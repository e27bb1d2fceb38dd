//! Tests of the comparison: with a port that is correct by construction, and with wrong ports.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::SystemTime;

use super::*;
use crate::record::{TAIL, whole_millis};
use crate::store::{Checkup, StoreError};

type Rules = fn(StoreTime, Option<Record>, &Operation) -> (Option<Record>, Reply);

/// A store with given rules on the wall clock.
#[derive(Debug)]
struct Port {
    rules: Rules,
    records: Mutex<HashMap<StoreKey, Record>>,
}

fn wall_clock() -> StoreTime {
    let now = SystemTime::UNIX_EPOCH
        .elapsed()
        .expect("the clock is after 1970");
    StoreTime::from_micros(u64::try_from(now.as_micros()).expect("the time fits 64 bits"))
}

#[async_trait]
impl Store for Port {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let mut records = self.records.lock().unwrap();
        commands
            .into_iter()
            .map(|Command { key, operation }| {
                let (record, reply) = (self.rules)(wall_clock(), records.remove(&key), &operation);
                records.extend(record.map(|record| (key, record)));
                Ok(reply)
            })
            .collect()
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let now = wall_clock();
        let records = self.records.lock().unwrap();
        keys.into_iter()
            .map(|key| {
                Ok(records.get(&key).map(|record| RecordSnapshot {
                    now,
                    record: record.clone(),
                }))
            })
            .collect()
    }

    async fn describe(&self, _: &Scope, _: Option<&str>, _: &str) -> Result<String, StoreError> {
        Err(StoreError::refused("not compared"))
    }

    async fn descriptor(&self, _: &Scope) -> Result<Option<String>, StoreError> {
        Err(StoreError::refused("not compared"))
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        Err(StoreError::refused("not compared"))
    }
}

struct PortBench(Arc<Port>);

#[async_trait]
impl Subject for PortBench {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.0) as Arc<dyn Store>
    }

    fn scope(&self) -> Scope {
        crate::testing::scope("equivalence")
    }

    async fn pass(&self, waits: &[(StoreKey, Duration)]) {
        let now = wall_clock();
        let mut records = self.0.records.lock().unwrap();
        for (key, wait) in waits {
            if let Some(record) = records.get_mut(key) {
                let expires_at = record.expires_at.millis() - whole_millis(*wait);
                record.expires_at = StoreTime::from_millis(expires_at);
                if expires_at <= now.millis() {
                    records.remove(key);
                }
            }
        }
    }

    async fn plant(&self, planted: &[(StoreKey, Record)]) {
        let mut records = self.0.records.lock().unwrap();
        for (key, record) in planted {
            let left = Duration::from_millis(record.expires_at.millis());
            records.insert(
                key.clone(),
                Record {
                    expires_at: wall_clock() + left,
                    ..record.clone()
                },
            );
        }
    }
}

async fn compare_with(rules: Rules) -> Result<Reached, String> {
    let bench = PortBench(Arc::new(Port {
        rules,
        records: Mutex::default(),
    }));
    compare(
        &bench,
        Plan {
            seed: 7,
            sequences: 1_000,
            steps: 16,
        },
    )
    .await
}

#[tokio::test]
async fn the_rules_equal_themselves_and_every_answer_is_reached() {
    let reached = compare_with(apply).await.unwrap();
    assert_eq!(reached.missing(), Vec::<&str>::new());
}

#[tokio::test]
async fn rules_with_a_fault_are_told_apart() {
    let faulty: [(&str, Rules); 4] = [
        (
            "an extend that sets instead of never moving back",
            |now, record, operation| {
                let (mut record, reply) = apply(now, record, operation);
                if let (Operation::Extend { lease, .. }, Some(record)) = (operation, &mut record)
                    && matches!(record.state, State::Pending { .. })
                {
                    record.expires_at = now + *lease + TAIL;
                }
                (record, reply)
            },
        ),
        ("a hand-over that prolongs", |now, record, operation| {
            let (mut record, reply) = apply(now, record, operation);
            if let (Operation::HandOver { .. }, Some(record)) = (operation, &mut record) {
                record.expires_at = record.expires_at + STEP;
            }
            (record, reply)
        }),
        (
            "a fencing token that never looks at the last one",
            |now, record, operation| {
                let mut forgetful = record;
                if let Some(Record {
                    state: State::Released { fencing_token, .. },
                    ..
                }) = &mut forgetful
                {
                    *fencing_token = fencing_token.map(|_| FencingToken(0));
                }
                apply(now, forgetful, operation)
            },
        ),
        (
            "a complete that does not compare the token",
            |now, record, operation| match (&record, operation) {
                (
                    Some(Record {
                        state: State::Pending { token: owner, .. },
                        ..
                    }),
                    Operation::Complete {
                        fingerprint,
                        result,
                        retention,
                        ..
                    },
                ) => {
                    let operation = Operation::Complete {
                        token: *owner,
                        fingerprint: *fingerprint,
                        result: result.clone(),
                        retention: *retention,
                    };
                    apply(now, record, &operation)
                }
                _ => apply(now, record, operation),
            },
        ),
    ];
    for (fault, rules) in faulty {
        assert!(compare_with(rules).await.is_err(), "{fault}");
    }
}
