//! From the source to the engine: limits what is in flight, receives, derives keys, and prefetches
//! records.

use std::sync::Arc;

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::in_flight::InFlight;
use super::item::{Item, key_lane};
use super::prepare::Preparation;
use super::progress::Past;
use super::shared::Shared;
use crate::gate::Identity;
use crate::observe::Event;
use crate::source::{Delivery, Source, SourceError};

/// The most prefetches in progress at once.
const PREFETCHES: usize = 4;
/// The assumed size of a message before any was received.
const FIRST_GUESS_BYTES: usize = 1024;

/// Runs until the consumer stops or the source ends.
pub(super) async fn intake(
    shared: Arc<Shared>,
    source: Arc<dyn Source>,
    engine: mpsc::Sender<Vec<Box<Item>>>,
) -> Result<(), SourceError> {
    let ended = receive_all(&shared, &*source, engine).await;
    source.stop_receiving();
    ended
}

async fn receive_all(
    shared: &Shared,
    source: &dyn Source,
    engine: mpsc::Sender<Vec<Box<Item>>>,
) -> Result<(), SourceError> {
    let batches = Receiving::new(shared, source)
        .batches()
        .map(|batch| prefetch(shared, batch))
        .buffered(PREFETCHES);
    let mut batches = std::pin::pin!(batches);
    loop {
        let batch = tokio::select! {
            biased;
            () = shared.stopping.cancelled() => return Ok(()),
            batch = batches.next() => batch,
        };
        match batch {
            None => return Ok(()),
            Some(Err(error)) => return Err(error),
            Some(Ok(items)) => {
                if engine.send(items).await.is_err() {
                    return Ok(());
                }
            }
        }
    }
}

/// The source's messages, each with its key.
struct Receiving<'a> {
    shared: &'a Shared,
    source: &'a dyn Source,
    preparation: Preparation<'a>,
    typical_bytes: usize,
    has_ended: bool,
}

impl<'a> Receiving<'a> {
    fn new(shared: &'a Shared, source: &'a dyn Source) -> Self {
        Self {
            shared,
            source,
            preparation: Preparation::new(shared),
            typical_bytes: FIRST_GUESS_BYTES,
            has_ended: false,
        }
    }

    fn batches(self) -> impl Stream<Item = Result<Vec<Box<Item>>, SourceError>> + 'a {
        stream::unfold(self, |mut receiving| async move {
            let next = receiving.next().await?;
            Some((next, receiving))
        })
    }

    async fn next(&mut self) -> Option<Result<Vec<Box<Item>>, SourceError>> {
        let in_flight = &self.shared.in_flight;
        loop {
            let waits = !self.preparation.is_idle();
            if self.has_ended && !waits {
                return None;
            }
            let ready = tokio::select! {
                biased;
                ready = self.preparation.next(), if waits => ready,
                received = receive(in_flight, self.source, self.typical_bytes), if !self.has_ended => match received {
                    Ok(Some(deliveries)) => self.arrived(deliveries),
                    Ok(None) => {
                        self.has_ended = true;
                        continue;
                    }
                    Err(error) => {
                        self.has_ended = true;
                        self.preparation = Preparation::new(self.shared);
                        return Some(Err(error));
                    }
                },
            };
            if ready.is_empty() {
                continue;
            }
            let now = Instant::now();
            let items = ready
                .into_iter()
                .map(|delivery| identify(self.shared, delivery, now));
            return Some(Ok(items.collect()));
        }
    }

    /// Counts what was received. Returns what need not wait for a schema.
    fn arrived(&mut self, deliveries: Vec<Delivery>) -> Vec<Delivery> {
        self.shared.watch.delivered(deliveries.len());
        let mut bytes = 0;
        for delivery in &deliveries {
            let size = delivery.message.size_bytes();
            self.shared.in_flight.receive(size);
            bytes += size;
        }
        self.typical_bytes = bytes / deliveries.len().max(1);
        self.preparation.admit(deliveries)
    }
}

/// Receives as many messages as the limits allow. With a source on demand, the request follows the
/// free capacity.
async fn receive(
    in_flight: &InFlight,
    source: &dyn Source,
    typical_bytes: usize,
) -> Result<Option<Vec<Delivery>>, SourceError> {
    let mut room = in_flight.room_other_than(0, typical_bytes).await;
    if !in_flight.is_on_demand() {
        return source.receive(room).await;
    }
    loop {
        tokio::select! {
            biased;
            received = source.receive(room), if room > 0 => return received,
            other = in_flight.room_other_than(room, typical_bytes) => room = other,
        }
    }
}

fn identify(shared: &Shared, delivery: Delivery, received_at: Instant) -> Box<Item> {
    let route = shared.route(delivery.message.route());
    let (identity, tenant) = match route.gate.identify_with_tenant(&delivery.message) {
        Ok((identity, tenant)) => (Ok(identity), tenant),
        Err(error) => (Err(error), None),
    };
    let key = identity.as_ref().ok().map(|identity| &identity.key);
    let is_redelivered = delivery.message.is_redelivered();
    let entry = key.and_then(|key| {
        let transactional = route.transactional.as_ref()?;
        Some(transactional.session.receive(key, is_redelivered))
    });
    let bytes = delivery.message.size_bytes();
    Box::new(Item {
        delivery,
        route,
        key_lane: identity.as_ref().ok().map(key_lane),
        identity,
        tenant,
        claim: None,
        probe: None,
        without_store: false,
        bytes,
        found: None,
        received_at,
        past: Past::default(),
        entry,
        attempt: None,
        admitted: None,
        is_started: false,
        turn: None,
    })
}

/// In a replay, asks the store in bulk which keys are completed. It only reads: every other key is
/// claimed.
async fn prefetch(
    shared: &Shared,
    batch: Result<Vec<Box<Item>>, SourceError>,
) -> Result<Vec<Box<Item>>, SourceError> {
    let mut items = batch?;
    if !shared.mostly_duplicates() {
        return Ok(items);
    }
    for route in shared.routes() {
        let of_route = items
            .iter()
            .enumerate()
            .filter(|(_, item)| Arc::ptr_eq(&item.route, route));
        let identified =
            of_route.filter_map(|(n, item)| Some((n, item.identity.as_ref().ok()?.clone())));
        let (places, identities): (Vec<usize>, Vec<Identity>) = identified.unzip();
        if places.is_empty() {
            continue;
        }
        let completed = route.gate.completed(&identities).await;
        for (place, stored) in places.into_iter().zip(completed) {
            if let Some(stored) = stored
                && let Some(item) = items.get_mut(place)
            {
                route.gate.observe(Event::Claimed {
                    scope: route.gate.scope(),
                    verdict: "completed",
                });
                item.found = Some(stored);
            }
        }
    }
    Ok(items)
}
