//! The poll thread's main loop: it replaces a failed client while the source is open.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::sync::oneshot;

use super::buffer::End;
use super::callbacks::MemberContext;
use super::commit;
use super::commit_desk::CommitContext as _;
use super::connection_watch::Watch;
use super::member::Member;
use super::poll::{Poller, Terms};
use crate::client::inquiry;
use crate::client::log;
use crate::client::properties::FileContents;
use crate::client::rotation::Rotation;
use crate::client::settings::{self, Settings};
use crate::client::tokens::Tokens;
use crate::client::trouble::{JoinTerms, Trouble};
use crate::partitions::fetch_limits::FetchLimits;
use oncegate_runtime::observe::Event;
use oncegate_runtime::source::SourceError;

/// How many clients may fail in a row without being assigned a partition.
const FRUITLESS_MAX: u32 = 10;

/// Delay before the first replacement client; doubled for each client that fails without a
/// partition.
const REPLACE_AFTER: Duration = Duration::from_millis(100);

/// The longest such delay.
const REPLACE_AFTER_MAX: Duration = Duration::from_secs(5);

/// A client that has worked for so long has not failed in vain, even if the group had no partition
/// for it.
const STANDBY_WORKS: Duration = Duration::from_secs(600);

/// How long to wait while another member holds our static id: longer than a session, which is at
/// most 60 s by a broker's default.
const HELD_MAX: Duration = Duration::from_secs(90);

/// How many failed clients may be closing at the same time before the next one is delayed.
const CLOSING_MAX: usize = 4;

/// That delay: each client that never closes keeps its threads, connections and memory. It is
/// shorter than the time without a poll that counts as a stall.
const CLOSING_DELAY: Duration = Duration::from_secs(30);

/// How long a commit may take to end before the client is closed under it.
const COMMIT_ENDS: Duration = Duration::from_secs(2);

/// The name of the operation that fails while more clients are closing than expected, in metrics
/// and in the status.
const CLOSE: &str = "close";

/// How often a wait checks whether the source is closing.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A client and the thread that commits through it.
struct Client {
    consumer: Arc<BaseConsumer<MemberContext>>,
    commits: JoinHandle<()>,
}

/// Joins the group, polls, joins again with another client when one has failed, and leaves. Answers
/// `opened` when the first client has joined, and `left` with the result for `close`.
pub(crate) fn run(
    settings: &Settings,
    (mut config, mut contents): (ClientConfig, FileContents),
    member: &Arc<Member>,
    opened: oneshot::Sender<Result<(), SourceError>>,
    left: oneshot::Sender<Result<(), String>>,
) {
    // A receiver must not wait for a thread that has panicked.
    let _end = EndOnDrop(member);
    let first = match Client::check_and_join(settings, &config, member) {
        Ok(first) => first,
        Err(error) => return drop(opened.send(Err(error))),
    };
    if opened.send(Ok(())).is_err() {
        member.leave(Instant::now());
    }
    let mut line = Succession::default();
    let mut client = first;
    loop {
        let joined_at = Instant::now();
        let watch = Watch::new(config.clone());
        let rotation = Rotation::new(settings.clone(), contents);
        let terms = terms(settings, &config, line.may_replace_unread());
        let mut poller = Poller::new(
            Arc::clone(&client.consumer),
            Arc::clone(member),
            terms,
            watch,
            rotation,
        );
        let trouble = match poller.run() {
            Some(Trouble::Hopeless(why)) => {
                tracing::error!(why, "the Kafka consumer has failed");
                member.buffer.end(End::Failed(why));
                // Running handlers may still finish, and their offsets are committed.
                member.leave(Instant::now() + member.drain_timeout + member.commit_patience);
                None
            }
            other => other,
        };
        let Some(trouble) = trouble else {
            drop(left.send(poller.leave()));
            drop(poller);
            client.dismantle();
            break;
        };
        if trouble == Trouble::Outdated {
            poller.give_back();
        }
        drop(poller);
        match settings.config() {
            Ok(made) => (config, contents) = made,
            Err(error) => tracing::warn!(%error, "continuing with the former properties"),
        }
        line.note_failure(
            &trouble,
            !member.assignments.is_empty(),
            joined_at.elapsed(),
        );
        let next = line
            .follow(client, trouble, member)
            .and_then(|()| Client::join(settings, &config, member));
        match next {
            Ok(next) => client = next,
            Err(error) => {
                drop(left.send(give_up(member, &error)));
                break;
            }
        }
    }
    line.end();
}

fn terms(settings: &Settings, config: &ClientConfig, may_replace_unread: bool) -> Terms {
    Terms {
        limits: FetchLimits::new(settings.unfinished_messages),
        routes: settings.routes,
        keeps_positions: settings.keeps_positions,
        new_protocol: settings::new_protocol(config),
        join: JoinTerms::of(config),
        may_replace_unread,
    }
}

/// Ends the source without a replacement client. Other members already own the failed client's
/// partitions.
fn give_up(member: &Member, error: &SourceError) -> Result<(), String> {
    if member.leaving().is_some() {
        return Err("the client failed before the last commit".to_owned());
    }
    let why = error.to_string();
    tracing::error!(why, "the Kafka consumer has failed");
    member.buffer.end(End::Failed(why));
    Ok(())
}

impl Client {
    /// Joins the group, after a check that the brokers answer, the topics exist, and the user may
    /// consume them.
    fn check_and_join(
        settings: &Settings,
        config: &ClientConfig,
        member: &Arc<Member>,
    ) -> Result<Self, SourceError> {
        let asking = inquiry::offsets_client(config.clone())?;
        settings.check_cluster(&asking)?;
        Self::join(settings, config, member)
    }

