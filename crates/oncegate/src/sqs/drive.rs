//! The thread of a queue: receives, extends, deletes, hands back.
//!
//! It shares no runtime with the handlers: one that blocks its thread must not cost the others their messages.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep_until};
use tracing::{error, info, warn};

use super::api::{Api, Attempt, CallError, Poll};
use super::convert::Reader;
use super::held::{Answer, Change, Group, Target};
use super::hub::{End, Fetched, Hub};
use super::receivers::Receivers;
use crate::observe::Event;

/// The thread looks at what it holds this often.
const TICKS_PER_VISIBILITY: u32 = 20;
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// How long a receive is repeated as the same attempt: SQS remembers it for five minutes.
const SAME_ANSWER: Duration = Duration::from_secs(4 * 60);

/// What goes on for a queue.
pub(crate) struct Driver {
    hub: Arc<Hub>,
    api: Arc<Api>,
    reader: Reader,
    receivers: Receivers,
    polls: JoinSet<Polled>,
    /// Receives of a FIFO queue whose answers were lost, and until when the queue gives the same answer again.
    unanswered: Vec<(Instant, Attempt)>,
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
    result: Result<Vec<Answer>, CallError>,
}

struct Changed {
    changes: Vec<Change>,
    sent_at: Instant,
    result: Result<Vec<Answer>, CallError>,
}

impl Driver {
    pub(crate) fn new(hub: Arc<Hub>, api: Arc<Api>, reader: Reader, visibility: Duration) -> Self {
        let (polls, deletes, changes) = (JoinSet::new(), JoinSet::new(), JoinSet::new());
        let ticks = (visibility / TICKS_PER_VISIBILITY).min(LONGEST_TICK);
        let (receivers, unanswered) = (Receivers::new(), Vec::new());
        Self { hub, api, reader, receivers, polls, unanswered, deletes, changes, ticks }
    }

