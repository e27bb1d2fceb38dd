//! A connection that consumes a queue, until it is lost or left.
//!
//! A lost connection is never repaired: a new session begins, with a new channel. So nothing of the
//! old one remains, such as a consumer that gets no messages.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, try_join_all};
use futures_util::stream::{BoxStream, FuturesUnordered, SelectAll, StreamExt as _, once};
use lapin::Channel;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use oncegate_runtime::message::Message;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::{info, warn};

use super::again::{self, BrokerLimits};
use super::connect::{
    BrokerConnection, CALL_LIMIT, call, channel, check_queue, close, close_channel, connect,
};
use super::convert::Reader;
use super::error::{AmqpError, Asked, CONSUMER_PRIORITY};
use super::headers::short;
use super::held::Settlement;
use super::hub::{Fetched, Hub};
use super::prefetch::{Prefetch, PrefetchChange};
use super::publisher::Publisher;
use super::settings::Settings;
use super::watch::Watch;

/// The interval at which the connection is looked at.
const TICK: Duration = Duration::from_secs(1);

/// A delivery of one of the channel's consumers; `None` when that has ended.
type Delivered = Option<lapin::Result<Delivery>>;

/// A message that was sent again, or could not be.
struct Renewed {
    fetched: Fetched,
    sent: Result<(), AmqpError>,
}

/// The consumers of a queue at the broker, on one channel.
pub(crate) struct Session {
    connection: BrokerConnection,
    channel: Channel,
    /// Deliveries of the consumers, in any order between them.
    delivered: SelectAll<BoxStream<'static, Delivered>>,
    /// The consumers' names at the broker, the first one first.
    tags: Vec<ShortString>,
    /// The number of consumers that were cancelled here, and whose end has not arrived.
    cancelled: usize,
    /// The prefetch that is missing, because the session began carefully.
    missing: Option<u16>,
    /// The number of consumers that stay while the prefetch is not larger than usual.
    usual: usize,
    prefetch: Prefetch,
    /// The messages that are sent again before they run.
    renewing: FuturesUnordered<BoxFuture<'static, Renewed>>,
    publisher: Arc<Publisher>,
    pub(crate) limits: BrokerLimits,
    settings: Settings,
    reader: Reader,
    /// Distinguishes this session's channel from every other.
    name: String,
}

impl Session {
    /// Connects, checks the queue, and begins to consume it.
    pub(crate) async fn open(
        settings: &Settings,
        reader: &Reader,
        publisher: &Arc<Publisher>,
        limits: BrokerLimits,
        prefetch: u16,
    ) -> Result<Self, AmqpError> {
        let queue = settings.queue.as_str();
        let connection =
            connect(&settings.connection, &format!("oncegate consumes {queue}")).await?;
        let opened = async {
            let channel = channel(&connection).await?;
            check_queue(&channel, queue).await?;
            let first = consume(&channel, settings, prefetch).await?;
            Ok((channel, first))
        };
        let (channel, first) = match opened.await {
            Ok(opened) => opened,
            Err(error) => {
                close(&connection).await;
                return Err(error);
            }
        };
        let name = format!("{:08x}", rand::random::<u32>());
        let mut session = Self {
            connection,
            channel,
            delivered: SelectAll::new(),
            tags: Vec::new(),
            cancelled: 0,
            missing: settings
                .prefetch()
                .checked_sub(prefetch)
                .filter(|more| *more > 0),
            usual: 1,
            prefetch: Prefetch::new(prefetch),
            renewing: FuturesUnordered::new(),
            publisher: Arc::clone(publisher),
            limits,
            settings: settings.clone(),
            reader: reader.clone(),
            name,
        };
        session.add(first);
        Ok(session)
    }

    /// Returns the first number of the broker's version.
    pub(crate) fn major_version(&self) -> Option<u32> {
        self.connection.seen.major_version()
    }

