//! A queue full of payments, on a server that runs or on one that is started.

use oncegate::BoxError;
use oncegate_examples::queue;
use oncegate_testkit::{ElasticmqServer, Sqs};
use tokio::runtime::Runtime;

pub(crate) struct Queue {
    runtime: Runtime,
    sqs: Sqs,
    queue: oncegate_testkit::Queue,
    /// The server stops when this is dropped.
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
        Ok(Self {
            runtime,
            sqs,
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
        self.runtime.block_on(self.queue.depth()).total() == 0
    }

    fn arguments(&self) -> [&str; 4] {
        [
            "--endpoint",
            self.sqs.endpoint(),
            "--queue",
            self.queue.url(),
        ]
    }
}
