//! The loop that publishes an outbox.
//!
//! # Not obvious
//!
//! Implementation notes: facts that this code depends on.
//!
//! - Order does not depend on the leader's lease. A relay sends a message only after the broker has confirmed the one
//!   before it with the same key, so the first copies are in order even while two relays send the same rows. The lease
//!   keeps them from sending everything twice.
//! - Sequences are given before a commit, so a row with a smaller one may become visible later than others. The relay
//!   reads what is not marked, and not what follows a position.
//! - A producer may deliver a message that it has reported as failed, or fail one and deliver the next. Waiting for each
//!   confirmation is what makes a gap impossible.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join;
use futures_util::stream::FuturesUnordered;
use oncegate_core::record::Token;
use oncegate_core::store::StoreError;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};

use super::held_back::{HeldOrders, OrderOf};
use super::{OutboxStore, PublishError, Publisher, ReadLimits, UnsentMessage};
use crate::backoff::Backoff;
use crate::failure::BoxError;
use crate::observe::{Event, Observer};

/// The pauses after errors of the database.
const STORE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// Of a lease, the part between two renewals.
const RENEWALS_PER_LEASE: u32 = 3;

/// The longest time between a confirmation and the mark of its message.
const MARK_WITHIN: Duration = Duration::from_secs(1);

/// The time between two purges when the last one has found little.
const PURGE_EVERY: Duration = Duration::from_secs(10);

/// How long the last call of a relay may take.
const RESIGN_LIMIT: Duration = Duration::from_secs(1);

/// A purge removes up to this many messages for each one of a batch, so that it keeps up with what is sent.
const PURGED_PER_SENT: u32 = 2;

/// Publishes an outbox: reads what was committed, sends it, and marks what the broker has confirmed.
///
/// Any number of relays may run for one outbox. One of them leads, by a lease in the database; when it ends, another
/// takes over, at the latest when the lease is over.
///
/// ```no_run
/// # #[cfg(all(feature = "kafka", feature = "postgres"))]
/// # async fn example() -> Result<(), oncegate::BoxError> {
/// use oncegate::kafka::KafkaPublisher;
/// use oncegate::outbox::Relay;
/// use oncegate::postgres::PostgresStore;
/// use oncegate::shutdown_signal;
///
/// let outbox = PostgresStore::connect("postgres://localhost/shop").await?.outbox("shop")?;
/// Relay::new(outbox, KafkaPublisher::new("localhost:9092")).run_until(shutdown_signal()).await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing happens before run_until()"]
pub struct Relay {
    outbox: Arc<dyn OutboxStore>,
    publisher: Arc<dyn Publisher>,
    observer: Option<Arc<dyn Observer>>,
    limits: ReadLimits,
    poll_interval: Duration,
    lease: Duration,
    retention: Duration,
    stop_deadline: Duration,
}

/// Why a relay has ended by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RelayError {
    /// The publisher's settings are wrong; the error names what to change.
    #[error("the publisher of outbox {outbox} cannot be opened: {error}")]
    Publisher {
        /// The outbox.
        outbox: String,
        /// What to change.
        error: BoxError,
    },
    /// The database refuses until something is changed there.
    #[error("outbox {outbox}: {error}")]
    Store {
        /// The outbox.
        outbox: String,
        /// What to change.
        #[source]
        error: StoreError,
    },
}

impl Relay {
    /// 500 messages.
    pub const DEFAULT_BATCH: u32 = 500;
    /// 16 MiB.
    pub const DEFAULT_BATCH_BYTES: u64 = 16 * 1024 * 1024;
    /// 100 ms.
    pub const DEFAULT_POLL_INTERVAL: Duration = Duration::from_millis(100);
    /// 10 s.
    pub const DEFAULT_LEASE: Duration = Duration::from_secs(10);
    /// One day.
    pub const DEFAULT_RETENTION: Duration = Duration::from_secs(86_400);
    /// 10 s.
    pub const DEFAULT_STOP_DEADLINE: Duration = Duration::from_secs(10);

    /// Creates a relay from an outbox to a broker.
    pub fn new(outbox: impl OutboxStore + 'static, publisher: impl Publisher + 'static) -> Self {
        Self {
            outbox: Arc::new(outbox),
            publisher: Arc::new(publisher),
            observer: None,
            limits: ReadLimits { messages: Self::DEFAULT_BATCH, bytes: Self::DEFAULT_BATCH_BYTES },
            poll_interval: Self::DEFAULT_POLL_INTERVAL,
            lease: Self::DEFAULT_LEASE,
            retention: Self::DEFAULT_RETENTION,
            stop_deadline: Self::DEFAULT_STOP_DEADLINE,
        }
    }

