//! `AmqpSource`: consumes a queue of RabbitMQ.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use oncegate_runtime::health::SourceStatus;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::{Delivery, Source, SourceError, StreamOrigin, Supply, Terms};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use super::ack_handle;
use super::again::BrokerLimits;
use super::connect::{channel, check_consume, close, connect};
use super::convert::Reader;
use super::dead_letters::AmqpDeadLetters;
use super::drive::Driver;
use super::error::AmqpError;
use super::hub::{End, Hub};
use super::login::AmqpLogin;
use super::management;
use super::publisher::Publisher;
use super::settings::{Connection, Settings};
use super::source_settings::AmqpSettings;

/// A source that consumes a classic or a quorum queue of RabbitMQ.
///
/// The broker delivers as many messages ahead as [`prefetch`](Self::prefetch) says. A message is
/// acknowledged after its record is completed, several by one ack where nothing unfinished is below
/// them. After a lost connection the source connects again, and the broker delivers every message
/// again that was not acknowledged. What runs meanwhile goes on: its record answers the delivery
/// that comes again.
///
/// ```no_run
/// use oncegate::amqp::AmqpSource;
///
/// let source = AmqpSource::new("amqp://shop:secret@localhost:5672/shop", "orders").prefetch(64);
/// let dead_letters = source.dead_letters("orders.dead");
/// ```
pub struct AmqpSource {
    settings: Settings,
    /// `max_attempts` of the consumer.
    max_attempts: AtomicU32,
    open: Mutex<Option<OpenSource>>,
}

struct OpenSource {
    hub: Arc<Hub>,
    /// Resolves when the thread has ended, with an error when the last acks may be lost.
    left: Option<oneshot::Receiver<Result<(), AmqpError>>>,
}

/// Time limit for the thread's last calls when the source is dropped without a close.
const DROPPED_GRACE: Duration = Duration::from_secs(5);
/// The time after the deadline that the thread may take to close its connection.
const LEAVING: Duration = Duration::from_secs(20);

impl AmqpSource {
    /// Creates a source for the queue of this name at the broker of the URI:
    /// `amqp://user:password@host:5672/vhost`, or `amqps://` with TLS (feature `tls`).
    ///
    /// The URI may have the parameters `heartbeat` (seconds; 10 by default), `connection_timeout`
    /// (milliseconds; 5,000 by default) and `auth_mechanism` (`plain` by default; `external` logs
    /// in by the client's certificate). It does not connect and checks nothing before
    /// [`open`](Source::open).
    pub fn new(uri: impl Into<String>, queue: impl Into<String>) -> Self {
        Self::with(Connection::new(uri.into()), queue.into())
    }

    pub(crate) fn with(connection: Connection, queue: String) -> Self {
        let settings = Settings::new(connection, queue);
        Self {
            settings,
            max_attempts: AtomicU32::default(),
            open: Mutex::default(),
        }
    }

    /// Sets all settings but the queue and the way to the broker, such as those of a file.
    #[must_use]
    pub fn settings(mut self, settings: AmqpSettings) -> Self {
        self.settings.source = settings;
        self
    }

    /// Sets [how many messages](AmqpSettings::prefetch) the broker delivers before the first of
    /// them is acknowledged: 128 by default.
    #[must_use]
    pub fn prefetch(mut self, messages: u16) -> Self {
        self.settings.source.prefetch = messages;
        self
    }

