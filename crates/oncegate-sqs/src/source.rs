//! `SqsSource`: consumes a queue of Amazon SQS.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::api::Api;
use super::convert::Reader;
use super::dead_letters::SqsDeadLetters;
use super::drive::Driver;
use super::hub::{End, Hub};
use super::settings::{Connection, Settings, name, wait_within};
use super::source_settings::{Body, SqsSettings};
use super::{ack_handle, queue};
use oncegate_runtime::health::SourceStatus;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::{Delivery, Source, SourceError, StreamOrigin, Supply, Terms};

/// A source that consumes a queue of Amazon SQS, standard or FIFO (by the suffix `.fifo`).
///
/// It receives only as many messages as handlers are free. It holds them by extending their
/// visibility timeout in batches while they run or wait, and deletes them in batches after their
/// records are completed. A message that has become visible again is not deleted: its handler goes
/// on under its lease, and the consumer that receives the message gets its result.
///
/// ```no_run
/// use std::time::Duration;
/// use oncegate::sqs::SqsSource;
///
/// let source = SqsSource::new("orders").region("eu-central-1").visibility(Duration::from_secs(120));
/// let dead_letters = source.dead_letters("orders-dead");
/// ```
pub struct SqsSource {
    settings: Settings,
    terms: Mutex<Terms>,
    open: Mutex<Option<OpenSource>>,
}

struct OpenSource {
    hub: Arc<Hub>,
    /// Resolves when the thread has ended, with the number of messages that were not deleted.
    left: Option<oneshot::Receiver<usize>>,
}

/// Time limit for the thread's last calls when the source is dropped without a close.
const DROPPED_GRACE: Duration = Duration::from_secs(5);

impl SqsSource {
    /// Creates a source for the queue with this name or URL.
    ///
    /// Credentials, region and endpoint come from the AWS SDK's default chain: environment,
    /// profile, web identity, container, instance. It does not connect and checks nothing before
    /// [`open`](Source::open).
    pub fn new(queue: impl Into<String>) -> Self {
        Self::with(Connection::default(), queue.into())
    }

    /// Creates a source that uses this client. The client's time limits are replaced, and its
    /// retries while consuming.
    pub fn from_client(client: Client, queue: impl Into<String>) -> Self {
        Self::with(
            Connection {
                client: Some(client),
                ..Connection::default()
            },
            queue.into(),
        )
    }

    fn with(connection: Connection, queue: String) -> Self {
        Self {
            settings: Settings::new(connection, queue),
            terms: Mutex::default(),
            open: Mutex::default(),
        }
    }

