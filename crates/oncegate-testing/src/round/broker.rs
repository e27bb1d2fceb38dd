//! The embedded broker: partitions, dealt out to the members of a group, which deliver again what
//! was not acknowledged.
//!
//! Like Kafka it resumes a partition at its first message that is not acknowledged, so a member
//! that takes over also gets later ones that are; and an ack of a partition that was taken away has
//! no effect.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::{AckHandle, Delivery, Source, SourceError};
use oncegate_runtime::{BoxError, Message};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use super::group::Group;
use crate::history::{Recorder, What};

/// The most messages that a member gets at a time, so that it alternates between its partitions.
const MOST_AT_A_TIME: usize = 3;

pub(crate) struct EmbeddedBroker {
    state: Mutex<State>,
    moved: Notify,
    recorder: Arc<Recorder>,
}

struct State {
    messages: Vec<Message>,
    partitions: Vec<Partition>,
    acked: BTreeSet<usize>,
    members: BTreeSet<u32>,
    /// Copies for a second member, while the first one has the message.
    copies: BTreeMap<u32, VecDeque<usize>>,
    held_back: Option<HeldBack>,
    rng: Rng,
}

/// A message that comes again only after another one.
struct HeldBack {
    message: usize,
    /// The messages of which one must be acknowledged before it goes on.
    until: BTreeSet<usize>,
}

#[derive(Default)]
struct Partition {
    /// The messages, in order.
    log: Vec<usize>,
    owner: Option<u32>,
    /// The place of the next message.
    next: usize,
    /// Grows with each change of the owner.
    epoch: u64,
}

impl EmbeddedBroker {
    /// `messages` has each message with its partition.
    pub(crate) fn new(
        messages: Vec<(usize, Message)>,
        partitions: usize,
        rng: Rng,
        recorder: Arc<Recorder>,
    ) -> Arc<Self> {
        let mut logs: Vec<Partition> = Vec::new();
        logs.resize_with(partitions, Partition::default);
        for (number, (partition, _)) in messages.iter().enumerate() {
            if let Some(partition) = logs.get_mut(*partition) {
                partition.log.push(number);
            }
        }
        let state = State {
            messages: messages.into_iter().map(|(_, message)| message).collect(),
            partitions: logs,
            acked: BTreeSet::new(),
            members: BTreeSet::new(),
            copies: BTreeMap::new(),
            held_back: None,
            rng,
        };
        Arc::new(Self {
            state: Mutex::new(state),
            moved: Notify::new(),
            recorder,
        })
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.moved.notify_waiters();
    }

    /// A panic elsewhere does no harm: nothing in here can panic between two changes that belong
    /// together.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[async_trait]
impl Group for EmbeddedBroker {
    async fn drive(&self) -> BoxError {
        std::future::pending().await
    }

    fn member(self: Arc<Self>, process: u32) -> Arc<dyn Source> {
        Arc::new(Member {
            number: process,
            broker: self,
        })
    }

    fn join(&self, member: u32) {
        self.change(|state| {
            state.members.insert(member);
            state.deal();
        });
    }

    fn leave(&self, member: u32) {
        self.change(|state| {
            state.members.remove(&member);
            state.copies.remove(&member);
            state.deal();
        });
    }

    fn rotate(&self) {
        self.change(|state| {
            let members: Vec<u32> = state.members.iter().copied().collect();
            for partition in &mut state.partitions {
                let after = members
                    .iter()
                    .find(|member| partition.owner.is_none_or(|owner| **member > owner));
                partition.assign(after.or(members.first()).copied(), &state.acked);
            }
        });
    }

    fn copy_to_others(&self, message: usize, member: u32) {
        self.change(|state| {
            for other in state.members.iter().filter(|other| **other != member) {
                state.copies.entry(*other).or_default().push_back(message);
            }
        });
    }

    fn hold_back(&self, message: usize, until: &[usize]) {
        self.change(|state| {
            let own = state.partition_of(message);
            let until: BTreeSet<usize> = until
                .iter()
                .copied()
                .filter(|other| {
                    state.partition_of(*other) != own
                        && !state.acked.contains(other)
                        && *other != message
                })
                .collect();
            state.held_back = (!until.is_empty()).then_some(HeldBack { message, until });
        });
    }

    fn rewind(&self) {
        self.change(|state| {
            state.acked.clear();
            state.held_back = None;
            for partition in &mut state.partitions {
                partition.epoch += 1;
                partition.next = 0;
            }
        });
    }

    fn unacked(&self) -> Vec<usize> {
        let state = self.state();
        (0..state.messages.len())
            .filter(|number| !state.acked.contains(number))
            .collect()
    }

    fn moved(&self) -> Notified<'_> {
        self.moved.notified()
    }
}

