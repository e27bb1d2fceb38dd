//! A round: an embedded broker, a store, consumers that come and go, and the downstream service.
//!
//! `group` is what delivers: `broker`, or `remote` where a real broker does. `store` is a process's
//! way to the store and `losses` what makes it lose its records, `downstream` the service that
//! witnesses the effects, `watched` writes the runs of the handler down, `process` has what faults
//! do to a process, `run` starts and ends them.

mod active;
mod broker;
mod downstream;
mod faults;
mod group;
mod losses;
mod process;
mod remote;
mod run;
mod store;
mod watched;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use fastrand::Rng;
use oncegate_core::key::{CompiledKey, Scope, StoreKey};
use oncegate_core::store::Store;
use oncegate_core::testing::fault::{FaultStore, Faults};
use oncegate_runtime::dead_letters::{DeadLetter, DeadLetters};
use oncegate_runtime::{BoxError, Message, Origin};
use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::broker::Topic;
use crate::fault::Fault;
use crate::history::{Form, Recorder, What, digest};
use crate::samples::{Samples, has_any};
use crate::schedule::{Schedule, Strike};
use broker::EmbeddedBroker;
use group::Group;
use losses::LossyStore;
use remote::RemoteGroup;

pub use downstream::{Downstream, DownstreamError, EffectRequest};
pub(crate) use process::Process;
pub(crate) use run::{
    ChangeConsumer, ChangeGate, OpenStore, RoundError, RoundSettings, STOP_DEADLINE_MS, play,
};
pub(crate) use watched::{Start, Watched};

/// A payload that is not JSON.
const MALFORMED: &[u8] = b"{\"order\": \xff";

/// A stored result that says that it is JSON, and ends too early.
const UNDECODABLE: &[u8] = b"\x01{\"of another version\":";

/// The state of a round, which its processes share.
pub(crate) struct Round {
    pub(crate) schedule: Schedule,
    pub(crate) recorder: Arc<Recorder>,
    samples: Arc<Samples>,
    settings: Arc<RoundSettings>,
    /// The scope of the round's gates.
    scope: Scope,
    group: Arc<dyn Group>,
    losses: Arc<LossyStore>,
    /// The same store with the faults of its network, if the round has them.
    store: Arc<FaultStore>,
    sent: Vec<Sending>,
    /// The values of poison that no sample has.
    poison: BTreeSet<String>,
    by_key: HashMap<StoreKey, usize>,
    strikes: Mutex<Vec<Strike>>,
    store_away_until: Mutex<Option<Instant>>,
    /// The keys whose stored results no longer decode.
    undecodable: Mutex<HashSet<StoreKey>>,
    ledger: downstream::Ledger,
    active: active::Active,
    processes: Mutex<Vec<Arc<Process>>>,
    /// The number of processes that start, and can do nothing yet.
    starting: AtomicUsize,
    /// The round ends: calls that are held up go on, so that no handler waits for them.
    stopping: CancellationToken,
}

/// A message of the round.
#[derive(Clone, Debug)]
struct Sending {
    sample: usize,
    form: Form,
}

/// The messages of a round, as they are sent.
#[derive(Default)]
struct Sendings {
    messages: Vec<(usize, Message)>,
    sent: Vec<Sending>,
    by_key: HashMap<StoreKey, usize>,
    poison: BTreeSet<String>,
}

impl Sendings {
    fn new(
        schedule: &Schedule,
        samples: &Samples,
        key: &CompiledKey,
        route: &Arc<str>,
        rng: &mut Rng,
        recorder: &Recorder,
    ) -> Self {
        let mut all = Self::default();
        for (number, planned) in schedule.messages.iter().enumerate() {
            let payload = match planned.form {
                Form::Original => samples.original(planned.sample),
                Form::Duplicate => samples.duplicate(planned.sample, rng),
                Form::Poison => samples.poison(planned.sample, rng),
                Form::Malformed => MALFORMED.into(),
            };
            if planned.form == Form::Poison {
                all.poison.extend(samples.foreign_values(&payload));
            }
            let origin = Origin::Kafka {
                topic: Arc::clone(route),
                partition: partition_number(planned.partition),
                offset: i64::try_from(number).unwrap_or(i64::MAX),
            };
            let message = Message::new(Arc::clone(route), origin, Some(payload));
            let store_key = key.derive(route, &message).ok();
            let what = What::Produced {
                message: number,
                sample: planned.sample,
                form: planned.form,
                key: store_key.as_ref().map(key_name),
            };
            recorder.note(None, what);
            if let Some(store_key) = store_key {
                all.by_key.entry(store_key).or_insert(number);
            }
            all.sent.push(Sending {
                sample: planned.sample,
                form: planned.form,
            });
            all.messages.push((planned.partition, message));
        }
        all
    }
}

