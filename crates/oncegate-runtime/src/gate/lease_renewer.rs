//! Renews leases, and finishes operations whose callers are gone.
//!
//! Each gate has one lease renewer, on its own thread: a handler that blocks its runtime's threads
//! must not stop its own heartbeats, nor those of others.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Operation, ReleaseCause, Reply};
use oncegate_core::store::{Command, Store, StoreError};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use super::GateError;
use super::journal::Notes;
use super::leases::{Held, LeaseGuard, Leases};
use super::loss::{LOOK_INTERVAL, LossWatch};
use super::pending::PendingOperation;
use crate::attempt::Attempt;
use crate::backoff::LONGEST_TIME;
use crate::entropy::Entropy;
use crate::observe::{Event, ExtraRunCause, Observer};

/// A lease is extended when a third of it is over.
pub(crate) const EXTENDS_PER_LEASE: u32 = 3;
/// An extend without an answer is repeated when another tenth of the lease is over.
const REPEATS_PER_LEASE: u32 = 10;
/// The handler's cancellation fires when a fifth of the lease is left.
const MARGIN_OF_LEASE: u32 = 5;
/// The number of times per lease that the lease renewer checks its leases.
const TICKS_PER_LEASE: u32 = 20;
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// The most extends in one call to the store.
const EXTENDS_PER_CALL: usize = 256;

/// The thread of the lease renewer.
#[derive(Clone, Copy, Debug)]
pub(super) enum RenewerThread {
    OwnThread,
    #[cfg_attr(
        not(feature = "testing"),
        expect(dead_code, reason = "only simulations share a runtime")
    )]
    CallersRuntime,
}

/// The parameters of a lease renewer.
#[derive(Debug)]
pub(super) struct Duty {
    pub(super) scope: Scope,
    pub(super) store: Arc<dyn Store>,
    pub(super) observer: Arc<dyn Observer>,
    pub(super) entropy: Arc<Entropy>,
    pub(super) notes: Notes,
    pub(super) lease: Duration,
    pub(super) max_run: Duration,
    pub(super) runs_on: RenewerThread,
    pub(super) losses: Option<Arc<LossWatch>>,
}

/// The handle to a running lease renewer, which ends when the handle is dropped.
#[derive(Debug)]
pub(super) struct LeaseRenewer {
    leases: Arc<Leases>,
    pending: mpsc::UnboundedSender<PendingOperation>,
    /// The number of pending operations.
    unfinished: Arc<watch::Sender<usize>>,
    closed: CancellationToken,
    thread: Option<std::thread::JoinHandle<()>>,
    lease: Duration,
    max_run: Duration,
}

impl LeaseRenewer {
    pub(super) fn start(duty: Duty) -> Result<Self, GateError> {
        let leases = Arc::new(Leases::default());
        let closed = CancellationToken::new();
        let (pending, inbox) = mpsc::unbounded_channel();
        let lease = duty.lease;
        let max_run = duty.max_run;
        let runs_on = duty.runs_on;
        let scope = duty.scope.as_str().to_owned();
        let rounds = Rounds {
            duty: Arc::new(duty),
            leases: Arc::clone(&leases),
            inbox,
            next_look: Instant::now() + LOOK_INTERVAL,
            closed: closed.clone(),
        };
        let thread = match runs_on {
            RenewerThread::CallersRuntime => {
                tokio::spawn(rounds.run());
                None
            }
            RenewerThread::OwnThread => {
                let spawned = rounds.spawn_thread();
                Some(spawned.map_err(|error| GateError::Settings {
                    scope,
                    what: format!("cannot start a thread: {error}"),
                })?)
            }
        };
        let unfinished = Arc::new(watch::Sender::new(0));
        Ok(Self {
            leases,
            pending,
            unfinished,
            closed,
            thread,
            lease,
            max_run,
        })
    }

