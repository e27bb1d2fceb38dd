//! The loop that publishes an outbox.
//!
//! # Not obvious
//!
//! Implementation notes: facts that this code depends on.
//!
//! - Order does not depend on the leader's lease. A relay sends a message only after the broker has
//!   confirmed the one before it with the same key, so the first copies are in order even while two
//!   relays send the same rows. The lease keeps them from sending everything twice.
//! - Sequences are given before a commit, so a row with a smaller one may become visible later than
//!   others. The relay reads rows that are not marked, not rows that follow a position.
//! - A producer may deliver a message that it has reported as failed, or fail one and deliver the
//!   next. Only the wait for each confirmation makes a gap impossible.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::join;
use oncegate_core::record::Token;
use oncegate_core::store::StoreError;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::flight::{Flight, OrderSize, in_orders};
use super::held_back::{HeldOrders, OrderOf};
use super::scan::Scan;
use super::{OutboxMessage, PublishError, Relay, RelayError, TopicPart, UnsentMessage};
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::observe::Event;

/// The pauses after errors of the database.
const STORE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// The number of renewals in the time of a lease.
const RENEWALS_PER_LEASE: u32 = 3;

/// Time limit for the wait for a batch. Messages that take longer stay in flight beside the next
/// one. It is also the longest time between a confirmation and the mark of its message.
const SLOW_AFTER: Duration = Duration::from_secs(1);

/// The time between two purges when the last one has found little.
const PURGE_EVERY: Duration = Duration::from_secs(10);

/// The number of messages that a purge may remove for each one of a batch, so that it keeps up with
/// the sent messages.
const PURGED_PER_SENT: u32 = 2;

/// Time limit for the last call of a relay.
const RESIGN_LIMIT: Duration = Duration::from_secs(1);

/// A running relay, which leads or waits for the lead.
struct Leader {
    relay: Relay,
    token: Token,
    stopping: CancellationToken,
}

impl Relay {
    /// Publishes until `stop` resolves. Then it sends nothing more, waits for messages in flight,
    /// and gives the lead away.
    ///
    /// The relay waits for a database or broker that is away. A message that the broker refuses,
    /// for example because it is too large, is logged as an error and tried again, at last every 30
    /// s; the later messages with its key wait behind it, and all others go on. The same holds for
    /// a topic that the broker refuses, of which one message is tried at a time. If this future is
    /// **dropped**, or the process ends, another relay takes over when the lease is over, and
    /// publishes again every message that was not marked.
    ///
    /// # Errors
    /// When a setting or a right must be changed.
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send) -> Result<(), RelayError> {
        let stopping = CancellationToken::new();
        let outbox = Arc::clone(&self.outbox);
        if let Some(finding) = self.settings.check().into_iter().next() {
            let outbox = outbox.name().to_owned();
            return Err(RelayError::Settings { outbox, finding });
        }
        let stop_deadline = self.settings.stop_deadline;
        let token = Token::from_bits(rand::random());
        let leader = Leader {
            relay: self,
            token,
            stopping: stopping.clone(),
        };
        let mut work = pin!(leader.work());
        tokio::select! {
            biased;
            ended = &mut work => return ended,
            () = stop => stopping.cancel(),
        }
        match timeout(stop_deadline, work).await {
            Ok(ended) => ended,
            Err(_elapsed) => {
                let name = outbox.name();
                warn!(
                    outbox = name,
                    "messages in flight were not confirmed before the stop; the next relay publishes them again"
                );
                // Without an answer, the lead ends with its lease.
                drop(timeout(RESIGN_LIMIT, outbox.resign(token)).await);
                Ok(())
            }
        }
    }
}

impl Leader {
    /// Leads in turns with other relays, until the stop.
    async fn work(&self) -> Result<(), RelayError> {
        let opened = self.relay.publisher.open().await;
        opened.map_err(|error| RelayError::Publisher {
            outbox: self.relay.outbox.name().to_owned(),
            error,
        })?;
        let ended = CancellationToken::new();
        let leading = async {
            let led = self.lead_in_turns().await;
            ended.cancel();
            led
        };
        let (led, ()) = join(
            leading,
            self.relay.monitor.measure(&*self.relay.outbox, &ended),
        )
        .await;
        led.map_err(|error| RelayError::Store {
            outbox: self.relay.outbox.name().to_owned(),
            error,
        })
    }

    async fn lead_in_turns(&self) -> Result<(), StoreError> {
        let outbox = &self.relay.outbox;
        let mut failures = 0;
        let mut is_checked = false;
        while !self.stopping.is_cancelled() {
            let asked = async {
                if !is_checked {
                    outbox.check().await?;
                }
                outbox.lead(self.token, self.relay.settings.lease).await
            };
            match asked.await {
                Ok(leads) => {
                    failures = 0;
                    is_checked = true;
                    if leads {
                        self.lead().await?;
                    } else {
                        // Jitter, so that relays that started together do not ask together.
                        let wait = (self.relay.settings.lease / RENEWALS_PER_LEASE)
                            .mul_f64(1.0 - fastrand::f64() / 2.0);
                        pause(&self.stopping, wait).await;
                    }
                }
                Err(error) => {
                    self.wait_after(error, &mut failures, &self.stopping)
                        .await?;
                }
            }
        }
        Ok(())
    }

