//! From the source to the engine: limits what is in flight, receives, derives keys, and prefetches records.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use super::attempt::Past;
use super::{Item, Shared};
use crate::gate::Identity;
use crate::observe::Event;
use crate::source::{Delivery, Source, SourceError};

/// The most messages that are received, and prefetched from the store, at once.
const RECEIVE_MOST: usize = 512;
/// How many prefetches may be in progress at once.
const PREFETCHES: usize = 4;
/// The assumed size of a message before any was received.
const FIRST_GUESS_BYTES: usize = 1024;

/// Counts and limits what the consumer holds between the source and the ack.
#[derive(Debug)]
pub(super) struct InFlight {
    most_messages: usize,
    most_bytes: usize,
    messages: AtomicUsize,
    bytes: AtomicUsize,
    /// Messages that could not use a permit now: parked, or behind another in a lane.
    waiting: AtomicUsize,
    /// Messages whose shard of the store is away.
    held_back: AtomicUsize,
    /// The whole store is away: at most one message that is not waiting may be in flight.
    paused: AtomicBool,
    /// How many messages that are not waiting may be in flight, when the source gives messages on demand.
    most_at_once: Option<usize>,
    freed: Notify,
}

impl InFlight {
    pub(super) fn new(most_messages: usize, most_bytes: usize) -> Self {
        Self {
            most_messages,
            most_bytes,
            messages: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            held_back: AtomicUsize::new(0),
            paused: AtomicBool::new(false),
            most_at_once: None,
            freed: Notify::new(),
        }
    }

    /// How many messages and bytes are in flight.
    pub(super) fn held(&self) -> (usize, usize) {
        (self.messages.load(Relaxed), self.bytes.load(Relaxed))
    }

    /// How many messages and bytes may be in flight.
    pub(super) fn limits(&self) -> (usize, usize) {
        (self.most_messages, self.most_bytes)
    }

    /// Limits the messages in flight to as many as can run at once.
    pub(super) fn on_demand(&mut self, permits: usize) {
        self.most_at_once = Some(permits);
    }

