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

use super::convert::Reader;
use super::error::AmqpError;
use super::hub::Hub;
use super::session::Session;
use super::settings::Settings;
use super::watch::Watch;

/// The delays between tries to connect.
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
/// The duration from which on a session was a good one: the next delay is the first again.
const GOOD_SESSION: Duration = Duration::from_secs(30);

/// The state of a queue's thread.
pub(crate) struct Driver {
    pub(crate) hub: Arc<Hub>,
    pub(crate) settings: Settings,
    pub(crate) reader: Reader,
}

impl Driver {
    /// Runs until the source leaves. The result of the first session is sent to `opened`; if that
    /// session cannot begin, the thread ends. An error means that the last acks may be lost.
    pub(crate) async fn run(
        self,
        opened: oneshot::Sender<Result<(), AmqpError>>,
    ) -> Result<(), AmqpError> {
        let first = Session::open(&self.settings, &self.reader).await;
        let mut session = match first {
            Ok(session) => session,
            Err(error) => {
                // A source that was dropped does not wait for it.
                _ = opened.send(Err(error));
                return Ok(());
            }
        };
        // A source that was dropped has asked the thread to leave.
        _ = opened.send(Ok(()));
        let mut failures = 0;
        let mut watch = Watch::new();
        loop {
            self.hub.connected();
            let began = Instant::now();
            let Err(error) = session.serve(&self.hub, &mut watch).await else {
                return Ok(());
            };
            drop(session);
            let unacked = self.hub.lock().held.in_hand();
            self.hub.disconnected(&error);
            if self.hub.lock().leave_by.is_some() {
                return Err(error);
            }
            warn!(queue = self.settings.queue, %error, messages = unacked, "the connection to the broker is lost; its messages are delivered again");
            if began.elapsed() >= GOOD_SESSION {
                failures = 0;
            }
            let Some(next) = self.connect_again(&mut failures).await else {
                return Ok(());
            };
            session = next;
        }
    }

    /// Connects again, however long that takes. `None` when the source leaves.
    async fn connect_again(&self, failures: &mut u32) -> Option<Session> {
        loop {
            *failures = failures.saturating_add(1);
            let attempt = async {
                sleep(BACKOFF.wait(*failures, rand::random())).await;
                Session::open(&self.settings, &self.reader).await
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
