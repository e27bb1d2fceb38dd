//! A worker process: pays orders, writes each payment into a ledger, and writes down all that it
//! does.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::consumer::DeadLetterLimit;
use oncegate::core::key::{CompiledKey, Scope};
use oncegate::core::store::Store;
use oncegate::dynamodb::DynamoDbStore;
use oncegate::kafka::KafkaSource;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::source::Source;
use oncegate::sqlite::SqliteStore;
use oncegate::{
    Attempt, Backoff, BoxError, Consumer, Failure, FingerprintSpec, Gate, Handler, Key, Message,
    OnStoreLoss, Ordering,
};
use oncegate_testing::promise::{
    EffectName, History, Occurrence, Point, PointHook, RecordedDeadLetters, RecordedObserver,
    RecordedSource, RecordedStore, SUCCEEDED,
};
use serde::Deserialize;

use super::points::Traps;
use super::settings::{Protocol, StoreKind, WorkerSettings};
use super::sink::Sink;
use crate::ledger::Ledger;

/// How long a claim protects its owner.
pub(super) const LEASE: Duration = Duration::from_millis(1_200);
/// After how long without a heartbeat the broker gives a worker's partitions away.
pub const SESSION: Duration = Duration::from_millis(2_000);
/// Kills use up attempts, and none of them may end as a dead letter.
pub(super) const MAX_ATTEMPTS: u32 = 60;
/// How many attempts fail of an order that never succeeds, before its handler gives it up.
pub(super) const FAILS_FOR: u32 = 3;
/// After so many orders their fates repeat.
pub(super) const ORDERS_OF_EVERY_FATE: u64 = 40;
/// One of them that is paid at once, and the one that takes several leases.
pub(super) const PAYS_AT_ONCE: u64 = 0;
pub(super) const TAKES_LONG: u64 = 31;
/// The time that an order takes that computes: longer than what is called one after another may.
const COMPUTES_FOR: Duration = Duration::from_millis(20);
const RETENTION: Duration = Duration::from_secs(86_400);
const CONCURRENCY: u32 = 8;
/// How long a store may be away while a worker starts.
const OPEN_AGAIN_AFTER: Duration = Duration::from_millis(200);

#[derive(Deserialize)]
pub(super) struct Order {
    pub(super) order: u64,
    pub(super) amount: u64,
}

/// What happens to an order in its handler, by its number.
pub(super) enum Fate {
    Pays,
    /// Without waiting for anything, as most that run beside it.
    PaysWithoutAWait,
    Computes,
    FailsOnce,
    PanicsOnce,
    GivesUp,
    FailsAlways,
    BlocksItsThread,
    TakesLong,
}

impl Fate {
    pub(super) fn of(order: u64) -> Self {
        match order % ORDERS_OF_EVERY_FATE {
            3 | 23 => Self::FailsOnce,
            7 => Self::PanicsOnce,
            11 => Self::GivesUp,
            17 => Self::FailsAlways,
            29 => Self::BlocksItsThread,
            5 | 13 | 21 => Self::Computes,
            even if even % 4 == 2 => Self::PaysWithoutAWait,
            TAKES_LONG => Self::TakesLong,
            _ => Self::Pays,
        }
    }
}

const PLANNED_PANIC: &str = "it panics once, as it should";

struct Pay {
    key: CompiledKey,
    ledger: Ledger,
    sinks: Vec<Sink>,
    history: Arc<History>,
    traps: Arc<Traps>,
}

impl Pay {
    fn key(&self, message: &Message) -> Option<String> {
        self.key
            .derive(message.route(), message)
            .ok()
            .map(|key| key.as_str().to_owned())
    }
}