    /// Sets the [priority](AmqpSettings::priority) of this consumer among those of the queue
    /// (`x-priority`): 0 by default.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.settings.source.priority = priority;
        self
    }

    /// Sets the password and the certificates, besides what the URI has.
    #[must_use]
    pub fn login(mut self, login: AmqpLogin) -> Self {
        self.settings.connection.login = login;
        self
    }

    /// Asks the [management plugin](AmqpSettings::management) at this URL, such as
    /// `http://localhost:15672`, for the limits of the queue at the start.
    #[must_use]
    pub fn management(mut self, url: impl Into<String>) -> Self {
        self.settings.source.management = Some(url.into());
        self
    }

    /// Runs the messages of the queue [one after another](AmqpSettings::in_order), as the broker
    /// has delivered them.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.settings.source.in_order = true;
        self
    }

    /// Takes each message's route [from its header](AmqpSettings::routes_from_headers)
    /// `oncegate-origin`, if present, instead of the queue's name. Use it to consume a dead-letter
    /// queue, and a queue that messages are redriven to, and only for queues that no other service
    /// writes to.
    #[must_use]
    pub fn routes_from_headers(mut self) -> Self {
        self.settings.source.routes_from_headers = true;
        self
    }

    /// Holds everything that is delivered, up to the [prefetch](AmqpSettings::prefetch), until it
    /// is acknowledged or the source is closed, and returns the rest in its order: to look into a
    /// queue, and not to work on it.
    #[must_use]
    pub fn looking(mut self) -> Self {
        self.settings.looks = true;
        self.in_order()
    }

    pub(crate) fn management_url(&self) -> Option<&str> {
        self.settings.source.management.as_deref()
    }

    pub(crate) fn connection(&self) -> &Connection {
        &self.settings.connection
    }

    /// Checks everything that needs no broker.
    ///
    /// # Errors
    /// Names the first wrong setting. [`open`](Source::open) returns the same error.
    pub fn check(&self) -> Result<(), SourceError> {
        Ok(self.settings.check()?)
    }

    /// Checks the queue and the right to read it, as [`open`](Source::open) does for a consumer
    /// with these terms. No message is delivered, and none loses its place. The broker's log has an
    /// error of the channel by which the right was tried.
    ///
    /// Returns a warning for each limit of the queue that may lose messages, with what to change,
    /// if the [management plugin](Self::management) is set.
    ///
    /// # Errors
    /// When the queue cannot be used: it does not exist, the broker cannot be reached, or a right
    /// is missing.
    pub async fn check_queue(&self, terms: &Terms) -> Result<Vec<String>, SourceError> {
        self.settings.check()?;
        let connection = connect(self.connection(), "oncegate looks at a queue").await?;
        let checked = async {
            let probe = channel(&connection).await?;
            check_consume(&probe, self.queue()).await
        };
        let checked = checked.await;
        let major = connection.seen.major_version();
        close(&connection).await;
        checked?;
        let Some(url) = self.management_url() else {
            return Ok(Vec::new());
        };
        let described = management::describe(self.connection(), self.queue(), url).await;
        Ok(match described {
            Ok(described) => described.warnings(self.queue(), terms.max_attempts, major),
            Err(error) => vec![management::unknown(self.queue(), &error)],
        })
    }

    fn limits(&self) -> BrokerLimits {
        BrokerLimits::new(None, None, self.settings.source.in_order)
    }

    fn publisher(&self) -> Arc<Publisher> {
        let name = format!("oncegate sends messages of {} again", self.queue());
        Arc::new(Publisher::new(self.connection().clone(), name))
    }

    /// Returns dead letters that write to another queue of the same broker.
    pub fn dead_letters(&self, queue: impl Into<String>) -> AmqpDeadLetters {
        AmqpDeadLetters::with(self.settings.connection.clone(), queue.into()).beside(
            self.queue().to_owned(),
            self.management_url().map(str::to_owned),
        )
    }

    /// Returns the queue's name.
    pub fn queue(&self) -> &str {
        &self.settings.queue
    }

    fn reader(&self) -> Reader {
        Reader {
            queue: self.queue().into(),
            routes_from_headers: self.settings.source.routes_from_headers,
            user: self.connection().user(),
        }
    }

    /// Returns how many bytes of messages the broker has sent, as of the last second.
    pub(crate) fn received_bytes(&self) -> u64 {
        self.hub()
            .map_or(0, |hub| hub.received.load(Ordering::Relaxed))
    }

    fn hub(&self) -> Result<Arc<Hub>, SourceError> {
        let open = self.open.lock();
        let hub = open.as_ref().map(|open| Arc::clone(&open.hub));
        hub.ok_or_else(|| SourceError::new("the AMQP source has not been opened"))
    }
}

#[async_trait]
impl Source for AmqpSource {
    fn agree(&self, terms: &Terms) -> Supply {
        self.max_attempts
            .store(terms.max_attempts, Ordering::Relaxed);
        Supply::OnDemand
    }