    /// Returns whether messages near the delivery limit are not sent again yet: the end of this
    /// session counts for them.
    pub(crate) fn is_renewing(&self) -> bool {
        !self.renewing.is_empty()
    }

    fn add(&mut self, consumer: lapin::Consumer) {
        self.tags.push(consumer.tag());
        let ended = once(std::future::ready(None));
        self.delivered.push(consumer.map(Some).chain(ended).boxed());
    }

    /// Receives and acknowledges until the source has left. The error says why the session is lost,
    /// or that the last acks may be.
    pub(crate) async fn serve(&mut self, hub: &Hub, watch: &mut Watch) -> Result<(), AmqpError> {
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        watch.begin();
        let mut is_consuming = true;
        loop {
            hub.turned();
            self.settle(hub).await?;
            let (ended, leave_by, is_settled) = {
                let state = hub.lock();
                (state.end.is_some(), state.leave_by, state.held.is_settled())
            };
            // The next consumer of an order begins when this one has closed its channel.
            if ended && is_consuming && !hub.in_order {
                is_consuming = false;
                self.stop_consuming(hub).await?;
                continue;
            }
            if leave_by.is_some_and(|by| is_settled || by <= Instant::now()) {
                return self.leave().await;
            }
            tokio::select! {
                biased;
                arrived = self.delivered.next(), if is_consuming => self.receive(hub, arrived)?,
                Some(renewed) = self.renewing.next(), if !self.renewing.is_empty() => Self::renewed(hub, renewed),
                () = hub.wake.notified() => {}
                _ = ticks.tick() => self.look(hub, watch, is_consuming).await?,
                () = sleep_until(leave_by.unwrap_or_else(Instant::now)), if leave_by.is_some() => {}
            }
        }
    }

    /// Passes on this delivery and all that are here.
    fn receive(&mut self, hub: &Hub, first: Option<Delivered>) -> Result<(), AmqpError> {
        let mut messages = Vec::new();
        let mut next = Some(first);
        while let Some(arrived) = next {
            match arrived {
                Some(Some(Ok(delivery))) => messages.extend(self.read(hub, delivery)),
                Some(Some(Err(error))) => {
                    return Err(AmqpError::of(Asked::Messages(&self.reader.queue), &error));
                }
                Some(None) if self.cancelled > 0 => self.cancelled -= 1,
                Some(None) | None => return Err(AmqpError::cancelled()),
            }
            next = self.delivered.next().now_or_never();
        }
        if !messages.is_empty() {
            hub.put(messages);
        }
        Ok(())
    }

    /// Reads a delivery. `None` if its queue is about to drop it: then it is sent again before it
    /// runs, because its run might end this process, with all that was delivered beside it.
    fn read(&mut self, hub: &Hub, delivery: Delivery) -> Option<(u64, Message)> {
        let tag = delivery.delivery_tag;
        let unreadable = self.connection.seen.take(self.channel.id(), tag);
        let returns = again::returns(&delivery.properties);
        let is_near = !self.settings.looks && self.limits.is_near(returns);
        let copy = (is_near && unreadable.is_none())
            .then(|| again::copy(&delivery, &self.settings.queue, self.reader.user.as_deref()))
            .flatten();
        let message = self.reader.read(delivery, unreadable, &self.name);
        let Some(copy) = copy else {
            if is_near {
                let origin = message.origin();
                warn!(%origin, returns, "the queue drops this message when it comes back too often, and no copy would be the same; it runs as it is");
            }
            return Some((tag, message));
        };
        let epoch = hub.hold(tag);
        let fetched = Fetched {
            message,
            epoch,
            tag,
        };
        let publisher = Arc::clone(&self.publisher);
        let queue = self.settings.queue.clone();
        let renewed = async move {
            let sent = publisher.publish_again(&queue, copy).await;
            Renewed { fetched, sent }
        };
        self.renewing.push(renewed.boxed());
        None
    }

