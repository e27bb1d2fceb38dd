//! Compares a store with [`apply`], step by step, on random sequences of operations.
//!
//! Every sequence has its own key and its own model. All sequences take a step together as one
//! batch, so ten thousand of them take seconds. After each step, the replies and the records are
//! compared.
//!
//! The test moves the time, in whole steps of an hour. Every lease, delay and retention ends on a
//! half step, so the real time that a run takes decides nothing. Fencing tokens depend on the
//! store's clock: their growth is compared, and their value only where the clock does not determine
//! it.

mod kinds;
mod random;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use self::kinds::Reached;
use self::kinds::{PLANTED_FENCING_TOKENS, kinds};
use self::random::Choices;
pub use self::random::STEP;
use crate::key::{Digest, Scope, StoreKey};
use crate::record::{FencingToken, Record, State, StoreTime};
use crate::rules::{Grant, Operation, Reply, Verdict, apply};
use crate::store::{Command, RecordSnapshot, Store};

/// The real time that a run may take without an influence on its outcome.
const SLACK: Duration = Duration::from_secs(1_200);

/// The start of the model's clock, in milliseconds.
const MODEL_START_MS: u64 = 1_000_000_000_000;

/// The store under test, with hooks that the sequences need besides the [`Store`] trait.
#[async_trait]
pub trait Subject: Send + Sync {
    /// The store.
    fn store(&self) -> Arc<dyn Store>;

    /// A scope that no other test or process uses.
    fn scope(&self) -> Scope;

    /// Simulates that time passes for each key, without waiting: moves the record's expiry towards
    /// now, and deletes a record whose expiry would not be later than now.
    async fn pass(&self, waits: &[(StoreKey, Duration)]);

    /// Stores these records. Their `expires_at` is the time that is left, counted from zero.
    async fn plant(&self, records: &[(StoreKey, Record)]);
}

/// The amount to compare.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The seed of the random numbers.
    pub seed: u64,
    /// The number of sequences.
    pub sequences: usize,
    /// The number of operations in each sequence.
    pub steps: usize,
}

/// Runs the plan. Returns how often each kind of reply occurred.
///
/// # Errors
/// The first difference, as text: the seed, the history of the key, and both replies or records.
pub async fn compare(subject: &dyn Subject, plan: Plan) -> Result<Reached, String> {
    let store = subject.store();
    let mut reached = Reached::default();
    let mut sequences = begin(subject, plan).await;
    for _ in 0..plan.steps {
        let operations: Vec<Operations> = sequences
            .iter_mut()
            .map(Sequence::next_operations)
            .collect();
        let commands = sequences
            .iter()
            .zip(&operations)
            .map(|(sequence, operations)| Command {
                key: sequence.key.clone(),
                operation: operations.real.clone(),
            })
            .collect();
        let replies = store.execute(commands).await;
        let keys = sequences
            .iter()
            .map(|sequence| sequence.key.clone())
            .collect();
        let snapshots = store.read(keys).await;
        if replies.len() != sequences.len() || snapshots.len() != sequences.len() {
            return Err("the store returned another number of replies than commands".to_owned());
        }
        let answers = replies.into_iter().zip(snapshots);
        for ((sequence, operations), answer) in sequences.iter_mut().zip(operations).zip(answers) {
            let compared = match answer {
                (Ok(reply), Ok(snapshot)) => {
                    sequence.compare(&operations, &reply, snapshot, &mut reached)
                }
                failed => Err(format!("the store failed: {failed:?}")),
            };
            compared.map_err(|difference| {
                format!(
                    "seed {}, key {}: {difference}{}",
                    plan.seed,
                    sequence.key,
                    sequence.history()
                )
            })?;
        }
        let waits: Vec<_> = sequences.iter_mut().filter_map(Sequence::wait).collect();
        subject.pass(&waits).await;
    }
    Ok(reached)
}

