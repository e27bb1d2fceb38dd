//! A topic of a real broker, as the group of a round.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
use futures_util::stream::FuturesUnordered;
use oncegate_runtime::source::{AckHandle, Delivery, Source, SourceError, SourceWrapper};
use oncegate_runtime::{BoxError, Message};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, mpsc};

use super::group::Group;
use crate::broker::Topic;
use crate::history::{Recorder, What};

/// The messages of a round in a topic, and which of them are acknowledged.
///
/// What is delivered again is sent again, because the position of a group that has members cannot
/// be changed.
pub(crate) struct RemoteGroup {
    topic: Arc<dyn Topic>,
    messages: Vec<(usize, Message)>,
    partitions: usize,
    state: Mutex<TopicState>,
    moved: Notify,
    actions: mpsc::UnboundedSender<Action>,
    waiting: tokio::sync::Mutex<mpsc::UnboundedReceiver<Action>>,
    recorder: Arc<Recorder>,
}

#[derive(Default)]
struct TopicState {
    /// The number of times that each message is sent, by its number.
    sent: Vec<usize>,
    /// The places in the topic that are acknowledged, by the number of the message.
    acked: BTreeMap<usize, BTreeSet<String>>,
    /// The messages that each process has received and not acknowledged.
    held: BTreeMap<u32, BTreeSet<usize>>,
}

/// An action of the topic.
enum Action {
    /// Messages with the partitions to which they are sent.
    Send(Vec<(usize, usize)>),
    Rebalance,
}

impl RemoteGroup {
    /// `messages` has each message with its partition.
    pub(crate) fn new(
        topic: Arc<dyn Topic>,
        messages: Vec<(usize, Message)>,
        partitions: usize,
        recorder: Arc<Recorder>,
    ) -> Arc<Self> {
        let (actions, waiting) = mpsc::unbounded_channel();
        let group = Self {
            topic,
            state: Mutex::new(TopicState {
                sent: vec![0; messages.len()],
                ..TopicState::default()
            }),
            messages,
            partitions,
            moved: Notify::new(),
            actions,
            waiting: tokio::sync::Mutex::new(waiting),
            recorder,
        };
        group.send(0..group.messages.len(), 0);
        Arc::new(group)
    }

    /// Sends messages, each to the partition that is as many places after its own.
    fn send(&self, numbers: impl IntoIterator<Item = usize>, places: usize) {
        let mut sending = Vec::new();
        {
            let mut state = self.state();
            for number in numbers {
                let (Some((partition, _)), Some(sent)) =
                    (self.messages.get(number), state.sent.get_mut(number))
                else {
                    continue;
                };
                *sent += 1;
                sending.push((
                    (partition + places)
                        .checked_rem(self.partitions)
                        .unwrap_or_default(),
                    number,
                ));
            }
        }
        self.act(Action::Send(sending));
    }

    fn act(&self, action: Action) {
        // The receiver lives as long as the group.
        drop(self.actions.send(action));
    }

    async fn acted(&self, action: Action) -> Result<(), BoxError> {
        match action {
            Action::Rebalance => self.topic.rebalance().await,
            Action::Send(sending) => {
                let sent = sending.into_iter().filter_map(|(partition, number)| {
                    let (_, message) = self.messages.get(number)?;
                    Some(self.topic.send(partition, number, message))
                });
                try_join_all(sent).await.map(drop)
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, TopicState> {
        self.state.lock()
    }
}

#[async_trait]
impl Group for RemoteGroup {
    async fn drive(&self) -> BoxError {
        let mut waiting = self.waiting.lock().await;
        let mut acting = FuturesUnordered::new();
        loop {
            tokio::select! {
                Some(action) = waiting.recv() => acting.push(self.acted(action)),
                Some(acted) = acting.next() => if let Err(error) = acted { return error },
            }
        }
    }

    fn member(self: Arc<Self>, process: u32) -> Arc<dyn Source> {
        Arc::new(RemoteMember {
            inner: self.topic.member(),
            process,
            group: self,
        })
    }

    /// The client of a process that stands still goes on, so its messages have come to others as
    /// copies.
    fn join(&self, _: u32) {}

    fn leave(&self, process: u32) {
        let held = self.state().held.remove(&process).unwrap_or_default();
        self.send(held, 1);
    }

    fn rotate(&self) {
        self.act(Action::Rebalance);
    }

    fn copy_to_others(&self, message: usize, _: u32) {
        self.send([message], 1);
    }

    fn rewind(&self) {
        self.send(0..self.messages.len(), 0);
    }

    fn unacked(&self) -> Vec<usize> {
        let state = self.state();
        let open = state.sent.iter().enumerate().filter(|(number, sent)| {
            let acked = state.acked.get(number).map_or(0, BTreeSet::len);
            acked < **sent
        });
        open.map(|(number, _)| number).collect()
    }

    fn moved(&self) -> Notified<'_> {
        self.moved.notified()
    }
}

/// A process's member of the group.
struct RemoteMember {
    inner: Arc<dyn Source>,
    process: u32,
    group: Arc<RemoteGroup>,
}

impl fmt::Debug for RemoteMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteMember({})", self.process)
    }
}

