//! The thread of a queue, which receives, extends, deletes and returns messages.
//!
//! It shares no runtime with the handlers: a handler that blocks its thread must not make the
//! others lose their messages.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};
use tracing::{error, info, warn};

use super::api::{Api, Attempt, CallError, Poll};
use super::convert::Reader;
use super::events;
use super::held::{Change, EntryResult, Group, Target};
use super::hub::{End, Fetched, Hub};
use super::payloads::{self, Payloads};
use super::receivers::Receivers;
use oncegate_runtime::observe::Event;

/// The number of checks of the held messages per visibility timeout.
const TICKS_PER_VISIBILITY: u32 = 20;
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// The time for which a receive is repeated with the same attempt id. SQS remembers it for five
/// minutes.
const SAME_ANSWER: Duration = Duration::from_secs(4 * 60);

/// The state of a queue's thread.
pub(crate) struct Driver {
    hub: Arc<Hub>,
    api: Arc<Api>,
    reader: Reader,
    /// The source of payloads that are not in the queue.
    payloads: Option<Arc<dyn Payloads>>,
    receivers: Receivers,
    polls: JoinSet<Polled>,
    /// Receives of a FIFO queue whose answers were lost, and until when the queue repeats the same
    /// answer.
    unanswered: Vec<(Instant, Attempt)>,
    /// Messages that wait for their payloads.
    fetches: JoinSet<Vec<Fetched>>,
    fetching: usize,
    deletes: JoinSet<Deleted>,
    changes: JoinSet<Changed>,
    ticks: Duration,
}

struct Polled {
    asked: usize,
    attempt: Option<Attempt>,
    result: Result<Vec<aws_sdk_sqs::types::Message>, CallError>,
}

struct Deleted {
    targets: Vec<Target>,
    result: Result<Vec<EntryResult>, CallError>,
}

struct Changed {
    changes: Vec<Change>,
    sent_at: Instant,
    result: Result<Vec<EntryResult>, CallError>,
}

impl Driver {
    pub(crate) fn new(
        hub: Arc<Hub>,
        api: Arc<Api>,
        reader: Reader,
        payloads: Option<Arc<dyn Payloads>>,
        visibility: Duration,
    ) -> Self {
        Self {
            hub,
            api,
            reader,
            payloads,
            receivers: Receivers::new(),
            polls: JoinSet::new(),
            unanswered: Vec::new(),
            fetches: JoinSet::new(),
            fetching: 0,
            deletes: JoinSet::new(),
            changes: JoinSet::new(),
            ticks: (visibility / TICKS_PER_VISIBILITY).min(LONGEST_TICK),
        }
    }

