//! The poll thread's main loop: it replaces a failed client while the source is open.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::sync::oneshot;

use super::buffer::End;
use super::connection::Watch;
use super::fetch_limits::FetchLimits;
use super::member::{Member, MemberContext};
use super::poll::{Poller, Terms};
use super::properties::FileContents;
use super::rotation::Rotation;
use super::settings::{self, Settings};
use super::tokens::Tokens;
use super::trouble::Trouble;
use super::{commit, inquiry};
use oncegate_runtime::observe::Event;
use oncegate_runtime::source::SourceError;

/// How many clients may fail in a row without being assigned a partition.
const FRUITLESS_MAX: u32 = 10;

/// Delay before the first replacement client; doubled for each client that fails without a partition.
const REPLACE_AFTER: Duration = Duration::from_millis(100);

/// The longest such delay.
const REPLACE_AFTER_MAX: Duration = Duration::from_secs(5);

/// A client that has worked for so long has not failed in vain, even if the group had no partition for it.
const STANDBY_WORKS: Duration = Duration::from_secs(600);

/// How long a client may take to begin to read a partition, while it is connected. Doubled for each client that took longer
/// since one did not, because the cause may be one that a new client does not mend: the group's coordinator is away, or a
/// transaction that commits the group's offsets is open.
const UNREAD_LIMIT: Duration = Duration::from_secs(60);

/// How often that time is doubled.
const UNREAD_DOUBLED: u32 = 4;

/// How long to wait while another member holds our static id: longer than a session, which is at most 60 s by a
/// broker's default.
const HELD_MAX: Duration = Duration::from_secs(90);

/// How many failed clients may be closing at the same time, which can take forever.
const RETIRED_MAX: usize = 4;

/// How often a wait checks whether the source is closing.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A client and the thread that commits through it.
struct Client {
    consumer: Arc<BaseConsumer<MemberContext>>,
    commits: JoinHandle<()>,
}

/// Joins the group, polls, joins again with another client when one has failed, and leaves. Answers `opened` when the
/// first client has joined, and `left` with the result for `close`.
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
    let terms = Terms {
        limits: FetchLimits::new(settings.unfinished_messages),
        routes: settings.routes,
        keeps_positions: settings.keeps_positions,
        new_protocol: settings::new_protocol(&config),
        unread_limit: UNREAD_LIMIT,
    };
    let mut line = Succession::default();
    let mut client = first;
    loop {
        let joined_at = Instant::now();
        let watch = Watch::new(config.clone());
        let rotation = Rotation::new(settings.clone(), contents);
        let terms = Terms { unread_limit: line.unread_limit(), ..terms };
        let mut poller =
            Poller::new(Arc::clone(&client.consumer), Arc::clone(member), terms, watch, rotation);
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
        line.note_failure(&trouble, !member.assignments.is_empty(), joined_at.elapsed());
        let next =
            line.follow(client, trouble, member).and_then(|()| Client::join(settings, &config, member));
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

/// Ends the source without a replacement client. Other members already own the failed client's partitions.
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
    /// Joins the group, after a check that the brokers answer, the topics exist, and the user may consume them.
    fn check_and_join(
        settings: &Settings,
        config: &ClientConfig,
        member: &Arc<Member>,
    ) -> Result<Self, SourceError> {
        let asking = inquiry::client(config.clone())?;
        settings.check_cluster(&asking)?;
        Self::join(settings, config, member)
    }

    fn join(settings: &Settings, config: &ClientConfig, member: &Arc<Member>) -> Result<Self, SourceError> {
        Self::subscribe(make(config, member)?, settings)
    }

    fn subscribe(consumer: BaseConsumer<MemberContext>, settings: &Settings) -> Result<Self, SourceError> {
        let names: Vec<_> = settings.topics.iter().map(String::as_str).collect();
        consumer
            .subscribe(&names)
            .map_err(|error| SourceError::caused("cannot subscribe to the topics", error))?;
        let consumer = Arc::new(consumer);
        let commits = commit::spawn(Arc::clone(&consumer), settings.commit_interval)
            .map_err(|error| SourceError::caused("cannot start the thread for Kafka commits", error))?;
        Ok(Self { consumer, commits })
    }

    /// Ends the commit thread and drops the consumer. Either may take long or forever, so every wait for this has a
    /// time limit.
    fn dismantle(self) {
        self.consumer.context().desk().stop();
        if self.commits.join().is_err() {
            tracing::error!("the commit thread has panicked");
        }
        drop(self.consumer);
    }
}

fn make(config: &ClientConfig, member: &Arc<Member>) -> Result<BaseConsumer<MemberContext>, SourceError> {
    let debug = config.get("debug") != Some(super::notices::DEBUG_CONTEXT);
    let mut config = config.clone();
    let tokens = Tokens::take(&mut config)?;
    config
        .create_with_context(MemberContext::new(Arc::clone(member), debug, tokens))
        .map_err(settings::unusable)
}

