//! The life of the poll thread: one client after the other, as long as the source is open.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use tokio::sync::oneshot;

use super::buffer::End;
use super::connection::Watch;
use super::member::{Context, Member};
use super::poll::{Poller, Terms};
use super::settings;
use super::source::Settings;
use super::trouble::Trouble;
use super::{commit, topics};
use crate::observe::Event;
use crate::source::SourceError;

/// How many clients may die one after the other without being given a partition.
const FRUITLESS_MAX: u32 = 10;

/// How long to wait before the first client in another's place, doubled with every fruitless one.
const REPLACE_AFTER: Duration = Duration::from_millis(100);

/// The longest such wait.
const REPLACE_AFTER_MAX: Duration = Duration::from_secs(5);

/// How long a static id may be held by a member that is not gone: longer than a session lasts, 60 s at the most
/// by a broker's default.
const HELD_MAX: Duration = Duration::from_secs(90);

/// How many dead clients may be busy with their own end, which can take for ever.
const RETIRED_MAX: usize = 4;

/// How often somebody who waits looks whether we are leaving.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A client that polls, and the thread that commits through it.
struct Client {
    consumer: Arc<BaseConsumer<Context>>,
    commits: JoinHandle<()>,
}

/// Joins the group, polls, joins again with another client when one has died, and leaves. Answers `opened`
/// when the first client has joined, and `left` with what `close` should hear.
pub(crate) fn run(
    settings: &Settings,
    config: &ClientConfig,
    member: &Arc<Member>,
    opened: oneshot::Sender<Result<(), SourceError>>,
    left: oneshot::Sender<Result<(), String>>,
) {
    // Whoever receives must not wait for a thread that has panicked.
    let _end = EndOnDrop(member);
    let first = match Client::check_and_join(settings, config, member) {
        Ok(first) => first,
        Err(error) => return drop(opened.send(Err(error))),
    };
    if opened.send(Ok(())).is_err() {
        member.leave(Instant::now());
    }
    let terms = Terms {
        span_max: settings.unfinished_messages,
        routes: settings.routes,
        start: settings.start,
        new_protocol: settings::new_protocol(config),
    };
    let mut line = Succession::default();
    let mut client = first;
    loop {
        let watch = Watch::new(config.clone());
        let mut poller = Poller::new(Arc::clone(&client.consumer), Arc::clone(member), terms, watch);
        let trouble = match poller.run() {
            Some(Trouble::Hopeless(why)) => {
                tracing::error!(why, "the Kafka consumer cannot go on");
                member.buffer.end(End::Failed(why));
                // What has started may still end and be committed.
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
        drop(poller);
        let next = line.follow(client, trouble, member).and_then(|()| Client::join(settings, config, member));
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

/// Nobody takes the dead client's place: everything that it had is others' already.
fn give_up(member: &Member, error: &SourceError) -> Result<(), String> {
    if member.leaving().is_some() {
        return Err("the client died before the last commit".to_owned());
    }
    let why = error.to_string();
    tracing::error!(why, "the Kafka consumer cannot go on");
    member.buffer.end(End::Failed(why));
    Ok(())
}

impl Client {
    /// Joins, after a look whether the brokers answer and the topics exist.
    fn check_and_join(
        settings: &Settings,
        config: &ClientConfig,
        member: &Arc<Member>,
    ) -> Result<Self, SourceError> {
        let consumer = make(config, member)?;
        topics::check(&consumer, &settings.brokers, &settings.topics, settings.open_timeout)?;
        Self::subscribe(consumer, settings)
    }

    fn join(settings: &Settings, config: &ClientConfig, member: &Arc<Member>) -> Result<Self, SourceError> {
        Self::subscribe(make(config, member)?, settings)
    }

    fn subscribe(consumer: BaseConsumer<Context>, settings: &Settings) -> Result<Self, SourceError> {
        let names: Vec<_> = settings.topics.iter().map(String::as_str).collect();
        consumer
            .subscribe(&names)
            .map_err(|error| SourceError::caused("cannot subscribe to the topics", error))?;
        let consumer = Arc::new(consumer);
        let commits = commit::spawn(Arc::clone(&consumer), settings.commit_interval)
            .map_err(|error| SourceError::caused("no thread for Kafka commits", error))?;
        Ok(Self { consumer, commits })
    }

    /// Ends the commit thread and drops the consumer. Either may take long, or for ever: nobody waits for it
    /// without a bound.
    fn dismantle(self) {
        self.consumer.context().desk().stop();
        if self.commits.join().is_err() {
            tracing::error!("the commit thread has panicked");
        }
        drop(self.consumer);
    }
}

fn make(config: &ClientConfig, member: &Arc<Member>) -> Result<BaseConsumer<Context>, SourceError> {
    let debug = config.get("debug") != Some(super::notices::DEBUG_CONTEXT);
    config.create_with_context(Context::new(Arc::clone(member), debug)).map_err(settings::unusable)
}

/// The clients that came before.
#[derive(Default)]
struct Succession {
    /// How many died since one was given a partition.
    fruitless: u32,
    /// Since when our static id is held by another member.
    held_since: Option<Instant>,
    /// Threads in which dead clients end.
    retired: Vec<JoinHandle<()>>,
}

impl Succession {
    /// Sends a dead client away and waits until another one may try. An error when none should.
    fn follow(&mut self, client: Client, trouble: Trouble, member: &Member) -> Result<(), SourceError> {
        let context = Arc::clone(client.consumer.context());
        if !member.assignments.is_empty() {
            (self.fruitless, self.held_since) = (0, None);
        }
        // In this order: what the old client's threads and callbacks still do concerns nobody from here on.
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
            Trouble::Dropped { .. } if self.fruitless >= FRUITLESS_MAX => {
                return Err(SourceError::new(format!(
                    "{FRUITLESS_MAX} Kafka clients one after the other have failed for good: {trouble:?}"
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
            "this client is no member of the group any more; another one takes its place"
        );
        member.observer.observe(Event::MemberReplaced { cause });
        let doubled = REPLACE_AFTER.saturating_mul(1 << self.fruitless.min(10));
        wait(member, doubled.min(REPLACE_AFTER_MAX))
    }

    /// The end of a client may hang, so it has a thread, and there is a limit on how many hang.
    fn retire(&mut self, client: Client) -> Result<(), SourceError> {
        self.retired.retain(|thread| !thread.is_finished());
        if self.retired.len() >= RETIRED_MAX {
            return Err(SourceError::new(format!(
                "{RETIRED_MAX} Kafka clients that have died do not end; the process should be restarted"
            )));
        }
        let thread = std::thread::Builder::new().name("oncegate-retired".to_owned());
        let thread = thread.spawn(move || client.dismantle());
        self.retired.push(thread.map_err(|error| SourceError::caused("no thread for a dead client", error))?);
        Ok(())
    }

    /// Waits for the dead clients. Whoever closes the source waits for this no longer than he wants.
    fn end(self) {
        for thread in self.retired {
            if thread.join().is_err() {
                tracing::error!("the end of a Kafka client has panicked");
            }
        }
    }
}

/// Waits, but not when we are leaving.
fn wait(member: &Member, pause: Duration) -> Result<(), SourceError> {
    let until = Instant::now() + pause;
    while Instant::now() < until {
        if member.leaving().is_some() {
            return Err(SourceError::new("the source was closed while it joined again"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Ends the buffer of a poll thread that is no more.
struct EndOnDrop<'a>(&'a Member);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.buffer.end(End::Failed("the Kafka poll thread has ended".to_owned()));
    }
}