impl Handler for Pay {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let order: Order = message.json()?;
        let key = self.key(message).unwrap_or_default();
        let origin = message.origin().to_string();
        let number = attempt.number();
        let content = order.amount.to_string();
        let fencing_token = attempt.fencing_token();
        let begun = Occurrence::Begun {
            key: key.clone(),
            origin: origin.clone(),
            attempt: number,
            fencing_token,
            content,
        };
        self.history.note(begun);
        let ended = Ended {
            history: &self.history,
            key,
            origin,
            attempt: number,
            outcome: "dropped",
        };
        let paid = self.pay(&order, attempt).await;
        let outcome = match &paid {
            Ok(_) => SUCCEEDED,
            Err(failure) if failure.is_permanent() => "gave_up",
            Err(_) => "failed",
        };
        ended.with(outcome);
        paid
    }

    async fn duplicate(&self, message: &Message, result: String) -> Result<(), Failure> {
        let order: Order = message.json()?;
        self.history.note(Occurrence::Duplicate {
            key: self.key(message).unwrap_or_default(),
            origin: message.origin().to_string(),
            content: order.amount.to_string(),
            of: named(&result)?,
            result,
        });
        Ok(())
    }
}

impl Pay {
    async fn pay(&self, order: &Order, attempt: &Attempt) -> Result<String, Failure> {
        let number = attempt.number();
        let before = match Fate::of(order.order) {
            Fate::FailsOnce if number == 1 => return Err(Failure::retry("it fails once")),
            Fate::PanicsOnce if number == 1 => panic!("{PLANNED_PANIC}"),
            Fate::GivesUp => return Err(Failure::permanent("this cannot be paid")),
            Fate::FailsAlways if number > FAILS_FOR => {
                return Err(Failure::permanent("it fails always"));
            }
            Fate::FailsAlways => return Err(Failure::retry("it fails always")),
            Fate::BlocksItsThread if number == 1 => {
                std::thread::sleep(LEASE * 3 / 2);
                Duration::ZERO
            }
            Fate::TakesLong if number == 1 => LEASE * 5 / 2,
            Fate::PaysWithoutAWait => return Ok(self.write(order, attempt)),
            Fate::Computes => {
                let begun = Instant::now();
                while begun.elapsed() < COMPUTES_FOR {
                    std::hint::spin_loop();
                }
                return Ok(self.write(order, attempt));
            }
            _ => Duration::from_millis(2),
        };
        // What takes time is never the proof that time has passed: it only makes room for a kill.
        tokio::time::sleep(before).await;
        let paid = self.write(order, attempt);
        tokio::time::sleep(Duration::from_millis(2)).await;
        Ok(paid)
    }

    /// Pays. Returns the result.
    fn write(&self, order: &Order, attempt: &Attempt) -> String {
        self.traps.pass(Point::EffectBefore);
        let payment = format!("{}/{}", order.order, order.amount);
        self.ledger.append(&payment);
        for sink in &self.sinks {
            sink.pay(&payment, attempt.fencing_token());
        }
        self.traps.pass(Point::EffectAfter);
        format!(
            "{payment} by {} at attempt {}",
            std::process::id(),
            attempt.number()
        )
    }
}

/// The effect that a result is of: `12/1 by 4711 at attempt 1`.
fn named(result: &str) -> Result<EffectName, Failure> {
    let payment = result
        .split(' ')
        .next()
        .and_then(|payment| payment.split_once('/'));
    let (order, amount) =
        payment.ok_or_else(|| Failure::retry("a result that names no payment"))?;
    Ok(EffectName::new(order, amount))
}

/// Writes down how a handler ended, also when its future is dropped or it panics.
struct Ended<'a> {
    history: &'a History,
    key: String,
    origin: String,
    attempt: u32,
    outcome: &'static str,
}

impl Ended<'_> {
    fn with(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.history.note(Occurrence::Ended {
            key: self.key.clone(),
            origin: self.origin.clone(),
            attempt: self.attempt,
            outcome: self.outcome.to_owned(),
        });
    }
}

/// Silences planned panics, so that the log shows only unplanned ones.
fn hush_planned_panics() {
    let speak = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic
            .payload()
            .downcast_ref::<String>()
            .is_none_or(|said| said != PLANNED_PANIC)
        {
            speak(panic);
        }
    }));
}

