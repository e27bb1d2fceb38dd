//! A member of the consumer group: its shared state, and how it handles assigned and revoked
//! partitions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::buffer::Buffer;
use super::commit_desk::CommitOutcome;
use super::connection::Connection;
use crate::client::login::{LOGIN, LoginFailure};
use crate::client::notices::Notices;
use crate::client::source_settings::StartAt;
use crate::client::trouble::{JOIN, OFFSET, READ};
use crate::partitions::assignment::{Assignment, Begin};
use crate::partitions::assignments::Assignments;
use crate::partitions::fetch_limits::Totals;
use crate::partitions::partition::Partition;
use crate::partitions::partition_map::PartitionMap;
use oncegate_runtime::health::FailureLog;
use oncegate_runtime::observe::{Event, Observer};
use oncegate_runtime::source::CommitAnnotation;

/// The time for which a broker may owe an answer. It answers a fetch at the latest after half a
/// second.
const SILENCE_MAX: Duration = Duration::from_secs(15);

/// After this time without a partition, others read the partitions that this member could not read.
/// It is longer than a session, in which the group may wait for a member that has gone.
const IDLE_SETTLES: Duration = Duration::from_secs(60);

/// The state shared by the poll thread, the commit thread and the source. It outlives a failed
/// client, and its replacement uses it as well.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) assignments: Assignments,
    pub(crate) buffer: Buffer,
    pub(crate) notices: Notices,
    pub(crate) observer: Arc<dyn Observer>,
    /// The position at which the group begins in a topic without committed offsets.
    start: StartAt,
    /// The operations that are failing now.
    pub(crate) failures: FailureLog,
    /// The time for which a revoke waits for running handlers.
    pub(crate) drain_timeout: Duration,
    /// The time for which a revoke waits for its commit.
    pub(crate) commit_patience: Duration,
    /// The metadata to store with each committed position.
    pub(crate) annotation: Option<CommitAnnotation>,
    /// The state of the client's connection.
    pub(crate) connection: Connection,
    /// The poll thread's state for `status`.
    polls: Mutex<Polls>,
    /// The number of broker responses that the client has counted.
    responses: AtomicU64,
    /// Set once: the member leaves, and must have left by this instant.
    leave_by: OnceLock<Instant>,
    /// The reason for which the member left without the last commit, for `close` to report.
    uncommitted: Mutex<Option<String>>,
    /// The time since which the group has had no partition for this member.
    idle_since: Mutex<Option<Instant>>,
    /// The reason for which the last login has failed, until the poll thread has reported it.
    login_failure: Mutex<Option<LoginFailure>>,
}

/// The state of the poll thread.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Polls {
    /// The time at which its last round began.
    pub(crate) last: Option<Instant>,
    /// `true` while fetching is paused because the buffer is full.
    pub(crate) held: bool,
}

impl Member {
    pub(crate) fn new(
        totals: Arc<Totals>,
        observer: Arc<dyn Observer>,
        buffer: Buffer,
        start: StartAt,
        drain_timeout: Duration,
        commit_patience: Duration,
        annotation: Option<CommitAnnotation>,
    ) -> Self {
        Self {
            assignments: Assignments::counted_in(totals),
            buffer,
            notices: Notices::default(),
            observer,
            start,
            failures: FailureLog::default(),
            drain_timeout,
            commit_patience,
            annotation,
            connection: Connection::default(),
            polls: Mutex::default(),
            responses: AtomicU64::new(0),
            leave_by: OnceLock::new(),
            uncommitted: Mutex::default(),
            idle_since: Mutex::default(),
            login_failure: Mutex::default(),
        }
    }

    /// Records how many responses the brokers have sent so far, and which broker has sent nothing
    /// for longest although it owes an answer. An increase means that a broker answers, even if
    /// there is no message.
    pub(crate) fn heard(&self, responses: Option<u64>, silent: Option<(String, Duration)>) {
        if let Some((broker, lasts)) = silent.filter(|(_, lasts)| *lasts >= SILENCE_MAX) {
            // Its client takes the connection for a good one until a request is given up.
            let seconds = lasts.as_secs();
            let why = format!("{broker} has a connection, and has not answered for {seconds} s");
            return self.failures.failed(Instant::now(), "broker", &why);
        }
        let Some(responses) = responses else { return };
        // A replacement client counts from 0.
        if self.responses.swap(responses, Ordering::Relaxed) != responses {
            self.failures.succeeded("broker");
            self.failures.succeeded("fetch");
        }
    }

    /// Records that a message was delivered, so that the operations that deliver messages have
    /// succeeded.
    pub(crate) fn delivers(&self) {
        for operation in ["broker", "fetch", LOGIN] {
            self.failures.succeeded(operation);
        }
    }