impl State {
    /// Deals the partitions out in turn.
    fn deal(&mut self) {
        let members: Vec<u32> = self.members.iter().copied().collect();
        for (place, partition) in self.partitions.iter_mut().enumerate() {
            let owner = place
                .checked_rem(members.len())
                .and_then(|place| members.get(place));
            if partition.owner.as_ref() != owner {
                partition.assign(owner.copied(), &self.acked);
            }
        }
    }

    fn partition_of(&self, message: usize) -> Option<usize> {
        self.partitions
            .iter()
            .position(|partition| partition.log.contains(&message))
    }

    fn acknowledge(&mut self, message: usize) {
        self.acked.insert(message);
        if self
            .held_back
            .as_ref()
            .is_some_and(|held| held.until.contains(&message))
        {
            self.held_back = None;
        }
    }

    /// The next messages for the member, with the partition's epoch; `None` for copies.
    fn take(&mut self, member: u32, most: usize) -> Vec<(usize, Option<(usize, u64)>)> {
        let mut taken: Vec<(usize, Option<(usize, u64)>)> = Vec::new();
        let copies = self.copies.get_mut(&member);
        taken.extend(
            copies
                .into_iter()
                .flat_map(std::mem::take)
                .map(|message| (message, None)),
        );
        let mut ready: Vec<usize> = (0..self.partitions.len()).collect();
        self.rng.shuffle(&mut ready);
        let most = most.min(self.rng.usize(1..=MOST_AT_A_TIME));
        let held_back = self.held_back.as_ref().map(|held| held.message);
        for place in ready {
            let Some(partition) = self
                .partitions
                .get_mut(place)
                .filter(|of| of.owner == Some(member))
            else {
                continue;
            };
            while taken.len() < most
                && let Some(message) = partition.log.get(partition.next)
                && Some(*message) != held_back
            {
                taken.push((*message, Some((place, partition.epoch))));
                partition.next += 1;
            }
        }
        taken
    }
}

impl Partition {
    fn assign(&mut self, owner: Option<u32>, acked: &BTreeSet<usize>) {
        self.owner = owner;
        self.epoch += 1;
        self.next = self
            .log
            .iter()
            .position(|message| !acked.contains(message))
            .unwrap_or(self.log.len());
    }
}

/// A process's connection to the broker.
struct Member {
    number: u32,
    broker: Arc<EmbeddedBroker>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({})", self.number)
    }
}

#[async_trait]
impl Source for Member {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.broker.join(self.number);
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        loop {
            let moved = self.broker.moved();
            let mut moved = std::pin::pin!(moved);
            // Registered before the look: a change between the two would be missed otherwise.
            moved.as_mut().enable();
            let deliveries = self.take(most);
            if !deliveries.is_empty() {
                return Ok(Some(deliveries));
            }
            moved.await;
        }
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        self.broker.leave(self.number);
        Ok(())
    }
}

impl Member {
    fn take(&self, most: usize) -> Vec<Delivery> {
        let taken: Vec<_> = {
            let mut state = self.broker.state();
            let taken = state.take(self.number, most);
            taken
                .into_iter()
                .filter_map(|(number, epoch)| {
                    Some((number, epoch, state.messages.get(number)?.clone()))
                })
                .collect()
        };
        taken
            .into_iter()
            .map(|(number, epoch, message)| {
                self.broker
                    .recorder
                    .note(self.number, What::Delivered { message: number });
                let handle = Handle {
                    number,
                    epoch,
                    member: self.number,
                    broker: Arc::clone(&self.broker),
                };
                Delivery {
                    message,
                    ack_handle: Arc::new(handle),
                }
            })
            .collect()
    }
}

/// Acknowledges one delivery.
struct Handle {
    number: usize,
    /// The partition and its epoch at the delivery; `None` for a copy.
    epoch: Option<(usize, u64)>,
    member: u32,
    broker: Arc<EmbeddedBroker>,
}

impl Handle {
    fn is_ours(&self, state: &State) -> bool {
        self.epoch.is_none_or(|(partition, epoch)| {
            state
                .partitions
                .get(partition)
                .is_some_and(|partition| partition.epoch == epoch)
        })
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Handle({})", self.number)
    }
}

impl AckHandle for Handle {
    fn start(&self) -> bool {
        self.is_ours(&self.broker.state())
    }

    fn ack(&self) {
        let mut accepted = false;
        self.broker.change(|state| {
            accepted = self.is_ours(state);
            if accepted {
                state.acknowledge(self.number);
            }
        });
        self.broker.recorder.note(
            self.member,
            What::Acked {
                message: self.number,
                accepted,
            },
        );
    }

    fn stop(&self) {}
}

#[cfg(test)]
#[path = "broker_tests.rs"]
mod tests;