    /// Acknowledges a message whose copy is in the queue, or passes it on.
    fn renewed(hub: &Hub, renewed: Renewed) {
        let Renewed { fetched, sent } = renewed;
        let origin = fetched.message.origin();
        match sent {
            Ok(()) => {
                info!(%origin, "the message came back so often that its queue would soon drop it; it was sent to the queue again");
                hub.ack(fetched.epoch, fetched.tag);
            }
            Err(error) => {
                warn!(%origin, %error, "the queue may drop this message, because it came back too often, and it could not be sent again; it runs as it is");
                hub.pass_on(fetched);
            }
        }
    }

    /// Sends the acks and returns that are due.
    async fn settle(&mut self, hub: &Hub) -> Result<(), AmqpError> {
        let (returns, acks) = hub.lock().held.take();
        for settlements in [returns, acks] {
            if !settlements.is_empty() {
                let sent = settlements
                    .into_iter()
                    .map(|settlement| send(&self.channel, settlement));
                call(Asked::Messages(&self.reader.queue), try_join_all(sent)).await?;
            }
        }
        Ok(())
    }

    /// Ends the consumers at the broker. What they have delivered meanwhile returns to the queue.
    async fn stop_consuming(&mut self, hub: &Hub) -> Result<(), AmqpError> {
        for tag in std::mem::take(&mut self.tags) {
            self.cancel(tag).await?;
        }
        let mut late = Vec::new();
        while let Some(Some(arrived)) = self.delivered.next().now_or_never() {
            if let Some(Ok(delivery)) = arrived {
                late.extend(self.read(hub, delivery));
            }
        }
        if !late.is_empty() {
            hub.put(late);
        }
        Ok(())
    }

    async fn cancel(&mut self, tag: ShortString) -> Result<(), AmqpError> {
        let asked = Asked::Messages(&self.settings.queue);
        let cancelled = self
            .channel
            .basic_cancel(tag, BasicCancelOptions::default());
        self.cancelled += 1;
        call(asked, cancelled).await
    }

    /// Returns what is not acknowledged, and closes the channel. Its answer comes after the broker
    /// has read every ack.
    pub(crate) async fn leave(&mut self) -> Result<(), AmqpError> {
        // From RabbitMQ 4.3 on, a close counts as a failure of each message, and a return does not.
        // In an order, the next consumer must not begin before this one has returned its message.
        if !self.settings.source.in_order || self.settings.looks {
            for tag in std::mem::take(&mut self.tags) {
                self.cancel(tag).await?;
            }
            let asked = Asked::Messages(&self.settings.queue);
            call(asked, return_message(&self.channel, EVERYTHING, ALL_UP_TO)).await?;
        }
        // A quorum queue takes a few settlements at once, and forgets the rest with its channel: a
        // question gives it the time to take them.
        check_queue(&self.channel, &self.settings.queue).await?;
        if !close_channel(&self.channel, CALL_LIMIT).await {
            return Err(AmqpError::away("the broker did not confirm the last acks"));
        }
        close(&self.connection).await;
        Ok(())
    }

    /// Looks at the connection, at what is held, and at a queue that delivers nothing.
    async fn look(
        &mut self,
        hub: &Hub,
        watch: &mut Watch,
        is_consuming: bool,
    ) -> Result<(), AmqpError> {
        if !self.connection.status().connected() || !self.channel.status().connected() {
            return Err(AmqpError::away("the connection to the broker is lost"));
        }
        let received = self.connection.seen.received();
        hub.received.store(received, Relaxed);
        if self.settings.looks || !is_consuming {
            return self.watch(hub, watch).await;
        }
        let old = hub.give_back_old(self.limits.hold_most());
        if old > 0 {
            info!(queue = self.settings.queue, messages = old, hold_most = ?self.limits.hold_most(), "messages that wait or run for long went back to the queue, before the broker's `consumer_timeout`; what runs goes on");
        }
        if let Some(more) = self.missing.take_if(|_| self.renewing.is_empty()) {
            let consumer = consume(&self.channel, &self.settings, more).await?;
            self.add(consumer);
            self.usual = self.tags.len();
            self.prefetch.widened(more);
        }
        let load = hub.load();
        if !hub.in_order {
            let waiting = load.waiting.saturating_sub(self.renewing.len());
            match self.prefetch.change(waiting, load.arrived) {
                PrefetchChange::None => {}
                PrefetchChange::Grow(more) => {
                    info!(
                        queue = self.settings.queue,
                        waiting,
                        more,
                        "the prefetch is full of messages that wait: the broker delivers more"
                    );
                    let consumer = consume(&self.channel, &self.settings, more).await?;
                    self.add(consumer);
                    self.prefetch.grown(more);
                }
                PrefetchChange::Shrink => {
                    for tag in self.tags.split_off(self.usual) {
                        self.cancel(tag).await?;
                    }
                    self.prefetch.shrunk();
                }
            }
        }
        self.watch(hub, watch).await
    }

