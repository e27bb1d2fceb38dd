//! Joins concurrent calls into batches: all calls that wait when the carrier is ready form one
//! batch.
//!
//! A store's throughput comes from batches. Callers submit items and wait; the one [`Carrier`]
//! takes the waiting calls, sends them to the store, and returns each caller its answers with a
//! single wake-up. Nothing waits for a batch to fill: under light load a batch is one call, under
//! heavy load it grows by itself.
//!
//! When many calls wait, a batch takes half of them: with all callers in one batch, callers and
//! server would wait for each other in turns. The carrier gives the threshold: it knows what a
//! batch costs besides its items.

use oncegate_core::key::StoreKey;
use oncegate_core::rules::{Operation, Resolution};
use oncegate_core::store::Command;
use tokio::sync::{mpsc, oneshot};

/// The most items in a batch; the last call may exceed it.
pub const MAX_BATCH_ITEMS: usize = 256;

/// The most bytes in a batch; the last call may exceed it.
const MAX_BATCH_BYTES: usize = 1 << 20;

/// The most calls that wait for a carrier. Further callers wait until one is taken.
const MAX_WAITING_CALLS: usize = 4_096;

/// Something that can be sent in a batch.
pub trait Item {
    /// Returns the approximate size on the wire, in bytes.
    fn bytes(&self) -> usize;
}

/// Approximate size of a command besides its text, in bytes.
const COMMAND_BYTES: usize = 100;

impl Item for Command {
    fn bytes(&self) -> usize {
        COMMAND_BYTES
            + match &self.operation {
                Operation::Complete { result, .. } => result.len(),
                Operation::Release { reason, .. } | Operation::Fail { reason, .. } => reason.len(),
                Operation::Resolve { resolution, .. } => match resolution {
                    Resolution::Completed { result } => result.len(),
                    Resolution::Failed { reason } => reason.len(),
                },
                _ => 0,
            }
    }
}

impl Item for StoreKey {
    fn bytes(&self) -> usize {
        self.as_str().len()
    }
}

/// The error of a carrier that is gone: it is unknown whether the items were sent.
#[derive(Debug, PartialEq, Eq)]
pub struct CarrierGone {
    /// `true` when the items certainly never reached the carrier.
    pub unsent: bool,
}

/// The callers' end of the channel.
#[derive(Debug)]
pub struct Joiner<T, A> {
    calls: mpsc::Sender<CallItems<T, A>>,
}

/// The carrier's end of the channel.
#[derive(Debug)]
pub struct Carrier<T, A> {
    calls: mpsc::Receiver<CallItems<T, A>>,
    /// Calls that were received, and wait for others.
    gathered: Vec<CallItems<T, A>>,
}

/// The items of one caller. Most calls have one item, and need no list for it.
#[derive(Debug)]
enum CallItems<T, A> {
    One(T, oneshot::Sender<A>),
    Many(Vec<T>, oneshot::Sender<Vec<A>>),
}

/// A caller that waits for answers, and the number of its items.
#[derive(Debug)]
enum Caller<A> {
    One(oneshot::Sender<A>),
    Many(usize, oneshot::Sender<Vec<A>>),
}

/// The items of a batch, and the callers that wait for the answers.
#[derive(Debug)]
pub struct Batch<T, A> {
    items: Vec<T>,
    callers: Vec<Caller<A>>,
}

/// Creates the two ends of a channel.
pub fn channel<T: Item, A>() -> (Joiner<T, A>, Carrier<T, A>) {
    let (sender, receiver) = mpsc::channel(MAX_WAITING_CALLS);
    (
        Joiner { calls: sender },
        Carrier {
            calls: receiver,
            gathered: Vec::new(),
        },
    )
}