    /// Runs until the source leaves and the queue has been told everything, or the deadline is over. Then it
    /// says how many finished messages are not deleted.
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
                () = self.hub.wake.notified() => {}
                () = sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            }
        }
    }

    /// Whether nothing is left to do, or no time.
    fn has_left(&self, by: Instant) -> bool {
        if Instant::now() < by {
            return self.receivers.under_way() == 0 && self.hub.lock().held.is_empty();
        }
        if self.receivers.under_way() > 0 {
            info!(
                "the stop deadline is over: a long poll is cut, and what it would still have brought comes again after its visibility timeout"
            );
        }
        true
    }

    /// Sends what is due. Returns when something else is, and until when everything must be told.
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
            // With nothing in hand and nothing to delete, waiting does not make it more.
            let final_room = state.held.in_hand() == 0 && state.held.undeleted() == 0;
            let free = state.free(self.receivers.asked());
            let Some(asked) = self.receivers.ask(now, free, final_room) else { break };
            self.poll(asked);
        }
        let wake_at =
            [state.held.next_wake(), self.receivers.next_wake(), leave_by].into_iter().flatten().min();
        (wake_at, leave_by)
    }

    fn poll(&mut self, asked: usize) {
        self.hub.observe(Event::SqsCalled { operation: "receive" });
        let (api, attempt) = (Arc::clone(&self.api), self.attempt());
        let poll = if self.receivers.is_failing() { Poll::Probe } else { Poll::Long };
        self.polls.spawn(async move {
            let result = api.receive(asked, poll, attempt.as_ref()).await;
            Polled { asked, attempt, result }
        });
    }

    /// A lost answer of a FIFO queue would block its groups for the visibility timeout: the same attempt gets it
    /// again.
    fn attempt(&mut self) -> Option<Attempt> {
        let now = Instant::now();
        self.unanswered.retain(|(until, _)| now < *until);
        let again = self.unanswered.pop().map(|(_, attempt)| attempt);
        self.reader.fifo.then(|| again.unwrap_or_else(Attempt::new))
    }

    fn delete(&mut self, targets: Vec<Target>) {
        self.hub.observe(Event::SqsCalled { operation: "delete" });
        let api = Arc::clone(&self.api);
        self.deletes.spawn(async move {
            let result = api.delete(&targets).await;
            Deleted { targets, result }
        });
    }

    fn change(&mut self, changes: Vec<Change>) {
        self.hub.observe(Event::SqsCalled { operation: "visibility" });
        let api = Arc::clone(&self.api);
        self.changes.spawn(async move {
            let sent_at = Instant::now();
            let result = api.change_visibility(&changes).await;
            Changed { changes, sent_at, result }
        });
    }

    fn look(&mut self) {
        let look = self.hub.lock().held.look(Instant::now());
        if look.lost > 0 {
            warn!(
                messages = look.lost,
                "no extension of their visibility was confirmed in time; their handlers are cancelled"
            );
            self.hub.observe(Event::SqsVisibilityLost { count: look.lost });
        }
        if look.undeleted > 0 {
            warn!(
                messages = look.undeleted,
                "finished messages could not be deleted in time; their records will answer their next delivery"
            );
            self.hub.observe(Event::SqsDeleteFailed { count: look.undeleted });
        }
        look.extends.into_iter().for_each(|changes| self.change(changes));
    }

    fn note_polled(&mut self, polled: Result<Polled, JoinError>) {
        let Some(Polled { asked, attempt, result }) = self.ended(polled) else { return };
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
                self.hub.end(End::Failed(format!("the queue is gone: {error}")));
            }
            Err(error) => {
                let now = Instant::now();
                let failures = self.receivers.failed(now, asked, rand::random());
                self.unanswered.extend(attempt.map(|attempt| (now + SAME_ANSWER, attempt)));
                self.report("receive", &error, failures);
            }
        }
    }

    fn report(&self, operation: &'static str, error: &CallError, failures: u32) {
        self.hub.failures.failed(Instant::now().into_std(), operation, error);
        self.hub.observe(Event::SourceError { operation });
        if error.is_denied() {
            error!(operation, %error, failures, "SQS refuses; trying again until somebody grants it");
        } else {
            warn!(operation, %error, failures, "SQS does not answer as it should; trying again");
        }
    }

    /// Holds what was received, and hands it to whoever waits. What comes when nobody will take it any more
    /// goes back at once.
    fn admit(&mut self, messages: Vec<aws_sdk_sqs::types::Message>) {
        let now = Instant::now();
        let mut groups: Vec<(String, Group)> = Vec::new();
        let mut fetched = Vec::with_capacity(messages.len());
        for message in messages {
            let Some(read) = self.reader.read(message) else { continue };
            let group = read.group.map(|name| {
                let known =
                    groups.iter().find(|(other, _)| *other == name).map(|(_, group)| Arc::clone(group));
                known.unwrap_or_else(|| {
                    let group = Group::default();
                    groups.push((name, Arc::clone(&group)));
                    group
                })
            });
            if read.last_receive {
                warn!(origin = %read.message.origin(), "it was received for the last time before the redrive policy takes it");
                self.hub.observe(Event::SqsLastReceive);
            }
            let stays = group.is_some() || read.last_receive;
            let Some(admitted) = self.hub.lock().held.admit(now, &read.id, read.handle, group) else {
                continue;
            };
            fetched.push(Fetched { message: read.message, id: read.id, admitted, stays });
        }
        self.hub.put(fetched);
    }

    fn note_deleted(&mut self, deleted: Result<Deleted, JoinError>) {
        let Some(Deleted { targets, result }) = self.ended(deleted) else { return };
        let answers = self.answers("delete", targets.len(), result);
        let (now, mut gone) = (Instant::now(), 0);
        let mut state = self.hub.lock();
        for (target, answer) in targets.iter().zip(answers) {
            gone += u64::from(state.held.note_delete(now, target, answer, rand::random()));
        }
        drop(state);
        if gone > 0 {
            warn!(
                messages = gone,
                "the queue no longer knows the receipts of finished messages: an earlier try has deleted them, or their records will answer their next delivery"
            );
            self.hub.observe(Event::SqsDeleteFailed { count: gone });
        }
    }

    fn note_changed(&mut self, changed: Result<Changed, JoinError>) {
        let Some(Changed { changes, sent_at, result }) = self.ended(changed) else { return };
        let answers = self.answers("visibility", changes.len(), result);
        let (now, mut lost, mut extended, mut returned) = (Instant::now(), 0, 0, 0);
        let mut state = self.hub.lock();
        for (change, answer) in changes.iter().zip(answers) {
            lost += u64::from(state.held.note_change(now, sent_at, change, answer, rand::random()));
            let done = u64::from(answer == Answer::Done);
            if change.keep { extended += done } else { returned += done }
        }
        drop(state);
        if lost > 0 {
            warn!(messages = lost, "the queue has taken messages back; their handlers are cancelled");
            self.hub.observe(Event::SqsVisibilityLost { count: lost });
        }
        if extended > 0 {
            self.hub.observe(Event::SqsVisibilityExtended { count: extended });
        }
        if returned > 0 {
            self.hub.observe(Event::SqsHandedBack { count: returned });
        }
    }

    /// The answers to a batch; when the call has failed, each entry has.
    fn answers(
        &self,
        operation: &'static str,
        count: usize,
        result: Result<Vec<Answer>, CallError>,
    ) -> Vec<Answer> {
        match result {
            Ok(answers) => {
                let failed = answers.iter().filter(|answer| **answer == Answer::Failed).count();
                if failed == 0 {
                    self.hub.failures.succeeded(operation);
                } else {
                    let error = format!("{failed} of {count} entries of a batch were refused");
                    self.hub.failures.failed(Instant::now().into_std(), operation, &error);
                    self.hub.observe(Event::SourceError { operation });
                    warn!(operation, entries = failed, "SQS has refused a part of a batch; trying again");
                }
                answers
            }
            Err(error) => {
                self.report(operation, &error, 1);
                vec![Answer::Failed; count]
            }
        }
    }

    /// A task that panicked is a bug: what it called for is not known, and nobody would ask again.
    fn ended<T>(&self, task: Result<T, JoinError>) -> Option<T> {
        task.inspect_err(|panic| {
            error!(%panic, "a call to SQS has panicked");
            self.hub.end(End::Failed(format!("a call to SQS has panicked: {panic}")));
        })
        .ok()
    }
}