    /// Renews a lease, whose claim was sent at `sent_at`, until the returned guard is dropped.
    pub(super) fn keep(&self, attempt: &Attempt, sent_at: Instant) -> LeaseGuard {
        let held = Held {
            attempt: attempt.clone(),
            valid_until: sent_at + self.lease,
            extend_at: sent_at + self.lease / EXTENDS_PER_LEASE,
            waiting: false,
            completing: false,
            ran_out: None,
        };
        let slot = self.leases.insert(held);
        let extended_from = sent_at + self.lease / EXTENDS_PER_LEASE;
        LeaseGuard {
            leases: Arc::clone(&self.leases),
            slot,
            token: attempt.completion().token,
            extended_from,
            margin: self.lease / MARGIN_OF_LEASE,
            max_run: self.max_run,
        }
    }

    /// Releases what `token` was granted or will be, as not started.
    pub(super) fn release_later(&self, key: StoreKey, token: Token) {
        let reason = "the claim was abandoned".to_owned();
        let end = ReleaseCause::NotStarted;
        self.finish_later(
            key,
            Operation::Release {
                token,
                delay: Duration::ZERO,
                end,
                reason,
            },
        );
    }

    /// Repeats an operation until its outcome is known.
    pub(super) fn finish_later(&self, key: StoreKey, operation: Operation) {
        self.repeat_later(Command { key, operation }, false);
    }

    /// Repeats an operation that was sent before until its outcome is known.
    pub(super) fn repeat_later(&self, command: Command, may_be_executed: bool) {
        let pending = PendingOperation::new(command, may_be_executed, &self.unfinished);
        // The inbox is closed only when the gate is dropped: then the lease lapses by itself.
        _ = self.pending.send(pending);
    }

    /// Waits until no operation is pending.
    pub(super) async fn operations_finished(&self) {
        // The sender is in `self`, so the wait cannot end in an error.
        _ = self
            .unfinished
            .subscribe()
            .wait_for(|unfinished| *unfinished == 0)
            .await;
    }

    /// The least time that is left of a lease; the whole lease when there is none.
    pub(super) fn least_remaining(&self) -> Duration {
        let ends = self
            .leases
            .lock()
            .iter()
            .flatten()
            .map(|held| held.valid_until)
            .min();
        ends.map_or(self.lease, |end| {
            end.saturating_duration_since(Instant::now())
        })
    }

    /// The least time that a running handler has left until `max_run`; the whole of it when none
    /// runs.
    pub(super) fn least_run_remaining(&self) -> Duration {
        let leases = self.leases.lock();
        let ends = leases
            .iter()
            .flatten()
            .filter(|held| !held.completing)
            .filter_map(|held| Some(held.attempt.began()? + self.max_run))
            .min();
        ends.map_or(self.max_run, |end| {
            end.saturating_duration_since(Instant::now())
        })
    }

    pub(super) fn cancel_all(&self) {
        for held in self.leases.lock().iter().flatten() {
            held.attempt.cancellation().discard();
        }
    }
}

impl Drop for LeaseRenewer {
    fn drop(&mut self) {
        self.closed.cancel();
        // The lease renewer itself may drop the last gate, and a thread must not join itself.
        if let Some(thread) = self
            .thread
            .take()
            .filter(|thread| thread.thread().id() != std::thread::current().id())
            && thread.join().is_err()
        {
            warn!("the lease renewer's thread has panicked");
        }
    }
}

/// The loop of the lease renewer's thread.
struct Rounds {
    duty: Arc<Duty>,
    leases: Arc<Leases>,
    inbox: mpsc::UnboundedReceiver<PendingOperation>,
    /// The time of the next check for a loss of records.
    next_look: Instant,
    closed: CancellationToken,
}

/// The reason why a handler is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The handler has run for `max_run`.
    TooLong,
    /// The lease is nearly over, and no heartbeat was answered. Another process may take over. If
    /// none does, the record still has this token when the store answers again, and takes the
    /// completion.
    Unconfirmed,
    /// A heartbeat was answered: the record is gone, or belongs to another claim.
    NotOwner,
}

