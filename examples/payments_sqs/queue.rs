//! A queue full of payments, on a server that runs or on one that is started.

use indicatif::ProgressBar;
use oncegate::BoxError;
use oncegate_testkit::{ElasticmqServer, Sqs};
use tokio::runtime::Runtime;

/// How many messages are sent before the bar moves.
const CHUNK: usize = 500;

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

    /// Whether every message is deleted. Messages in flight count as not deleted.
    pub(crate) fn is_empty(&self) -> bool {
        self.runtime.block_on(self.queue.depth()).total() == 0
    }
}
