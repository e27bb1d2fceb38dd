//! A store, a source, dead letters and an observer that record every call, through the public
//! traits alone.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::key::{CompiledKey, StoreKey};
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::StoreWrapper;
use oncegate_core::store::{Command, Completed, Store, StoreError};
use oncegate_runtime::dead_letters::{DeadLetter, DeadLetters};
use oncegate_runtime::source::{AckHandle, Delivery, Source, SourceError, SourceWrapper};
use oncegate_runtime::{BoxError, Counters, Event, Message, Observer};

use super::history::{History, Occurrence};
use super::operation::{Op, StoreAnswer, text};
use super::point::{NoHook, Point, PointHook};

/// The time that a completion gets to leave the process before [`Point::CompleteSent`] is passed.
const ON_ITS_WAY: Duration = Duration::from_millis(3);

/// A store that notes every call and its answer, and passes it on.
#[derive(Debug)]
pub struct RecordedStore {
    inner: Arc<dyn Store>,
    history: Arc<History>,
    hook: Arc<dyn PointHook>,
    calls: AtomicU64,
}

impl RecordedStore {
    /// Wraps a store. There may be one for each [`History`].
    pub fn new(inner: impl Store + 'static, history: Arc<History>) -> Self {
        Self {
            inner: Arc::new(inner),
            history,
            hook: Arc::new(NoHook),
            calls: AtomicU64::new(0),
        }
    }

    /// Calls `hook` before and after claims and completions. Default: nothing happens there.
    #[must_use]
    pub fn at_points(mut self, hook: Arc<dyn PointHook>) -> Self {
        self.hook = hook;
        self
    }

    async fn answered(
        &self,
        commands: Vec<Command>,
        completes: bool,
    ) -> Vec<Result<Reply, StoreError>> {
        let mut answer = pin!(self.inner.execute(commands));
        if completes && self.hook.is_set(Point::CompleteSent) {
            // Sent, and executed or not: an answer that comes in this time is discarded.
            tokio::select! {
                biased;
                replies = &mut answer => {
                    self.hook.pass(Point::CompleteSent);
                    return replies;
                }
                () = tokio::time::sleep(ON_ITS_WAY) => self.hook.pass(Point::CompleteSent),
            }
        }
        answer.await
    }
}

#[async_trait]
impl StoreWrapper for RecordedStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let first = self.calls.fetch_add(commands.len() as u64, SeqCst);
        let claims = commands
            .iter()
            .any(|one| matches!(one.operation, Operation::Claim { .. }));
        let completes = commands
            .iter()
            .any(|one| matches!(one.operation, Operation::Complete { .. }));
        if claims {
            self.hook.pass(Point::ClaimBefore);
        }
        if completes {
            self.hook.pass(Point::CompleteBefore);
        }
        self.history.note_all(
            (first..)
                .zip(&commands)
                .map(|(call, command)| Occurrence::Invoke {
                    call,
                    key: command.key.as_str().to_owned(),
                    op: Op::of(&command.operation),
                }),
        );
        let replies = self.answered(commands, completes).await;
        self.history.note_all(
            (first..)
                .zip(&replies)
                .map(|(call, reply)| outcome(call, reply)),
        );
        let is_granted = replies.iter().any(|reply| {
            matches!(
                reply,
                Ok(Reply::Verdict {
                    verdict: Verdict::Granted(_),
                    ..
                })
            )
        });
        if claims && is_granted {
            self.hook.pass(Point::ClaimAfter);
        }
        if completes
            && replies
                .iter()
                .any(|reply| matches!(reply, Ok(Reply::Applied { .. })))
        {
            self.hook.pass(Point::CompleteAfter);
        }
        replies
    }

    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let found = self.inner.prefetch(keys.clone()).await;
        let completed = keys.iter().zip(&found).filter_map(|(key, found)| {
            let result = text(&found.as_ref().ok()?.as_ref()?.result);
            Some(Occurrence::Found {
                key: key.as_str().to_owned(),
                result,
            })
        });
        self.history.note_all(completed);
        found
    }
}

fn outcome(call: u64, reply: &Result<Reply, StoreError>) -> Occurrence {
    match reply {
        Ok(reply) => Occurrence::Ok {
            call,
            answer: StoreAnswer::of(reply),
        },
        Err(StoreError::Unknown { .. }) => Occurrence::Info { call },
        Err(error) => Occurrence::Fail {
            call,
            class: error.class().to_owned(),
        },
    }
}

/// The key of a message, as the consumer's gate derives it.
fn key_of(key: &CompiledKey, message: &Message) -> Option<String> {
    key.derive(message.route(), message)
        .ok()
        .map(|key| key.as_str().to_owned())
}

/// A source that notes every delivery and every ack, and passes them on.
#[derive(Debug)]
pub struct RecordedSource {
    inner: Arc<dyn Source>,
    key: CompiledKey,
    history: Arc<History>,
    hook: Arc<dyn PointHook>,
}