async fn begin(subject: &dyn Subject, plan: Plan) -> Vec<Sequence> {
    let scope = subject.scope();
    let mut seeds = fastrand::Rng::with_seed(plan.seed);
    let mut sequences: Vec<Sequence> = (0..plan.sequences)
        .map(|_| {
            let key = StoreKey::new(&scope, Digest::from_bytes(seeds.u128(..).to_be_bytes()));
            Sequence::new(key, Choices::new(seeds.u64(..)))
        })
        .collect();
    let planted: Vec<_> = sequences.iter_mut().filter_map(Sequence::plant).collect();
    subject.plant(&planted).await;
    sequences
}

/// The same operation for the model and the store. A reopen and a resolve may differ in the fencing
/// tokens of the expected record, because they depend on the clocks.
struct Operations {
    model: Operation,
    real: Operation,
}

/// The state of one key: the model's record, the last record read from the store, and the history.
struct Sequence {
    key: StoreKey,
    choices: Choices,
    now: StoreTime,
    model: Option<Record>,
    real: Option<Record>,
    /// Earlier records of both sides, as the expected records of a reopen.
    seen: Vec<(Record, Record)>,
    /// The last fencing token that the store derived from its clock.
    last_fencing_token: Option<FencingToken>,
    past: Vec<String>,
}

impl Sequence {
    fn new(key: StoreKey, choices: Choices) -> Self {
        let now = StoreTime::from_millis(MODEL_START_MS);
        Self {
            key,
            choices,
            now,
            model: None,
            real: None,
            seen: Vec::new(),
            last_fencing_token: None,
            past: Vec::new(),
        }
    }

    /// Starts some sequences with a record, for attempt numbers and fencing tokens that take long
    /// to reach.
    fn plant(&mut self) -> Option<(StoreKey, Record)> {
        let planted = self.choices.planted()?;
        let left = Duration::from_millis(planted.expires_at.millis());
        self.past.push(format!("planted {planted:?}"));
        self.model = Some(Record {
            expires_at: self.now + left,
            ..planted.clone()
        });
        self.real = Some(planted.clone());
        Some((self.key.clone(), planted))
    }

    fn next_operations(&mut self) -> Operations {
        // If the model's clock stood still, it would issue the same fencing token twice.
        self.now = self.now + Duration::from_millis(1);
        let current = self.model.clone().zip(self.real.clone());
        let expected = self.choices.expected(current, &self.seen);
        let model = self.choices.operation(
            self.model.as_ref(),
            expected.as_ref().map(|(model, _)| model),
        );
        let real = match (&model, expected) {
            (Operation::Reopen { .. }, Some((_, expected))) => Operation::Reopen { expected },
            (
                Operation::Resolve {
                    token,
                    resolution,
                    retention,
                    ..
                },
                Some((_, expected)),
            ) => Operation::Resolve {
                expected,
                token: *token,
                resolution: resolution.clone(),
                retention: *retention,
            },
            _ => model.clone(),
        };
        self.past.push(format!("{model:?}"));
        Operations { model, real }
    }

    fn wait(&mut self) -> Option<(StoreKey, Duration)> {
        let wait = self.choices.wait();
        if wait.is_zero() {
            return None;
        }
        self.past
            .push(format!("{} steps pass", wait.as_secs() / STEP.as_secs()));
        self.now = self.now + wait;
        Some((self.key.clone(), wait))
    }

    fn compare(
        &mut self,
        operations: &Operations,
        real_reply: &Reply,
        snapshot: Option<RecordSnapshot>,
        reached: &mut Reached,
    ) -> Result<(), String> {
        let before = self.model.take();
        let (model, reply) = apply(self.now, before.clone(), &operations.model);
        if !same_reply(&reply, real_reply) {
            return Err(format!(
                "the answer is {real_reply:?}, and should be {reply:?}"
            ));
        }
        if !same_record(model.as_ref(), self.now, snapshot.as_ref()) {
            return Err(format!(
                "the record is {snapshot:?}, and should be {model:?} at {:?}",
                self.now
            ));
        }
        self.compare_fencing_tokens(&reply, real_reply, snapshot.as_ref())?;
        for kind in kinds(before.as_ref(), &operations.model, &reply) {
            reached.count(kind);
        }
        let real = snapshot.map(|snapshot| snapshot.record);
        self.seen.extend(model.clone().zip(real.clone()));
        self.model = model;
        self.real = real;
        Ok(())
    }

