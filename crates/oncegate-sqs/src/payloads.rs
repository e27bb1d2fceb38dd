//! Waits for payloads that are not in the queue, before their messages are passed on.
//!
//! Meanwhile the messages are held like all others, and take up the permits that they were received
//! for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tracing::{info, warn};

use super::hub::{Fetched, Hub};
use oncegate_runtime::BoxError;
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::message::Message;
use oncegate_runtime::observe::Event;

/// The delays between tries to get a payload.
const FAILURE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));
/// The name of the operation in the failures of a source.
const OPERATION: &str = "payload";

/// A source of payloads that are not in the queue.
#[async_trait]
pub(crate) trait Payloads: fmt::Debug + Send + Sync {
    /// Returns whether the payload of this message is a pointer to the real one.
    fn has(&self, message: &Message) -> bool;

    /// Returns the message with its real payload, or marked as bad input.
    ///
    /// # Errors
    /// When it cannot be got now.
    async fn get(&self, message: &Message) -> Result<Message, BoxError>;
}

/// Returns the messages with their payloads. After the end of the source, as they were: they go
/// back to the queue.
pub(crate) async fn fetch(
    payloads: Arc<dyn Payloads>,
    hub: Arc<Hub>,
    mut fetched: Vec<Fetched>,
) -> Vec<Fetched> {
    let all = async {
        for fetched in &mut fetched {
            if payloads.has(&fetched.message) {
                fetch_one(&*payloads, &hub, fetched).await;
            }
        }
    };
    tokio::select! {
        biased;
        () = hub.ended.cancelled() => {}
        () = all => {}
    }
    fetched
}

/// Tries until the payload is there, or the message is no longer ours.
async fn fetch_one(payloads: &dyn Payloads, hub: &Hub, fetched: &mut Fetched) {
    let mut failures = 0;
    while !fetched.admitted.lost.is_cancelled() {
        match payloads.get(&fetched.message).await {
            Ok(message) => {
                fetched.message = message;
                hub.failures.succeeded(OPERATION);
                if failures > 0 {
                    info!(origin = %fetched.message.origin(), failures, "a payload has come");
                }
                return;
            }
            Err(error) => {
                failures += 1;
                hub.failures
                    .failed(Instant::now().into_std(), OPERATION, &error);
                hub.observe(Event::SourceError {
                    operation: OPERATION,
                });
                warn!(origin = %fetched.message.origin(), error, failures, "a message waits for its payload");
                tokio::time::sleep(FAILURE_BACKOFF.wait(failures, rand::random())).await;
            }
        }
    }
}
