//! A store that injects the faults of real stores, controlled by a seed.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use parking_lot::{Mutex, MutexGuard};

use crate::key::{Scope, StoreKey};
use crate::rules::Reply;
use crate::store::{Checkup, Command, RecordSnapshot, Store, StoreError, StoreLoss};

/// The maximum number of commands that wait for a late execution. Further ones are dropped.
const MAX_STRAYS: usize = 64;

/// The probability of each fault, from 0 to 1. The default is no faults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Per command: it is not executed, and the caller gets [`StoreError::Unavailable`].
    pub unavailable: f64,
    /// Per command: it is executed, and the reply is lost.
    pub reply_lost: f64,
    /// Per command: it is not executed, and the caller gets [`StoreError::Unknown`].
    pub request_lost: f64,
    /// Per command with an unknown outcome: it is executed during a later call, possibly for the
    /// second time.
    pub stray: f64,
    /// Per call: the execution is delayed by up to [`max_delay`](Self::max_delay).
    pub slow_request: f64,
    /// Per call: the replies are delayed by up to [`max_delay`](Self::max_delay) after the
    /// execution.
    pub slow_reply: f64,
    /// The maximum delay of either kind. Needs [`FaultStore::sleep_with`].
    pub max_delay: Duration,
    /// Per call: an outage begins with it.
    pub outage: f64,
    /// The maximum length of an outage, in calls.
    pub outage_max_calls: u32,
    /// Per call: the store loses all records before it. Needs [`FaultStore::forget_with`].
    pub forget: f64,
}

/// The number of faults injected, for tests that need each kind to occur.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Injected {
    /// Calls of `execute` and `read`, with and without faults.
    pub calls: u64,
    /// Commands that were refused.
    pub unavailable: u64,
    /// Commands that were executed and whose reply was lost.
    pub reply_lost: u64,
    /// Commands that were not executed and had no reply.
    pub request_lost: u64,
    /// Commands with an unknown outcome that were executed late.
    pub strays: u64,
    /// Calls that were delayed.
    pub slow: u64,
    /// Calls during an outage.
    pub outage: u64,
    /// The number of times that the store lost all records.
    pub forgotten: u64,
}

type Sleep = dyn Fn(Duration) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync;
type Forget = dyn Fn() + Send + Sync;

/// Wraps a store and injects faults between it and its callers.
///
/// The same seed and the same calls in the same order give the same faults. The outcome of a read
/// is never unknown: with a fault, a read, a describe or a check returns
/// [`StoreError::Unavailable`].
pub struct FaultStore {
    inner: Arc<dyn Store>,
    sleep: Option<Box<Sleep>>,
    forget: Option<Box<Forget>>,
    network: Mutex<Network>,
}

/// The simulated network between the callers and the store.
struct Network {
    rng: Rng,
    faults: Faults,
    injected: Injected,
    /// Commands that are still in flight although their caller no longer waits for a reply.
    strays: VecDeque<Command>,
    outage_calls_left: u32,
    down: bool,
}

/// The outcome of one command.
#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Answered,
    Refused,
    ReplyLost,
    RequestLost,
}

/// The faults of one call.
struct PlannedFaults {
    down: bool,
    forget: bool,
    before: Duration,
    after: Duration,
    strays: Vec<Command>,
    fates: Vec<Fate>,
}

impl FaultStore {
    /// Wraps `inner`.
    pub fn new(inner: Arc<dyn Store>, faults: Faults, seed: u64) -> Self {
        let network = Network {
            rng: Rng::with_seed(seed),
            faults,
            injected: Injected::default(),
            strays: VecDeque::new(),
            outage_calls_left: 0,
            down: false,
        };
        Self {
            inner,
            sleep: None,
            forget: None,
            network: Mutex::new(network),
        }
    }

    /// Sets the function that waits for a delay, such as `tokio::time::sleep`. Default: no delays.
    #[must_use]
    pub fn sleep_with<F>(mut self, sleep: impl Fn(Duration) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.sleep = Some(Box::new(move |time| Box::pin(sleep(time))));
        self
    }

    /// Sets the function that deletes all records of the inner store. Default: records are never
    /// lost.
    #[must_use]
    pub fn forget_with(mut self, forget: impl Fn() + Send + Sync + 'static) -> Self {
        self.forget = Some(Box::new(forget));
        self
    }

    /// Begins an outage: every call fails until [`end_outage`](Self::end_outage).
    pub fn begin_outage(&self) {
        self.network().down = true;
    }

    /// Ends an outage of either kind.
    pub fn end_outage(&self) {
        let mut network = self.network();
        network.down = false;
        network.outage_calls_left = 0;
    }

    /// Stops all faults and outages. Commands that are still in flight are dropped.
    pub fn stop_faults(&self) {
        let mut network = self.network();
        network.faults = Faults::default();
        network.strays.clear();
        network.down = false;
        network.outage_calls_left = 0;
    }

    /// The number of faults so far.
    pub fn injected(&self) -> Injected {
        self.network().injected
    }

    /// Locks the network. Every change is complete before the lock is released, so a panic
    /// elsewhere does no harm.
    fn network(&self) -> MutexGuard<'_, Network> {
        self.network.lock()
    }

    /// Decides all faults of a call at once, so that one seed gives one sequence of faults.
    fn plan(&self, commands: usize) -> PlannedFaults {
        let can_sleep = self.sleep.is_some();
        let can_forget = self.forget.is_some();
        let mut network = self.network();
        let plan = network.plan(commands, can_sleep, can_forget);
        network.injected.calls += 1;
        network.injected.slow += u64::from(!plan.before.is_zero() || !plan.after.is_zero());
        network.injected.outage += u64::from(plan.down);
        network.injected.forgotten += u64::from(plan.forget);
        network.injected.strays += plan.strays.len() as u64;
        for fate in plan.fates.iter().filter(|_| !plan.down) {
            match fate {
                Fate::Answered => {}
                Fate::Refused => network.injected.unavailable += 1,
                Fate::ReplyLost => network.injected.reply_lost += 1,
                Fate::RequestLost => network.injected.request_lost += 1,
            }
        }
        plan
    }

    async fn wait(&self, time: Duration) {
        if let (Some(sleep), false) = (&self.sleep, time.is_zero()) {
            sleep(time).await;
        }
    }

    fn forget_if(&self, forgets: bool) {
        if let (Some(forget), true) = (&self.forget, forgets) {
            forget();
        }
    }
}

