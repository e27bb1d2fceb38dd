//! A queue full of payments, on a server that runs or on one that is started.

use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_testkit::{QueueKind, RabbitMq, RabbitMqServer, RabbitQueue};
use tokio::runtime::Runtime;

/// How many messages are sent before the bar moves.
const CHUNK: usize = 500;

pub(crate) struct Queue {
    runtime: Runtime,
    broker: RabbitMq,
    uri: String,
    queue: RabbitQueue,
    /// The server stops when this is dropped.
    _server: Option<RabbitMqServer>,
}

impl Queue {
    pub(crate) fn create(broker: Option<&str>, run: &str) -> Result<Self, BoxError> {
        let runtime = Runtime::new()?;
        if broker.is_none() && !RabbitMqServer::is_installed() {
            return Err("there is no RabbitMQ: `scripts/fetch-servers` installs one, and `--broker` takes one that runs".into());
        }
        let (broker, server) = match broker {
            Some(addresses) => (runtime.block_on(RabbitMq::at(addresses)), None),
            None => {
                let server = runtime.block_on(RabbitMqServer::start());
                (RabbitMq::clone(&server), Some(server))
            }
        };
        let queue = runtime.block_on(broker.new_queue(run, QueueKind::Quorum));
        let uri = broker.uri();
        Ok(Self { runtime, broker, uri, queue, _server: server })
    }

    pub(crate) fn uri(&self) -> &str {
        &self.uri
    }

    pub(crate) fn name(&self) -> &str {
        self.queue.name()
    }

    pub(crate) fn send(&self, payments: &[String], bar: &ProgressBar) {
        for chunk in payments.chunks(CHUNK) {
            self.runtime.block_on(self.queue.send(chunk.to_vec()));
            bar.inc(chunk.len() as u64);
        }
    }

    /// Whether every message is acknowledged. Messages in flight count as not acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.runtime
            .block_on(async { self.queue.ready().await == 0 && self.broker.left(&self.queue).await == 0 })
    }
}
