//! A queue full of payments, on a server that runs or on one that is started.

use std::collections::BTreeSet;

use fastrand::Rng;
use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_examples::broker::Produced;
use oncegate_tests::{ElasticmqServer, Sqs};
use tokio::runtime::Runtime;

/// How many messages are sent before the bar moves.
const CHUNK: usize = 500;

pub(crate) struct Queue {
    runtime: Runtime,
    sqs: Sqs,
    queue: oncegate_tests::Queue,
    /// The server lives as long as this.
    _server: Option<ElasticmqServer>,
}

impl Queue {
    pub(crate) fn create(endpoint: Option<&str>, run: &str) -> Result<Self, BoxError> {
        let runtime = Runtime::new()?;
        if endpoint.is_none() && !ElasticmqServer::is_fetched() {
            return Err("there is no SQS server: `scripts/fetch-servers` fetches ElasticMQ, and \
                        `docker compose up -d --wait sqs` starts one for `--endpoint http://127.0.0.1:9324`"
                .into());
        }
        let (sqs, server) = match endpoint {
            Some(endpoint) => (Sqs::at(endpoint), None),
            None => {
                let server = runtime.block_on(ElasticmqServer::start());
                (Sqs::clone(&server), Some(server))
            }
        };
        let queue = runtime.block_on(sqs.new_queue(run));
        Ok(Self { runtime, sqs, queue, _server: server })
    }

    pub(crate) fn endpoint(&self) -> &str {
        self.sqs.endpoint()
    }

    pub(crate) fn url(&self) -> &str {
        self.queue.url()
    }

    pub(crate) fn send(&self, payments: &[String], bar: &ProgressBar) {
        for chunk in payments.chunks(CHUNK) {
            self.runtime.block_on(self.queue.send(chunk.to_vec()));
            bar.inc(chunk.len() as u64);
        }
    }

    /// Whether everything is deleted. What a worker holds counts as there.
    pub(crate) fn is_empty(&self) -> bool {
        self.runtime.block_on(self.queue.depth()).total() == 0
    }
}

/// Payments, about a third of them again: with another message id and time, another order of the fields, and `10`
/// spelt `10.0`. The same seed makes the same ones.
pub(crate) fn payments(messages: u32, seed: u64) -> (Vec<String>, Produced) {
    let mut rng = Rng::with_seed(seed);
    let mut orders: Vec<(String, u32)> = Vec::new();
    let mut payload = |n: u32| {
        let again = if rng.u32(..3) == 0 { rng.choice(&orders) } else { None };
        if let Some((order, amount)) = again {
            return format!(
                r#"{{"sent_at":{n},"amount":{amount}.0,"message_id":"m-{n}","order_id":"{order}"}}"#
            );
        }
        let (order, amount) = (format!("order-{}", orders.len()), rng.u32(1..1_000));
        orders.push((order.clone(), amount));
        format!(r#"{{"message_id":"m-{n}","order_id":"{order}","amount":{amount},"sent_at":{n}}}"#)
    };
    let payloads = (0..messages).map(&mut payload).collect();
    let orders: BTreeSet<String> = orders.into_iter().map(|(order, _)| order).collect();
    (payloads, Produced { messages: messages.into(), payments: orders.len() as u64, orders })
}
