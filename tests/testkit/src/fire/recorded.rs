//! A store, a source, dead letters and an observer that record every call, through the public traits alone.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::key::{CompiledKey, StoreKey};
use oncegate::core::rules::{Operation, Reply, Verdict};
use oncegate::core::store::{Command, Completed, Store, StoreError};
use oncegate::core::testing::wrapper::StoreWrapper;
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use oncegate::source::{AckHandle, Delivery, RetryQueue, Source, SourceError, Supply, Terms};
use oncegate::{BoxError, Counters, Event, Message, Observer};

use super::history::{Answer, History, Op, What, text};
use super::points::{Point, is_set, pass};

/// How long a completion gets to leave the process before it dies at [`Point::CompleteSent`].
const ON_ITS_WAY: Duration = Duration::from_millis(3);

/// Writes down every call and its answer.
#[derive(Debug)]
pub(super) struct RecordedStore {
    pub(super) inner: Arc<dyn Store>,
    pub(super) history: Arc<History>,
    pub(super) calls: AtomicU64,
}

#[async_trait]
impl StoreWrapper for RecordedStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let first = self.calls.fetch_add(commands.len() as u64, SeqCst);
        let claims = commands.iter().any(|one| matches!(one.operation, Operation::Claim { .. }));
        let completes = commands.iter().any(|one| matches!(one.operation, Operation::Complete { .. }));
        if claims {
            pass(Point::ClaimBefore);
        }
        if completes {
            pass(Point::CompleteBefore);
        }
        self.history.note_all((first..).zip(&commands).map(|(call, command)| What::Invoke {
            call,
            key: command.key.as_str().to_owned(),
            op: Op::of(&command.operation),
        }));
        let replies = self.answered(commands, completes).await;
        self.history.note_all((first..).zip(&replies).map(|(call, reply)| outcome(call, reply)));
        let granted = |reply: &Result<Reply, StoreError>| {
            matches!(reply, Ok(Reply::Verdict { verdict: Verdict::Granted(_), .. }))
        };
        if claims && replies.iter().any(granted) {
            pass(Point::ClaimAfter);
        }
        if completes && replies.iter().any(|reply| matches!(reply, Ok(Reply::Applied { .. }))) {
            pass(Point::CompleteAfter);
        }
        replies
    }

    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let found = self.inner.prefetch(keys.clone()).await;
        let completed = keys.iter().zip(&found).filter_map(|(key, found)| {
            let result = text(&found.as_ref().ok()?.as_ref()?.result);
            Some(What::Found { key: key.as_str().to_owned(), result })
        });
        self.history.note_all(completed);
        found
    }
}

impl RecordedStore {
    async fn answered(&self, commands: Vec<Command>, completes: bool) -> Vec<Result<Reply, StoreError>> {
        let mut answer = pin!(self.inner.execute(commands));
        if completes && is_set(Point::CompleteSent) {
            // Sent, and executed or not: an answer that comes in this time is discarded.
            tokio::select! {
                biased;
                replies = &mut answer => {
                    pass(Point::CompleteSent);
                    return replies;
                }
                () = tokio::time::sleep(ON_ITS_WAY) => pass(Point::CompleteSent),
            }
        }
        answer.await
    }
}

fn outcome(call: u64, reply: &Result<Reply, StoreError>) -> What {
    match reply {
        Ok(reply) => What::Ok { call, answer: Answer::of(reply) },
        Err(StoreError::Unknown { .. }) => What::Info { call },
        Err(error) => What::Fail { call, class: error.class().to_owned() },
    }
}

/// How messages are named in a history.
#[derive(Clone, Debug)]
pub(super) struct Names {
    pub(super) key: CompiledKey,
}

impl Names {
    pub(super) fn key(&self, message: &Message) -> Option<String> {
        self.key.derive(message.route(), message).ok().map(|key| key.as_str().to_owned())
    }
}

/// Writes down every delivery and every ack.
#[derive(Debug)]
pub(super) struct RecordedSource<S> {
    pub(super) inner: S,
    pub(super) names: Names,
    pub(super) history: Arc<History>,
}

#[async_trait]
impl<S: Source> Source for RecordedSource<S> {
    fn agree(&self, terms: &Terms) -> Supply {
        self.inner.agree(terms)
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.inner.open(observer).await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let Some(deliveries) = self.inner.receive(most).await? else { return Ok(None) };
        let recorded = |Delivery { message, ack_handle }| {
            let (origin, key) = (message.origin().to_string(), self.names.key(&message));
            let ack_handle =
                RecordedTicket { inner: ack_handle, origin, key, history: Arc::clone(&self.history) };
            Delivery { message, ack_handle: Arc::new(ack_handle) }
        };
        let received = |Delivery { message, .. }: &Delivery| What::Received {
            origin: message.origin().to_string(),
            key: self.names.key(message),
        };
        self.history.note_all(deliveries.iter().map(received));
        Ok(Some(deliveries.into_iter().map(recorded).collect()))
    }

    fn stop_receiving(&self) {
        self.inner.stop_receiving();
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        self.inner.retry_queue()
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        self.inner.close(deadline).await
    }
}

#[derive(Debug)]
struct RecordedTicket {
    inner: Arc<dyn AckHandle>,
    origin: String,
    key: Option<String>,
    history: Arc<History>,
}

impl AckHandle for RecordedTicket {
    fn start(&self) -> bool {
        self.inner.start()
    }

    fn ack(&self) {
        pass(Point::AckBefore);
        self.history.note(What::Ack { origin: self.origin.clone(), key: self.key.clone() });
        self.inner.ack();
        pass(Point::AckAfter);
    }

    fn stop(&self) {
        self.inner.stop();
    }

    fn nack_after(&self, delay: Duration) -> bool {
        self.inner.nack_after(delay)
    }

    fn lost(&self) -> Option<Pin<Box<dyn Future<Output = ()> + Send + '_>>> {
        self.inner.lost()
    }
}

/// Records the messages that are durably dead-lettered.
#[derive(Debug)]
pub(super) struct RecordedLetters<D> {
    pub(super) inner: D,
    pub(super) history: Arc<History>,
}

#[async_trait]
impl<D: DeadLetters> DeadLetters for RecordedLetters<D> {
    async fn open(&self) -> Result<(), BoxError> {
        self.inner.open().await
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        self.inner.send(letter).await?;
        self.history.note(What::StoredDeadLetter {
            key: letter.key.clone(),
            origin: letter.message.origin().to_string(),
            cause: letter.cause.as_str().to_owned(),
        });
        Ok(())
    }
}

/// Counts, and records the events that only an observer gets.
pub(super) struct RecordedEvents {
    pub(super) counters: Counters,
    pub(super) history: Arc<History>,
}

impl fmt::Debug for RecordedEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RecordedEvents")
    }
}

impl RecordedEvents {
    /// Everything counted, by name and label.
    pub(super) fn counted(&self) -> What {
        let counts = self.counters.snapshot().into_iter();
        What::Counted { counts: counts.map(|((name, label), n)| (format!("{name} {label}"), n)).collect() }
    }
}

impl Observer for RecordedEvents {
    fn observe(&self, event: Event<'_>) {
        self.counters.observe(event);
        match event {
            Event::StoreLost { .. } => self.history.note(What::LossNoticed),
            Event::Rebalanced { revoked: 1.., .. } => pass(Point::Revoke),
            _ => {}
        }
    }
}
