//! A worker process for the tests that kill it: charges payments from a topic, and writes each charge into a ledger.

use std::sync::Arc;
use std::time::Duration;

use oncegate::core::store::Store;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{BoxError, Consumer, Failure, Gate, Handler, Key, Message};
use oncegate_tests::Ledger;

/// How long a charge takes before and after its effect: a kill at random hits either side.
const BEFORE_THE_EFFECT: Duration = Duration::from_millis(4);
const AFTER_THE_EFFECT: Duration = Duration::from_millis(2);
const LEASE: Duration = Duration::from_millis(900);

struct Charge {
    ledger: Ledger,
}

#[derive(serde::Deserialize)]
struct Payment {
    order: String,
}

impl Handler for Charge {
    type Output = String;

    async fn handle(&self, message: Message) -> Result<String, Failure> {
        let payment: Payment = message.json()?;
        tokio::time::sleep(BEFORE_THE_EFFECT).await;
        self.ledger.append(&payment.order);
        tokio::time::sleep(AFTER_THE_EFFECT).await;
        Ok(payment.order)
    }
}

/// Arguments: the brokers, the topic, the group, the store, the scope, the ledger's path.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [brokers, topic, group, store, scope, ledger] = arguments.as_slice() else {
        return Err("worker BROKERS TOPIC GROUP STORE SCOPE LEDGER".into());
    };
    let store: Arc<dyn Store> = Arc::new(RedisStore::connect(store).await?);
    let gate = Gate::new(scope, Key::json(["order"]), store).lease(LEASE);
    let source = KafkaSource::new(brokers, group, [topic])
        .property("session.timeout.ms", "1500")
        .property("heartbeat.interval.ms", "300");
    let handler = Charge { ledger: Ledger::open(ledger) };
    // Ends with its parent; nobody asks it to stop.
    Consumer::new(source, gate, handler).concurrency(8).run_until(std::future::pending()).await?;
    Ok(())
}
