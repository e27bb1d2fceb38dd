//! A broker in memory: it delivers again whatever was not acknowledged, and judges every ack.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::observe::Observer;
use oncegate::source::{Delivery, Source, SourceError, Ticket};
use oncegate::{Message, Origin};
use tokio::sync::Notify;

/// What was produced, what was acknowledged, and who reads it now.
#[derive(Debug, Default)]
pub(crate) struct Broker {
    state: Mutex<State>,
    moved: Notify,
}

#[derive(Debug, Default)]
struct State {
    payloads: Vec<String>,
    acked: BTreeSet<usize>,
    /// Which member owns a message; messages stand for partitions of their own.
    owner: BTreeMap<usize, usize>,
    /// What a member has been given since it joined.
    given: BTreeSet<(usize, usize)>,
    members: BTreeSet<usize>,
    next_member: usize,
}

/// Asked at each ack: may this message be acknowledged? It panics with the reason when it may not.
pub(crate) type Judge = Arc<dyn Fn(usize) + Send + Sync>;

impl Broker {
    pub(crate) fn new(payloads: Vec<String>) -> Arc<Self> {
        let state = State { payloads, ..State::default() };
        Arc::new(Self { state: Mutex::new(state), moved: Notify::new() })
    }

    /// A new member of the group; the messages are dealt out anew.
    pub(crate) fn join(self: &Arc<Self>, judge: Judge) -> Member {
        let mut state = self.state.lock().unwrap();
        let id = state.next_member;
        state.next_member += 1;
        state.members.insert(id);
        state.deal();
        self.moved.notify_waiters();
        Member { id, broker: Arc::clone(self), judge }
    }

    /// A member is gone; the others get its messages.
    pub(crate) fn leave(&self, member: usize) {
        let mut state = self.state.lock().unwrap();
        state.members.remove(&member);
        state.deal();
        self.moved.notify_waiters();
    }

    pub(crate) fn unacked(&self) -> Vec<usize> {
        let state = self.state.lock().unwrap();
        (0..state.payloads.len()).filter(|n| !state.acked.contains(n)).collect()
    }

    /// Everything is delivered again: what replaying a topic from its start is.
    pub(crate) fn rewind(&self) {
        let mut state = self.state.lock().unwrap();
        state.acked.clear();
        state.given.clear();
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
    /// Deals the messages out to the members in turn; whoever gets one back gets it delivered again.
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

    fn take(&mut self, member: usize, most: usize) -> Vec<usize> {
        let mine = |n: &usize| {
            self.owner.get(n) == Some(&member)
                && !self.acked.contains(n)
                && !self.given.contains(&(member, *n))
        };
        let taken: Vec<usize> = (0..self.payloads.len()).filter(mine).take(most).collect();
        self.given.extend(taken.iter().map(|n| (member, *n)));
        taken
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
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        loop {
            let moved = self.broker.moved.notified();
            let taken = self.broker.state.lock().unwrap().take(self.id, most);
            if !taken.is_empty() {
                return Ok(Some(taken.into_iter().map(|n| self.deliver(n)).collect()));
            }
            moved.await;
        }
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

impl Member {
    fn deliver(&self, n: usize) -> Delivery {
        let payload = self.broker.state.lock().unwrap().payloads[n].clone();
        let message = Message::new("payments", Origin::Other(n.to_string().into()), Some(payload.into()));
        Delivery { message, ticket: Arc::new(Receipt { n, member: self.clone() }) }
    }
}

#[derive(Debug)]
struct Receipt {
    n: usize,
    member: Member,
}

impl Ticket for Receipt {
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
