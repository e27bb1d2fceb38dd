//! A broker in memory: it delivers again whatever was not acknowledged, and judges every ack. It is
//! a log, dealt out to the members of a group, with or without retry topics, or a queue, which
//! takes messages back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use fastrand::Rng;
use oncegate::observe::Observer;
use oncegate::source::{AckHandle, Delivery, RetryQueue, Source, SourceError, Supply, Terms};
use oncegate::{BoxError, Message, Origin};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// How long a queue hides a message whose worker is gone.
const VISIBILITY: Duration = Duration::from_secs(2);
/// A retry that comes sooner stays with its worker.
const SHORTEST_RETRY: Duration = Duration::from_secs(1);

/// How long a message waits in a retry topic.
const WAITS: [Duration; 2] = [Duration::from_millis(1_500), Duration::from_secs(6)];
/// A retry that is due before stays in its lane.
const BEYOND: Duration = Duration::from_millis(300);

/// What kind of broker it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Log,
    LogWithRetries,
    Queue,
}

/// What was produced, what was acknowledged, and which members read it now.
#[derive(Debug)]
pub(crate) struct Broker {
    kind: Kind,
    state: Mutex<State>,
    moved: Notify,
}

#[derive(Debug)]
struct State {
    payloads: Vec<String>,
    acked: BTreeSet<usize>,
    /// Which member owns a message; messages stand for partitions of their own.
    owner: BTreeMap<usize, usize>,
    /// What a member has been given since it joined.
    given: BTreeSet<(usize, usize)>,
    members: BTreeSet<usize>,
    next_member: usize,
    /// What members of a queue hold.
    held: BTreeMap<usize, Hold>,
    /// From when on a message is shown again.
    visible_from: BTreeMap<usize, Instant>,
    next_hold: u64,
    /// Those that have a copy which waits for their retry.
    copied: BTreeSet<usize>,
    rng: Rng,
}

/// A message of a queue in the hands of a member.
#[derive(Clone, Debug)]
struct Hold {
    number: u64,
    member: usize,
    lost: CancellationToken,
}

/// Asked at each ack: may this message be acknowledged? It panics with the reason when it may not.
pub(crate) type Judge = Arc<dyn Fn(usize) + Send + Sync>;

impl Broker {
    pub(crate) fn new(kind: Kind, payloads: Vec<String>, rng: Rng) -> Arc<Self> {
        let state = State {
            payloads,
            acked: BTreeSet::new(),
            owner: BTreeMap::new(),
            given: BTreeSet::new(),
            members: BTreeSet::new(),
            next_member: 0,
            held: BTreeMap::new(),
            visible_from: BTreeMap::new(),
            next_hold: 0,
            copied: BTreeSet::new(),
            rng,
        };
        Arc::new(Self {
            kind,
            state: Mutex::new(state),
            moved: Notify::new(),
        })
    }

    /// A new member of the group; the messages are dealt out anew.
    pub(crate) fn join(self: &Arc<Self>, judge: Judge) -> Member {
        let mut state = self.state.lock().unwrap();
        let id = state.next_member;
        state.next_member += 1;
        state.members.insert(id);
        state.deal();
        self.moved.notify_waiters();
        Member {
            id,
            broker: Arc::clone(self),
            judge,
        }
    }

    /// A member is gone; the others get its messages.
    pub(crate) fn leave(&self, member: usize) {
        let mut state = self.state.lock().unwrap();
        state.members.remove(&member);
        state.deal();
        let left: Vec<usize> = state
            .held
            .iter()
            .filter(|(_, hold)| hold.member == member)
            .map(|(n, _)| *n)
            .collect();
        for n in left {
            state.held.remove(&n);
            state.visible_from.insert(n, Instant::now() + VISIBILITY);
        }
        self.moved.notify_waiters();
    }

    /// Takes back a message that a consumer holds. `false`: no consumer holds one.
    pub(crate) fn lose_one(&self, which: usize) -> bool {
        let mut state = self.state.lock().unwrap();
        let held: Vec<usize> = state.held.keys().copied().collect();
        let Some(n) = (!held.is_empty()).then(|| held[which % held.len()]) else {
            return false;
        };
        if let Some(hold) = state.held.remove(&n) {
            hold.lost.cancel();
        }
        state.visible_from.insert(n, Instant::now());
        self.moved.notify_waiters();
        true
    }