/// A worker, until it is asked to stop by SIGTERM.
///
/// # Errors
/// When its consumer cannot go on.
pub async fn work(settings: WorkerSettings) -> Result<(), BoxError> {
    hush_planned_panics();
    let history = Arc::new(History::open(&settings.history)?);
    let traps = Arc::new(Traps::of_environment());
    let hook = || Arc::clone(&traps) as Arc<dyn PointHook>;
    let key = Key::json(["order"]);
    let compiled = key.compile(&Scope::new(&settings.scope)?)?;
    let store = opened(settings.store, &settings.address).await;
    let store = RecordedStore::new(store, Arc::clone(&history)).at_points(hook());
    let gate = Gate::new(settings.scope.as_str(), key, store)
        .lease(LEASE)
        .retention(RETENTION)
        // A loss is one of the faults, and it is counted.
        .on_store_loss(OnStoreLoss::Continue)
        .fenced()
        .fingerprint(FingerprintSpec::payload().except(["n"]));
    let source = source(&settings);
    let letters = source.dead_letters(settings.dead_topic.as_str());
    let letters = RecordedDeadLetters::new(letters, Arc::clone(&history));
    let source: Arc<dyn Source> = match &settings.retries {
        None => Arc::new(source),
        Some((wait, topic)) => {
            Arc::new(source.retry_topics([(*wait, topic)]).beyond(Duration::ZERO))
        }
    };
    let source =
        RecordedSource::new(source, compiled.clone(), Arc::clone(&history)).at_points(hook());
    let handler = Pay {
        key: compiled,
        ledger: Ledger::open(&settings.ledger),
        sinks: settings.sinks.iter().map(Sink::open).collect(),
        history: Arc::clone(&history),
        traps: Arc::clone(&traps),
    };
    let observer = Arc::new(RecordedObserver::new(history).at_points(hook()));
    Consumer::new(source, gate, handler)
        .concurrency(CONCURRENCY)
        .ordering(Ordering::Key)
        .overtaking_retries()
        .max_attempts(MAX_ATTEMPTS)
        .backoff(Backoff::new(
            Duration::from_millis(5),
            Duration::from_millis(100),
        ))
        .dead_letter_limit(DeadLetterLimit {
            in_a_row: 1_000_000,
            share: 1.1,
        })
        .dead_letters(letters)
        .observer(Arc::clone(&observer) as _)
        .run_until(oncegate::shutdown_signal())
        .await?;
    observer.note_counts();
    Ok(())
}

fn source(settings: &WorkerSettings) -> KafkaSource {
    let topics = [settings.topic.as_str()];
    let source = KafkaSource::new(settings.brokers.as_str(), settings.group.as_str(), topics);
    let source = match settings.protocol {
        Protocol::Classic => source
            .property("session.timeout.ms", SESSION.as_millis().to_string())
            .property("heartbeat.interval.ms", "300"),
        Protocol::New => source.property("group.protocol", "consumer"),
    };
    match settings.poll_interval {
        None => source,
        Some(interval) => source
            .property("max.poll.interval.ms", interval.as_millis().to_string())
            .drain_timeout(interval / 4),
    }
}

/// The store, as soon as it can be reached.
async fn opened(kind: StoreKind, address: &str) -> Arc<dyn Store> {
    loop {
        let opened: Result<Arc<dyn Store>, _> = match kind {
            StoreKind::Redis => {
                let store = RedisStore::connect(address);
                store.await.map(|store| Arc::new(store) as _)
            }
            StoreKind::Sqlite => SqliteStore::open(address)
                .await
                .map(|store| Arc::new(store) as _),
            StoreKind::DynamoDb => DynamoDbStore::connect(address)
                .await
                .map(|store| Arc::new(store) as _),
            StoreKind::Postgres => PostgresStore::connect(address)
                .await
                .map(|store| Arc::new(store) as _),
        };
        match opened {
            Ok(store) => return store,
            Err(error) => eprintln!("the store does not open: {error}"),
        }
        tokio::time::sleep(OPEN_AGAIN_AFTER).await;
    }
}