    /// Publishes until the stop, or until the lead is lost.
    async fn lead(&self) -> Result<(), StoreError> {
        let outbox = self.relay.outbox.name();
        info!(outbox, "this relay leads");
        self.observe(Event::OutboxLeaderChanged { change: "took" });
        let ended = self.stopping.child_token();
        let publishing = async {
            let published = self.publish_until(&ended).await;
            ended.cancel();
            published
        };
        let (is_lost, published) = join(self.renew_until(&ended), publishing).await;
        if is_lost {
            warn!(outbox, "this relay has lost the lead");
            self.observe(Event::OutboxLeaderChanged { change: "lost" });
            return published;
        }
        if let Err(error) = self.relay.outbox.resign(self.token).await {
            warn!(outbox, %error, "the lead was not given away; it ends with its lease");
        }
        self.observe(Event::OutboxLeaderChanged { change: "resigned" });
        published
    }

    /// Renews the lease until `ended`, which it cancels when the lead is lost. Returns whether the
    /// lead is lost.
    async fn renew_until(&self, ended: &CancellationToken) -> bool {
        let lease = self.relay.settings.lease;
        let mut renewed_at = Instant::now();
        loop {
            pause(ended, lease / RENEWALS_PER_LEASE).await;
            if ended.is_cancelled() {
                return false;
            }
            let asked_at = Instant::now();
            let is_lost = match timeout(lease, self.relay.outbox.lead(self.token, lease)).await {
                Ok(Ok(true)) => {
                    renewed_at = asked_at;
                    false
                }
                Ok(Ok(false)) => true,
                // Without an answer, this relay leads until its lease is over.
                Ok(Err(_)) | Err(_) => renewed_at.elapsed() > lease,
            };
            if is_lost {
                ended.cancel();
                return true;
            }
        }
    }

    /// Reads and sends batch by batch.
    ///
    /// An order that takes long stays in flight beside the next batches, and delays no other.
    async fn publish_until(&self, ended: &CancellationToken) -> Result<(), StoreError> {
        let Relay {
            outbox, settings, ..
        } = &self.relay;
        let poll_interval = settings.poll_interval;
        let sent = Mutex::new(Vec::new());
        let mut held = HeldOrders::default();
        let mut flight = Flight::default();
        let mut failures = 0;
        let mut purge_at = Instant::now();
        let mut scan = Scan::new(purge_at);
        while !ended.is_cancelled() {
            let now = Instant::now();
            // So many topics are held back that nothing else may be read.
            if let Some(free_at) = held.full_until(now) {
                self.land(&mut flight, &mut held, &sent, free_at).await?;
                pause(ended, free_at - now).await;
                continue;
            }
            let Some(room) = flight.room(settings.limits()) else {
                self.land(&mut flight, &mut held, &sent, now + SLOW_AFTER)
                    .await?;
                continue;
            };
            let held_back = scan.and(flight.and(held.at(now)), &held, now);
            let batch = match outbox.read(&held_back, room).await {
                Ok(batch) => batch,
                Err(error) => {
                    self.wait_after(error, &mut failures, ended).await?;
                    continue;
                }
            };
            failures = 0;
            let is_idle = batch.is_empty();
            let last = batch.last().map(|unsent| unsent.sequence);
            let read_at = Instant::now();
            let taken = held.take(in_orders(batch), now, |order| self.part(order));
            if is_idle {
                scan.note_end(&mut held, now);
            }
            scan.note_read(last, taken.is_passing);
            let is_passed = !is_idle && taken.orders.is_empty();
            for (order, messages) in taken.orders {
                let size = OrderSize::of(&messages);
                flight.add(
                    order,
                    size,
                    self.send_in_order(messages, read_at, &sent, ended).boxed(),
                );
            }
            let until = match (is_passed, is_idle) {
                // Nothing of this read is tried: the next one begins behind it.
                (true, _) => read_at,
                (_, true) => read_at + poll_interval,
                (_, false) => read_at + SLOW_AFTER,
            };
            self.land(&mut flight, &mut held, &sent, until).await?;
            let is_purged = self.purge_if_due(&mut purge_at).await;
            if is_idle && is_purged {
                pause(ended, poll_interval.saturating_sub(read_at.elapsed())).await;
            }
        }
        // Every message in flight gets its outcome. The stop deadline ends this wait as well.
        while !flight.is_empty() {
            self.land(&mut flight, &mut held, &sent, Instant::now() + SLOW_AFTER)
                .await?;
        }
        Ok(())
    }

    /// Waits for the messages in flight, up to `until`, and marks those that were sent.
    async fn land(
        &self,
        flight: &mut Flight<'_>,
        held: &mut HeldOrders,
        sent: &Mutex<Vec<i64>>,
        until: Instant,
    ) -> Result<(), StoreError> {
        loop {
            tokio::select! {
                biased;
                Some((order, outcome)) = flight.next() => {
                    let part = self.part(&order);
                    match outcome {
                        Ok(()) => held.succeeded(&order, part),
                        Err(failure) => {
                            held.failed((order, part), &failure, Instant::now(), fastrand::f64());
                        }
                    }
                }
                () = sleep_until(until), if !flight.is_empty() => break,
                else => break,
            }
        }
        self.mark(sent).await
    }

