//! `SqsSource`: a queue of Amazon SQS as a source.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use aws_sdk_sqs::Client;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::api::Api;
use super::convert::Reader;
use super::dead_letters::SqsDeadLetters;
use super::drive::Driver;
use super::hub::{End, Hub};
use super::settings::{Body, Connection, Settings, name, wait_within};
use super::{ack_handle, queue};
use crate::health::SourceStatus;
use crate::observe::Observer;
use crate::source::{Delivery, Source, SourceError, Supply, Terms};

/// A queue of Amazon SQS, standard or FIFO (by the suffix `.fifo`).
///
/// Only as many messages are received as handlers are free to run. They are held, by a visibility timeout that is
/// extended in batches, for as long as they run or wait, and deleted in batches behind their completed records.
/// When the queue has taken a message back, its handler is cancelled and nothing is deleted.
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
    open: Mutex<Option<Open>>,
}

struct Open {
    hub: Arc<Hub>,
    /// Resolves when the thread has ended, with the number of messages that were not deleted.
    left: Option<oneshot::Receiver<usize>>,
}

/// How long the thread goes on telling the queue what it must know when the source is dropped without a close.
const DROPPED_GRACE: Duration = Duration::from_secs(5);

impl SqsSource {
    /// 60 seconds.
    pub const DEFAULT_VISIBILITY: Duration = Duration::from_secs(60);

    /// The queue of this name or URL.
    ///
    /// Credentials, region and endpoint are found in the AWS SDK's usual ways: environment, profile, web
    /// identity, container, instance. Nothing is connected or checked before [`open`](Source::open).
    pub fn new(queue: impl Into<String>) -> Self {
        Self::with(Connection::default(), queue.into())
    }

    /// The same with a client of one's own, whose time limits are replaced, and whose retries while consuming.
    pub fn from_client(client: Client, queue: impl Into<String>) -> Self {
        Self::with(Connection { client: Some(client), ..Connection::default() }, queue.into())
    }

    fn with(connection: Connection, queue: String) -> Self {
        Self { settings: Settings::new(connection, queue), terms: Mutex::default(), open: Mutex::default() }
    }

    /// The region; by default that of the environment or profile, or else of the queue's URL.
    #[must_use]
    pub fn region(mut self, region: impl Into<String>) -> Self {
        self.settings.connection.region = Some(region.into());
        self
    }

    /// Where SQS is, such as `http://127.0.0.1:9324` for a server of one's own; by default the region's endpoint,
    /// or the host of a queue's URL that is not at AWS.
    #[must_use]
    pub fn endpoint_url(mut self, url: impl Into<String>) -> Self {
        self.settings.connection.endpoint_url = Some(url.into());
        self
    }

    /// How long the queue hides a message without a heartbeat: 60 s by default, whole seconds from 1 s to 6 h.
    ///
    /// It is set with every receive, whatever the queue's own setting is, and how long a message waits after its
    /// worker was killed. It should be no shorter than the gate's lease.
    #[must_use]
    pub fn visibility(mut self, visibility: Duration) -> Self {
        self.settings.visibility = visibility;
        self
    }