    /// The most messages that are read and in flight at a time: 500 by default.
    pub fn batch(mut self, messages: u32) -> Self {
        self.limits.messages = messages.max(1);
        self
    }

    /// The most bytes of their payloads: 16 MiB by default. A larger message is sent alone.
    pub fn batch_bytes(mut self, bytes: u64) -> Self {
        self.limits.bytes = bytes;
        self
    }

    /// How long the relay waits before it reads an empty outbox again: 100 ms by default.
    pub fn poll_interval(self, poll_interval: Duration) -> Self {
        Self { poll_interval, ..self }
    }

    /// How long another relay waits after the leader was killed: 10 s by default. The leader renews it three times in
    /// that time.
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease, ..self }
    }

    /// How long sent messages are kept in the table, to look at: one day by default. They are removed in small steps.
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention, ..self }
    }

    /// How long messages in flight may be waited for after a stop: 10 s by default. Those that are not confirmed by then
    /// are published again by the next relay.
    pub fn stop_deadline(self, stop_deadline: Duration) -> Self {
        Self { stop_deadline, ..self }
    }

    /// The observer that gets the events. Default: none.
    pub fn observer(self, observer: Arc<dyn Observer>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Publishes until `stop` resolves. Then it sends nothing more, waits for what is in flight, and gives the lead away.
    ///
    /// A database or broker that is away is waited for. A message that the broker refuses, for example because it is too
    /// large, is logged as an error and tried again, at last every 30 s; the later messages with its key wait behind it,
    /// and all others go on. If this future is **dropped**, or the process ends, another relay takes over when the lease
    /// is over, and publishes again what was not marked.
    ///
    /// # Errors
    /// When a setting or a right must be changed.
    pub async fn run_until(self, stop: impl Future<Output = ()> + Send) -> Result<(), RelayError> {
        let stopping = CancellationToken::new();
        let (stop_deadline, outbox) = (self.stop_deadline, Arc::clone(&self.outbox));
        let token = Token::from_bits(rand::random());
        let leader = Leader { relay: self, token, stopping: stopping.clone() };
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

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Relay")
            .field("outbox", &self.outbox)
            .field("publisher", &self.publisher)
            .field("limits", &self.limits)
            .field("lease", &self.lease)
            .field("retention", &self.retention)
            .finish_non_exhaustive()
    }
}

/// A running relay, which leads or waits for the lead.
struct Leader {
    relay: Relay,
    token: Token,
    stopping: CancellationToken,
}

impl Leader {
    async fn work(&self) -> Result<(), RelayError> {
        let name = || self.relay.outbox.name().to_owned();
        let opened = self.relay.publisher.open().await;
        opened.map_err(|error| RelayError::Publisher { outbox: name(), error })?;
        self.lead_in_turns().await.map_err(|error| RelayError::Store { outbox: name(), error })
    }