    /// Runs until the source leaves and all calls are answered, or the deadline is over. Returns
    /// how many finished messages are not deleted.
    pub(crate) async fn run(mut self) -> usize {
        let mut ticks: Interval = interval(self.ticks);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let (wake_at, leave_by) = self.send();
            if leave_by.is_some_and(|by| self.has_left(by)) {
                return self.hub.lock().held.undeleted();
            }
            tokio::select! {
                biased;
                _ = ticks.tick() => self.look(),
                Some(changed) = self.changes.join_next() => self.note_changed(changed),
                Some(deleted) = self.deletes.join_next() => self.note_deleted(deleted),
                Some(polled) = self.polls.join_next() => self.note_polled(polled),
                Some(fetched) = self.fetches.join_next() => self.note_fetched(fetched),
                () = self.hub.wake.notified() => {}
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            }
        }
    }

    /// Returns whether no work or no time is left.
    fn has_left(&self, by: Instant) -> bool {
        if Instant::now() < by {
            return self.receivers.under_way() == 0 && self.hub.lock().held.is_empty();
        }
        if self.receivers.under_way() > 0 {
            info!(
                "the stop deadline is over: a long poll is cancelled, and its messages are redelivered after their \
                 visibility timeout"
            );
        }
        true
    }

    /// Starts the calls that are due. Returns when the next one is due, and the deadline for all
    /// calls.
    fn send(&mut self) -> (Option<Instant>, Option<Instant>) {
        let now = Instant::now();
        let hub = Arc::clone(&self.hub);
        let mut state = hub.lock();
        state.turned_at = now;
        let leave_by = state.leave_by;
        let all = leave_by.is_some();
        for targets in state.held.take_deletes(now, all) {
            self.delete(targets);
        }
        for changes in state.held.take_returns(now, all) {
            self.change(changes);
        }
        while !state.is_ended() {
            // With nothing in hand and no delete that takes up room, a wait frees no more.
            let final_room = state.held.in_hand() == 0 && state.held.overdue_deletes() == 0;
            let free = state.free(self.receivers.asked() + self.fetching);
            let Some(asked) = self.receivers.ask(now, free, final_room) else {
                break;
            };
            self.poll(asked);
        }
        let wake_at = [state.held.next_wake(), self.receivers.next_wake(), leave_by]
            .into_iter()
            .flatten()
            .min();
        (wake_at, leave_by)
    }

    fn poll(&mut self, asked: usize) {
        self.hub.observe(events::count(events::RECEIVE, 1));
        let api = Arc::clone(&self.api);
        let attempt = self.attempt();
        let poll = if self.receivers.is_failing() {
            Poll::Probe
        } else {
            Poll::Long
        };
        self.polls.spawn(async move {
            let result = api.receive(asked, poll, attempt.as_ref()).await;
            Polled {
                asked,
                attempt,
                result,
            }
        });
    }

    /// Returns the attempt id for a receive from a FIFO queue. A lost answer would block its groups
    /// for the visibility timeout; the same attempt id returns that answer again.
    fn attempt(&mut self) -> Option<Attempt> {
        let now = Instant::now();
        self.unanswered.retain(|(until, _)| now < *until);
        let again = self.unanswered.pop().map(|(_, attempt)| attempt);
        self.reader.fifo.then(|| again.unwrap_or_else(Attempt::new))
    }

    fn delete(&mut self, targets: Vec<Target>) {
        self.hub.observe(events::count(events::DELETE, 1));
        let api = Arc::clone(&self.api);
        self.deletes.spawn(async move {
            let result = api.delete(&targets).await;
            Deleted { targets, result }
        });
    }

    fn change(&mut self, changes: Vec<Change>) {
        self.hub
            .observe(events::count(events::CHANGE_VISIBILITY, 1));
        let api = Arc::clone(&self.api);
        self.changes.spawn(async move {
            let sent_at = Instant::now();
            let result = api.change_visibility(&changes).await;
            Changed {
                changes,
                sent_at,
                result,
            }
        });
    }

    fn look(&mut self) {
        let work = self.hub.lock().held.due(Instant::now());
        if work.lost > 0 {
            warn!(
                messages = work.lost,
                "the visibility timeout of these messages could not be extended in time; their handlers go on under their leases"
            );
            self.hub
                .observe(events::count(events::VISIBILITY_LOST, work.lost));
        }
        if work.undeleted > 0 {
            warn!(
                messages = work.undeleted,
                "finished messages could not be deleted in time; their records will answer the next delivery"
            );
            self.hub
                .observe(events::count(events::DELETE_FAILED, work.undeleted));
        }
        work.extends
            .into_iter()
            .for_each(|changes| self.change(changes));
    }

    fn note_polled(&mut self, polled: Result<Polled, JoinError>) {
        let Some(Polled {
            asked,
            attempt,
            result,
        }) = self.ended(polled)
        else {
            return;
        };
        match result {
            Ok(messages) => {
                self.hub.failures.succeeded("receive");
                if self.receivers.answered(asked, messages.len()) {
                    info!("SQS answers again");
                }
                self.admit(messages);
            }
            Err(error) if error.is_no_queue() => {
                self.receivers.failed(Instant::now(), asked, rand::random());
                error!(%error, "the queue is gone");
                self.hub
                    .end(End::Failed(format!("the queue is gone: {error}")));
            }
            Err(error) => {
                let now = Instant::now();
                let failures = self.receivers.failed(now, asked, rand::random());
                self.unanswered
                    .extend(attempt.map(|attempt| (now + SAME_ANSWER, attempt)));
                self.report("receive", &error, failures);
            }
        }
    }

    fn report(&self, operation: &'static str, error: &CallError, failures: u32) {
        self.hub
            .failures
            .failed(Instant::now().into_std(), operation, error);
        self.hub.observe(Event::SourceError { operation });
        if error.is_denied() {
            error!(operation, %error, failures, "SQS denies access; check the rights and the credentials; retrying");
        } else {
            warn!(operation, %error, failures, "the call to SQS failed; retrying");
        }
    }

    /// Holds received messages, and passes them to the receiver. Messages that arrive after the end
    /// are returned at once.
    fn admit(&mut self, messages: Vec<aws_sdk_sqs::types::Message>) {
        let now = Instant::now();
        let mut groups: Vec<(String, Group)> = Vec::new();
        let mut fetched = Vec::with_capacity(messages.len());
        for message in messages {
            let Some(read) = self.reader.read(message) else {
                continue;
            };
            let group = read.group.map(|name| {
                let known = groups
                    .iter()
                    .find(|(other, _)| *other == name)
                    .map(|(_, group)| Arc::clone(group));
                known.unwrap_or_else(|| {
                    let group = Group::default();
                    groups.push((name, Arc::clone(&group)));
                    group
                })
            });
            if read.last_receive {
                let origin = read.message.origin();
                warn!(%origin, "this is the message's last receive before the redrive policy moves it");
                self.hub.observe(events::count(events::LAST_RECEIVE, 1));
            }
            let stays = group.is_some() || read.last_receive;
            let Some(admitted) = self
                .hub
                .lock()
                .held
                .admit(now, &read.id, read.handle, group)
            else {
                continue;
            };
            fetched.push(Fetched {
                message: read.message,
                id: read.id,
                admitted,
                stays,
            });
        }
        self.pass_on(fetched);
    }

    /// Passes messages to the receiver, those with a payload elsewhere when it has come.
    fn pass_on(&mut self, fetched: Vec<Fetched>) {
        let Some(payloads) = &self.payloads else {
            return self.hub.put(fetched);
        };
        let (waiting, here): (Vec<Vec<Fetched>>, Vec<Fetched>) = if self.reader.fifo {
            // In their order. The queue sends no more of a group while some of it is held.
            if fetched.iter().any(|fetched| payloads.has(&fetched.message)) {
                (vec![fetched], Vec::new())
            } else {
                (Vec::new(), fetched)
            }
        } else {
            let (elsewhere, here): (Vec<_>, Vec<_>) = fetched
                .into_iter()
                .partition(|fetched| payloads.has(&fetched.message));
            (
                elsewhere.into_iter().map(|fetched| vec![fetched]).collect(),
                here,
            )
        };
        for fetched in waiting {
            self.fetching += fetched.len();
            self.fetches.spawn(payloads::fetch(
                Arc::clone(payloads),
                Arc::clone(&self.hub),
                fetched,
            ));
        }
        self.hub.put(here);
    }

    fn note_fetched(&mut self, fetched: Result<Vec<Fetched>, JoinError>) {
        let Some(fetched) = self.ended(fetched) else {
            return;
        };
        self.fetching -= fetched.len();
        self.hub.put(fetched);
    }

    fn note_deleted(&mut self, deleted: Result<Deleted, JoinError>) {
        let Some(Deleted { targets, result }) = self.ended(deleted) else {
            return;
        };
        let answers = self.answers("delete", targets.len(), result);
        let now = Instant::now();
        let mut gone = 0;
        let mut state = self.hub.lock();
        for (target, answer) in targets.iter().zip(answers) {
            gone += u64::from(state.held.note_delete(now, target, answer, rand::random()));
        }
        drop(state);
        if gone > 0 {
            warn!(
                messages = gone,
                "the receipt handles of finished messages are no longer valid: an earlier call has deleted them, or \
                 their records will answer the next delivery"
            );
            self.hub.observe(events::count(events::DELETE_FAILED, gone));
        }
    }

    fn note_changed(&mut self, changed: Result<Changed, JoinError>) {
        let Some(Changed {
            changes,
            sent_at,
            result,
        }) = self.ended(changed)
        else {
            return;
        };
        let answers = self.answers("visibility", changes.len(), result);
        let now = Instant::now();
        let mut lost = 0;
        let mut extended = 0;
        let mut returned = 0;
        let mut state = self.hub.lock();
        for (change, answer) in changes.iter().zip(answers) {
            lost += u64::from(
                state
                    .held
                    .note_change(now, sent_at, change, answer, rand::random()),
            );
            let done = u64::from(answer == EntryResult::Done);
            if change.keep {
                extended += done;
            } else {
                returned += done;
            }
        }
        drop(state);
        if lost > 0 {
            warn!(
                messages = lost,
                "messages have become visible again in the queue; their handlers go on under their leases"
            );
            self.hub
                .observe(events::count(events::VISIBILITY_LOST, lost));
        }
        if extended > 0 {
            self.hub
                .observe(events::count(events::VISIBILITY_EXTENDED, extended));
        }
        if returned > 0 {
            self.hub.observe(events::count(events::RETURNED, returned));
        }
    }

    /// Returns the answers to a batch. If the call has failed, each entry has.
    fn answers(
        &self,
        operation: &'static str,
        count: usize,
        result: Result<Vec<EntryResult>, CallError>,
    ) -> Vec<EntryResult> {
        match result {
            Ok(answers) => {
                let failed = answers
                    .iter()
                    .filter(|answer| **answer == EntryResult::Failed)
                    .count();
                if failed == 0 {
                    self.hub.failures.succeeded(operation);
                } else {
                    let error = format!("{failed} of {count} entries of a batch failed");
                    self.hub
                        .failures
                        .failed(Instant::now().into_std(), operation, &error);
                    self.hub.observe(Event::SourceError { operation });
                    warn!(
                        operation,
                        entries = failed,
                        "some entries of a batch to SQS failed; retrying"
                    );
                }
                answers
            }
            Err(error) => {
                self.report(operation, &error, 1);
                vec![EntryResult::Failed; count]
            }
        }
    }

    /// Returns the result of a task. A panic is a bug and ends the source, because no other code
    /// would repeat the call.
    fn ended<T>(&self, task: Result<T, JoinError>) -> Option<T> {
        task.inspect_err(|panic| {
            error!(%panic, "a call to SQS has panicked");
            self.hub
                .end(End::Failed(format!("a call to SQS has panicked: {panic}")));
        })
        .ok()
    }
}