    /// Looks whether a queue that delivers nothing has messages.
    async fn watch(&mut self, hub: &Hub, watch: &mut Watch) -> Result<(), AmqpError> {
        let load = hub.load();
        let is_full = !hub.in_order && load.waiting > 0 && load.waiting == load.in_hand;
        let in_hand = if is_full { 0 } else { load.in_hand };
        if !watch.is_due(in_hand, load.delivered_at) {
            return Ok(());
        }
        let messages = check_queue(&self.channel, &self.reader.queue).await?;
        if is_full {
            if messages > 0 {
                hub.stalled(&format!(
                    "the queue has {messages} messages, and the broker delivers none of them: all {} that it has delivered \
                 wait for a retry, a lease or a time that a handler has named; raise `prefetch`, or the consumer's limit \
                 of messages in flight",
                    load.waiting
                ));
            }
            return Ok(());
        }
        if watch.is_silent(messages) {
            return Err(AmqpError::away(format!(
                "the queue has {messages} messages and delivers none to this consumer: it is consumed anew. That is no \
                 fault while another consumer is the single active one, or has a higher priority"
            )));
        }
        Ok(())
    }
}

/// Begins to consume the queue by one more consumer of the channel.
async fn consume(
    channel: &Channel,
    settings: &Settings,
    prefetch: u16,
) -> Result<lapin::Consumer, AmqpError> {
    let asked = Asked::Messages(&settings.queue);
    // For the consumers that come after it.
    call(
        asked,
        channel.basic_qos(prefetch, BasicQosOptions::default()),
    )
    .await?;
    let Some(queue) = short(&settings.queue) else {
        return Err(AmqpError::new("the name is too long"));
    };
    let mut arguments = FieldTable::default();
    // Always there, because a stream refuses it: a stream delivers acknowledged messages again.
    arguments.insert(
        CONSUMER_PRIORITY.into(),
        AMQPValue::LongInt(settings.source.priority),
    );
    let options = BasicConsumeOptions::default();
    let consumer = channel.basic_consume(queue, "".into(), options, arguments);
    call(asked, consumer).await
}

/// The tag that stands for all deliveries.
const EVERYTHING: u64 = 0;
/// A return of all deliveries up to one, or of this one.
const ALL_UP_TO: bool = true;
const THIS_ONE: bool = false;

async fn return_message(channel: &Channel, tag: u64, multiple: bool) -> lapin::Result<()> {
    let options = BasicNackOptions {
        multiple,
        requeue: true,
    };
    channel.basic_nack(tag, options).await
}

async fn send(channel: &Channel, settlement: Settlement) -> lapin::Result<()> {
    match settlement {
        Settlement::Return(tag) => return_message(channel, tag, THIS_ONE).await,
        Settlement::Ack(tag) => {
            channel
                .basic_ack(tag, BasicAckOptions { multiple: false })
                .await
        }
        Settlement::AckUpTo(tag) => {
            channel
                .basic_ack(tag, BasicAckOptions { multiple: true })
                .await
        }
    }
}