    /// Returns the queue with the broker's address and virtual host. The client tells nothing of
    /// the cluster behind them.
    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        let uri = self.settings.connection.uri()?;
        let host = uri.authority.host.to_ascii_lowercase();
        let port = uri.authority.port;
        let has_one_route = !self.settings.source.routes_from_headers;
        Ok(vec![StreamOrigin {
            route: has_one_route.then(|| self.queue().to_owned()),
            broker: format!("RabbitMQ at {host}:{port}, virtual host `{}`", uri.vhost),
        }])
    }

    /// Connects, and consumes the queue. Delivered messages wait here until they are received.
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.settings.check()?;
        if self.hub().is_ok() {
            return Err(SourceError::new("the AMQP source is already open"));
        }
        let hub = Arc::new(Hub::new(observer, self.settings.source.in_order));
        let driver = Driver {
            hub: Arc::clone(&hub),
            settings: self.settings.clone(),
            reader: self.reader(),
            publisher: self.publisher(),
            limits: self.limits(),
            max_attempts: self.max_attempts.load(Ordering::Relaxed),
            is_careful: false,
            is_unreadable: false,
        };
        let (opened, opening) = oneshot::channel();
        let left = spawn(Arc::clone(&hub), driver, opened)?;
        let open = Opening(Some(Arc::clone(&hub)));
        let opened = opening.await;
        let warnings = opened.map_err(|_| {
            SourceError::new("the thread of the queue ended before it was connected")
        })??;
        info!(
            queue = self.queue(),
            prefetch = self.settings.prefetch(),
            "the queue is open"
        );
        open.done();
        *self.open.lock() = Some(OpenSource {
            hub,
            left: Some(left),
        });
        for warning in warnings {
            warn!(queue = self.queue(), "{warning}");
        }
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let hub = self.hub()?;
        match hub.take(most).await {
            Ok(fetched) => {
                let in_order = self.settings.source.in_order;
                let deliveries = fetched
                    .into_iter()
                    .map(|fetched| ack_handle::delivery(&hub, fetched, in_order));
                Ok(Some(deliveries.collect()))
            }
            Err(End::Closed) => Ok(None),
            Err(End::Failed(why)) => Err(SourceError::new(why)),
        }
    }

    /// Returns to the queue the messages that were not taken.
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

    /// Sends the last acks, and returns when the broker has read them.
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
        let why = match timeout_at(by + LEAVING, left).await {
            Ok(Ok(Ok(()))) => return Ok(()),
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(_)) => "the queue's thread ended before the last acks".to_owned(),
            Err(_) => "the queue's thread did not end in time".to_owned(),
        };
        let error = SourceError::new(format!(
            "{why}; finished messages may be delivered again, and their records will answer them"
        ));
        // The settings are right: the source was open.
        Err(error.away())
    }
}

/// Starts the queue's own thread.
fn spawn(
    hub: Arc<Hub>,
    driver: Driver,
    opened: oneshot::Sender<Result<Vec<String>, AmqpError>>,
) -> Result<oneshot::Receiver<Result<(), AmqpError>>, SourceError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(no_thread)?;
    let (left, leaving) = oneshot::channel();
    std::thread::Builder::new()
        .name("oncegate-amqp".to_owned())
        .spawn(move || {
            // A receiver must not wait for a thread that has panicked.
            let _end = EndOnDrop(hub);
            let ended = runtime.block_on(driver.run(opened));
            drop(runtime);
            // A source that was dropped does not wait for it.
            _ = left.send(ended);
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

/// A queue that a source is opening. If that is dropped, the queue's thread leaves: otherwise it
/// would stay for as long as the process, with messages that are never taken.
struct Opening(Option<Arc<Hub>>);

impl Opening {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        if let Some(hub) = self.0.take() {
            hub.leave(Instant::now() + DROPPED_GRACE);
        }
    }
}

impl Drop for AmqpSource {
    /// Leaves the queue as `close` does, without waiting for the end.
    fn drop(&mut self) {
        if let Some(open) = self.open.lock().take() {
            open.hub.leave(Instant::now() + DROPPED_GRACE);
        }
    }
}

impl fmt::Debug for AmqpSource {
    /// Does not show the URI, because it has a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpSource")
            .field("queue", &self.settings.queue)
            .finish_non_exhaustive()
    }
}
