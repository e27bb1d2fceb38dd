//! A source of given messages, which remembers what was acknowledged, and dead letters in memory.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::health::SourceStatus;
use oncegate::observe::Observer;
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use oncegate::{BoxError, Message, Origin};
use tokio::sync::{Notify, watch};

/// Delivers its messages once, in order, and then waits for more.
#[derive(Debug)]
pub(crate) struct List {
    waiting: Mutex<VecDeque<Message>>,
    pushed: Notify,
    next_offset: AtomicI64,
    /// The offsets that were acknowledged, in that order.
    acked: watch::Sender<Vec<i64>>,
    /// The offsets that were taken away from the consumer.
    taken_away: watch::Sender<Vec<i64>>,
    /// What it reports as its status.
    pub(crate) status: Mutex<SourceStatus>,
}

impl List {
    /// Messages of `topic`, partition 0, with these payloads; the first field of a pair is the
    /// broker's key.
    pub(crate) fn of(
        topic: &str,
        messages: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Arc<Self> {
        let list = Self {
            waiting: Mutex::default(),
            pushed: Notify::new(),
            next_offset: AtomicI64::new(0),
            acked: watch::channel(Vec::new()).0,
            taken_away: watch::channel(Vec::new()).0,
            status: Mutex::default(),
        };
        for (key, payload) in messages {
            list.push(topic, key, payload);
        }
        Arc::new(list)
    }

    pub(crate) fn push(&self, topic: &str, key: &'static str, payload: String) {
        let message = Message::new(topic, self.next_origin(topic), Some(payload.into()));
        self.deliver(if key.is_empty() {
            message
        } else {
            message.with_key(key)
        });
    }

    /// Delivers a message that its broker has had since 1970: longer than any record is kept.
    #[allow(dead_code, reason = "for the tests of transactions")]
    pub(crate) fn push_old(&self, topic: &str, payload: String) {
        // Long ago: a timestamp of 0 is none.
        self.deliver(
            Message::new(topic, self.next_origin(topic), Some(payload.into())).with_timestamp_ms(1),
        );
    }

    /// Delivers a message once more.
    pub(crate) fn push_again(&self, message: &Message) {
        let again = Message::new(
            message.route(),
            self.next_origin("again"),
            message.payload_bytes(),
        );
        self.deliver(match message.dead_letter_of() {
            Some(scope) => again.with_dead_letter_of(scope),
            None => again,
        });
    }

    /// Takes a message away from the consumer, as a broker does that gives its partition to another
    /// one.
    pub(crate) fn take_away(&self, message: &Message) {
        let Origin::Kafka { offset, .. } = *message.origin() else {
            panic!("a list gives offsets")
        };
        self.taken_away
            .send_modify(|taken_away| taken_away.push(offset));
    }

    fn next_origin(&self, topic: &str) -> Origin {
        Origin::Kafka {
            topic: topic.into(),
            partition: 0,
            offset: self.next_offset.fetch_add(1, Relaxed),
        }
    }

    fn deliver(&self, message: Message) {
        self.waiting.lock().unwrap().push_back(message);
        self.pushed.notify_one();
    }

    pub(crate) fn acked(&self) -> Vec<i64> {
        self.acked.borrow().clone()
    }

    /// Waits until this many messages are acknowledged.
    pub(crate) async fn until_acked(&self, count: usize) {
        let mut acked = self.acked.subscribe();
        let limit = Duration::from_secs(3_600);
        let reached =
            tokio::time::timeout(limit, acked.wait_for(|acked| acked.len() >= count)).await;
        reached
            .unwrap_or_else(|_| panic!("only {:?} are acknowledged", self.acked()))
            .unwrap();
    }
}

/// What a consumer is given.
#[derive(Debug)]
pub(crate) struct Listed(pub(crate) Arc<List>);

#[async_trait]
impl Source for Listed {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let take = || -> Vec<Message> {
            let mut waiting = self.0.waiting.lock().unwrap();
            let count = most.min(waiting.len());
            waiting.drain(..count).collect()
        };
        let messages = loop {
            let pushed = self.0.pushed.notified();
            let messages = take();
            if !messages.is_empty() {
                break messages;
            }
            pushed.await;
        };
        let deliver = |message: Message| {
            let Origin::Kafka { offset, .. } = *message.origin() else {
                panic!("a list gives offsets")
            };
            Delivery {
                message,
                ack_handle: Arc::new(Receipt {
                    offset,
                    list: Arc::clone(&self.0),
                }),
            }
        };
        Ok(Some(messages.into_iter().map(deliver).collect()))
    }

    fn status(&self) -> SourceStatus {
        self.0.status.lock().unwrap().clone()
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

#[derive(Debug)]
struct Receipt {
    offset: i64,
    list: Arc<List>,
}

impl AckHandle for Receipt {
    fn start(&self) -> bool {
        self.is_ours()
    }

    fn is_ours(&self) -> bool {
        !self.list.taken_away.borrow().contains(&self.offset)
    }

    fn ack(&self) {
        self.list.acked.send_modify(|acked| acked.push(self.offset));
    }

    fn stop(&self) {}
}

/// Dead letters in memory: the cause and the reason of each.
#[derive(Debug, Default)]
pub(crate) struct Letters(Mutex<Vec<(&'static str, String)>>);

impl Letters {
    pub(crate) fn causes(&self) -> Vec<&'static str> {
        self.0
            .lock()
            .unwrap()
            .iter()
            .map(|(cause, _)| *cause)
            .collect()
    }

    pub(crate) fn reasons(&self) -> Vec<String> {
        self.0
            .lock()
            .unwrap()
            .iter()
            .map(|(_, reason)| reason.clone())
            .collect()
    }
}

#[async_trait]
impl DeadLetters for Letters {
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        self.0
            .lock()
            .unwrap()
            .push((letter.cause.as_str(), letter.reason.clone()));
        Ok(())
    }
}