impl<T: Item, A> Joiner<T, A> {
    /// Submits `items` and waits for their answers, in the order of the items.
    ///
    /// More items than fit in a batch are split. A caller that stops waiting does not affect the
    /// others: its items may still be sent.
    ///
    /// # Errors
    /// Returns an error when the carrier is gone before it has answered all items.
    pub async fn submit(&self, items: Vec<T>) -> Result<Vec<A>, CarrierGone> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let bytes = items.iter().map(Item::bytes).sum::<usize>();
        if items.len() <= MAX_BATCH_ITEMS && bytes <= MAX_BATCH_BYTES {
            let answer = self.hand_in(items).await?;
            return answer.await.map_err(|_| CarrierGone { unsent: false });
        }
        let mut waiting = Vec::with_capacity(items.len() / MAX_BATCH_ITEMS + 1);
        let mut answers = Vec::with_capacity(items.len());
        let mut items = items.into_iter().peekable();
        while items.peek().is_some() {
            let mut free = MAX_BATCH_BYTES;
            let mut chunk = Vec::new();
            while chunk.len() < MAX_BATCH_ITEMS
                && let Some(item) = items.next_if(|item| chunk.is_empty() || item.bytes() <= free)
            {
                free = free.saturating_sub(item.bytes());
                chunk.push(item);
            }
            // Some chunks may have been sent already, so it is not certain that none was.
            waiting.push(
                self.hand_in(chunk)
                    .await
                    .map_err(|_| CarrierGone { unsent: false })?,
            );
        }
        for answer in waiting {
            answers.append(&mut answer.await.map_err(|_| CarrierGone { unsent: false })?);
        }
        Ok(answers)
    }

    /// Like [`submit`](Self::submit), for one item.
    ///
    /// # Errors
    /// Returns an error when the carrier is gone before it has answered.
    pub async fn submit_one(&self, item: T) -> Result<A, CarrierGone> {
        let (caller, answer) = oneshot::channel();
        // Boxed: the channel is seldom full, and otherwise every caller's future would be larger.
        match self.calls.try_reserve() {
            Ok(slot) => slot.send(CallItems::One(item, caller)),
            Err(_) => Box::pin(self.send(CallItems::One(item, caller))).await?,
        }
        answer.await.map_err(|_| CarrierGone { unsent: false })
    }

    async fn hand_in(&self, items: Vec<T>) -> Result<oneshot::Receiver<Vec<A>>, CarrierGone> {
        let (caller, answer) = oneshot::channel();
        self.send(CallItems::Many(items, caller)).await?;
        Ok(answer)
    }

    async fn send(&self, call: CallItems<T, A>) -> Result<(), CarrierGone> {
        self.calls
            .send(call)
            .await
            .map_err(|_| CarrierGone { unsent: true })
    }
}

impl<T: Item, A> Carrier<T, A> {
    /// Waits for `at_least` calls and takes the calls waiting with them, up to a batch's limits. Up
    /// to `undivided` items it takes all of them; of more, it takes half.
    ///
    /// Returns `None` when every [`Joiner`] is gone. Dropping the future loses nothing.
    pub async fn next(
        &mut self,
        at_least: usize,
        undivided: impl FnOnce() -> usize,
    ) -> Option<Batch<T, A>> {
        while self.gathered.len() < at_least.max(1) {
            let missing = at_least.max(1) - self.gathered.len();
            if self.calls.recv_many(&mut self.gathered, missing).await == 0 {
                if self.gathered.is_empty() {
                    return None;
                }
                break;
            }
        }
        let waiting = self.gathered.len() + self.calls.len();
        let most = ((waiting - 1) / 2).clamp(undivided(), MAX_BATCH_ITEMS);
        let count = waiting.min(most);
        let mut batch = Batch {
            items: Vec::with_capacity(count),
            callers: Vec::with_capacity(count),
        };
        let mut bytes = self
            .gathered
            .drain(..)
            .map(|call| batch.push(call))
            .sum::<usize>();
        while batch.items.len() < most && bytes < MAX_BATCH_BYTES {
            let Ok(call) = self.calls.try_recv() else {
                break;
            };
            bytes += batch.push(call);
        }
        Some(batch)
    }
}

impl<T: Item, A> Batch<T, A> {
    /// Adds a call, and returns its size in bytes.
    fn push(&mut self, call: CallItems<T, A>) -> usize {
        match call {
            CallItems::One(item, caller) => {
                let bytes = item.bytes();
                self.items.push(item);
                self.callers.push(Caller::One(caller));
                bytes
            }
            CallItems::Many(mut items, caller) => {
                let bytes = items.iter().map(Item::bytes).sum();
                self.callers.push(Caller::Many(items.len(), caller));
                self.items.append(&mut items);
                bytes
            }
        }
    }
}

impl<T, A> Batch<T, A> {
    /// The number of items.
    #[expect(clippy::len_without_is_empty, reason = "a batch has at least one")]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Takes the items out, in the order in which the answers are expected.
    pub fn take_items(&mut self) -> Vec<T> {
        std::mem::take(&mut self.items)
    }

    /// Sends each caller its answers, skipping callers that are gone.
    pub fn answer(self, answers: impl IntoIterator<Item = A>) {
        let mut answers = answers.into_iter();
        for caller in self.callers {
            // The caller may have stopped waiting; then its answer is dropped.
            match caller {
                Caller::One(caller) => {
                    let own = answers.next();
                    debug_assert!(own.is_some(), "a batch has one answer for each item");
                    _ = own.map(|own| caller.send(own));
                }
                Caller::Many(count, caller) => {
                    let own: Vec<A> = answers.by_ref().take(count).collect();
                    debug_assert_eq!(own.len(), count, "a batch has one answer for each item");
                    _ = caller.send(own);
                }
            }
        }
    }

