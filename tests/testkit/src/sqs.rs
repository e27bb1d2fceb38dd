//! SQS as its clients see it: queues, messages in and out, and what is left in them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::retry::RetryConfig;
use aws_sdk_sqs::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_sqs::types::builders::SendMessageBatchRequestEntryBuilder;
use aws_sdk_sqs::types::{
    DeleteMessageBatchRequestEntry, Message, MessageSystemAttributeName, QueueAttributeName,
    SendMessageBatchRequestEntry,
};
use futures_util::{StreamExt as _, stream};
use tokio::sync::OnceCell;

use crate::elasticmq::ElasticmqServer;

/// Names the SQS server of the run, `ElasticMQ` or what speaks its protocol:
/// `http://127.0.0.1:9324`.
pub const VARIABLE: &str = "ONCEGATE_TEST_SQS";

/// How long one question of a readiness probe may take.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// The longest wait for a server to answer, and for a queue to become as a test wants it.
const WAIT_LIMIT: Duration = Duration::from_secs(240);

/// Interval at which a queue is polled while a test waits for it.
const WAIT_INTERVAL: Duration = Duration::from_millis(30);

/// The most that a batch of the protocol can hold.
const BATCH_MAX: usize = 10;

/// How many batches [`Queue::send`] has in flight at once, when their order does not matter.
const BATCHES_AT_ONCE: usize = 8;

/// An SQS server that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct Sqs {
    endpoint: String,
    client: Client,
}

impl Sqs {
    /// The server of this run: the one that [`VARIABLE`] names, or else an `ElasticMQ` that this
    /// process starts on first use. Other tests use it at the same time: keep to queues of
    /// [`unique`](crate::unique) names.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<Sqs> = OnceCell::const_new();
        static OWN: OnceCell<ElasticmqServer> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(endpoint) => NAMED
                .get_or_init(|| Self::reached(VARIABLE, endpoint))
                .await
                .again(),
            Err(_) => OWN.get_or_init(ElasticmqServer::start).await.again(),
        }
    }

    /// The same server with a client of its own. Connections live on the runtime that opened them,
    /// and each test has another.
    pub(crate) fn again(&self) -> Self {
        Self::at(self.endpoint.clone())
    }

    /// The server that a variable names.
    pub(crate) async fn reached(variable: &str, endpoint: String) -> Self {
        let sqs = Self::at(endpoint);
        let deadline = Instant::now() + WAIT_LIMIT;
        while let Err(error) = sqs.answers().await {
            assert!(
                Instant::now() < deadline,
                "{variable} names {}, which does not answer: {error}",
                sqs.endpoint
            );
            tokio::time::sleep(WAIT_INTERVAL).await;
        }
        sqs
    }

    /// The server at this address, `http://host:port`, without a check that it answers.
    ///
    /// Its client signs with credentials that local servers do not check, and repeats no call by
    /// itself.
    #[must_use]
    pub fn at(endpoint: impl Into<String>) -> Self {
        let endpoint = endpoint.into();
        let config = aws_sdk_sqs::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::from_static("us-east-1"))
            .credentials_provider(Credentials::new("test", "test", None, None, "test"))
            .retry_config(RetryConfig::disabled())
            .endpoint_url(&endpoint)
            .build();
        Self {
            endpoint,
            client: Client::from_conf(config),
        }
    }

    /// The address for clients: `http://host:port`.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// A client for calls that this harness does not wrap.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) async fn answers(&self) -> Result<(), String> {
        let question = self.client.list_queues().queue_name_prefix("none").send();
        match tokio::time::timeout(PROBE_LIMIT, question).await {
            Err(_) => Err(format!("no answer within {PROBE_LIMIT:?}")),
            Ok(Err(error)) => Err(format!("{error:?}")),
            Ok(Ok(_)) => Ok(()),
        }
    }

    /// Makes a standard queue of a new name that starts with `prefix`.
    ///
    /// # Panics
    /// As [`Sqs::new_queue_with`].
    pub async fn new_queue(&self, prefix: &str) -> Queue {
        self.new_queue_with(prefix, &[]).await
    }

    /// Makes a FIFO queue of a new name that starts with `prefix` and ends as it must.
    ///
    /// # Panics
    /// As [`Sqs::new_queue_with`].
    pub async fn new_fifo_queue(&self, prefix: &str) -> Queue {
        self.new_fifo_queue_with(prefix, &[]).await
    }

    /// A FIFO queue with these attributes.
    ///
    /// # Panics
    /// As [`Sqs::new_queue_with`].
    pub async fn new_fifo_queue_with(
        &self,
        prefix: &str,
        attributes: &[(QueueAttributeName, &str)],
    ) -> Queue {
        let mut attributes = attributes.to_vec();
        attributes.push((QueueAttributeName::FifoQueue, "true"));
        self.create_queue(&format!("{}.fifo", crate::unique(prefix)), &attributes)
            .await
    }

    /// Makes a standard queue of a new name that starts with `prefix`, with these attributes.
    ///
    /// # Panics
    /// When the server refuses or does not answer.
    pub async fn new_queue_with(
        &self,
        prefix: &str,
        attributes: &[(QueueAttributeName, &str)],
    ) -> Queue {
        self.create_queue(&crate::unique(prefix), attributes).await
    }

    async fn create_queue(&self, name: &str, attributes: &[(QueueAttributeName, &str)]) -> Queue {
        let attributes: HashMap<_, _> = attributes
            .iter()
            .map(|(name, value)| (name.clone(), (*value).to_owned()))
            .collect();
        let created = self
            .client
            .create_queue()
            .queue_name(name)
            .set_attributes(Some(attributes));
        let created = created.send().await;
        let created =
            created.unwrap_or_else(|error| panic!("cannot create the queue {name}: {error:?}"));
        let url = created
            .queue_url
            .unwrap_or_else(|| panic!("{name} has no URL"));
        Queue {
            client: self.client.clone(),
            url,
        }
    }

    /// The same queue, reached through this server's address: a proxy, for example.
    #[must_use]
    pub fn same_queue(&self, queue: &Queue) -> Queue {
        Queue {
            client: self.client.clone(),
            url: queue.url.clone(),
        }
    }
}

