//! A queue full of payments, on a server that runs or on one that is started.

use oncegate::BoxError;
use oncegate_examples::queue;
use oncegate_testkit::{QueueKind, RabbitMq, RabbitMqServer, RabbitQueue};
use tokio::runtime::Runtime;

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
        Ok(Self {
            runtime,
            broker,
            uri,
            queue,
            _server: server,
        })
    }
}

impl queue::Queue for Queue {
    fn send(&self, payments: Vec<String>) {
        self.runtime.block_on(self.queue.send(payments));
    }

    fn is_empty(&self) -> bool {
        self.runtime.block_on(async {
            self.queue.ready().await == 0 && self.broker.left(&self.queue).await == 0
        })
    }

    fn arguments(&self) -> [&str; 4] {
        ["--uri", &self.uri, "--queue", self.queue.name()]
    }
}
