//! The seats of a batch: each message's attempt holds one, and gives it up when its message is not to be in the call, or
//! takes it. When no seat is left undecided, the call of the batch has its members.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

/// The right of one message to be in the call of its batch, with `R`: what the call needs of it. The call returns an `E`
/// to it. A seat that is dropped is given up.
#[derive(Debug)]
pub(super) struct Seat<R, E> {
    position: usize,
    takes: mpsc::UnboundedSender<Member<R, E>>,
    permit: Arc<OwnedSemaphorePermit>,
}

/// A message that is in the call.
#[derive(Debug)]
pub(super) struct Member<R, E> {
    position: usize,
    pub(super) one: R,
    end: oneshot::Sender<E>,
}

/// The members of a batch, while its seats are being taken.
#[derive(Debug)]
pub(super) struct Members<R, E> {
    taken: mpsc::UnboundedReceiver<Member<R, E>>,
}

/// Returns this many seats, which share the permit, and those who will take them.
pub(super) fn seats<R, E>(count: usize, permit: OwnedSemaphorePermit) -> (Members<R, E>, Vec<Seat<R, E>>) {
    let (sender, taken) = mpsc::unbounded_channel();
    let permit = Arc::new(permit);
    let seat = |position| Seat { position, takes: sender.clone(), permit: Arc::clone(&permit) };
    (Members { taken }, (0..count).map(seat).collect())
}

impl<R, E> Seat<R, E> {
    /// The permit that the messages of the batch share.
    pub(super) fn permit(&self) -> Arc<OwnedSemaphorePermit> {
        Arc::clone(&self.permit)
    }

    /// Waits for the call, and returns what it says of this message.
    pub(super) async fn take(self, one: R) -> E {
        let (end, ended) = oneshot::channel();
        let Self { position, takes, permit } = self;
        // When this is not taken, the task of the batch is being dropped, and this future with it.
        _ = takes.send(Member { position, one, end });
        drop((takes, permit));
        match ended.await {
            Ok(end) => end,
            Err(_) => std::future::pending().await,
        }
    }
}

impl<R, E> Members<R, E> {
    /// Waits until every seat is taken or given up. Returns the members in the order of their messages.
    pub(super) async fn gathered(mut self) -> Vec<Member<R, E>> {
        let mut members = Vec::new();
        while let Some(member) = self.taken.recv().await {
            members.push(member);
        }
        // The store answers in any order.
        members.sort_by_key(|member| member.position);
        members
    }
}

impl<R, E> Member<R, E> {
    /// Ends the message's wait. If its attempt has ended before, it was cancelled, and this is ignored.
    pub(super) fn end(self, end: E) {
        _ = self.end.send(end);
    }

    /// Whether its attempt has ended: it was cancelled.
    pub(super) fn is_gone(&self) -> bool {
        self.end.is_closed()
    }

    /// Waits until its attempt has ended.
    pub(super) async fn gone(&mut self) {
        self.end.closed().await;
    }
}