impl Network {
    fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.rng.f64() < probability
    }

    fn plan(&mut self, commands: usize, can_sleep: bool, can_forget: bool) -> PlannedFaults {
        if self.happens(self.faults.outage) {
            self.outage_calls_left = self.rng.u32(1..=self.faults.outage_max_calls.max(1));
        }
        let down = self.down || self.outage_calls_left > 0;
        self.outage_calls_left = self.outage_calls_left.saturating_sub(1);
        let forget = can_forget && self.happens(self.faults.forget);
        let before = self.delay(can_sleep, self.faults.slow_request);
        let after = self.delay(can_sleep, self.faults.slow_reply);
        let strays = if down {
            Vec::new()
        } else {
            self.arriving_strays()
        };
        let fates = (0..commands).map(|_| self.fate()).collect();
        PlannedFaults {
            down,
            forget,
            before,
            after,
            strays,
            fates,
        }
    }

    fn delay(&mut self, can_sleep: bool, probability: f64) -> Duration {
        let longest_us = u64::try_from(self.faults.max_delay.as_micros()).unwrap_or(u64::MAX);
        if can_sleep && longest_us > 0 && self.happens(probability) {
            Duration::from_micros(self.rng.u64(1..=longest_us))
        } else {
            Duration::ZERO
        }
    }

    /// Takes the strays that arrive with this call, each with a probability of one in four. Some
    /// arrive much later.
    fn arriving_strays(&mut self) -> Vec<Command> {
        let mut arriving = Vec::new();
        for _ in 0..self.strays.len() {
            if let Some(stray) = self.strays.pop_front() {
                if self.rng.u8(0..4) == 0 {
                    arriving.push(stray);
                } else {
                    self.strays.push_back(stray);
                }
            }
        }
        arriving
    }

    fn fate(&mut self) -> Fate {
        if self.happens(self.faults.unavailable) {
            Fate::Refused
        } else if self.happens(self.faults.reply_lost) {
            Fate::ReplyLost
        } else if self.happens(self.faults.request_lost) {
            Fate::RequestLost
        } else {
            Fate::Answered
        }
    }

    /// Keeps a command with an unknown outcome for a late execution, with the configured
    /// probability.
    fn keep_stray(&mut self, command: &Command) {
        if self.happens(self.faults.stray) && self.strays.len() < MAX_STRAYS {
            self.strays.push_back(command.clone());
        }
    }
}

impl fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultStore")
            .field("inner", &self.inner)
            .field("injected", &self.injected())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Store for FaultStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let plan = self.plan(commands.len());
        self.wait(plan.before).await;
        self.forget_if(plan.forget);
        if plan.down {
            return commands.iter().map(|_| Err(outage())).collect();
        }
        // Requests that seemed lost earlier arrive now, before the new ones.
        if !plan.strays.is_empty() {
            self.inner.execute(plan.strays).await;
        }
        let mut arriving = Vec::new();
        for (command, fate) in commands.into_iter().zip(&plan.fates) {
            if matches!(fate, Fate::ReplyLost | Fate::RequestLost) {
                self.network().keep_stray(&command);
            }
            if matches!(fate, Fate::Answered | Fate::ReplyLost) {
                arriving.push(command);
            }
        }
        let mut replies = self.inner.execute(arriving).await.into_iter();
        let answers = plan.fates.iter().map(|fate| match fate {
            Fate::Answered => replies
                .next()
                .unwrap_or_else(|| Err(StoreError::unknown("no answer"))),
            Fate::ReplyLost => {
                replies.next();
                Err(StoreError::unknown("injected: the reply was lost"))
            }
            Fate::RequestLost => Err(StoreError::unknown("injected: the request was lost")),
            Fate::Refused => Err(StoreError::unavailable("injected: refused")),
        });
        let answers = answers.collect();
        self.wait(plan.after).await;
        answers
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let plan = self.plan(keys.len());
        self.wait(plan.before).await;
        self.forget_if(plan.forget);
        if plan.down {
            return keys.iter().map(|_| Err(outage())).collect();
        }
        if !plan.strays.is_empty() {
            self.inner.execute(plan.strays).await;
        }
        let answers = self.inner.read(keys).await.into_iter().zip(&plan.fates);
        let answers = answers.map(|(answer, fate)| match fate {
            Fate::Answered => answer,
            _ => Err(StoreError::unavailable(
                "injected: the reply to a read was lost",
            )),
        });
        let answers = answers.collect();
        self.wait(plan.after).await;
        answers
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        if self.plan(0).down {
            return Err(outage());
        }
        self.inner.describe(scope, expected, proposed).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        if self.plan(0).down {
            return Err(outage());
        }
        self.inner.descriptor(scope).await
    }

    fn loss(&self) -> Option<StoreLoss> {
        self.inner.loss()
    }

    fn accept_loss(&self) {
        self.inner.accept_loss();
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        if self.plan(0).down {
            return Err(outage());
        }
        self.inner.check().await
    }
}

fn outage() -> StoreError {
    StoreError::unavailable("injected: an outage")
}

#[cfg(test)]
mod tests;