    /// Sets the region; by default that of the environment or profile, or else of the queue's URL.
    #[must_use]
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.settings.connection.region = Some(region.into());
        self
    }

    /// Sets the endpoint of SQS, such as `http://127.0.0.1:9324` for a local server; by default the
    /// region's endpoint, or the host of a queue URL that is not at AWS.
    #[must_use]
    pub fn endpoint_url(mut self, url: impl Into<String>) -> Self {
        self.settings.connection.endpoint_url = Some(url.into());
        self
    }

    /// Sets all settings but the queue and how it is reached, such as those of a file.
    #[must_use]
    pub fn settings(mut self, settings: SqsSettings) -> Self {
        self.settings.source = settings;
        self
    }

    /// Sets the [visibility timeout](SqsSettings::visibility), for which the queue hides a message
    /// without a heartbeat: 60 s by default.
    #[must_use]
    pub fn visibility(mut self, visibility: Duration) -> Self {
        self.settings.source.visibility = visibility;
        self
    }

    /// Sets the [longest wait of a receive](SqsSettings::wait) while the queue is empty: 20 s by
    /// default.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.source.wait = wait;
        self
    }

    /// Checks everything that needs no queue.
    ///
    /// # Errors
    /// Names the first wrong setting. [`open`](Source::open) returns the same error.
    pub fn check(&self) -> Result<(), SourceError> {
        self.settings.check()
    }

    /// Sets [how message bodies are read](SqsSettings::body): as the payload itself, by default.
    #[must_use]
    pub fn body(mut self, body: Body) -> Self {
        self.settings.source.body = body;
        self
    }

    /// Reads the payloads of messages that are pointers to objects in S3 from there; by default
    /// such a pointer is the payload.
    #[cfg(feature = "s3")]
    #[must_use]
    pub fn s3_payloads(mut self, payloads: super::S3Payloads) -> Self {
        self.settings.s3_payloads = Some(payloads);
        self
    }

    /// Takes each message's route [from its attribute](SqsSettings::routes_from_attributes)
    /// `oncegate-origin`, if present, instead of the queue's name. Use it to consume a dead-letter
    /// queue, and only for queues that no other service writes to.
    #[must_use]
    pub fn routes_from_attributes(mut self) -> Self {
        self.settings.source.routes_from_attributes = true;
        self
    }

    /// Returns dead letters that write to another queue, by name or URL, with the same connection.
    pub fn dead_letters(&self, queue: impl Into<String>) -> SqsDeadLetters {
        SqsDeadLetters::with(self.settings.connection.clone(), queue.into())
            .beside(self.settings.queue.clone())
    }

    /// Checks the queue as [`open`](Source::open) does for a consumer with these terms, without
    /// receiving.
    ///
    /// Returns a warning for each setting that weakens the guarantees or has unexpected effects,
    /// with what to change.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, cannot be reached, or a right is missing.
    pub async fn check_queue(&self, terms: &Terms) -> Result<Vec<String>, SourceError> {
        let settings = &self.settings;
        settings.check()?;
        let client = settings.connection.client(&settings.queue).await;
        let queue = queue::find(&client, &settings.queue).await?;
        queue::check_rights(&client, &queue).await?;
        Ok(queue
            .warnings(settings, terms)
            .iter()
            .map(ToString::to_string)
            .collect())
    }

    /// Returns the queue's name.
    pub fn queue(&self) -> &str {
        name(&self.settings.queue)
    }

    fn hub(&self) -> Result<Arc<Hub>, SourceError> {
        let open = self.open.lock();
        let hub = open.as_ref().map(|open| Arc::clone(&open.hub));
        hub.ok_or_else(|| SourceError::new("the SQS source has not been opened"))
    }

    fn terms(&self) -> Terms {
        *self.terms.lock()
    }
}

#[async_trait]
impl Source for SqsSource {
    fn agree(&self, terms: &Terms) -> Supply {
        *self.terms.lock() = *terms;
        Supply::OnDemand
    }

