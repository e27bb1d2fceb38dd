//! The earlier clients of a source: when another one follows, and when none does.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::consumer::Consumer as _;

use super::member::Member;
use super::member_client::{LOOK_EVERY, MemberClient};
use crate::client::log;
use crate::client::trouble::Trouble;
use oncegate_runtime::observe::Event;
use oncegate_runtime::source::SourceError;

/// The number of clients that may fail in a row without being assigned a partition.
const FRUITLESS_MAX: u32 = 10;

/// Delay before the first replacement client; doubled for each client that fails without a
/// partition.
const REPLACE_AFTER: Duration = Duration::from_millis(100);

/// The longest such delay.
const REPLACE_AFTER_MAX: Duration = Duration::from_secs(5);

/// A client that has worked for so long has not failed in vain, even if the group had no partition
/// for it.
const STANDBY_WORKS: Duration = Duration::from_secs(600);

/// The time to wait while another member holds our static id: longer than a session, which is at
/// most 60 s by a broker's default.
const HELD_MAX: Duration = Duration::from_secs(90);

/// The number of failed clients that may be closing at the same time before the next one is
/// delayed.
const CLOSING_MAX: usize = 4;

/// The delay of the next client then: each client that never closes keeps its threads, connections
/// and memory. It is shorter than the time without a poll that counts as a stall.
const CLOSING_DELAY: Duration = Duration::from_secs(30);

/// The name of the operation that fails while more clients are closing than expected, in metrics
/// and in the status.
const CLOSE: &str = "close";

/// The earlier clients of this source.
#[derive(Default)]
pub(super) struct Succession {
    /// The number of clients that have failed since one was assigned a partition, or has worked for
    /// long without one.
    fruitless: u32,
    /// `true` if the last client has failed because it did not begin to read a partition.
    was_unread: bool,
    /// The time since which another member holds our static id.
    held_since: Option<Instant>,
    /// Threads that close failed clients.
    retired: Vec<JoinHandle<()>>,
}

impl Succession {
    /// Returns whether the next client is replaced if it does not begin to read a partition.
    pub(super) fn may_replace_unread(&self) -> bool {
        !self.was_unread && self.closing() < CLOSING_MAX
    }

    /// Returns how many failed clients are closing.
    fn closing(&self) -> usize {
        self.retired
            .iter()
            .filter(|thread| !thread.is_finished())
            .count()
    }

    /// Notes that a client has failed: why, after it had partitions or not, and after how long.
    pub(super) fn note_failure(
        &mut self,
        trouble: &Trouble,
        had_partitions: bool,
        worked_for: Duration,
    ) {
        self.was_unread = trouble.is_unread();
        if had_partitions {
            self.held_since = None;
        }
        if had_partitions || worked_for >= STANDBY_WORKS {
            self.fruitless = 0;
        }
    }

    /// Retires a failed client and waits until a replacement may join. Returns an error when none
    /// should.
    pub(super) fn follow(
        &mut self,
        client: MemberClient,
        trouble: Trouble,
        member: &Member,
    ) -> Result<(), SourceError> {
        let context = Arc::clone(client.consumer.context());
        // This comes first, so that the old client's threads and callbacks have no effect from here
        // on.
        context.retire();
        member.dropped();
        member.connection.begin_anew();
        self.retire(client, member)?;
        let (cause, why) = match trouble {
            Trouble::Hopeless(why) => return Err(SourceError::new(why)),
            Trouble::Held(why) => {
                if self.held_since.get_or_insert_with(Instant::now).elapsed() > HELD_MAX {
                    return Err(SourceError::new(format!(
                        "another member of the group uses our static_member id, for longer than {HELD_MAX:?}; \
                         give each process its own: {why}"
                    )));
                }
                ("static_member", why)
            }
            Trouble::Outdated => {
                tracing::info!(
                    "the brokers accept the changed password or certificate; replacing this Kafka client"
                );
                member
                    .observer
                    .observe(Event::MemberReplaced { cause: "login" });
                return Ok(());
            }
            Trouble::Dropped { .. } if self.fruitless >= FRUITLESS_MAX => {
                return Err(SourceError::new(format!(
                    "{FRUITLESS_MAX} Kafka clients in a row have failed: {trouble:?}"
                )));
            }
            Trouble::Dropped { cause, why } => {
                self.fruitless += 1;
                (cause, why)
            }
        };
        tracing::warn!(
            cause,
            why,
            "this Kafka client is no longer a member of the group, or does not work; replacing it"
        );
        member.observer.observe(Event::MemberReplaced { cause });
        let doubled = REPLACE_AFTER.saturating_mul(1 << self.fruitless.min(10));
        wait(member, doubled.min(REPLACE_AFTER_MAX))
    }