    /// How many messages have waited elsewhere for their retry.
    pub(crate) fn copied(&self) -> u64 {
        self.state.lock().unwrap().copied.len() as u64
    }

    /// Whether the message has a copy that waits for its retry, or has waited.
    pub(crate) fn is_copied(&self, n: usize) -> bool {
        self.state.lock().unwrap().copied.contains(&n)
    }

    pub(crate) fn unacked(&self) -> Vec<usize> {
        let state = self.state.lock().unwrap();
        (0..state.payloads.len())
            .filter(|n| !state.acked.contains(n))
            .collect()
    }

    /// Everything is delivered again: what replaying a topic from its start is.
    pub(crate) fn rewind(&self) {
        let mut state = self.state.lock().unwrap();
        state.acked.clear();
        state.given.clear();
        state.visible_from.clear();
        self.moved.notify_waiters();
    }

    pub(crate) fn payload(&self, n: usize) -> String {
        self.state.lock().unwrap().payloads[n].clone()
    }

    pub(crate) fn payloads(&self) -> Vec<String> {
        self.state.lock().unwrap().payloads.clone()
    }
}

impl State {
    /// Assigns the messages to the members in turn. A member that gets one back receives it again.
    fn deal(&mut self) {
        let members: Vec<usize> = self.members.iter().copied().collect();
        for message in 0..self.payloads.len() {
            let owner = (!members.is_empty()).then(|| members[message % members.len()]);
            let before = match owner {
                Some(owner) => self.owner.insert(message, owner),
                None => self.owner.remove(&message),
            };
            if before != owner
                && let Some(owner) = owner
            {
                self.given.remove(&(owner, message));
            }
        }
    }

    /// What the queue shows, each with what its member gets of it; and when it shows more.
    fn take_visible(
        &mut self,
        member: usize,
        most: usize,
    ) -> (Vec<(usize, Hold)>, Option<Instant>) {
        let now = Instant::now();
        let visible = |n: &usize| {
            let hidden = self.visible_from.get(n).is_some_and(|from| *from > now);
            !hidden && !self.acked.contains(n) && !self.held.contains_key(n)
        };
        let taken: Vec<usize> = (0..self.payloads.len())
            .filter(visible)
            .take(most)
            .collect();
        let mut holds = Vec::new();
        for n in taken {
            self.next_hold += 1;
            let hold = Hold {
                number: self.next_hold,
                member,
                lost: CancellationToken::new(),
            };
            self.held.insert(n, hold.clone());
            holds.push((n, hold));
        }
        (
            holds,
            self.visible_from
                .values()
                .filter(|from| **from > now)
                .min()
                .copied(),
        )
    }

    /// What is the member's and due, and when more is.
    fn take(&mut self, member: usize, most: usize) -> (Vec<usize>, Option<Instant>) {
        let now = Instant::now();
        let mine = |n: &usize| {
            self.owner.get(n) == Some(&member)
                && !self.acked.contains(n)
                && !self.given.contains(&(member, *n))
                && self.visible_from.get(n).is_none_or(|from| *from <= now)
        };
        let taken: Vec<usize> = (0..self.payloads.len()).filter(mine).take(most).collect();
        self.given.extend(taken.iter().map(|n| (member, *n)));
        (
            taken,
            self.visible_from
                .values()
                .filter(|from| **from > now)
                .min()
                .copied(),
        )
    }
}

/// One consumer's connection to the broker.
#[derive(Clone)]
pub(crate) struct Member {
    pub(crate) id: usize,
    broker: Arc<Broker>,
    judge: Judge,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Member({})", self.id)
    }
}

#[async_trait]
impl Source for Member {
    fn agree(&self, _: &Terms) -> Supply {
        match self.broker.kind {
            Kind::Log | Kind::LogWithRetries => Supply::Ahead,
            Kind::Queue => Supply::OnDemand,
        }
    }

    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        loop {
            let moved = self.broker.moved.notified();
            let (deliveries, next) = self.take(most);
            if !deliveries.is_empty() {
                return Ok(Some(deliveries));
            }
            match next {
                Some(at) => tokio::select! { () = moved => {}, () = sleep_until(at) => {} },
                None => moved.await,
            }
        }
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        (self.broker.kind == Kind::LogWithRetries)
            .then(|| Arc::new(self.clone()) as Arc<dyn RetryQueue>)
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

#[async_trait]
impl RetryQueue for Member {
    fn wait(&self, wait: Duration) -> Option<Duration> {
        WAITS
            .into_iter()
            .find(|of_topic| *of_topic >= wait)
            .filter(|_| wait > BEYOND)
    }