    /// Gives every item the same answer.
    pub fn answer_all(self, answer: &A)
    where
        A: Clone,
    {
        self.answer(std::iter::repeat_with(|| answer.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Item for u32 {
        fn bytes(&self) -> usize {
            4
        }
    }

    fn double(items: Vec<u32>) -> Vec<u32> {
        items.into_iter().map(|item| item * 2).collect()
    }

    #[tokio::test]
    async fn concurrent_calls_travel_together() {
        let (joiner, mut carrier) = channel::<u32, u32>();
        let calls = async { tokio::join!(joiner.submit(vec![1, 2]), joiner.submit_one(3)) };
        let carry = async {
            let mut batch = carrier.next(1, || 64).await.unwrap();
            let items = batch.take_items();
            assert_eq!(items, [1, 2, 3]);
            batch.answer(double(items));
        };
        let ((one, other), ()) = tokio::join!(calls, carry);
        assert_eq!(one, Ok(vec![2, 4]));
        assert_eq!(other, Ok(6));
    }

    #[tokio::test]
    async fn of_much_a_batch_leaves_half_for_the_next() {
        let (joiner, mut carrier) = channel::<u32, u32>();
        let calls = futures_util::future::join_all((0..300).map(|n| joiner.submit(vec![n])));
        // Tokio's budget would admit no more than 128 of them before the carrier runs.
        let calls = tokio::task::unconstrained(calls);
        let carry = async {
            for expected in [149, 75, 64, 12] {
                let mut batch = carrier.next(1, || 64).await.unwrap();
                let items = batch.take_items();
                assert_eq!(items.len(), expected);
                batch.answer(double(items));
            }
        };
        let (answers, ()) = tokio::join!(calls, carry);
        assert!(answers.into_iter().eq((0..300).map(|n| Ok(vec![n * 2]))));
    }

    #[tokio::test]
    async fn a_large_call_is_split_and_put_together_again() {
        let (joiner, mut carrier) = channel::<u32, u32>();
        let all: Vec<u32> = (0..1_000).collect();
        let submit = joiner.submit(all.clone());
        let carry = async {
            let mut carried = 0;
            while carried < 1_000 {
                let mut batch = carrier.next(1, || 64).await.unwrap();
                let items = batch.take_items();
                assert!(items.len() <= MAX_BATCH_ITEMS);
                carried += items.len();
                batch.answer(double(items));
            }
        };
        let (answers, ()) = tokio::join!(submit, carry);
        assert_eq!(answers, Ok(double(all)));
    }

    #[tokio::test]
    async fn what_is_heavy_travels_by_itself() {
        #[derive(Debug, PartialEq)]
        struct Crate(usize);

        impl Item for Crate {
            fn bytes(&self) -> usize {
                self.0
            }
        }

        let (joiner, mut carrier) = channel::<Crate, ()>();
        let submit = joiner.submit(vec![
            Crate(10),
            Crate(2 * MAX_BATCH_BYTES),
            Crate(MAX_BATCH_BYTES),
            Crate(10),
        ]);
        let carry = async {
            let mut sizes = Vec::new();
            while sizes.iter().sum::<usize>() < 4 {
                let mut batch = carrier.next(1, || 64).await.unwrap();
                let count = batch.take_items().len();
                sizes.push(count);
                batch.answer(vec![(); count]);
            }
            sizes
        };
        let (answers, sizes) = tokio::join!(submit, carry);
        assert_eq!(answers, Ok(vec![(); 4]));
        assert_eq!(
            sizes,
            [2, 1, 1],
            "the first call is joined by what crosses the line"
        );
    }

    #[tokio::test]
    async fn a_batch_dropped_unanswered_is_not_an_answer() {
        let (joiner, mut carrier) = channel::<u32, u32>();
        let drop_it = async { drop(carrier.next(1, || 64).await) };
        let (answer, ()) = tokio::join!(joiner.submit(vec![1]), drop_it);
        assert_eq!(answer, Err(CarrierGone { unsent: false }));
        let drop_it = async { drop(carrier.next(1, || 64).await) };
        let (answer, ()) = tokio::join!(joiner.submit_one(1), drop_it);
        assert_eq!(answer, Err(CarrierGone { unsent: false }));
        drop(carrier);
        assert_eq!(
            joiner.submit(vec![1]).await,
            Err(CarrierGone { unsent: true })
        );
        assert_eq!(
            joiner.submit_one(1).await,
            Err(CarrierGone { unsent: true })
        );
    }
}