    fn enter(&self, bytes: usize) {
        self.messages.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    pub(super) fn leave(&self, bytes: usize) {
        self.messages.fetch_sub(1, Relaxed);
        self.bytes.fetch_sub(bytes, Relaxed);
        self.freed.notify_one();
    }

    /// Counts a message that could not use a permit now.
    pub(super) fn waits(&self) {
        self.waiting.fetch_add(1, Relaxed);
        self.freed.notify_one();
    }

    /// Counts a message that waited and may run now.
    pub(super) fn waits_no_more(&self) {
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// Counts a message whose shard of the store is away. While another shard answers, others may come in its place.
    pub(super) fn hold_back(&self) {
        self.held_back.fetch_add(1, Relaxed);
        self.freed.notify_one();
    }

    /// Counts a message that was held back and is tried again.
    pub(super) fn hold_back_no_more(&self) {
        self.held_back.fetch_sub(1, Relaxed);
    }

    /// Notes that the whole store has gone away, or that some of it is back.
    pub(super) fn pause(&self, paused: bool) {
        self.paused.store(paused, Relaxed);
        self.freed.notify_one();
    }

    /// How many messages of `typical_bytes` may be received now.
    ///
    /// A message larger than the limit on bytes is received when nothing else is in flight.
    fn room(&self, typical_bytes: usize) -> usize {
        let messages = self.messages.load(Relaxed);
        let free_bytes = self.most_bytes.saturating_sub(self.bytes.load(Relaxed)) / typical_bytes.max(1);
        let room = self.most_messages.saturating_sub(messages).min(free_bytes).min(RECEIVE_MOST);
        let room = if messages == 0 { room.max(1) } else { room };
        let Some(most) = self.most_at_once else { return room };
        // While paused, one message is received when none is in flight, to find out whether the store is back.
        let most = if self.paused.load(Relaxed) { 1 } else { most + self.held_back.load(Relaxed) };
        // A message may be counted twice for a moment; then it is requested a little later.
        room.min((most + self.waiting.load(Relaxed)).saturating_sub(messages))
    }

    /// Waits until the free capacity differs from `room`, and returns it.
    async fn room_other_than(&self, room: usize, typical_bytes: usize) -> usize {
        loop {
            let freed = self.freed.notified();
            let now = self.room(typical_bytes);
            if now != room {
                return now;
            }
            freed.await;
        }
    }

    /// Receives as many messages as the limits allow. With a source on demand, the request follows the free capacity.
    async fn receive(
        &self,
        source: &dyn Source,
        typical_bytes: usize,
    ) -> Result<Option<Vec<Delivery>>, SourceError> {
        let mut room = self.room_other_than(0, typical_bytes).await;
        if self.most_at_once.is_none() {
            return source.receive(room).await;
        }
        loop {
            tokio::select! {
                biased;
                received = source.receive(room), if room > 0 => return received,
                other = self.room_other_than(room, typical_bytes) => room = other,
            }
        }
    }
}

/// Runs until the consumer stops or the source ends.
pub(super) async fn intake(
    shared: Arc<Shared>,
    source: Arc<dyn Source>,
    engine: mpsc::Sender<Vec<Item>>,
) -> Result<(), SourceError> {
    let ended = receive_all(&shared, &*source, engine).await;
    source.stop_receiving();
    ended
}

async fn receive_all(
    shared: &Shared,
    source: &dyn Source,
    engine: mpsc::Sender<Vec<Item>>,
) -> Result<(), SourceError> {
    let batches = received(shared, source).map(|batch| prefetch(shared, batch)).buffered(PREFETCHES);
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
fn received<'a>(
    shared: &'a Shared,
    source: &'a dyn Source,
) -> impl Stream<Item = Result<Vec<Item>, SourceError>> + 'a {
    stream::unfold(Some(FIRST_GUESS_BYTES), move |typical_bytes| async move {
        match shared.in_flight.receive(source, typical_bytes?).await {
            Ok(None) => None,
            Err(error) => Some((Err(error), None)),
            Ok(Some(deliveries)) => {
                shared.watch.delivered(deliveries.len());
                let now = Instant::now();
                let items: Vec<Item> =
                    deliveries.into_iter().map(|delivery| identify(shared, delivery, now)).collect();
                let bytes = items.iter().map(|item| item.bytes).sum::<usize>();
                let typical_bytes = bytes / items.len().max(1);
                Some((Ok(items), Some(typical_bytes)))
            }
        }
    })
}

fn identify(shared: &Shared, delivery: Delivery, received_at: Instant) -> Item {
    let route = shared.route(delivery.message.route());
    let (identity, tenant) = match route.gate.identify_with_tenant(&delivery.message) {
        Ok((identity, tenant)) => (Ok(identity), tenant),
        Err(error) => (Err(error), None),
    };
    let bytes = delivery.message.size_bytes();
    shared.in_flight.enter(bytes);
    Item {
        delivery,
        route,
        identity,
        tenant,
        claim: None,
        without_store: false,
        bytes,
        found: None,
        received_at,
        past: Past::default(),
        wait: None,
        attempt: None,
    }
}

/// In a replay, asks the store in bulk which keys are completed. It only reads: every other key is claimed.
async fn prefetch(shared: &Shared, batch: Result<Vec<Item>, SourceError>) -> Result<Vec<Item>, SourceError> {
    let mut items = batch?;
    if !shared.mostly_duplicates() {
        return Ok(items);
    }
    for route in shared.routes() {
        let of_route = items.iter().enumerate().filter(|(_, item)| Arc::ptr_eq(&item.route, route));
        let identified = of_route.filter_map(|(n, item)| Some((n, item.identity.as_ref().ok()?.clone())));
        let (places, identities): (Vec<usize>, Vec<Identity>) = identified.unzip();
        if places.is_empty() {
            continue;
        }
        let completed = route.gate.completed(&identities).await;
        for (place, stored) in places.into_iter().zip(completed) {
            if let Some(stored) = stored
                && let Some(item) = items.get_mut(place)
            {
                route.gate.observe(Event::Claimed { scope: route.gate.scope(), verdict: "completed" });
                item.found = Some(stored);
            }
        }
    }
    Ok(items)
}