    /// How long a receive waits for messages while the queue is empty, at most: 20 s by default, whole seconds from
    /// 1 s.
    ///
    /// A receive under way cannot be ended without stranding what it may bring. So this is also how long an idle
    /// consumer may take to stop, and it is kept a second below the consumer's `stop_deadline`.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.settings.wait = wait;
        self
    }

    /// Checks everything that needs no queue.
    ///
    /// # Errors
    /// The first setting that is wrong, by its name. [`open`](Source::open) says the same.
    pub fn check(&self) -> Result<(), SourceError> {
        self.settings.check()
    }

    /// What bodies are: the payload itself, by default.
    #[must_use]
    pub fn body(mut self, body: Body) -> Self {
        self.settings.body = body;
        self
    }

    /// Takes each message's route from its attribute `oncegate-origin`, where it has one, instead of the queue's
    /// name.
    ///
    /// For queues of dead letters that are consumed: such a message keeps its first route, and so its key. Only
    /// for queues to which nobody else writes.
    #[must_use]
    pub fn routes_from_attributes(mut self) -> Self {
        self.settings.routes_from_attributes = true;
        self
    }

    /// Dead letters to another queue, by name or URL, reached in the same way.
    pub fn dead_letters(&self, queue: impl Into<String>) -> SqsDeadLetters {
        SqsDeadLetters::with(self.settings.connection.clone(), queue.into())
            .beside(self.settings.queue.clone())
    }

    /// Looks at the queue as [`open`](Source::open) does for a consumer of these terms, and says what weakens the
    /// promise or will surprise somebody, each with its remedy. Receives nothing.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, cannot be reached, or a right is missing.
    pub async fn check_queue(&self, terms: &Terms) -> Result<Vec<String>, SourceError> {
        let settings = &self.settings;
        settings.check()?;
        let client = settings.connection.client(&settings.queue).await;
        let queue = queue::find(&client, &settings.queue).await?;
        queue::check_rights(&client, &queue).await?;
        Ok(queue.warnings(settings, terms).iter().map(ToString::to_string).collect())
    }

    /// The queue's name.
    pub fn queue(&self) -> &str {
        name(&self.settings.queue)
    }

    fn hub(&self) -> Result<Arc<Hub>, SourceError> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let hub = open.as_ref().map(|open| Arc::clone(&open.hub));
        hub.ok_or_else(|| SourceError::new("the SQS source has not been opened"))
    }

    fn terms(&self) -> Terms {
        *self.terms.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Source for SqsSource {
    fn agree(&self, terms: &Terms) -> Supply {
        *self.terms.lock().unwrap_or_else(PoisonError::into_inner) = *terms;
        Supply::OnDemand
    }

    /// Finds the queue, checks its attributes and the rights, and says what does not fit together.
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        let settings = &self.settings;
        settings.check()?;
        if self.hub().is_ok() {
            return Err(SourceError::new("the SQS source is open already"));
        }
        let client = settings.connection.client(&settings.queue).await;
        let queue = queue::find(&client, &settings.queue).await?;
        queue::check_rights(&client, &queue).await?;
        info!(queue = self.queue(), fifo = queue.fifo, visibility = ?settings.visibility, "the queue is open");
        for warning in queue.warnings(settings, &self.terms()) {
            warn!(queue = self.queue(), "{warning}");
        }
        let hub = Arc::new(Hub::new(settings.visibility, observer));
        let reader = Reader {
            queue: self.queue().into(),
            fifo: queue.fifo,
            body: settings.body,
            routes_from_attributes: settings.routes_from_attributes,
            max_receives: queue.max_receives,
        };
        let wait = wait_within(settings.wait, self.terms().stop_deadline);
        let api = Arc::new(Api::new(&client, queue.url, wait, settings.visibility));
        let driver = Driver::new(Arc::clone(&hub), api, reader, settings.visibility);
        let left = spawn(Arc::clone(&hub), driver)?;
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = Some(Open { hub, left: Some(left) });
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let hub = self.hub()?;
        match hub.take(most).await {
            Ok(fetched) => {
                Ok(Some(fetched.into_iter().map(|fetched| ack_handle::delivery(&hub, fetched)).collect()))
            }
            Err(End::Closed) => Ok(None),
            Err(End::Failed(why)) => Err(SourceError::new(why)),
        }
    }

    /// What nobody has taken goes back, and so does what receives under way still bring.
    fn stop_receiving(&self) {
        if let Ok(hub) = self.hub() {
            hub.end(End::Closed);
        }
    }

    fn status(&self) -> SourceStatus {
        self.hub().map(|hub| hub.status(self.queue())).unwrap_or_default()
    }

    /// Deletes what is finished, hands back what is not, and waits for the receives that are under way.
    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        let by = Instant::now() + deadline;
        let left = {
            let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(open) = open.as_mut() else { return Ok(()) };
            open.hub.leave(by);
            open.left.take()
        };
        let Some(left) = left else { return Ok(()) };
        let failed = |why: String| {
            Err(SourceError::new(format!("{why}; these messages come again, and their records answer them")))
        };
        match timeout_at(by + Duration::from_secs(1), left).await {
            Ok(Ok(0)) => Ok(()),
            Ok(Ok(undeleted)) => {
                failed(format!("{undeleted} finished messages could not be deleted in time"))
            }
            Ok(Err(_)) => failed("the queue's thread has ended before the last deletes".to_owned()),
            Err(_) => failed("the queue's thread has not ended in time".to_owned()),
        }
    }
}

/// Starts the queue's own thread.
fn spawn(hub: Arc<Hub>, driver: Driver) -> Result<oneshot::Receiver<usize>, SourceError> {
    let refuse = |error: std::io::Error| SourceError::caused("no thread for the queue", error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(refuse)?;
    let (left, leaving) = oneshot::channel();
    let body = move || {
        // Whoever receives must not wait for a thread that has panicked.
        let _end = EndOnDrop(hub);
        let undeleted = runtime.block_on(driver.run());
        drop(runtime);
        // Whoever dropped the source does not wait for it.
        let _ = left.send(undeleted);
    };
    std::thread::Builder::new().name("oncegate-sqs".to_owned()).spawn(body).map_err(refuse)?;
    Ok(leaving)
}

/// Ends the receives of a thread that is no more.
struct EndOnDrop(Arc<Hub>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(End::Failed("the queue's thread has ended".to_owned()));
    }
}

impl Drop for SqsSource {
    /// Leaves as `close` does, but nobody waits for it.
    fn drop(&mut self) {
        if let Some(open) = self.open.lock().unwrap_or_else(PoisonError::into_inner).take() {
            open.hub.leave(Instant::now() + DROPPED_GRACE);
        }
    }
}

impl fmt::Debug for SqsSource {
    /// Shows no client: it knows credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqsSource").field("queue", &self.settings.queue).finish_non_exhaustive()
    }
}