    /// Records whether the client has a connection. The brokers have accepted the login of one that
    /// it has.
    pub(crate) fn connected(&self, is_connected: bool) {
        self.connection.note(is_connected);
        if is_connected {
            self.failures.succeeded(LOGIN);
        }
    }

    /// Records that the poll thread begins another round.
    pub(crate) fn polling(&self, held: bool) {
        *self.polls.lock() = Polls {
            last: Some(Instant::now()),
            held,
        };
    }

    /// Returns the state of the poll thread.
    pub(crate) fn polls(&self) -> Polls {
        *self.polls.lock()
    }

    /// Asks the poll thread to leave the group. The first deadline counts.
    pub(crate) fn leave(&self, by: Instant) {
        let _ = self.leave_by.set(by);
    }

    /// Returns the instant by which the member must have left, once it is leaving.
    pub(crate) fn leaving(&self) -> Option<Instant> {
        self.leave_by.get().copied()
    }

    /// Keeps why a login has failed until the poll thread has reported it.
    pub(crate) fn login_failed(&self, failure: LoginFailure) {
        *self.login_failure.lock() = Some(failure);
    }

    /// Returns why the last login has failed, since it was last asked.
    pub(crate) fn take_login_failure(&self) -> Option<LoginFailure> {
        self.login_failure.lock().take()
    }

    /// Returns why the member left without the last commit, if it did.
    pub(crate) fn take_uncommitted(&self) -> Option<String> {
        self.uncommitted.lock().take()
    }

    /// Ends all epochs, because the client is no longer a member and gets no callback for it: other
    /// members own its partitions, or will. It waits for nothing and commits nothing.
    pub(crate) fn dropped(&self) {
        let revoked = self.assignments.end_all();
        self.buffer.purge_revoked();
        if revoked > 0 {
            self.observer.observe(Event::Rebalanced {
                assigned: 0,
                revoked,
            });
        }
    }

    /// Returns whether a group without committed offsets begins at the end.
    pub(crate) fn begins_at_end(&self) -> bool {
        self.start == StartAt::End
    }

    /// Begins epochs. The commit thread decides where the `held` ones of these partitions begin,
    /// the client the others.
    pub(crate) fn assigned(&self, partitions: &[Partition], held: &PartitionMap<()>) {
        self.failures.succeeded(JOIN);
        if partitions.is_empty() {
            return;
        }
        let assigned = partitions.len();
        tracing::info!(partitions = %Names(partitions), "partitions assigned");
        let (held, read): (Vec<_>, Vec<_>) = partitions
            .iter()
            .cloned()
            .partition(|one| held.of(one).is_some());
        self.assignments.assign(read, Begin::Begun);
        self.assignments.assign(held, Begin::Unresolved);
        self.observer.observe(Event::Rebalanced {
            assigned,
            revoked: 0,
        });
    }

    /// Records whether the client is a member of the group that waits for nothing.
    pub(crate) fn settled(&self, is_settled: bool) {
        let mut idle_since = self.idle_since.lock();
        if is_settled {
            self.failures.succeeded(JOIN);
        } else if self.assignments.is_empty() {
            self.note_joining();
        }
        if !is_settled || !self.assignments.is_empty() {
            *idle_since = None;
        } else if idle_since.get_or_insert_with(Instant::now).elapsed() >= IDLE_SETTLES {
            self.failures.succeeded(OFFSET);
            self.failures.succeeded(READ);
        }
    }

    /// Notes that this consumer has no partition before its group has settled. An error that the
    /// brokers have given for that says more.
    fn note_joining(&self) {
        let now = Instant::now();
        let failures = self.failures.at(now);
        if failures.iter().all(|failure| failure.operation != JOIN) {
            let why = "it has no partition, and joins its group again: a broker, the group's coordinator or another \
                       member keeps it waiting";
            self.failures.failed(now, JOIN, &why);
        }
    }

    /// Gives up partitions: no further handler starts for them, running handlers may finish, their
    /// positions are committed, and then their epochs end.
    ///
    /// It runs on the poll thread, so it must not wait for anything that needs that thread. It
    /// waits for handlers and for the commit thread, each with a time limit.
    pub(crate) fn revoked(
        &self,
        partitions: &[Partition],
        lost: bool,
        commit: impl FnOnce(Instant) -> CommitOutcome,
    ) {
        if partitions.is_empty() {
            return;
        }
        let begun = Instant::now();
        let revoked = self.assignments.begin_revoke(partitions);
        self.buffer.purge_revoked();
        if lost {
            // Other members own them already; a wait or a commit would only do harm.
            self.assignments.end(&revoked);
            tracing::warn!(partitions = %Names(partitions), "partitions lost");
        } else {
            self.drain_and_commit(&revoked, begun, commit);
            self.assignments.end(&revoked);
            let took_ms = begun.elapsed().as_millis();
            tracing::info!(partitions = %Names(partitions), took_ms, "partitions revoked");
        }
        self.observer.observe(Event::Rebalanced {
            assigned: 0,
            revoked: partitions.len(),
        });
    }

