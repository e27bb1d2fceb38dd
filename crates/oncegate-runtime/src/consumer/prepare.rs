//! Gets what the formats of keys need from elsewhere, such as schemas, before keys are derived.
//!
//! A registry that is away is an outage: the messages wait, nothing more is received, and health
//! says why. It never makes a message a bad one.

use std::time::Duration;

use oncegate_core::key::PrepareError;
use tokio::time::Instant;
use tracing::{info, warn};

use super::shared::Shared;
use crate::backoff::Backoff;
use crate::gate::OpenGate;
use crate::message::Message;
use crate::source::Delivery;

/// The waits between two requests for what does not come.
const PATIENCE: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));

/// The name of schemas in the failures of a source.
const SCHEMA: &str = "schema";

/// Returns when the keys of all these messages can be derived. The caller stops it by dropping it.
pub(super) async fn prepare(shared: &Shared, deliveries: &[Delivery]) {
    if !shared.routes().any(|route| route.gate.has_format()) {
        return;
    }
    for delivery in deliveries {
        let message = &delivery.message;
        let gate = &shared.route(message.route()).gate;
        if let Err(error) = gate.prepare(message).await {
            wait_for(shared, gate, message, error).await;
        }
    }
}

/// Asks again until the answer comes.
async fn wait_for(shared: &Shared, gate: &OpenGate, message: &Message, mut error: PrepareError) {
    let mut failures = 1;
    loop {
        warn!(scope = gate.scope(), origin = %message.origin(), %error, failures, "messages wait");
        shared
            .failures
            .failed(Instant::now().into_std(), SCHEMA, &error);
        tokio::time::sleep(PATIENCE.wait(failures, gate.fraction())).await;
        match gate.prepare(message).await {
            Ok(()) => break,
            Err(again) => error = again,
        }
        failures += 1;
    }
    info!(scope = gate.scope(), failures, "messages go on");
    shared.failures.succeeded(SCHEMA);
}