impl Round {
    pub(crate) fn new(
        schedule: Schedule,
        samples: Arc<Samples>,
        key: &CompiledKey,
        store: Arc<dyn Store>,
        topic: Option<Arc<dyn Topic>>,
        scope: Scope,
        settings: Arc<RoundSettings>,
    ) -> Arc<Self> {
        let mut rng = Rng::with_seed(schedule.seed);
        let recorder = Arc::new(Recorder::new());
        let Sendings {
            messages,
            sent,
            by_key,
            poison,
        } = Sendings::new(
            &schedule,
            &samples,
            key,
            &settings.route,
            &mut rng,
            &recorder,
        );
        let losses = Arc::new(LossyStore::new(store));
        let store = faulty(&schedule, Arc::clone(&losses), settings.lease, rng.u64(..));
        let partitions = schedule.partitions;
        let noted = Arc::clone(&recorder);
        let group: Arc<dyn Group> = match topic {
            Some(topic) => RemoteGroup::new(topic, messages, partitions, noted),
            None => EmbeddedBroker::new(messages, partitions, rng.fork(), noted),
        };
        for fault in schedule.faults.iter().copied() {
            if fault.lasts_all_round() {
                recorder.note(
                    None,
                    What::FaultBegan {
                        fault,
                        sample: None,
                    },
                );
            }
        }
        Arc::new(Self {
            strikes: Mutex::new(schedule.strikes.clone()),
            schedule,
            recorder,
            samples,
            settings,
            scope,
            group,
            losses,
            store: Arc::new(store),
            sent,
            poison,
            by_key,
            store_away_until: Mutex::new(None),
            undecodable: Mutex::default(),
            ledger: downstream::Ledger::default(),
            active: active::Active::default(),
            processes: Mutex::default(),
            starting: AtomicUsize::new(0),
            stopping: CancellationToken::new(),
        })
    }

    /// The number of a message in the round.
    fn number_of(&self, message: &Message) -> usize {
        match message.origin() {
            Origin::Kafka { offset, .. } => usize::try_from(*offset).unwrap_or(usize::MAX),
            _ => usize::MAX,
        }
    }

    /// The sample that a message stands for; `None` for poison.
    fn sample_of(&self, number: usize) -> Option<usize> {
        let sending = self.sent.get(number)?;
        matches!(sending.form, Form::Original | Form::Duplicate).then_some(sending.sample)
    }

    /// The name of a key in the history, if a message of the round has it.
    fn name_of(&self, key: &StoreKey) -> Option<String> {
        self.by_key.contains_key(key).then(|| key_name(key))
    }

    /// Another process. Their numbers begin with 1.
    fn new_process(&self) -> Arc<Process> {
        let mut processes = self.processes.lock();
        let process = Arc::new(Process::new(
            u32::try_from(processes.len() + 1).unwrap_or(u32::MAX),
        ));
        processes.push(Arc::clone(&process));
        process
    }

    /// The process that handles a message with these values, where processes cannot be told apart
    /// by their calls.
    #[cfg(feature = "http")]
    fn process_with(&self, body: &serde_json::Value) -> Option<Arc<Process>> {
        let number = self.active.process_of(&self.owners(body))?;
        let processes = self.processes.lock();
        processes
            .iter()
            .find(|process| process.number == number)
            .cloned()
    }

    /// The name of the round, which no other one of the trial has.
    pub(crate) fn name(&self) -> &str {
        self.scope.as_str()
    }