    fn drain_and_commit(
        &self,
        revoked: &[Arc<Assignment>],
        begun: Instant,
        commit: impl FnOnce(Instant) -> CommitOutcome,
    ) {
        let mut drain_by = begun + self.drain_timeout;
        if let Some(leave_by) = self.leaving() {
            // `close` has its own deadline, and the commit needs a part of that time.
            let left = leave_by.saturating_duration_since(begun);
            drain_by = drain_by.min(begun + left / 2);
        }
        let running = self.assignments.wait_drained(revoked, drain_by);
        if running > 0 {
            tracing::warn!(
                running,
                "handlers still run on revoked partitions; their messages will be delivered again"
            );
        }
        if !self.assignments.are_due(revoked) {
            // The commit thread may wait for the broker, to decide where other partitions begin.
            return;
        }
        // `close` sets the time limit of a member's last commit: a rebalance may hold it back for
        // longer than a revoke of a member that stays may wait.
        let commit_by = self
            .leaving()
            .unwrap_or_else(|| Instant::now() + self.commit_patience);
        match commit(commit_by) {
            CommitOutcome::Committed => {}
            CommitOutcome::Lost(error) => {
                tracing::warn!(error, "the partitions were lost before their last commit");
            }
            CommitOutcome::NotOurs(error)
            | CommitOutcome::Busy(error)
            | CommitOutcome::Failed(error) => {
                tracing::warn!(error, "partitions were revoked without their last commit");
                if self.leaving().is_some() {
                    *self.uncommitted.lock() = Some(error);
                }
            }
        }
    }
}

/// Formats partitions for a log line.
struct Names<'a>(&'a [Partition]);

impl std::fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, partition) in self.0.iter().enumerate() {
            write!(f, "{}{partition}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use oncegate_runtime::observe::Counters;

    use super::*;

    const PATIENCE: Duration = Duration::from_millis(1);

    fn member() -> Member {
        let buffer = Buffer::new(1, 1).expect("there are file descriptors");
        let totals = Arc::default();
        let observer = Arc::new(Counters::default());
        Member::new(
            totals,
            observer,
            buffer,
            StartAt::Beginning,
            PATIENCE,
            PATIENCE,
            None,
        )
    }

    /// Assigns a partition, and finishes a message of it.
    fn finished(member: &Member) -> Partition {
        let partition = Partition {
            topic: "orders".into(),
            number: 0,
        };
        member.assigned(std::slice::from_ref(&partition), &PartitionMap::default());
        let assignment = member.assignments.get(&partition).expect("it is ours");
        let received = assignment.receive(5).expect("it is ours");
        assert!(assignment.complete(received.receipt));
        partition
    }

    /// Revokes a partition, and returns until when its commit may take.
    fn commit_deadline(member: &Member) -> Instant {
        let partition = finished(member);
        let mut deadline = None;
        member.revoked(&[partition], false, |by| {
            deadline = Some(by);
            CommitOutcome::Committed
        });
        deadline.expect("the revoke commits")
    }

    #[test]
    fn a_leaving_members_last_commit_may_take_as_long_as_close() {
        let member = member();
        let far = Instant::now() + Duration::from_secs(3_600);
        assert!(
            commit_deadline(&member) < far,
            "a revoke of a member that stays has a limit of its own"
        );
        member.leave(far);
        assert_eq!(commit_deadline(&member), far);
    }

    #[test]
    fn a_member_with_nothing_to_commit_waits_for_no_commit() {
        let member = member();
        member.leave(Instant::now() + Duration::from_secs(3_600));
        let partition = finished(&member);
        member.assignments.committed(&member.assignments.due());
        let never =
            |_| CommitOutcome::Failed("the broker did not answer a commit in time".to_owned());
        member.revoked(&[partition], false, never);
        assert!(member.uncommitted.lock().is_none());
    }

    #[test]
    fn a_stop_ends_well_when_others_have_the_partitions_already() {
        for (outcome, is_reported) in [
            (CommitOutcome::Lost("unknown member".to_owned()), false),
            (CommitOutcome::NotOurs("rebalance".to_owned()), true),
            (CommitOutcome::Failed("no answer".to_owned()), true),
        ] {
            let member = member();
            member.leave(Instant::now() + Duration::from_secs(3_600));
            let partition = finished(&member);
            member.revoked(&[partition], false, |_| outcome.clone());
            assert_eq!(
                member.uncommitted.lock().is_some(),
                is_reported,
                "{outcome:?}"
            );
        }
    }
}