    fn join(
        settings: &Settings,
        config: &ClientConfig,
        member: &Arc<Member>,
    ) -> Result<Self, SourceError> {
        Self::subscribe(make(config, member)?, settings)
    }

    fn subscribe(
        consumer: BaseConsumer<MemberContext>,
        settings: &Settings,
    ) -> Result<Self, SourceError> {
        let names: Vec<_> = settings.topics.iter().map(String::as_str).collect();
        consumer
            .subscribe(&names)
            .map_err(|error| SourceError::caused("cannot subscribe to the topics", error))?;
        let consumer = Arc::new(consumer);
        let commits =
            commit::spawn(Arc::clone(&consumer), settings.commit_interval).map_err(|error| {
                SourceError::caused("cannot start the thread for Kafka commits", error)
            })?;
        Ok(Self { consumer, commits })
    }

    /// Ends the commit thread and drops the consumer. Either may take long or forever, so every
    /// wait for this has a time limit.
    ///
    /// A commit that waits for a coordinator ends only when the client is closed: by itself, such a
    /// client would never end.
    fn dismantle(self) {
        self.consumer.context().desk().stop();
        let until = Instant::now() + COMMIT_ENDS;
        while !self.commits.is_finished() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        if !self.commits.is_finished() {
            tracing::warn!("a commit does not end; closing its Kafka client under it");
            if let Err(error) = self.consumer.close_queue() {
                tracing::warn!(%error, "the Kafka client cannot be closed");
            }
            while !self.commits.is_finished() {
                // Its callbacks have no effect, and its messages come again.
                drop(self.consumer.poll(LOOK_EVERY));
            }
        }
        if self.commits.join().is_err() {
            tracing::error!("the commit thread has panicked");
        }
        drop(self.consumer);
    }
}

fn make(
    config: &ClientConfig,
    member: &Arc<Member>,
) -> Result<BaseConsumer<MemberContext>, SourceError> {
    let debug = config.get("debug") != Some(crate::client::notices::DEBUG_CONTEXT);
    let mut config = config.clone();
    let tokens = Tokens::take(&mut config)?;
    config
        .create_with_context(MemberContext::new(Arc::clone(member), debug, tokens))
        .map_err(settings::unusable)
}

/// The earlier clients of this source.
#[derive(Default)]
struct Succession {
    /// How many clients have failed since one was assigned a partition, or has worked for long
    /// without one.
    fruitless: u32,
    /// Whether the last client has failed because it did not begin to read a partition.
    was_unread: bool,
    /// Since when another member holds our static id.
    held_since: Option<Instant>,
    /// Threads that close failed clients.
    retired: Vec<JoinHandle<()>>,
}

impl Succession {
    /// Whether the next client is replaced if it does not begin to read a partition.
    fn may_replace_unread(&self) -> bool {
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
    fn note_failure(&mut self, trouble: &Trouble, had_partitions: bool, worked_for: Duration) {
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
    fn follow(
        &mut self,
        client: Client,
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
    fn retire(&mut self, client: Client, member: &Member) -> Result<(), SourceError> {
        let thread = std::thread::Builder::new().name("oncegate-retired".to_owned());
        let thread = thread.spawn(move || client.dismantle());
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
    fn end(self) {
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

/// Ends the buffer when the poll thread ends.
struct EndOnDrop<'a>(&'a Member);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0
            .buffer
            .end(End::Failed("the Kafka poll thread has ended".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consume::source::KafkaSource;
    use crate::partitions::assignment::Begin;
    use crate::partitions::partition::Partition;
    use oncegate_runtime::observe::Counters;

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
                drop(held.lock().map(|held| held.recv()))
            }));
        }
        assert!(!line.may_replace_unread());
        drop(hold);
        line.end();
    }

    /// Nothing listens at the address, so the commit waits for a coordinator.
    #[test]
    fn a_client_closes_though_its_commit_waits() {
        let source = KafkaSource::new("127.0.0.1:1", "group", ["orders"]);
        let (config, _) = source.settings.config().unwrap();
        let member = source
            .settings
            .member(Arc::default(), Arc::new(Counters::default()), None)
            .unwrap();
        let member = Arc::new(member);
        let client = Client::join(&source.settings, &config, &member).unwrap();
        let partition = Partition {
            topic: "orders".into(),
            number: 0,
        };
        member.assignments.assign([partition.clone()], Begin::Begun);
        let assignment = member.assignments.get(&partition).unwrap();
        assignment.complete(assignment.receive(0).unwrap().receipt);
        client.consumer.context().desk().ask();
        client.dismantle();
        assert_eq!(member.assignments.due().len(), 1, "nothing was committed");
    }

    // invariant: consumption-without-commits
    #[test]
    fn a_commit_thread_that_has_ended_ends_the_source() {
        let source = KafkaSource::new("127.0.0.1:1", "group", ["orders"]);
        let (config, contents) = source.settings.config().unwrap();
        let member = source
            .settings
            .member(Arc::default(), Arc::new(Counters::default()), None)
            .unwrap();
        let member = Arc::new(member);
        let consumer = Arc::new(make(&config, &member).unwrap());
        // What the thread does when it panics.
        consumer.context().desk().stop();
        let terms = terms(&source.settings, &config, true);
        let rotation = Rotation::new(source.settings.clone(), contents);
        let mut poller = Poller::new(
            consumer,
            Arc::clone(&member),
            terms,
            Watch::new(config),
            rotation,
        );
        let trouble = poller.run();
        assert!(
            matches!(&trouble, Some(Trouble::Hopeless(why)) if why.contains("commits")),
            "{trouble:?}"
        );
    }
}
