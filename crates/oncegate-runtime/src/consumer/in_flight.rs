//! The limits on what the consumer holds between the source and the ack.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use super::schedule::MessageCounts;

/// The most messages that are received, and prefetched from the store, at once.
const RECEIVE_MOST: usize = 512;

/// Counts and limits what the consumer holds between the source and the ack.
#[derive(Debug)]
pub(super) struct InFlight {
    most_messages: usize,
    most_bytes: usize,
    /// The most messages in flight that are not waiting, when the source gives messages on demand.
    most_at_once: Option<usize>,
    load: Mutex<Load>,
    /// Messages whose dead letter cannot be written at the moment.
    unwritten: AtomicUsize,
    /// Nothing is received: an operator has paused everything.
    held: AtomicBool,
    freed: Notify,
}

/// The messages in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Load {
    /// Messages between the source and the engine, and their bytes.
    received: (usize, usize),
    /// The engine's last counts.
    engine: MessageCounts,
    /// The whole store is away: at most one message that is not waiting may be in flight.
    is_paused: bool,
}

impl Load {
    fn held(&self) -> (usize, usize) {
        (
            self.received.0 + self.engine.messages,
            self.received.1 + self.engine.bytes,
        )
    }
}

impl InFlight {
    pub(super) fn new(most_messages: usize, most_bytes: usize) -> Self {
        Self {
            most_messages,
            most_bytes,
            most_at_once: None,
            load: Mutex::default(),
            unwritten: AtomicUsize::new(0),
            held: AtomicBool::new(false),
            freed: Notify::new(),
        }
    }

    /// Returns the number of messages and of bytes in flight.
    pub(super) fn held(&self) -> (usize, usize) {
        self.load().held()
    }

    /// Returns the limits on messages and bytes in flight.
    pub(super) fn limits(&self) -> (usize, usize) {
        (self.most_messages, self.most_bytes)
    }

    /// Limits the messages in flight to as many as can run at once.
    pub(super) fn on_demand(&mut self, permits: usize) {
        self.most_at_once = Some(permits);
    }

    /// Returns whether messages are requested as they can run.
    pub(super) fn is_on_demand(&self) -> bool {
        self.most_at_once.is_some()
    }

    /// Counts a message that was received.
    pub(super) fn receive(&self, bytes: usize) {
        let mut load = self.load();
        load.received.0 += 1;
        load.received.1 += bytes;
    }

    /// Takes over the engine's counts. `admitted` are the messages and bytes that have come to it
    /// since the last time.
    pub(super) fn publish(&self, engine: MessageCounts, admitted: (usize, usize), is_paused: bool) {
        let mut load = self.load();
        let before = *load;
        load.received.0 = load.received.0.saturating_sub(admitted.0);
        load.received.1 = load.received.1.saturating_sub(admitted.1);
        load.engine = engine;
        load.is_paused = is_paused;
        let is_changed = before != *load;
        drop(load);
        if is_changed {
            self.freed.notify_one();
        }
    }

    /// Lets nothing be received until it is called with `false`.
    pub(super) fn hold(&self, is_held: bool) {
        if self.held.load(Relaxed) != is_held {
            self.held.store(is_held, Relaxed);
            self.freed.notify_one();
        }
    }

    /// Counts a message whose dead letter cannot be written as waiting, until the guard is dropped.
    pub(super) fn waits_for_dead_letter(&self) -> UnwrittenLetter<'_> {
        self.unwritten.fetch_add(1, Relaxed);
        self.freed.notify_one();
        UnwrittenLetter(self)
    }

    /// Returns whether messages may still come to the engine before others have ended. `admitted`
    /// are those that have come since the last counts were published.
    pub(super) fn may_bring_more(&self, admitted: usize) -> bool {
        self.room(1) > 0 || self.load().received.0 > admitted
    }

    /// Returns how many messages of `typical_bytes` may be received now.
    ///
    /// A message larger than the limit on bytes is received when nothing else is in flight.
    fn room(&self, typical_bytes: usize) -> usize {
        if self.held.load(Relaxed) {
            return 0;
        }
        let load = *self.load();
        let (messages, bytes) = load.held();
        let free_bytes = self.most_bytes.saturating_sub(bytes) / typical_bytes.max(1);
        let room = self
            .most_messages
            .saturating_sub(messages)
            .min(free_bytes)
            .min(RECEIVE_MOST);
        let room = if messages == 0 { room.max(1) } else { room };
        let Some(most) = self.most_at_once else {
            return room;
        };
        // While paused, one message is received when none is in flight, to find out whether the
        // store is back.
        let most = if load.is_paused {
            1
        } else {
            most + load.engine.held_back
        };
        let waiting = load.engine.waiting + self.unwritten.load(Relaxed);
        room.min((most + waiting).saturating_sub(messages))
    }

    /// Waits until the free capacity differs from `room`, and returns it.
    pub(super) async fn room_other_than(&self, room: usize, typical_bytes: usize) -> usize {
        loop {
            let freed = self.freed.notified();
            let now = self.room(typical_bytes);
            if now != room {
                return now;
            }
            freed.await;
        }
    }

    fn load(&self) -> MutexGuard<'_, Load> {
        self.load.lock()
    }
}

/// Counts a message as waiting until it is dropped.
pub(super) struct UnwrittenLetter<'a>(&'a InFlight);

impl Drop for UnwrittenLetter<'_> {
    fn drop(&mut self) {
        self.0.unwritten.fetch_sub(1, Relaxed);
    }
}