/// A queue, and how to look into it without oncegate.
#[derive(Clone, Debug)]
pub struct Queue {
    client: Client,
    url: String,
}

/// How many messages a queue has, by what may happen to them next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Messages that a receive may return.
    pub visible: u64,
    /// Messages that were received and whose visibility timeout is not over.
    pub in_flight: u64,
    /// Messages that were sent with a delay that is not over.
    pub delayed: u64,
}

impl Depth {
    /// All of them.
    #[must_use]
    pub fn total(self) -> u64 {
        self.visible + self.in_flight + self.delayed
    }
}

impl Queue {
    /// The URL for clients.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The last part of the URL.
    #[must_use]
    pub fn name(&self) -> &str {
        self.url.rsplit('/').next().unwrap_or_default()
    }

    /// Sends a message for each body, in batches of ten that overtake each other.
    ///
    /// # Panics
    /// When the server does not take one.
    pub async fn send(
        &self,
        bodies: impl IntoIterator<Item = impl Into<String>, IntoIter: Send> + Send,
    ) {
        let entry = |body: _| SendMessageBatchRequestEntry::builder().message_body(body);
        let entries: Vec<_> = bodies.into_iter().map(|body| entry(body.into())).collect();
        self.send_batches(entries, BATCHES_AT_ONCE).await;
    }

    /// Sends these messages in their order, whatever they have besides a body.
    ///
    /// # Panics
    /// When the server does not take one.
    pub async fn send_in_order(&self, entries: Vec<SendMessageBatchRequestEntryBuilder>) {
        self.send_batches(entries, 1).await;
    }

    async fn send_batches(
        &self,
        entries: Vec<SendMessageBatchRequestEntryBuilder>,
        at_once: usize,
    ) {
        let batches: Vec<_> = entries.chunks(BATCH_MAX).map(<[_]>::to_vec).collect();
        stream::iter(batches)
            .for_each_concurrent(at_once, |batch| self.send_batch(batch))
            .await;
    }

    async fn send_batch(&self, batch: Vec<SendMessageBatchRequestEntryBuilder>) {
        let entries = batch.into_iter().enumerate();
        let entries = entries.map(|(n, entry)| {
            entry
                .id(n.to_string())
                .build()
                .expect("an entry has a body")
        });
        let sent = self
            .client
            .send_message_batch()
            .queue_url(&self.url)
            .set_entries(Some(entries.collect()));
        let sent = sent.send().await;
        let sent = sent.unwrap_or_else(|error| panic!("cannot send to {}: {error:?}", self.url));
        assert!(
            sent.failed.is_empty(),
            "{} did not take {:?}",
            self.url,
            sent.failed
        );
    }

    /// Sends messages of a group in their order, to a FIFO queue. Equal bodies are different
    /// messages.
    ///
    /// # Panics
    /// When the server does not take one.
    pub async fn send_to_group(
        &self,
        group: &str,
        bodies: impl IntoIterator<Item = impl Into<String>, IntoIter: Send> + Send,
    ) {
        let entry = |body: String| {
            SendMessageBatchRequestEntry::builder()
                .message_body(body)
                .message_group_id(group)
                .message_deduplication_id(crate::unique("d"))
        };
        self.send_in_order(bodies.into_iter().map(|body| entry(body.into())).collect())
            .await;
    }