    /// The sample that a call belongs to, its run, and whether a duplicate is being told of.
    fn context(
        &self,
        process: &Process,
        body: &serde_json::Value,
    ) -> (Option<usize>, Option<u64>, bool) {
        if has_any(body, &self.poison) {
            return (None, None, false);
        }
        self.active
            .context(process.number, &self.samples.owners(body))
    }

    /// The samples that the body of an effect fits best; none for an effect of poison, whatever
    /// else its handler has put in.
    fn owners(&self, body: &serde_json::Value) -> Vec<usize> {
        if has_any(body, &self.poison) {
            Vec::new()
        } else {
            self.samples.owners(body)
        }
    }

    /// Writes down the effects that the witness lists.
    ///
    /// # Errors
    /// When an effect fits several samples, so that nothing can be said about any of them.
    fn note_listed(&self, effects: &[serde_json::Value]) -> Result<(), BoxError> {
        for (effect, body) in (1..).zip(effects) {
            let owners = self.owners(body);
            if let [one, other, ..] = owners.as_slice() {
                let what = format!(
                    "effect {effect} of the witness fits samples {one} and {other}; let it list the fields that tell them apart"
                );
                return Err(what.into());
            }
            let step = body
                .get("step")
                .and_then(serde_json::Value::as_str)
                .unwrap_or_default()
                .to_owned();
            self.recorder.note(
                None,
                What::Listed {
                    effect,
                    sample: owners.first().copied(),
                    step,
                },
            );
        }
        Ok(())
    }

    /// Kills a process.
    fn kill(&self, process: &Process) {
        if process.kill() {
            self.recorder.note(process.number, What::Killed);
            self.group.leave(process.number);
        }
    }

    fn is_store_away(&self) -> bool {
        let until = *self.store_away_until.lock();
        until.is_some_and(|until| Instant::now() < until)
    }

    /// The store loses every record. A producer or an operator who notices that sends everything
    /// again.
    fn lose_records(&self) {
        self.losses.lose_records();
        self.group.rewind();
    }

    /// From now on the stored result of this key is one that no handler can read, and its
    /// duplicates come.
    fn spoil_result(&self, key: StoreKey) {
        self.undecodable.lock().insert(key);
        self.group.rewind();
    }

    /// The stored result of this key, as a handler gets it.
    fn result_of(&self, key: &StoreKey, stored: Bytes) -> Bytes {
        let undecodable = self.undecodable.lock();
        if undecodable.contains(key) {
            Bytes::from_static(UNDECODABLE)
        } else {
            stored
        }
    }
}

impl fmt::Debug for Round {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Round")
            .field("schedule", &self.schedule)
            .finish_non_exhaustive()
    }
}

/// A key's name in the history: the beginning of its digest.
fn key_name(key: &StoreKey) -> String {
    digest(key.as_str().as_bytes())
}

fn partition_number(partition: usize) -> i32 {
    i32::try_from(partition).unwrap_or(i32::MAX)
}

/// The store behind a network that loses requests and replies, if the round has that fault.
fn faulty(schedule: &Schedule, store: Arc<LossyStore>, lease: Duration, seed: u64) -> FaultStore {
    let faults = if schedule.has(Fault::LostReplies) {
        Faults {
            unavailable: 0.05,
            reply_lost: 0.2,
            request_lost: 0.1,
            stray: 0.3,
            slow_reply: 0.1,
            max_delay: lease / 4,
            ..Faults::default()
        }
    } else {
        Faults::default()
    };
    FaultStore::new(store, faults, seed).sleep_with(tokio::time::sleep)
}

/// Dead letters in the history.
#[derive(Debug)]
struct Letters {
    round: Arc<Round>,
    process: u32,
    /// The letters by their ids: one that is written again is no other.
    written: Mutex<BTreeMap<String, usize>>,
}

#[async_trait]
impl DeadLetters for Letters {
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        let message = self.round.number_of(&letter.message);
        let mut written = self.written.lock();
        if written.insert(letter.id(), message).is_none() {
            let cause = letter.cause.as_str();
            self.round
                .recorder
                .note(self.process, What::DeadLettered { message, cause });
        }
        Ok(())
    }
}
