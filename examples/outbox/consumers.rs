//! The two consumers: what you would write yourself. One ships orders, the other receives their
//! notices.

use std::str::FromStr as _;

use clap::Args;
use deadpool_postgres::{Manager, Pool};
use oncegate::kafka::KafkaSource;
use oncegate::outbox::{ID_HEADER, OutboxMessage};
use oncegate::postgres::{PostgresOutbox, PostgresStore};
use oncegate::{Attempt, BoxError, Consumer, Failure, Gate, Handler, Key, Message, OrPermanent};
use oncegate_examples::crew::{start_logging, until_told_to_stop};
use serde::{Deserialize, Serialize};
use tokio_postgres::NoTls;
use tokio_util::sync::CancellationToken;

const CONCURRENCY: u32 = 16;

#[derive(Debug, Args)]
pub(crate) struct Consumers {
    #[arg(long)]
    bootstrap: String,
    #[arg(long)]
    postgres: String,
    #[arg(long)]
    run: String,
}

#[derive(Debug, Deserialize)]
struct Order {
    order_id: String,
    customer: String,
}

/// The message that is published.
#[derive(Debug, Serialize, Deserialize)]
struct Shipped {
    order_id: String,
    customer: String,
    sequence: i64,
}

/// Ships an order, and writes its notice into the outbox.
struct Shipping {
    pool: Pool,
    outbox: PostgresOutbox,
    run: String,
}

impl Handler for Shipping {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let Order { order_id, customer } = message.json()?;
        let mut client = self.pool.get().await?;
        let mut transaction = client.transaction().await?;
        let ship = "INSERT INTO shipments (run, order_id) VALUES ($1, $2) RETURNING sequence";
        let sequence = transaction
            .query_one(ship, &[&self.run, &order_id])
            .await?
            .get(0);
        let payload = serde_json::to_vec(&Shipped {
            order_id,
            customer: customer.clone(),
            sequence,
        })?;
        let notice = OutboxMessage::new(format!("{}-shipments", self.run), payload).key(customer);
        self.outbox.publish(&mut transaction, notice).await?;
        attempt.commit_with(transaction, &()).await
    }
}

/// Receives the notice of a shipment. It depends on nothing of the outbox but the header's name.
struct Notices {
    pool: Pool,
    run: String,
}

impl Handler for Notices {
    type Output = ();

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<(), Failure> {
        let shipped: Shipped = message.json()?;
        // The broker's key orders messages; here it must be the customer's.
        (message.key() == Some(shipped.customer.as_bytes()))
            .then_some(())
            .or_permanent()?;
        let mut client = self.pool.get().await?;
        let transaction = client.transaction().await?;
        let insert =
            "INSERT INTO notices (run, order_id, customer, sequence) VALUES ($1, $2, $3, $4)";
        let notice: [&(dyn tokio_postgres::types::ToSql + Sync); 4] = [
            &self.run,
            &shipped.order_id,
            &shipped.customer,
            &shipped.sequence,
        ];
        transaction.execute(insert, &notice).await?;
        attempt.commit_with(transaction, &()).await
    }
}

impl Consumers {
    #[tokio::main]
    pub(crate) async fn run(self) -> Result<(), BoxError> {
        start_logging();
        let config = tokio_postgres::Config::from_str(&self.postgres)?;
        let pool = Pool::builder(Manager::new(config, NoTls))
            .max_size(2 * CONCURRENCY as usize)
            .build()?;
        let store = PostgresStore::connect(&self.postgres).await?;
        let gate = |name: &str, key| {
            Gate::new(format!("{}-{name}", self.run), key, store.clone()).transactional()
        };
        let stop = CancellationToken::new();

        let orders = gate("shipping", Key::json(["order_id"]));
        let outbox = store.outbox(&self.run)?;
        let shipping = Shipping {
            pool: pool.clone(),
            outbox,
            run: self.run.clone(),
        };
        let source = self.source("orders", "orders");
        let shipping = Consumer::new(source, orders, shipping).concurrency(CONCURRENCY);

        // The id is the same however often the relay has published it.
        let shipments = gate("notices", Key::header(ID_HEADER));
        let notices = Notices {
            pool,
            run: self.run.clone(),
        };
        let source = self.source("notices", "shipments");
        let notices = Consumer::new(source, shipments, notices).concurrency(CONCURRENCY);

        let told = async {
            until_told_to_stop().await;
            stop.cancel();
            Ok(())
        };
        let shipping = shipping.run_until(stop.clone().cancelled_owned());
        let notices = notices.run_until(stop.clone().cancelled_owned());
        tokio::try_join!(shipping, notices, told)?;
        Ok(())
    }

    fn source(&self, group: &str, topic: &str) -> KafkaSource {
        let group = format!("{}-{group}", self.run);
        KafkaSource::new(&self.bootstrap, group, [format!("{}-{topic}", self.run)])
    }
}