/// A lease that is to be extended now.
struct DueExtend {
    slot: usize,
    token: Token,
    key: StoreKey,
}

/// Extends that were sent together, with their answers.
struct Extended {
    sent_at: Instant,
    leases: Vec<(usize, Token)>,
    replies: Vec<Result<Reply, StoreError>>,
}

impl Rounds {
    fn spawn_thread(self) -> std::io::Result<std::thread::JoinHandle<()>> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        std::thread::Builder::new()
            .name("oncegate-leases".to_owned())
            .spawn(move || runtime.block_on(self.run()))
    }

    async fn run(mut self) {
        let mut ticks = interval((self.duty.lease / TICKS_PER_LEASE).min(LONGEST_TICK));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut extends = JoinSet::new();
        let mut finishing = JoinSet::new();
        let mut looks = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                () = self.closed.cancelled() => return,
                Some(extended) = extends.join_next() => {
                    match extended {
                        Ok(extended) => self.note(extended),
                        Err(panic) => self.note_panic(&panic),
                    }
                }
                _ = ticks.tick() => {
                    self.look(&mut extends);
                    self.look_for_loss(&mut looks);
                }
                Some(pending) = self.inbox.recv() => {
                    finishing.spawn(finish(Arc::clone(&self.duty), pending));
                }
                Some(_) = finishing.join_next() => {}
                Some(_) = looks.join_next() => {}
            }
        }
    }

    /// Starts a check for a loss of records when it is due, one at a time: between half and one and
    /// a half intervals after the last, so that the processes of a fleet do not all ask at once.
    fn look_for_loss(&mut self, looks: &mut JoinSet<()>) {
        let Some(losses) = self.duty.losses.as_ref().filter(|_| looks.is_empty()) else {
            return;
        };
        let now = Instant::now();
        // A loss that the store itself has noticed holds up claims until it was checked.
        if now < self.next_look && !losses.is_behind() {
            return;
        }
        self.next_look = now + LOOK_INTERVAL.mul_f64(0.5 + self.duty.entropy.fraction());
        let losses = Arc::clone(losses);
        looks.spawn(async move { losses.look().await });
    }

    /// Sends the extends that are due, and cancels the runs whose time is over.
    fn look(&self, extends: &mut JoinSet<Extended>) {
        let now = Instant::now();
        let mut due = Vec::new();
        for (slot, held) in self.leases.lock().iter_mut().enumerate() {
            let Some(held) = held else { continue };
            // A run that takes too long gets no more heartbeats, so that its lease lapses.
            let too_long = held.has_run_for(self.duty.max_run, now);
            if too_long || now + self.duty.lease / MARGIN_OF_LEASE >= held.valid_until {
                self.cancel(
                    held,
                    if too_long {
                        Cause::TooLong
                    } else {
                        Cause::Unconfirmed
                    },
                );
            }
            if !too_long && !held.waiting && now >= held.extend_at {
                held.waiting = true;
                due.push(DueExtend {
                    slot,
                    token: held.token(),
                    key: held.key().clone(),
                });
            }
        }
        // A shard of the store that hangs delays only the answers of its own keys.
        due.sort_by_key(|due| self.shard(due));
        let by_shard = due.chunk_by(|one, other| self.shard(one) == self.shard(other));
        for due in by_shard.flat_map(|due| due.chunks(EXTENDS_PER_CALL)) {
            extends.spawn(self.extend(due));
        }
    }

    fn shard(&self, due: &DueExtend) -> u64 {
        self.duty.store.shard(&due.key)
    }

    /// Extends these leases by one call of the store.
    fn extend(&self, due: &[DueExtend]) -> impl Future<Output = Extended> + Send + 'static {
        let leases = due.iter().map(|due| (due.slot, due.token)).collect();
        let lease = self.duty.lease;
        let commands = due
            .iter()
            .map(|due| Command {
                key: due.key.clone(),
                operation: Operation::Extend {
                    token: due.token,
                    lease,
                },
            })
            .collect();
        let duty = Arc::clone(&self.duty);
        async move {
            let sent_at = Instant::now();
            let replies = duty.store.execute(commands).await;
            let scope = duty.scope.as_str();
            let took = sent_at.elapsed();
            duty.observer.observe(Event::StoreCalled {
                scope,
                operation: "extend",
                took,
            });
            Extended {
                sent_at,
                leases,
                replies,
            }
        }
    }

    fn cancel(&self, held: &mut Held, cause: Cause) {
        let cancellation = held.attempt.cancellation();
        if cause == Cause::Unconfirmed {
            if cancellation.is_cancelled() {
                return;
            }
            cancellation.cancel();
        } else {
            if cancellation.is_discarded() {
                return;
            }
            if cause == Cause::TooLong {
                cancellation.overrun();
            } else {
                cancellation.discard();
            }
        }
        let scope = self.duty.scope.as_str();
        let completing = held.completing;
        let key = held.key().clone();
        match cause {
            Cause::TooLong => {
                warn!(scope, %key, max_run = ?self.duty.max_run, "a handler has run for too long; its lease will lapse");
                return;
            }
            Cause::Unconfirmed => {
                held.ran_out = Some(held.cause());
                warn!(scope, %key, completing, "no heartbeat was confirmed in time; the handler is told to stop, and what it returns is recorded when the store answers, unless another process has taken over");
                return;
            }
            Cause::NotOwner => {
                warn!(scope, %key, completing, "the store reports that this process no longer owns the record: it was deleted, or another process has claimed it; the handler is cancelled");
            }
        }
        // What has not begun will not begin under this claim, so the other run is the only one.
        if held.attempt.began().is_some() {
            self.duty.observer.observe(Event::ExtraRun {
                scope,
                cause: held.cause(),
            });
        }
    }

    /// A store that panicked has answered no extend: all that wait for an answer are due again.
    fn note_panic(&self, panic: &JoinError) {
        error!(scope = self.duty.scope.as_str(), %panic, "the store has panicked in a heartbeat");
        self.leases
            .lock()
            .iter_mut()
            .flatten()
            .for_each(|held| held.waiting = false);
    }

    fn note(&self, extended: Extended) {
        let now = Instant::now();
        let scope = self.duty.scope.as_str();
        let mut slots = self.leases.lock();
        for ((slot, token), reply) in extended.leases.into_iter().zip(extended.replies) {
            let Some(held) = slots.get_mut(slot, token) else {
                continue;
            };
            held.waiting = false;
            match reply {
                Ok(Reply::Applied { .. }) => {
                    held.valid_until = extended.sent_at + self.duty.lease;
                    held.extend_at = extended.sent_at + self.duty.lease / EXTENDS_PER_LEASE;
                }
                Ok(Reply::NotOwner | Reply::Verdict { .. }) => {
                    self.cancel(held, Cause::NotOwner);
                    // Nothing is left to extend; the owner learns it from its completion.
                    held.extend_at = now + LONGEST_TIME;
                }
                Err(error) => {
                    held.extend_at = now + self.duty.lease / REPEATS_PER_LEASE;
                    self.duty.observer.observe(Event::StoreError {
                        scope,
                        class: error.class(),
                    });
                }
            }
        }
    }
}

/// Repeats until the outcome is known. The caller is gone, so no answer is returned.
async fn finish(duty: Arc<Duty>, mut pending: PendingOperation) {
    let scope = duty.scope.as_str();
    let reply = pending
        .execute(&*duty.store, &duty.entropy, |error| {
            duty.observer.observe(Event::StoreError {
                scope,
                class: error.class(),
            });
        })
        .await;
    if pending.is_discard() && pending.is_executed(&reply) {
        duty.observer.observe(Event::ExtraRun {
            scope,
            cause: ExtraRunCause::Discarded,
        });
    }
    duty.notes.note_ended(&pending.command, &reply);
}
