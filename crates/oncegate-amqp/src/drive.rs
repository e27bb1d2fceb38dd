//! The thread of a queue: one session after another, until the source leaves.
//!
//! The thread shares no runtime with the handlers: a handler that blocks its thread must not cost
//! the connection its heartbeat.

use std::sync::Arc;
use std::time::Duration;

use oncegate_runtime::backoff::Backoff;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::again::BrokerLimits;
use super::convert::Reader;
use super::error::{AmqpError, TimedOut};
use super::hub::Hub;
use super::management;
use super::publisher::Publisher;
use super::session::Session;
use super::settings::Settings;
use super::watch::Watch;

/// The delays between tries to connect.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
/// The duration from which on a session was a good one: the next delay is the first again.
const GOOD_SESSION: Duration = Duration::from_secs(30);
/// A consumer that the broker ends after a message was held for this long may have exceeded its
/// `consumer_timeout`.
const LONG_HELD: Duration = Duration::from_secs(2);
/// The prefetch at the beginning of a careful session: every message of a larger one would come
/// back, and be counted, with the first.
const CAREFUL_PREFETCH: u16 = 1;

/// The state of a queue's thread.
pub(crate) struct Driver {
    pub(crate) hub: Arc<Hub>,
    pub(crate) settings: Settings,
    pub(crate) reader: Reader,
    /// Sends messages again that the queue would drop.
    pub(crate) publisher: Arc<Publisher>,
    pub(crate) limits: BrokerLimits,
    /// `max_attempts` of the consumer.
    pub(crate) max_attempts: u32,
    /// The last session ended with something that the client cannot read, or while messages near
    /// the delivery limit were sent again: the next one begins with one message, so that another
    /// end counts for that one alone.
    pub(crate) is_careful: bool,
    /// The last session ended with something that the client cannot read.
    pub(crate) is_unreadable: bool,
}

/// Warnings about a queue that is consumed, or the reason that it cannot be.
type Opened = Result<Vec<String>, AmqpError>;

impl Driver {
    /// Runs until the source leaves. The result of the first session is sent to `opened`; if that
    /// session cannot begin, the thread ends. An error means that the last acks may be lost.
    pub(crate) async fn run(mut self, opened: oneshot::Sender<Opened>) -> Result<(), AmqpError> {
        let mut session = match self.open().await {
            Ok(session) => session,
            Err(error) => {
                // A source that was dropped does not wait for it.
                _ = opened.send(Err(error));
                return Ok(());
            }
        };
        let warnings = self.compare_limits(&mut session).await;
        // A source that was dropped has asked the thread to leave.
        _ = opened.send(Ok(warnings));
        let mut failures = 0;
        let mut watch = Watch::new();
        loop {
            self.hub.connected(self.is_unreadable);
            let began = Instant::now();
            let Err(error) = session.serve(&self.hub, &mut watch).await else {
                break;
            };
            self.is_unreadable = error.is_unreadable;
            self.is_careful = error.is_unreadable || session.is_renewing();
            drop(session);
            let load = self.hub.load();
            self.learn(&error);
            self.hub.disconnected(&error);
            if self.hub.lock().leave_by.is_some() {
                return Err(error);
            }
            warn!(queue = self.settings.queue, %error, messages = load.in_hand, "the connection to the broker is lost; its messages are delivered again");
            if began.elapsed() >= GOOD_SESSION {
                failures = 0;
            }
            let Some(next) = self.connect_again(&mut failures).await else {
                break;
            };
            session = next;
        }
        self.publisher.close().await;
        Ok(())
    }

    async fn open(&self) -> Result<Session, AmqpError> {
        let prefetch = if self.is_careful {
            CAREFUL_PREFETCH
        } else {
            self.settings.prefetch()
        };
        let Self {
            settings,
            reader,
            publisher,
            limits,
            ..
        } = self;
        Session::open(settings, reader, publisher, *limits, prefetch).await
    }

    /// Asks for the queue's limits, before the first message is received. Returns warnings.
    async fn compare_limits(&mut self, session: &mut Session) -> Vec<String> {
        let Some(url) = self.settings.source.management.as_deref() else {
            return Vec::new();
        };
        let major = session.major_version();
        let queue = &self.settings.queue;
        match management::describe(&self.settings.connection, queue, url).await {
            Ok(described) => {
                let limit = Some(described.returns_most(major));
                let timeout = described.consumer_timeout();
                self.limits = BrokerLimits::new(limit, timeout, self.settings.source.in_order);
                session.limits = self.limits;
                described.warnings(queue, self.max_attempts, major)
            }
            Err(error) => vec![management::unknown(queue, &error)],
        }
    }

    /// Notes what the end of a session tells about the broker.
    fn learn(&mut self, error: &AmqpError) {
        let held = self.hub.lock().held.oldest().map(|oldest| oldest.elapsed());
        match (error.timed_out, held) {
            (Some(TimedOut::After(timeout)), _) => self.limits.learn(timeout),
            (Some(TimedOut::Perhaps), Some(held)) if held >= LONG_HELD => self.limits.learn(held),
            _ => {}
        }
    }

    /// Connects again, however long that takes. `None` when the source leaves.
    async fn connect_again(&self, failures: &mut u32) -> Option<Session> {
        loop {
            *failures = failures.saturating_add(1);
            let attempt = async {
                sleep(BACKOFF.wait(*failures, rand::random())).await;
                self.open().await
            };
            let connected = tokio::select! {
                biased;
                () = self.left() => return None,
                connected = attempt => connected,
            };
            match connected {
                Ok(session) => {
                    info!(queue = self.settings.queue, "the broker answers again");
                    return Some(session);
                }
                Err(error) => {
                    self.hub.disconnected(&error);
                    warn!(queue = self.settings.queue, %error, failures, "the broker cannot be consumed; trying again");
                }
            }
        }
    }

    /// Resolves when the source leaves. Notes that the thread runs, meanwhile.
    async fn left(&self) {
        while self.hub.lock().leave_by.is_none() {
            self.hub.turned();
            tokio::select! {
                () = self.hub.wake.notified() => {}
                () = sleep(Duration::from_secs(1)) => {}
            }
        }
    }
}
