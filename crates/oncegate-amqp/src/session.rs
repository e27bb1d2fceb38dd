//! A connection that consumes a queue, until it is lost or left.
//!
//! A lost connection is never repaired: a new session begins, with a new channel. So nothing of the
//! old one remains, such as a consumer that gets no messages.

use std::time::Duration;

use futures_util::future::{FutureExt as _, try_join_all};
use futures_util::stream::StreamExt as _;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Consumer};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::connect::{CALL_LIMIT, call, channel, check_queue, close, close_channel, connect};
use super::convert::Reader;
use super::error::{AmqpError, Asked, CONSUMER_PRIORITY};
use super::headers::short;
use super::held::Settlement;
use super::hub::Hub;
use super::settings::Settings;
use super::watch::Watch;

/// The interval at which the connection is looked at.
const TICK: Duration = Duration::from_secs(1);

/// A consumer of a queue at the broker.
pub(crate) struct Session {
    connection: lapin::Connection,
    channel: Channel,
    consumer: Consumer,
    reader: Reader,
    /// Distinguishes this session's channel from every other.
    name: String,
}

impl Session {
    /// Connects, checks the queue, and begins to consume it.
    pub(crate) async fn open(settings: &Settings, reader: &Reader) -> Result<Self, AmqpError> {
        let queue = settings.queue.as_str();
        let connection =
            connect(&settings.connection, &format!("oncegate consumes {queue}")).await?;
        let opened = Self::consume(&connection, settings).await;
        let (channel, consumer) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                close(&connection).await;
                return Err(error);
            }
        };
        let name = format!("{:08x}", rand::random::<u32>());
        Ok(Self {
            connection,
            channel,
            consumer,
            reader: reader.clone(),
            name,
        })
    }

    async fn consume(
        connection: &lapin::Connection,
        settings: &Settings,
    ) -> Result<(Channel, Consumer), AmqpError> {
        let asked = Asked::Messages(&settings.queue);
        let channel = channel(connection).await?;
        check_queue(&channel, &settings.queue).await?;
        call(
            asked,
            channel.basic_qos(settings.source.prefetch, BasicQosOptions::default()),
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
        let consumer = call(
            asked,
            channel.basic_consume(queue, "".into(), options, arguments),
        )
        .await?;
        Ok((channel, consumer))
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
                arrived = self.consumer.next(), if is_consuming => self.receive(hub, arrived)?,
                () = hub.wake.notified() => {}
                _ = ticks.tick() => self.look(hub, watch).await?,
                () = sleep_until(leave_by.unwrap_or_else(Instant::now)), if leave_by.is_some() => {}
            }
        }
    }

    /// Passes on this delivery and all that are here.
    fn receive(
        &mut self,
        hub: &Hub,
        first: Option<lapin::Result<Delivery>>,
    ) -> Result<(), AmqpError> {
        let mut messages = Vec::new();
        let mut next = Some(first);
        while let Some(arrived) = next {
            match arrived {
                Some(Ok(delivery)) => {
                    messages.push((
                        delivery.delivery_tag,
                        self.reader.read(delivery, &self.name),
                    ));
                }
                Some(Err(error)) => {
                    return Err(AmqpError::of(Asked::Messages(&self.reader.queue), &error));
                }
                None => {
                    return Err(AmqpError::away(
                        "the broker has cancelled the consumer: the queue was deleted, its node has stopped, or (a quorum queue \
                         of RabbitMQ 4.3) a message was not acknowledged within its `consumer_timeout`; then set that in \
                         rabbitmq.conf above the longest time that a message runs and waits for its retries",
                    ));
                }
            }
            next = self.consumer.next().now_or_never();
        }
        hub.put(messages);
        Ok(())
    }

    /// Sends the acks and returns that are due.
    async fn settle(&self, hub: &Hub) -> Result<(), AmqpError> {
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

    /// Ends the consumer at the broker. What it has delivered meanwhile returns to the queue.
    async fn stop_consuming(&mut self, hub: &Hub) -> Result<(), AmqpError> {
        let tag = self.consumer.tag();
        let asked = Asked::Messages(&self.reader.queue);
        call(
            asked,
            self.channel
                .basic_cancel(tag, BasicCancelOptions::default()),
        )
        .await?;
        let mut late = Vec::new();
        while let Some(Some(Ok(delivery))) = self.consumer.next().now_or_never() {
            late.push((
                delivery.delivery_tag,
                self.reader.read(delivery, &self.name),
            ));
        }
        if !late.is_empty() {
            hub.put(late);
        }
        Ok(())
    }

    /// Closes the channel. Its answer comes after the broker has read every ack.
    pub(crate) async fn leave(&self) -> Result<(), AmqpError> {
        if !close_channel(&self.channel, CALL_LIMIT).await {
            return Err(AmqpError::away("the broker did not confirm the last acks"));
        }
        close(&self.connection).await;
        Ok(())
    }

    /// Looks whether the connection lives, and whether a queue that delivers nothing has messages.
    async fn look(&self, hub: &Hub, watch: &mut Watch) -> Result<(), AmqpError> {
        if !self.connection.status().connected() || !self.channel.status().connected() {
            return Err(AmqpError::away("the connection to the broker is lost"));
        }
        let (in_hand, delivered_at) = {
            let state = hub.lock();
            (state.held.in_hand(), state.delivered_at)
        };
        if !watch.is_due(in_hand, delivered_at) {
            return Ok(());
        }
        let messages = check_queue(&self.channel, &self.reader.queue).await?;
        if watch.is_silent(messages) {
            return Err(AmqpError::away(format!(
                "the queue has {messages} messages and delivers none to this consumer: it is consumed anew. That is no \
                 fault while another consumer is the single active one, or has a higher priority"
            )));
        }
        Ok(())
    }
}

async fn send(channel: &Channel, settlement: Settlement) -> lapin::Result<()> {
    match settlement {
        Settlement::Return(tag) => {
            channel
                .basic_nack(
                    tag,
                    BasicNackOptions {
                        multiple: false,
                        requeue: true,
                    },
                )
                .await
        }
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
