//! Gets what the formats of keys need from elsewhere, such as schemas, before keys are derived.
//!
//! A registry that is away is an outage of the routes that need it: their messages wait, and health
//! says why. It never makes a message a bad one. The other routes go on, until all that the
//! consumer may hold has to wait.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt as _};
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tokio::time::Instant;
use tracing::{info, warn};

use super::shared::{Route, Shared};
use crate::backoff::Backoff;
use crate::message::Message;
use crate::source::Delivery;

/// The waits between two requests for what does not come.
const PATIENCE: Backoff = Backoff::new(Duration::from_millis(250), Duration::from_secs(10));

/// The name of schemas in the failures of a source.
const SCHEMA: &str = "schema";

/// The messages whose keys cannot be derived yet. Those of a route keep their order.
pub(super) struct Preparation<'a> {
    shared: &'a Shared,
    /// The messages that wait, by the number of their route.
    waiting: BTreeMap<usize, Vec<Delivery>>,
    /// For each of these routes, what its first message needs.
    asked: FuturesUnordered<BoxFuture<'a, usize>>,
}

impl<'a> Preparation<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        Self {
            shared,
            waiting: BTreeMap::new(),
            asked: FuturesUnordered::new(),
        }
    }

    /// Returns whether no message waits.
    pub(super) fn is_idle(&self) -> bool {
        self.asked.is_empty()
    }

    /// Returns the messages whose keys can be derived now. The others wait.
    pub(super) fn admit(&mut self, deliveries: Vec<Delivery>) -> Vec<Delivery> {
        if !self.shared.routes().any(|route| route.gate.has_format()) {
            return deliveries;
        }
        deliveries
            .into_iter()
            .filter_map(|delivery| self.ready(delivery))
            .collect()
    }

    /// Waits until messages of a route may go on, and returns them. Dropping the future loses
    /// nothing.
    pub(super) async fn next(&mut self) -> Vec<Delivery> {
        let Some(route) = self.asked.next().await else {
            return Vec::new();
        };
        if self.asked.is_empty() {
            self.shared.failures.succeeded(SCHEMA);
        }
        let waiting = self.waiting.remove(&route).unwrap_or_default();
        self.admit(waiting)
    }

    fn ready(&mut self, delivery: Delivery) -> Option<Delivery> {
        let route = self.shared.route(delivery.message.route());
        let number = route.number;
        if let Some(waiting) = self.waiting.get_mut(&number) {
            waiting.push(delivery);
            return None;
        }
        let mut asked = prepare(self.shared, route, delivery.message.clone()).boxed();
        // Nearly always, nothing is to be got.
        if (&mut asked).now_or_never().is_some() {
            return Some(delivery);
        }
        self.waiting.insert(number, vec![delivery]);
        self.asked.push(asked.map(move |()| number).boxed());
        None
    }
}

/// Returns when the key of this message can be derived. Asks again until the answer comes.
async fn prepare(shared: &Shared, route: Arc<Route>, message: Message) {
    let gate = &route.gate;
    let mut failures = 0;
    while let Err(error) = gate.prepare(&message).await {
        failures += 1;
        warn!(scope = gate.scope(), origin = %message.origin(), %error, failures, "messages wait");
        shared
            .failures
            .failed(Instant::now().into_std(), SCHEMA, &error);
        tokio::time::sleep(PATIENCE.wait(failures, gate.fraction())).await;
    }
    if failures > 0 {
        info!(scope = gate.scope(), failures, "messages go on");
    }
}