    fn part(&self, order: &OrderOf) -> Option<TopicPart> {
        self.relay.publisher.part(order.topic_name(), order.key())
    }

    /// Sends messages one after another, up to the first that is not confirmed.
    async fn send_in_order(
        &self,
        messages: Vec<UnsentMessage>,
        read_at: Instant,
        sent: &Mutex<Vec<i64>>,
        ended: &CancellationToken,
    ) -> Result<(), PublishError> {
        for UnsentMessage {
            sequence,
            message,
            age,
            fault,
        } in messages
        {
            // Another relay may lead by now, or this one stops.
            if ended.is_cancelled() {
                return Ok(());
            }
            // Other programs may write rows, too.
            let fault = fault.or_else(|| message.check().err().map(|error| error.to_string()));
            let published = match fault {
                Some(fault) => Err(PublishError::Refused(fault)),
                None => self.relay.publisher.publish(&message).await,
            };
            match published {
                Ok(()) => {
                    self.observe(Event::OutboxPublished {
                        age: age + read_at.elapsed(),
                    });
                    sent.lock().push(sequence);
                }
                Err(failure) => {
                    self.observe(Event::OutboxFailed {
                        class: failure.class(),
                    });
                    self.report(&message, &failure);
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    fn report(&self, message: &OutboxMessage, failure: &PublishError) {
        let outbox = self.relay.outbox.name();
        let id = message.message_id();
        let topic = message.topic();
        match failure {
            PublishError::Refused(why) => {
                error!(
                    outbox,
                    id, topic, why, "a message is refused; later ones with its key wait behind it"
                );
            }
            PublishError::TopicRefused(why) => {
                error!(
                    outbox,
                    id,
                    topic,
                    why,
                    "a topic is refused; its messages wait, and one is tried at a time"
                );
            }
            PublishError::Unconfirmed(why) => {
                warn!(
                    outbox,
                    id, topic, why, "a message was not confirmed; it is published again"
                );
            }
        }
    }

    /// Marks the confirmed messages, and repeats that until the database has the marks.
    async fn mark(&self, sent: &Mutex<Vec<i64>>) -> Result<(), StoreError> {
        let sequences = std::mem::take(&mut *sent.lock());
        if sequences.is_empty() {
            return Ok(());
        }
        let mut failures = 0;
        // The stop deadline ends this as well: then the next relay publishes them again.
        let never = CancellationToken::new();
        while let Err(error) = self.relay.outbox.mark_sent(sequences.clone()).await {
            self.wait_after(error, &mut failures, &never).await?;
        }
        Ok(())
    }

    /// Purges at `purge_at`, and sets the next time. Returns whether nothing more is to be removed
    /// now.
    async fn purge_if_due(&self, purge_at: &mut Instant) -> bool {
        if Instant::now() < *purge_at {
            return true;
        }
        let is_purged = self.purge().await;
        let rest = if is_purged {
            PURGE_EVERY
        } else {
            Duration::ZERO
        };
        *purge_at = Instant::now() + rest;
        is_purged
    }

    /// Removes messages that were sent long ago. Returns whether nothing more is to be removed now.
    async fn purge(&self) -> bool {
        let Relay {
            outbox, settings, ..
        } = &self.relay;
        let most = settings.batch.saturating_mul(PURGED_PER_SENT);
        match outbox.purge(settings.retention, most).await {
            Ok(count) => {
                if count > 0 {
                    debug!(outbox = outbox.name(), count, "sent messages were removed");
                    self.observe(Event::OutboxPurged { count });
                }
                count < u64::from(most)
            }
            Err(error) => {
                warn!(outbox = outbox.name(), %error, "sent messages were not removed; the next purge tries again");
                true
            }
        }
    }

    /// Waits after an error of the database. `failures` counts those in a row.
    ///
    /// # Errors
    /// The error, if waiting does not help.
    async fn wait_after(
        &self,
        error: StoreError,
        failures: &mut u32,
        ended: &CancellationToken,
    ) -> Result<(), StoreError> {
        self.observe(Event::OutboxFailed { class: "store" });
        if !error.is_away() {
            return Err(error);
        }
        if *failures == 0 {
            warn!(outbox = self.relay.outbox.name(), %error, "the outbox cannot be reached; the relay tries again");
        }
        *failures += 1;
        pause(ended, STORE_BACKOFF.wait(*failures, fastrand::f64())).await;
        Ok(())
    }

    fn observe(&self, event: Event<'_>) {
        if let Some(observer) = &self.relay.observer {
            observer.observe(event);
        }
    }
}

/// Waits for `time`, or until `ended`.
async fn pause(ended: &CancellationToken, time: Duration) {
    tokio::select! {
        biased;
        () = ended.cancelled() => {}
        () = sleep(time) => {}
    }
}