/// The earlier clients of this source.
#[derive(Default)]
struct Succession {
    /// How many clients have failed since one was assigned a partition, or has worked for long without one.
    fruitless: u32,
    /// How many clients in a row have not begun to read a partition in time.
    unread: u32,
    /// Since when another member holds our static id.
    held_since: Option<Instant>,
    /// Threads that close failed clients.
    retired: Vec<JoinHandle<()>>,
}

impl Succession {
    /// How long the next client may take to begin to read a partition.
    fn unread_limit(&self) -> Duration {
        UNREAD_LIMIT * 2_u32.pow(self.unread.min(UNREAD_DOUBLED))
    }

    /// Notes that a client has failed: why, after it had partitions or not, and after how long.
    fn note_failure(&mut self, trouble: &Trouble, had_partitions: bool, worked_for: Duration) {
        // One that has read for long first is not the next in a row.
        let is_next = worked_for < self.unread_limit() * 2;
        self.unread = match trouble.is_unread() {
            true if is_next => self.unread + 1,
            true => 1,
            false => 0,
        };
        if had_partitions {
            self.held_since = None;
        }
        if had_partitions || worked_for >= STANDBY_WORKS {
            self.fruitless = 0;
        }
    }

    /// Retires a failed client and waits until a replacement may join. Returns an error when none should.
    fn follow(&mut self, client: Client, trouble: Trouble, member: &Member) -> Result<(), SourceError> {
        let context = Arc::clone(client.consumer.context());
        // This comes first, so that the old client's threads and callbacks have no effect from here on.
        context.retire();
        member.dropped();
        member.connection.begin_anew();
        self.retire(client)?;
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
                member.observer.observe(Event::MemberReplaced { cause: "login" });
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

    /// Closes a client on a thread of its own, because closing may hang. The number of such threads is limited.
    fn retire(&mut self, client: Client) -> Result<(), SourceError> {
        self.retired.retain(|thread| !thread.is_finished());
        if self.retired.len() >= RETIRED_MAX {
            return Err(SourceError::new(format!(
                "{RETIRED_MAX} failed Kafka clients have not closed; restart the process"
            )));
        }
        let thread = std::thread::Builder::new().name("oncegate-retired".to_owned());
        let thread = thread.spawn(move || client.dismantle());
        self.retired.push(thread.map_err(|error| {
            SourceError::caused("cannot start the thread that closes a failed client", error)
        })?);
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
            return Err(SourceError::new("the source was closed while it rejoined the group"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Ends the buffer when the poll thread ends.
struct EndOnDrop<'a>(&'a Member);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.buffer.end(End::Failed("the Kafka poll thread has ended".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::KafkaSource;
    use super::*;
    use oncegate_runtime::observe::Counters;

    const DROPPED: Trouble = Trouble::Dropped { cause: "dropped", why: String::new() };

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
        assert_eq!(line.fruitless, 1, "a client that fails at once has failed in vain");
        line.note_failure(&DROPPED, true, Duration::from_secs(1));
        assert_eq!(line.fruitless, 0);
    }

    // invariant: stall-unreported
    #[test]
    fn clients_that_do_not_begin_to_read_one_after_the_other_get_longer_and_longer() {
        let mut line = Succession::default();
        let mut limits = Vec::new();
        for _ in 0..6 {
            limits.push(line.unread_limit().as_secs() / UNREAD_LIMIT.as_secs());
            let trouble = Trouble::unread(line.unread_limit());
            line.note_failure(&trouble, true, line.unread_limit());
        }
        assert_eq!(limits, [1, 2, 4, 8, 16, 16]);
        line.note_failure(&Trouble::unread(UNREAD_LIMIT), true, Duration::from_secs(86_400));
        assert_eq!(line.unread_limit(), UNREAD_LIMIT * 2, "it had read before");
        line.note_failure(&DROPPED, true, UNREAD_LIMIT);
        assert_eq!(line.unread_limit(), UNREAD_LIMIT);
    }

    // invariant: consumption-without-commits
    #[test]
    fn a_commit_thread_that_has_ended_ends_the_source() {
        let source = KafkaSource::new("127.0.0.1:1", "group", ["orders"]);
        let (config, contents) = source.settings.config().unwrap();
        let member = source.settings.member(Arc::default(), Arc::new(Counters::default()), None).unwrap();
        let member = Arc::new(member);
        let consumer = Arc::new(make(&config, &member).unwrap());
        // What the thread does when it panics.
        consumer.context().desk().stop();
        let terms = Terms {
            limits: FetchLimits::new(1),
            keeps_positions: false,
            routes: source.settings.routes,
            new_protocol: false,
            unread_limit: UNREAD_LIMIT,
        };
        let rotation = Rotation::new(source.settings.clone(), contents);
        let mut poller = Poller::new(consumer, Arc::clone(&member), terms, Watch::new(config), rotation);
        let trouble = poller.run();
        assert!(matches!(&trouble, Some(Trouble::Hopeless(why)) if why.contains("commits")), "{trouble:?}");
    }
}