impl RecordedSource {
    /// Wraps a source. `key` is that of the gate, compiled for its scope: it names the messages in
    /// the history.
    pub fn new(inner: impl Source + 'static, key: CompiledKey, history: Arc<History>) -> Self {
        Self {
            inner: Arc::new(inner),
            key,
            history,
            hook: Arc::new(NoHook),
        }
    }

    /// Calls `hook` before and after each ack. Default: nothing happens there.
    #[must_use]
    pub fn at_points(mut self, hook: Arc<dyn PointHook>) -> Self {
        self.hook = hook;
        self
    }

    fn recorded(&self, delivery: Delivery) -> Delivery {
        let Delivery {
            message,
            ack_handle,
        } = delivery;
        let ack_handle = RecordedAckHandle {
            inner: ack_handle,
            origin: message.origin().to_string(),
            key: key_of(&self.key, &message),
            history: Arc::clone(&self.history),
            hook: Arc::clone(&self.hook),
        };
        Delivery {
            message,
            ack_handle: Arc::new(ack_handle),
        }
    }
}

#[async_trait]
impl SourceWrapper for RecordedSource {
    fn inner(&self) -> &dyn Source {
        &*self.inner
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let Some(deliveries) = self.inner.receive(most).await? else {
            return Ok(None);
        };
        self.history
            .note_all(deliveries.iter().map(|delivery| Occurrence::Received {
                origin: delivery.message.origin().to_string(),
                key: key_of(&self.key, &delivery.message),
            }));
        let recorded = deliveries
            .into_iter()
            .map(|delivery| self.recorded(delivery))
            .collect();
        Ok(Some(recorded))
    }
}

#[derive(Debug)]
struct RecordedAckHandle {
    inner: Arc<dyn AckHandle>,
    origin: String,
    key: Option<String>,
    history: Arc<History>,
    hook: Arc<dyn PointHook>,
}

impl AckHandle for RecordedAckHandle {
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
        self.hook.pass(Point::AckBefore);
        self.history.note(Occurrence::Ack {
            origin: self.origin.clone(),
            key: self.key.clone(),
        });
        self.inner.ack();
        self.hook.pass(Point::AckAfter);
    }

    fn stop(&self) {
        self.inner.stop();
    }

    fn nack_after(&self, delay: Duration) -> bool {
        self.inner.nack_after(delay)
    }
}

/// Dead letters that are noted once they are durable.
#[derive(Debug)]
pub struct RecordedDeadLetters {
    inner: Arc<dyn DeadLetters>,
    history: Arc<History>,
}

impl RecordedDeadLetters {
    /// Wraps a destination of dead letters.
    pub fn new(inner: impl DeadLetters + 'static, history: Arc<History>) -> Self {
        Self {
            inner: Arc::new(inner),
            history,
        }
    }
}

#[async_trait]
impl DeadLetters for RecordedDeadLetters {
    async fn open(&self) -> Result<(), BoxError> {
        self.inner.open().await
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        self.inner.send(letter).await?;
        self.history.note(Occurrence::StoredDeadLetter {
            key: letter.key.clone(),
            origin: letter.message.origin().to_string(),
            cause: letter.cause.as_str().to_owned(),
        });
        Ok(())
    }
}

/// An observer that counts, and notes the losses of the store that the process notices.
pub struct RecordedObserver {
    counters: Counters,
    history: Arc<History>,
    hook: Arc<dyn PointHook>,
}

impl RecordedObserver {
    /// Creates an observer for [`Consumer::observer`](oncegate_runtime::Consumer::observer).
    pub fn new(history: Arc<History>) -> Self {
        Self {
            counters: Counters::default(),
            history,
            hook: Arc::new(NoHook),
        }
    }

    /// Calls `hook` when partitions are revoked. Default: nothing happens there.
    #[must_use]
    pub fn at_points(mut self, hook: Arc<dyn PointHook>) -> Self {
        self.hook = hook;
        self
    }

    /// Notes what was counted. Call it when the consumer has ended as it should; without it, S20 is
    /// not judged.
    pub fn note_counts(&self) {
        let counts = self.counters.snapshot().into_iter();
        let counts = counts
            .map(|((name, label), count)| (format!("{name} {label}"), count))
            .collect();
        self.history.note(Occurrence::Counted { counts });
    }
}

impl fmt::Debug for RecordedObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedObserver").finish_non_exhaustive()
    }
}

impl Observer for RecordedObserver {
    fn observe(&self, event: Event<'_>) {
        self.counters.observe(event);
        match event {
            Event::StoreLost { .. } => self.history.note(Occurrence::LossNoticed),
            Event::Rebalanced { revoked: 1.., .. } => self.hook.pass(Point::Revoke),
            _ => {}
        }
    }
}