    /// Fails now and then; half of the time the copy is there all the same.
    async fn send(&self, message: &Message, wait: Duration) -> Result<(), BoxError> {
        sleep_until(Instant::now() + Duration::from_millis(5)).await;
        let mut state = self.broker.state.lock().unwrap();
        let fails = state.rng.u32(..4) == 0;
        let is_there = state.rng.bool();
        if !fails || is_there {
            let n: usize = message.origin().to_string().parse().unwrap();
            let copy = state.payloads.len();
            let payload = state.payloads[n].clone();
            state.payloads.push(payload);
            state.visible_from.insert(copy, Instant::now() + wait);
            state.copied.insert(n);
            state.deal();
            self.broker.moved.notify_waiters();
        }
        if fails {
            Err("the retry topic does not answer".into())
        } else {
            Ok(())
        }
    }
}

impl Member {
    fn take(&self, most: usize) -> (Vec<Delivery>, Option<Instant>) {
        let mut state = self.broker.state.lock().unwrap();
        let (taken, next) = match self.broker.kind {
            Kind::Log | Kind::LogWithRetries => {
                let (taken, next) = state.take(self.id, most);
                (taken.into_iter().map(|n| (n, None)).collect(), next)
            }
            Kind::Queue => {
                let (taken, next) = state.take_visible(self.id, most);
                (
                    taken
                        .into_iter()
                        .map(|(n, hold)| (n, Some(hold)))
                        .collect::<Vec<_>>(),
                    next,
                )
            }
        };
        let deliver = |(n, hold): (usize, Option<Hold>)| -> Delivery {
            let origin = Origin::Other(n.to_string().into());
            let message = Message::new("payments", origin, Some(state.payloads[n].clone().into()));
            let member = self.clone();
            let ack_handle: Arc<dyn AckHandle> = match hold {
                None => Arc::new(Receipt { n, member }),
                Some(hold) => Arc::new(Handle { n, hold, member }),
            };
            Delivery {
                message,
                ack_handle,
            }
        };
        (taken.into_iter().map(deliver).collect(), next)
    }
}

#[derive(Debug)]
struct Receipt {
    n: usize,
    member: Member,
}

impl AckHandle for Receipt {
    fn start(&self) -> bool {
        self.member.broker.state.lock().unwrap().owner.get(&self.n) == Some(&self.member.id)
    }

    fn ack(&self) {
        (self.member.judge)(self.n);
        let mut state = self.member.broker.state.lock().unwrap();
        if state.owner.get(&self.n) == Some(&self.member.id) {
            state.acked.insert(self.n);
        }
    }

    fn stop(&self) {}
}

/// A message of a queue, as its worker has it.
#[derive(Debug)]
struct Handle {
    n: usize,
    hold: Hold,
    member: Member,
}

impl Handle {
    /// Ends the hold, if it still is this one.
    fn end(&self, then: impl FnOnce(&mut State)) {
        let mut state = self.member.broker.state.lock().unwrap();
        if state
            .held
            .get(&self.n)
            .is_some_and(|hold| hold.number == self.hold.number)
        {
            state.held.remove(&self.n);
            then(&mut state);
            self.member.broker.moved.notify_waiters();
        }
    }

    fn give_back(&self, delay: Duration) {
        self.end(|state| {
            state.visible_from.insert(self.n, Instant::now() + delay);
        });
    }
}

impl AckHandle for Handle {
    fn start(&self) -> bool {
        !self.hold.lost.is_cancelled()
    }

    fn ack(&self) {
        (self.member.judge)(self.n);
        self.end(|state| {
            state.acked.insert(self.n);
        });
    }

    fn stop(&self) {}

    fn nack_after(&self, delay: Duration) -> bool {
        let goes = delay >= SHORTEST_RETRY;
        if goes {
            self.give_back(delay);
        }
        goes
    }

    fn is_ours(&self) -> bool {
        !self.hold.lost.is_cancelled()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.give_back(Duration::ZERO);
    }
}