    /// Closes a client on a thread of its own, because closing may hang. While many are closing, it
    /// delays the next one: how fast clients that never close can add up has a limit, and how many
    /// may be needed has none.
    fn retire(&mut self, client: MemberClient, member: &Member) -> Result<(), SourceError> {
        let thread = std::thread::Builder::new().name("oncegate-retired".to_owned());
        let thread = thread.spawn(move || client.close());
        self.retired.push(thread.map_err(|error| {
            SourceError::caused("cannot start the thread that closes a failed client", error)
        })?);
        self.retired.retain(|thread| !thread.is_finished());
        let until = Instant::now() + CLOSING_DELAY;
        while self.closing() > CLOSING_MAX && Instant::now() < until {
            let closing = self.closing();
            let why = format!(
                "{closing} replaced Kafka clients have not closed, each with its threads and connections; restart \
                 the process if they do not"
            );
            member.failures.failed(Instant::now(), CLOSE, &why);
            if let Some(left_out) = log::worth_logging(&why) {
                tracing::error!(why, left_out, "the next Kafka client is delayed");
            }
            wait(member, LOOK_EVERY)?;
        }
        if self.closing() <= CLOSING_MAX {
            member.failures.succeeded(CLOSE);
        }
        Ok(())
    }

    /// Waits for the failed clients to close. `close` limits its wait for this by its own deadline.
    pub(super) fn end(self) {
        for thread in self.retired {
            if thread.join().is_err() {
                tracing::error!("closing a Kafka client has panicked");
            }
        }
    }
}

/// Waits for `pause`; returns an error when the source closes.
fn wait(member: &Member, pause: Duration) -> Result<(), SourceError> {
    let until = Instant::now() + pause;
    while Instant::now() < until {
        if member.leaving().is_some() {
            return Err(SourceError::new(
                "the source was closed while it rejoined the group",
            ));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DROPPED: Trouble = Trouble::Dropped {
        cause: "dropped",
        why: String::new(),
    };

    // invariant: standby-given-up
    #[test]
    fn a_standby_is_not_given_up_for_failures_that_are_days_apart() {
        let mut line = Succession::default();
        for _ in 0..=FRUITLESS_MAX * 2 {
            line.note_failure(&DROPPED, false, Duration::from_secs(86_400));
            assert!(line.fruitless < FRUITLESS_MAX);
            line.fruitless += 1;
        }
        line.note_failure(&DROPPED, false, Duration::from_secs(1));
        assert_eq!(
            line.fruitless, 1,
            "a client that fails at once has failed in vain"
        );
        line.note_failure(&DROPPED, true, Duration::from_secs(1));
        assert_eq!(line.fruitless, 0);
    }

    // invariant: stall-unreported
    #[test]
    fn a_replacement_that_did_not_help_is_not_repeated() {
        let mut line = Succession::default();
        assert!(line.may_replace_unread());
        line.note_failure(
            &Trouble::unread(Duration::from_secs(60)),
            true,
            Duration::from_secs(60),
        );
        assert!(
            !line.may_replace_unread(),
            "the next one shows whether it helped"
        );
        line.note_failure(&DROPPED, true, Duration::from_secs(1));
        assert!(
            line.may_replace_unread(),
            "this one had another reason to fail"
        );
    }

    // invariant: stall-unreported
    #[test]
    fn clients_that_do_not_close_are_not_added_to_without_need() {
        let mut line = Succession::default();
        let (hold, held) = std::sync::mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        for _ in 0..CLOSING_MAX {
            assert!(line.may_replace_unread());
            let held = Arc::clone(&held);
            line.retired.push(std::thread::spawn(move || {
                drop(held.lock().map(|held| held.recv()));
            }));
        }
        assert!(!line.may_replace_unread());
        drop(hold);
        line.end();
    }
}