    fn compare_fencing_tokens(
        &mut self,
        model: &Reply,
        real: &Reply,
        snapshot: Option<&RecordSnapshot>,
    ) -> Result<(), String> {
        let (Some(model), Some(real)) = (granted_fencing_token(model), granted_fencing_token(real))
        else {
            return Ok(());
        };
        let now = snapshot.map_or(0, |snapshot| snapshot.now.micros());
        let as_it_should_be = if model.0 >= PLANTED_FENCING_TOKENS {
            // The clock does not determine this token: it is the last one plus one, or a repeat of
            // the same grant.
            real == model
        } else if pending_fencing_token(self.real.as_ref()) == Some(real) {
            true
        } else {
            let slack = u64::try_from(SLACK.as_micros()).unwrap_or(u64::MAX);
            let of_the_clock = real.0 <= now && now - real.0 <= slack;
            of_the_clock
                && self
                    .last_fencing_token
                    .replace(real)
                    .is_none_or(|last| real > last)
        };
        if !as_it_should_be {
            return Err(format!(
                "{real:?} is granted at {now}, and {model:?} by the rules"
            ));
        }
        Ok(())
    }

    fn history(&self) -> String {
        self.past
            .iter()
            .fold(String::new(), |text, line| text + "\n  " + line)
    }
}

fn granted_fencing_token(reply: &Reply) -> Option<FencingToken> {
    match reply {
        Reply::Verdict {
            verdict: Verdict::Granted(grant),
            ..
        } => grant.fencing_token,
        _ => None,
    }
}

fn pending_fencing_token(record: Option<&Record>) -> Option<FencingToken> {
    match record?.state {
        State::Pending { fencing_token, .. } => fencing_token,
        _ => None,
    }
}

/// Returns whether both replies are equal, except for the value of fencing tokens and the real time
/// that a run takes.
fn same_reply(model: &Reply, real: &Reply) -> bool {
    let (
        Reply::Verdict {
            verdict: model_verdict,
            uncompared: model_uncompared,
        },
        Reply::Verdict {
            verdict,
            uncompared,
        },
    ) = (model, real)
    else {
        return model == real;
    };
    let same_verdict = match (model_verdict, verdict) {
        (Verdict::Granted(model), Verdict::Granted(real)) => {
            plain_grant(model) == plain_grant(real)
        }
        (Verdict::Busy { retry_in: model }, Verdict::Busy { retry_in: real }) => {
            real <= model && *model - *real <= SLACK
        }
        (model, real) => model == real,
    };
    model_uncompared == uncompared && same_verdict
}

fn same_record(model: Option<&Record>, now: StoreTime, snapshot: Option<&RecordSnapshot>) -> bool {
    let (
        Some(model),
        Some(RecordSnapshot {
            now: real_now,
            record: real,
        }),
    ) = (model, snapshot)
    else {
        return model.is_none() && snapshot.is_none();
    };
    // In the store, real time has passed, so less time is left. Two readings of a clock within one
    // operation may differ by a millisecond.
    let expected = left_ms(model, now);
    let found = left_ms(real, *real_now);
    let slack = u64::try_from(SLACK.as_millis()).unwrap_or(u64::MAX);
    found <= expected + 1 && expected <= found + slack && plain(model) == plain(real)
}

fn left_ms(record: &Record, now: StoreTime) -> u64 {
    record.expires_at.millis().saturating_sub(now.millis())
}

/// The grant without the value of its fencing token.
fn plain_grant(grant: &Grant) -> Grant {
    Grant {
        fencing_token: grant.fencing_token.map(|_| FencingToken(0)),
        ..*grant
    }
}

/// The record without the values that depend on a clock.
fn plain(record: &Record) -> Record {
    let mut record = Record {
        expires_at: StoreTime::default(),
        ..record.clone()
    };
    if let State::Pending {
        fencing_token: Some(fencing_token),
        ..
    }
    | State::Released {
        fencing_token: Some(fencing_token),
        ..
    } = &mut record.state
        && fencing_token.0 < PLANTED_FENCING_TOKENS
    {
        *fencing_token = FencingToken(0);
    }
    record
}