    /// Returns the queue with its account and region.
    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        let settings = &self.settings;
        let client = settings.connection.client(&settings.queue).await;
        let queue = queue::find(&client, &settings.queue).await?;
        let has_one_route = !settings.source.routes_from_attributes;
        let streams = queue.place.into_iter().map(|broker| StreamOrigin {
            route: has_one_route.then(|| self.queue().to_owned()),
            broker,
        });
        Ok(streams.collect())
    }

    /// Finds the queue, checks its attributes and the rights, and logs settings that contradict
    /// each other.
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        let settings = &self.settings;
        settings.check()?;
        if self.hub().is_ok() {
            return Err(SourceError::new("the SQS source is already open"));
        }
        let client = settings.connection.client(&settings.queue).await;
        let queue = queue::find(&client, &settings.queue).await?;
        queue::check_rights(&client, &queue).await?;
        info!(queue = self.queue(), fifo = queue.fifo, visibility = ?settings.source.visibility, "the queue is open");
        for warning in queue.warnings(settings, &self.terms()) {
            warn!(queue = self.queue(), "{warning}");
        }
        let hub = Arc::new(Hub::new(settings.source.visibility, observer));
        let reader = Reader {
            queue: self.queue().into(),
            fifo: queue.fifo,
            body: settings.source.body,
            routes_from_attributes: settings.source.routes_from_attributes,
            max_receives: queue.max_receives,
        };
        let wait = wait_within(settings.source.wait, self.terms().stop_deadline);
        let api = Arc::new(Api::new(
            &client,
            queue.url,
            wait,
            settings.source.visibility,
        ));
        let payloads = settings.payloads(&client).await?;
        let driver = Driver::new(
            Arc::clone(&hub),
            api,
            reader,
            payloads,
            settings.source.visibility,
        );
        let left = spawn(Arc::clone(&hub), driver)?;
        *self.open.lock() = Some(OpenSource {
            hub,
            left: Some(left),
        });
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let hub = self.hub()?;
        match hub.take(most).await {
            Ok(fetched) => Ok(Some(
                fetched
                    .into_iter()
                    .map(|fetched| ack_handle::delivery(&hub, fetched))
                    .collect(),
            )),
            Err(End::Closed) => Ok(None),
            Err(End::Failed(why)) => Err(SourceError::new(why)),
        }
    }

    /// Returns messages that were not taken, and those of receives still in flight, to the queue.
    fn stop_receiving(&self) {
        if let Ok(hub) = self.hub() {
            hub.end(End::Closed);
        }
    }

    fn status(&self) -> SourceStatus {
        self.hub()
            .map(|hub| hub.status(self.queue()))
            .unwrap_or_default()
    }

    /// Deletes finished messages, returns unfinished ones, and waits for receives in flight.
    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        let by = Instant::now() + deadline;
        let left = {
            let mut open = self.open.lock();
            let Some(open) = open.as_mut() else {
                return Ok(());
            };
            open.hub.leave(by);
            open.left.take()
        };
        let Some(left) = left else { return Ok(()) };
        match timeout_at(by + Duration::from_secs(1), left).await {
            Ok(Ok(0)) => Ok(()),
            Ok(Ok(undeleted)) => Err(not_deleted(&format!(
                "{undeleted} finished messages could not be deleted in time"
            ))),
            Ok(Err(_)) => Err(not_deleted(
                "the queue's thread ended before the last deletes",
            )),
            Err(_) => Err(not_deleted("the queue's thread did not end in time")),
        }
    }
}

fn not_deleted(why: &str) -> SourceError {
    SourceError::new(format!(
        "{why}; they will be delivered again, and their records will answer them"
    ))
}

/// Starts the queue's own thread.
fn spawn(hub: Arc<Hub>, driver: Driver) -> Result<oneshot::Receiver<usize>, SourceError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(no_thread)?;
    let (left, leaving) = oneshot::channel();
    std::thread::Builder::new()
        .name("oncegate-sqs".to_owned())
        .spawn(move || {
            // A receiver must not wait for a thread that has panicked.
            let _end = EndOnDrop(hub);
            let undeleted = runtime.block_on(driver.run());
            drop(runtime);
            // A source that was dropped does not wait for it.
            let _ = left.send(undeleted);
        })
        .map_err(no_thread)?;
    Ok(leaving)
}

fn no_thread(error: std::io::Error) -> SourceError {
    SourceError::caused("cannot start the thread of the queue", error)
}

/// Ends the receives when the thread ends.
struct EndOnDrop(Arc<Hub>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0
            .end(End::Failed("the queue's thread has ended".to_owned()));
    }
}

impl Drop for SqsSource {
    /// Leaves the queue as `close` does, without waiting for the end.
    fn drop(&mut self) {
        if let Some(open) = self.open.lock().take() {
            open.hub.leave(Instant::now() + DROPPED_GRACE);
        }
    }
}

impl fmt::Debug for SqsSource {
    /// Does not show the client, because it has credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsSource")
            .field("queue", &self.settings.queue)
            .finish_non_exhaustive()
    }
}