    async fn lead_in_turns(&self) -> Result<(), StoreError> {
        let outbox = &self.relay.outbox;
        let (mut failures, mut is_checked) = (0, false);
        while !self.stopping.is_cancelled() {
            let asked = async {
                if !is_checked {
                    outbox.check().await?;
                }
                outbox.lead(self.token, self.relay.lease).await
            };
            match asked.await {
                Ok(leads) => {
                    (failures, is_checked) = (0, true);
                    if leads {
                        self.lead().await?;
                    } else {
                        // Jitter, so that relays that started together do not ask together.
                        let wait =
                            (self.relay.lease / RENEWALS_PER_LEASE).mul_f64(1.0 - fastrand::f64() / 2.0);
                        pause(&self.stopping, wait).await;
                    }
                }
                Err(error) => self.wait_after(error, &mut failures, &self.stopping).await?,
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

    /// Renews the lease until `ended`, which it cancels when the lead is lost. Returns whether it is lost.
    async fn renew_until(&self, ended: &CancellationToken) -> bool {
        let lease = self.relay.lease;
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
                Ok(Err(_)) | Err(_) => renewed_at.elapsed() > lease,
            };
            if is_lost {
                ended.cancel();
                return true;
            }
        }
    }

    /// Reads and sends batch by batch.
    async fn publish_until(&self, ended: &CancellationToken) -> Result<(), StoreError> {
        let Relay { outbox, limits, poll_interval, .. } = &self.relay;
        let mut held = HeldOrders::default();
        let (mut failures, mut purge_at) = (0, Instant::now());
        while !ended.is_cancelled() {
            let now = Instant::now();
            if let Some(free_at) = held.full_until(now) {
                pause(ended, free_at - now).await;
                continue;
            }
            let batch = match outbox.read(&held.at(now), *limits).await {
                Ok(batch) => batch,
                Err(error) => {
                    self.wait_after(error, &mut failures, ended).await?;
                    continue;
                }
            };
            failures = 0;
            let is_idle = batch.is_empty();
            self.send(batch, &mut held, ended).await?;
            let mut is_purged = true;
            if purge_at <= Instant::now() {
                is_purged = self.purge().await;
                purge_at = Instant::now() + if is_purged { PURGE_EVERY } else { Duration::ZERO };
            }
            if is_idle && is_purged {
                pause(ended, *poll_interval).await;
            }
        }
        Ok(())
    }

    /// Sends a batch: of each order one message at a time, of different orders all at once.
    async fn send(
        &self,
        batch: Vec<UnsentMessage>,
        held: &mut HeldOrders,
        ended: &CancellationToken,
    ) -> Result<(), StoreError> {
        let read_at = Instant::now();
        let sent = Mutex::new(Vec::new());
        let orders = in_orders(batch).into_iter();
        let mut sending: FuturesUnordered<_> = orders
            .map(|(order, messages)| {
                let sent = &sent;
                async move { (order, self.send_in_order(messages, read_at, sent, ended).await) }
            })
            .collect();
        let mut mark_at = Instant::now() + MARK_WITHIN;
        loop {
            tokio::select! {
                biased;
                Some((order, outcome)) = sending.next() => match outcome {
                    Ok(()) => held.succeeded(&order),
                    Err(()) => held.failed(order, Instant::now(), fastrand::f64()),
                },
                () = sleep_until(mark_at), if !sending.is_empty() => {
                    self.mark(&sent).await?;
                    mark_at = Instant::now() + MARK_WITHIN;
                }
                else => break,
            }
        }
        drop(sending);
        self.mark(&sent).await
    }

    /// Sends messages one after another, up to the first that is not confirmed.
    async fn send_in_order(
        &self,
        messages: Vec<UnsentMessage>,
        read_at: Instant,
        sent: &Mutex<Vec<i64>>,
        ended: &CancellationToken,
    ) -> Result<(), ()> {
        for UnsentMessage { sequence, message, age } in messages {
            // Another relay may lead by now, or this one stops.
            if ended.is_cancelled() {
                return Ok(());
            }
            match self.relay.publisher.publish(&message).await {
                Ok(()) => {
                    self.observe(Event::OutboxPublished { age: age + read_at.elapsed() });
                    sent.lock().unwrap_or_else(PoisonError::into_inner).push(sequence);
                }
                Err(failure) => {
                    self.observe(Event::OutboxFailed { class: failure.class() });
                    let (outbox, id, topic) =
                        (self.relay.outbox.name(), message.message_id(), message.topic());
                    match failure {
                        PublishError::Refused(why) => {
                            error!(
                                outbox,
                                id,
                                topic,
                                why,
                                "a message is refused; later ones with its key wait behind it"
                            );
                        }
                        PublishError::Unconfirmed(why) => {
                            warn!(
                                outbox,
                                id, topic, why, "a message was not confirmed; it is published again"
                            );
                        }
                    }
                    return Err(());
                }
            }
        }
        Ok(())
    }

    /// Marks what was confirmed, and repeats that until the database has it.
    async fn mark(&self, sent: &Mutex<Vec<i64>>) -> Result<(), StoreError> {
        let sequences = std::mem::take(&mut *sent.lock().unwrap_or_else(PoisonError::into_inner));
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

    /// Removes what was sent long ago. Returns whether nothing more is to be removed now.
    async fn purge(&self) -> bool {
        let Relay { outbox, limits, retention, .. } = &self.relay;
        let most = limits.messages.saturating_mul(PURGED_PER_SENT);
        match outbox.purge(*retention, most).await {
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

/// The messages by their orders, each in the order of the batch; the order with the oldest message first.
fn in_orders(batch: Vec<UnsentMessage>) -> Vec<(OrderOf, Vec<UnsentMessage>)> {
    let mut orders: Vec<(OrderOf, Vec<UnsentMessage>)> = Vec::new();
    let mut places = std::collections::HashMap::new();
    for unsent in batch {
        let order = OrderOf::of(&unsent);
        let place = *places.entry(order.clone()).or_insert(orders.len());
        match orders.get_mut(place) {
            Some((_, messages)) => messages.push(unsent),
            None => orders.push((order, vec![unsent])),
        }
    }
    orders
}

/// Waits for `time`, or until `ended`.
async fn pause(ended: &CancellationToken, time: Duration) {
    tokio::select! {
        biased;
        () = ended.cancelled() => {}
        () = sleep(time) => {}
    }
}