    /// How many messages the queue has. Servers count approximately while messages come and go.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn depth(&self) -> Depth {
        self.try_depth()
            .await
            .unwrap_or_else(|error| panic!("{}: {error}", self.url))
    }

    async fn try_depth(&self) -> Result<Depth, String> {
        use QueueAttributeName as Name;
        const NAMES: [QueueAttributeName; 3] = [
            Name::ApproximateNumberOfMessages,
            Name::ApproximateNumberOfMessagesNotVisible,
            Name::ApproximateNumberOfMessagesDelayed,
        ];
        let asked = self.client.get_queue_attributes().queue_url(&self.url);
        let asked = asked.set_attribute_names(Some(NAMES.to_vec())).send().await;
        let attributes = asked
            .map_err(|error| format!("{error:?}"))?
            .attributes
            .unwrap_or_default();
        let number = |name: &QueueAttributeName| {
            let value = attributes
                .get(name)
                .ok_or_else(|| format!("the server does not report {name}"))?;
            value.parse().map_err(|_| format!("{name} is {value}"))
        };
        let [visible, in_flight, delayed] = &NAMES;
        Ok(Depth {
            visible: number(visible)?,
            in_flight: number(in_flight)?,
            delayed: number(delayed)?,
        })
    }

    /// Waits until the queue is so. A server that is away is asked again.
    ///
    /// # Panics
    /// When that takes longer than 240 seconds; the text has the state of the queue.
    pub async fn until(&self, what: &str, so: impl Fn(Depth) -> bool) {
        let deadline = Instant::now() + WAIT_LIMIT;
        loop {
            let depth = self.try_depth().await;
            if depth.as_ref().is_ok_and(|depth| so(*depth)) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{} is not {what} after {WAIT_LIMIT:?}: {depth:?}",
                self.url
            );
            tokio::time::sleep(WAIT_INTERVAL).await;
        }
    }

    /// Waits until the queue has no message, visible or not.
    ///
    /// # Panics
    /// As [`Queue::until`].
    pub async fn until_empty(&self) {
        self.until("empty", |depth| depth.total() == 0).await;
    }

    /// Receives once, at most ten messages with all attributes that the server returns, and hides
    /// those for so long.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn receive(&self, visibility: Duration) -> Vec<Message> {
        let seconds = i32::try_from(visibility.as_secs()).expect("a visibility fits");
        let received = self
            .client
            .receive_message()
            .queue_url(&self.url)
            .visibility_timeout(seconds);
        let received = received
            .max_number_of_messages(10)
            .message_system_attribute_names(MessageSystemAttributeName::All)
            .message_attribute_names("All");
        let received = received.send().await;
        let received =
            received.unwrap_or_else(|error| panic!("cannot receive from {}: {error:?}", self.url));
        received.messages.unwrap_or_default()
    }

    /// Takes every visible message out of the queue.
    ///
    /// # Panics
    /// When the server does not answer, or does not delete one.
    pub async fn take_all(&self) -> Vec<Message> {
        const LONG_ENOUGH_TO_DELETE: Duration = Duration::from_secs(30);
        let mut taken = Vec::new();
        loop {
            let received = self.receive(LONG_ENOUGH_TO_DELETE).await;
            if received.is_empty() {
                return taken;
            }
            let entry = |(n, message): (usize, &Message)| {
                let handle = message
                    .receipt_handle
                    .as_deref()
                    .expect("a received message has a handle");
                let entry = DeleteMessageBatchRequestEntry::builder();
                entry
                    .id(n.to_string())
                    .receipt_handle(handle)
                    .build()
                    .expect("both are set")
            };
            let entries = received.iter().enumerate().map(entry).collect();
            let deleted = self
                .client
                .delete_message_batch()
                .queue_url(&self.url)
                .set_entries(Some(entries));
            let deleted = deleted.send().await;
            let deleted =
                deleted.unwrap_or_else(|error| panic!("cannot delete in {}: {error:?}", self.url));
            assert!(
                deleted.failed.is_empty(),
                "{:?} were not deleted",
                deleted.failed
            );
            taken.extend(received);
        }
    }

    /// Has the server move a message to `dead` that would be received more often than that.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn redrive_to(&self, dead: &Self, receives_max: u32) {
        let asked = self.client.get_queue_attributes().queue_url(&dead.url);
        let asked = asked
            .attribute_names(QueueAttributeName::QueueArn)
            .send()
            .await;
        let attributes = asked
            .expect("the server returns its ARN")
            .attributes
            .unwrap_or_default();
        let arn = attributes
            .get(&QueueAttributeName::QueueArn)
            .expect("a queue has an ARN");
        let policy =
            serde_json::json!({"deadLetterTargetArn": arn, "maxReceiveCount": receives_max});
        self.set_attribute(QueueAttributeName::RedrivePolicy, &policy.to_string())
            .await;
    }

    /// Changes an attribute of the queue.
    ///
    /// # Panics
    /// When the server refuses.
    pub async fn set_attribute(&self, name: QueueAttributeName, value: &str) {
        let changed = self.client.set_queue_attributes().queue_url(&self.url);
        let changed = changed.attributes(name, value).send().await;
        changed.unwrap_or_else(|error| panic!("cannot change {}: {error:?}", self.url));
    }
}