impl RemoteMember {
    /// Writes the delivery down, and the ack of it. `None` for a message that the round has not
    /// sent.
    fn noted(&self, delivery: Delivery) -> Option<Delivery> {
        let number = self.group.topic.number_of(&delivery.message)?;
        let (_, sent) = self.group.messages.get(number)?;
        self.group
            .state()
            .held
            .entry(self.process)
            .or_default()
            .insert(number);
        self.group
            .recorder
            .note(self.process, What::Delivered { message: number });
        let handle = RemoteHandle {
            number,
            place: delivery.message.origin().to_string(),
            process: self.process,
            inner: delivery.ack_handle,
            group: Arc::clone(&self.group),
        };
        // A worker that looks at the topic must see that of the samples.
        let message = Message::new(
            sent.route(),
            sent.origin().clone(),
            delivery.message.payload_bytes(),
        );
        Some(Delivery {
            message,
            ack_handle: Arc::new(handle),
        })
    }
}

#[async_trait]
impl SourceWrapper for RemoteMember {
    fn inner(&self) -> &dyn Source {
        &*self.inner
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        loop {
            let Some(received) = self.inner.receive(most).await? else {
                return Ok(None);
            };
            let noted: Vec<Delivery> = received
                .into_iter()
                .filter_map(|one| self.noted(one))
                .collect();
            if !noted.is_empty() {
                return Ok(Some(noted));
            }
        }
    }

    /// A broker that does not take the last acknowledgements in time delivers their messages again,
    /// which no handler is to blame for.
    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        drop(self.inner.close(deadline).await);
        Ok(())
    }
}

/// Acknowledges one delivery.
struct RemoteHandle {
    number: usize,
    /// The position of the message in the topic: copies of it are elsewhere.
    place: String,
    process: u32,
    inner: Arc<dyn AckHandle>,
    group: Arc<RemoteGroup>,
}

impl fmt::Debug for RemoteHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteHandle({})", self.number)
    }
}

impl AckHandle for RemoteHandle {
    fn start(&self) -> bool {
        self.inner.start()
    }

    fn is_ours(&self) -> bool {
        self.inner.is_ours()
    }

    fn order(&self) -> Option<u64> {
        self.inner.order()
    }

    fn ack(&self) {
        self.inner.ack();
        {
            let mut state = self.group.state();
            state
                .acked
                .entry(self.number)
                .or_default()
                .insert(self.place.clone());
            if let Some(held) = state.held.get_mut(&self.process) {
                held.remove(&self.number);
            }
        }
        // Whether the broker has it in time shows itself: if not, it delivers the message again.
        self.group.recorder.note(
            self.process,
            What::Acked {
                message: self.number,
                accepted: true,
            },
        );
        self.group.moved.notify_waiters();
    }

    fn stop(&self) {
        self.inner.stop();
    }

    fn nack_after(&self, delay: Duration) -> bool {
        self.inner.nack_after(delay)
    }
}

#[cfg(test)]
mod tests {
    use oncegate_runtime::observe::Observer;

    use super::*;

    /// A topic whose members cannot acknowledge what they have finished, because the broker is too
    /// busy.
    #[derive(Debug)]
    struct Busy;

    #[async_trait]
    impl Topic for Busy {
        async fn send(&self, _: usize, _: usize, _: &Message) -> Result<(), BoxError> {
            Ok(())
        }

        fn member(&self) -> Arc<dyn Source> {
            Arc::new(Self)
        }

        fn number_of(&self, _: &Message) -> Option<usize> {
            None
        }

        async fn rebalance(&self) -> Result<(), BoxError> {
            Ok(())
        }
    }

    #[async_trait]
    impl Source for Busy {
        async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
            Ok(())
        }

        async fn receive(&self, _: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
            Ok(None)
        }

        async fn close(&self, _: Duration) -> Result<(), SourceError> {
            Err(SourceError::new(
                "the broker did not answer a commit in time",
            ))
        }
    }

    #[tokio::test]
    async fn no_handler_is_blamed_for_a_broker_that_is_busy_at_the_end() {
        let group = RemoteGroup::new(Arc::new(Busy), Vec::new(), 1, Arc::new(Recorder::new()));
        group.member(1).close(Duration::ZERO).await.unwrap();
    }
}
