//! A worker process for the tests that kill or stop it: charges payments from a topic or a queue,
//! and writes each charge into a ledger. It ends at a SIGTERM, and at once at a second one.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use oncegate::amqp::AmqpSource;
use oncegate::core::store::Store;
use oncegate::dead_letters::millis_since_1970;
use oncegate::kafka::{KafkaDeadLetters, KafkaSource};
use oncegate::redis::RedisStore;
use oncegate::source::Source;
use oncegate::sqs::SqsSource;
use oncegate::{
    Attempt, BoxError, Consumer, Failure, Gate, Handler, Key, Message, shutdown_signal,
};
use oncegate_testkit::Ledger;

/// How long a charge takes before and after its effect: a kill at random hits either side.
const BEFORE_THE_EFFECT: Duration = Duration::from_millis(4);
const AFTER_THE_EFFECT: Duration = Duration::from_millis(2);
/// A worker that stands still for longer is taken for dead; on a machine that others use, each may
/// for a second.
const LEASE: Duration = Duration::from_secs(2);
const SLOW: Duration = Duration::from_millis(300);
/// When a payment that is not due wants to be asked again.
const ASKED_AGAIN: Duration = Duration::from_secs(7);
/// So long that a test which waits for it has failed.
const STOP_DEADLINE: Duration = Duration::from_secs(600);
/// A crash costs an attempt.
const MAX_ATTEMPTS: u32 = 5;

struct Charge {
    ledger: Ledger,
}

#[derive(serde::Deserialize)]
struct Payment {
    order: String,
    #[serde(default)]
    how: How,
    /// In milliseconds since 1970: a payment of `later` is not charged before.
    #[serde(default)]
    due_ms: u64,
}

/// How a payment is charged. Those that are not usual write the beginning of each run into the
/// ledger as well.
#[derive(Clone, Copy, Default, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum How {
    #[default]
    Usual,
    /// It takes its time.
    Slow,
    /// Its first attempt does not return.
    Hold,
    /// Each attempt ends the process.
    Abort,
    /// It wants to be asked again until it is due.
    Later,
}

impl Handler for Charge {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let payment: Payment = message.json()?;
        if !matches!(payment.how, How::Usual | How::Later) {
            self.ledger
                .append(&format!("start {} {}", payment.order, attempt.number()));
        }
        match payment.how {
            How::Usual => tokio::time::sleep(BEFORE_THE_EFFECT).await,
            How::Slow => tokio::time::sleep(SLOW).await,
            How::Hold if !attempt.recovered() => std::future::pending().await,
            How::Hold => {}
            How::Abort => std::process::abort(),
            How::Later if millis_since_1970(SystemTime::now()) < payment.due_ms => {
                return Err(Failure::later(ASKED_AGAIN, "it is not due"));
            }
            How::Later => {}
        }
        self.ledger.append(&payment.order);
        tokio::time::sleep(AFTER_THE_EFFECT).await;
        Ok(payment.order)
    }
}

/// How long a queue hides a message after its worker was killed.
const VISIBILITY: Duration = Duration::from_secs(4);
/// How long a receive waits, and so at the most how long messages that come back stay unseen.
const WAIT: Duration = Duration::from_secs(1);

/// How many messages wait in a worker of RabbitMQ.
const PREFETCH: u16 = 16;

/// Arguments: the store, the scope, the ledger's path, and `kafka` with brokers, topic, group and
/// optionally the dead-letter topic, `sqs` with the queue's URL, or `amqp` with the broker's URI,
/// the queue and optionally `in-order`.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [store, scope, ledger, from @ ..] = arguments.as_slice() else {
        return Err("worker STORE SCOPE LEDGER …".into());
    };
    let source: Arc<dyn Source> = match *from {
        ["kafka", brokers, topic, group, ..] => Arc::new(
            KafkaSource::new(brokers, group, [topic])
                .property("session.timeout.ms", "1500")
                .property("heartbeat.interval.ms", "300"),
        ),
        ["sqs", queue] => Arc::new(SqsSource::new(queue).visibility(VISIBILITY).wait(WAIT)),
        ["amqp", uri, queue, "in-order"] => {
            Arc::new(AmqpSource::new(uri, queue).prefetch(PREFETCH).in_order())
        }
        ["amqp", uri, queue] => Arc::new(AmqpSource::new(uri, queue).prefetch(PREFETCH)),
        _ => {
            return Err(
                "worker … kafka BROKERS TOPIC GROUP, … sqs QUEUE-URL, or … amqp URI QUEUE [in-order]".into(),
            );
        }
    };
    let store: Arc<dyn Store> = Arc::new(RedisStore::connect(store).await?);
    let gate = Gate::new(*scope, Key::json(["order"]), store).lease(LEASE);
    let handler = Charge {
        ledger: Ledger::open(*ledger),
    };
    let mut consumer = Consumer::new(source, gate, handler)
        .concurrency(8)
        .max_attempts(MAX_ATTEMPTS)
        .stop_deadline(STOP_DEADLINE)
        .stop_at_once_on(shutdown_signal());
    if let ["kafka", brokers, _, _, dead] = *from {
        consumer = consumer.dead_letters(KafkaDeadLetters::new(brokers, dead));
    }
    consumer.run_until(shutdown_signal()).await?;
    Ok(())
}
