//! A trial: rounds under faults, and what they have shown.

mod error;
mod progress;

use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use oncegate_core::key::{Key, Scope};
use oncegate_core::store::Store;
use oncegate_runtime::{BatchHandler, BatchLimits, BoxError, Consumer, Gate, MemoryStore};
use tokio::time::Instant;

use self::error::SCOPE_MAX_BYTES;
pub use self::error::TrialError;
pub use self::progress::Progress;
pub(crate) use self::progress::ProgressHook;
use crate::broker::Broker;
use crate::facts::{Facts, Steps};
use crate::fault::Fault;
use crate::launch::{Launch, LaunchInBatches};
use crate::plan::Plan;
use crate::round::{ChangeConsumer, ChangeGate, Downstream, OpenStore, RoundSettings};
use crate::rounds::Rounds;
use crate::samples::Samples;
use crate::verdict::Verdict;
use crate::witness::Witness;

/// The route of the messages, unless another is set.
const ROUTE: &str = "samples";
/// The scope of the gates, unless another is set.
const SCOPE: &str = "trial";

/// Tries to make a handler lose an effect, or have it twice.
///
/// A trial consists of rounds. In each, some of the messages and duplicates of them go through an
/// embedded broker, a gate with a store (in memory, unless [`store_with`](Self::store_with) opens
/// another), and the handler, while faults of the round's schedule happen. The handler has its
/// effects in a [`Downstream`] service, which is the witness, or where a [`Witness`] lists them. A
/// judge then compares the messages with the effects.
///
/// Each process gets a handler of its own from the closure, because a process that is killed loses
/// its memory.
///
/// On paused time (`#[tokio::test(start_paused = true)]`) a trial of 60 rounds takes about a
/// second, if the handler waits for nothing outside of the program. Otherwise rounds run at the
/// same time, and a trial takes half a minute.
///
/// ```
/// use oncegate::{Attempt, Failure, Handler, Key, Message};
/// use oncegate_testing::{Downstream, Trial};
/// use serde_json::json;
///
/// struct Billing {
///     bank: Downstream,
/// }
///
/// impl Handler for Billing {
///     type Output = String;
///
///     async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
///         let order: serde_json::Value = message.json()?;
///         let charge = json!({ "order_id": order["order_id"], "amount": order["amount"] });
///         let key = attempt.idempotency_key("charge");
///         let answer = self.bank.effect(&charge).idempotency_key(&key).send().await?;
///         Ok(answer["receipt"].to_string())
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), oncegate_testing::TrialError> {
/// let verdict = Trial::new(|bank: Downstream| Billing { bank })
///     .key(Key::json(["order_id"]))
///     .messages([json!({"order_id": "o-1", "amount": 10}), json!({"order_id": "o-2", "amount": 20})])
///     .run()
///     .await?;
/// verdict.assert_clean();
/// # Ok(())
/// # }
/// ```
pub struct Trial {
    launch: Arc<dyn Launch>,
    key: Option<Key>,
    payloads: Vec<Bytes>,
    volatile: BTreeSet<String>,
    seed: u64,
    faults: Vec<Fault>,
    rounds: u64,
    time: Option<Duration>,
    only: Option<u64>,
    left_out: Vec<Fault>,
    only_samples: Vec<usize>,
    lease: Duration,
    parallel: usize,
    route: String,
    scope: String,
    open: Box<OpenStore>,
    broker: Option<Arc<dyn Broker>>,
    change_gate: Box<ChangeGate>,
    change_consumer: Box<ChangeConsumer>,
    witness: Option<Box<dyn Witness>>,
    progress: Option<Box<ProgressHook>>,
}

impl Trial {
    /// 60 rounds.
    pub const DEFAULT_ROUNDS: u64 = 60;
    /// The default lease: one second.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(1);
    /// Eight rounds.
    pub const DEFAULT_PARALLEL: usize = 8;

    /// A trial of the handlers that `launch` starts: a closure that makes one of a [`Downstream`],
    /// or a [`Launch`].
    pub fn new(launch: impl Launch) -> Self {
        Self {
            launch: Arc::new(launch),
            key: None,
            payloads: Vec::new(),
            volatile: BTreeSet::new(),
            seed: random_seed(),
            faults: Fault::ALL.to_vec(),
            rounds: Self::DEFAULT_ROUNDS,
            time: None,
            only: None,
            left_out: Vec::new(),
            only_samples: Vec::new(),
            lease: Self::DEFAULT_LEASE,
            parallel: Self::DEFAULT_PARALLEL,
            route: ROUTE.to_owned(),
            scope: SCOPE.to_owned(),
            open: Box::new(|| {
                std::future::ready(Ok(Arc::new(MemoryStore::new()) as Arc<dyn Store>)).boxed()
            }),
            broker: None,
            change_gate: Box::new(|gate| gate),
            change_consumer: Box::new(|consumer| consumer),
            witness: None,
            progress: None,
        }
    }

    /// A trial of the batch handlers that `make` makes, with batches within these limits.
    ///
    /// Each message of a batch has its own run in the history, with its own outcome. A call of the
    /// [`Downstream`] service is for one effect, so a handler makes one for each message; effects
    /// that are written together, as rows are, need a [`Witness`].
    ///
    /// Rounds after the first one have at most six samples, and so have their batches.
    pub fn in_batches<H: BatchHandler>(
        limits: BatchLimits,
        make: impl Fn(Downstream) -> H + Send + Sync + 'static,
    ) -> Self {
        Self::new(LaunchInBatches { limits, make })
    }

    /// Sets how the idempotency keys of the messages are derived. Required.
    #[must_use]
    pub fn key(mut self, key: Key) -> Self {
        self.key = Some(key);
        self
    }

    /// The samples: JSON objects, each a different business event; 1 to
    /// [`MAX_SAMPLES`](crate::MAX_SAMPLES). Required.
    ///
    /// Their values tell which effect belongs to which, so use ids that are distinct.
    #[must_use]
    pub fn messages<M: ToString>(mut self, samples: impl IntoIterator<Item = M>) -> Self {
        self.payloads.extend(
            samples
                .into_iter()
                .map(|sample| Bytes::from(sample.to_string())),
        );
        self
    }

    /// Paths of fields that differ when the same event is sent again, such as `sent_at` or
    /// `trace.id`. None by default.
    #[must_use]
    pub fn volatile<P: Into<String>>(mut self, paths: impl IntoIterator<Item = P>) -> Self {
        self.volatile.extend(paths.into_iter().map(Into::into));
        self
    }

    /// The seed that decides the schedules; random by default. The verdict has it.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The faults; all by default.
    #[must_use]
    pub fn faults(mut self, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.faults = faults.into_iter().collect();
        self
    }

    /// Sets the number of rounds, besides the first one without faults: 60 by default. The first
    /// ones have each fault by itself, the others several at the same time.
    #[must_use]
    pub fn rounds(mut self, rounds: u64) -> Self {
        self.rounds = rounds;
        self
    }

    /// Starts rounds until this time is over, instead of a number of them.
    #[must_use]
    pub fn for_time(mut self, time: Duration) -> Self {
        self.time = Some(time);
        self.rounds = u64::MAX;
        self
    }

    /// Plays only this round, after the first one without faults: to repeat a finding.
    #[must_use]
    pub fn only_round(mut self, round: u64) -> Self {
        self.only = Some(round);
        self
    }

    /// Leaves these faults out of the round of [`only_round`](Self::only_round), as the finding to
    /// repeat did. None by default.
    #[must_use]
    pub fn leave_out(mut self, faults: impl IntoIterator<Item = Fault>) -> Self {
        self.left_out = faults.into_iter().collect();
        self
    }

    /// Sends these samples alone in the round of [`only_round`](Self::only_round), as the finding
    /// to repeat did: their numbers, from 1. All by default.
    #[must_use]
    pub fn only_samples(mut self, samples: impl IntoIterator<Item = usize>) -> Self {
        self.only_samples = samples.into_iter().collect();
        self
    }

    /// The lease of the gates: one second by default, 100 ms to one minute. Faults last for parts
    /// or multiples of it.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Sets the number of rounds that run at the same time: eight by default. Set 1 if handlers
    /// share something outside of the trial.
    #[must_use]
    pub fn parallel(mut self, rounds: usize) -> Self {
        self.parallel = rounds.max(1);
        self
    }

    /// The route of the messages, which is a part of their keys, and which handlers can see:
    /// `samples` by default.
    #[must_use]
    pub fn route(mut self, route: impl Into<String>) -> Self {
        self.route = route.into();
        self
    }

    /// Sets the beginning of the scopes of the gates: `trial` by default, at most 43 characters.
    /// Each round has a scope of its own, with its number behind this. Needed where several trials
    /// share a store.
    #[must_use]
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = scope.into();
        self
    }

    /// Sets how the store of a round is opened: each has a memory store of its own by default.
    ///
    /// It may be the same store for all, because rounds have scopes of their own. The trial puts
    /// its faults in front of it: a store that loses its records seems to have them under other
    /// keys afterwards. On paused time, leave the default: the clock would run ahead while another
    /// store answers.
    #[must_use]
    pub fn store_with<F>(mut self, open: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Arc<dyn Store>, BoxError>> + Send + 'static,
    {
        self.open = Box::new(move || open().boxed());
        self
    }

    /// A real broker that delivers the messages: by default, each round has an embedded one.
    ///
    /// Not for paused time. A process that is killed leaves its consumer group, and what one that
    /// stands still has not finished is sent again, because a client of this process cannot be
    /// stopped by itself.
    #[must_use]
    pub fn broker(mut self, broker: impl Broker) -> Self {
        self.broker = Some(Arc::new(broker));
        self
    }

    /// Changes each gate as `change` does, before the trial sets its lease and what a loss of the
    /// store leads to.
    #[must_use]
    pub fn gate_with(mut self, change: impl Fn(Gate) -> Gate + Send + Sync + 'static) -> Self {
        self.change_gate = Box::new(change);
        self
    }

    /// Changes each consumer as `change` does, before the trial sets its limits for attempts,
    /// waits, dead letters and stops, which its faults need. Its order is
    /// [`Unordered`](oncegate_runtime::Ordering::Unordered) unless `change` sets another.
    #[must_use]
    pub fn consumer_with(
        mut self,
        change: impl Fn(Consumer) -> Consumer + Send + Sync + 'static,
    ) -> Self {
        self.change_consumer = Box::new(change);
        self
    }

    /// Judges the effects that this witness lists, besides those in the [`Downstream`] service.
    /// None by default.
    ///
    /// Faults that begin with a call of the service begin with a run of the handler then, except
    /// those of its answers.
    #[must_use]
    pub fn witness(mut self, witness: impl Witness) -> Self {
        self.witness = Some(Box::new(witness));
        self
    }

    /// Calls `progress` after each round.
    #[must_use]
    pub fn progress(mut self, progress: impl Fn(&Progress) + Send + Sync + 'static) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }

    /// Plays the rounds, and judges them. A round that has shown a defect is played again with
    /// fewer faults and fewer samples, so that the finding has the shortest history that shows it.
    ///
    /// Dropping the future ends the handlers as a crash would.
    ///
    /// # Errors
    /// When the settings make no sense, a handler cannot be started, or none of the handlers has an
    /// effect.
    pub async fn run(self) -> Result<Verdict, TrialError> {
        let began = Instant::now();
        let (mut rounds, plan) = self.prepared()?;
        let handler = match plan.timed() {
            Some(_) => rounds.handler_time().await?,
            None => None,
        };
        rounds.most_of_first = plan.most_of_first(handler);
        let first = rounds.play(0).await?;
        let facts = Facts::of(&first.events);
        let has_effects = !facts.steps().is_empty();
        let steps = facts.expected();
        let mut verdict = Verdict::new(rounds.seed);
        verdict.took = began.elapsed();
        if plan.only.is_none() {
            verdict.asked_for = rounds.faults.iter().copied().collect();
        }
        plan.add(&mut verdict, &first, &Steps::new());
        if !first.schedule.only_samples.is_empty() && plan.timed().is_some() {
            let (whole, violations) = rounds.judged_keys()?;
            verdict.add_violations(&whole, &first.events, violations);
        }
        rounds.most_of_others = plan.most_of_others(handler, began.elapsed(), rounds.faults.len());
        if !has_effects {
            // Faults would show nothing more. Without a defect that explains it, the handler does
            // not know the witness.
            verdict.put_in_order();
            return if verdict.explains_silence() {
                Ok(verdict)
            } else {
                Err(TrialError::NoEffects)
            };
        }
        let mut numbers: Box<dyn Iterator<Item = u64> + Send> = match plan.only {
            Some(round) => Box::new((round > 0).then_some(round).into_iter()),
            None => Box::new(1..=plan.rounds),
        };
        let mut running = FuturesUnordered::new();
        loop {
            while running.len() < plan.parallel
                && plan.timed().is_none_or(|time| began.elapsed() < time)
                && let Some(round) = numbers.next()
            {
                running.push(rounds.play(round));
            }
            let Some(played) = running.next().await else {
                break;
            };
            verdict.took = began.elapsed();
            plan.add(&mut verdict, &played?, &steps);
        }
        drop(running);
        rounds.shorten(&mut verdict, &steps).await?;
        verdict.put_in_order();
        verdict.took = began.elapsed();
        Ok(verdict)
    }

    /// Checks the settings, and splits them into what rounds are made of, and which are played.
    pub(crate) fn prepared(self) -> Result<(Rounds, Plan), TrialError> {
        let key = self.key.ok_or(TrialError::NoKey)?;
        if self.lease < LEAST_LEASE || self.lease > LONGEST_LEASE {
            return Err(TrialError::Lease { lease: self.lease });
        }
        let scope = Scope::new(&self.scope)
            .ok()
            .filter(|scope| scope.as_str().len() <= SCOPE_MAX_BYTES);
        let Some(scope) = scope else {
            return Err(TrialError::Scope { scope: self.scope });
        };
        key.compile(&scope).map_err(TrialError::Key)?;
        let samples = Arc::new(Samples::new(self.payloads, self.volatile)?);
        let settings = RoundSettings {
            key,
            lease: self.lease,
            launch: self.launch,
            route: self.route.into(),
            scope,
            open: self.open,
            broker: self.broker,
            change_gate: self.change_gate,
            change_consumer: self.change_consumer,
            witness: self.witness,
        };
        let rounds = Rounds {
            seed: self.seed,
            faults: self.faults,
            left_out: self.left_out,
            only_samples: self.only_samples,
            most_of_first: None,
            most_of_others: None,
            samples,
            settings: Arc::new(settings),
            played: AtomicU64::new(0),
        };
        let Self {
            rounds: count,
            time,
            only,
            parallel,
            progress,
            ..
        } = self;
        Ok((
            rounds,
            Plan {
                rounds: count,
                time,
                only,
                parallel,
                progress,
            },
        ))
    }
}

/// The shortest and the longest lease. With a shorter one, a busy machine would lose leases for no
/// reason.
const LEAST_LEASE: Duration = Duration::from_millis(100);
const LONGEST_LEASE: Duration = Duration::from_secs(60);

impl fmt::Debug for Trial {
    /// Shows nothing of the messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial")
            .field("samples", &self.payloads.len())
            .field("seed", &self.seed)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

/// Returns a seed for a trial whose seed must be known before it runs.
pub fn random_seed() -> u64 {
    fastrand::u64(..)
}
