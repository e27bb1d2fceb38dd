//! The messages of topics that have no record, as a source.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::Message;
use oncegate::admin::dry_run::Selector;
use oncegate::core::store::StoreError;
use oncegate::kafka::TopicReader;
use oncegate::observe::Observer;
use oncegate::source::{AckHandle, Delivery, Source, SourceError};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until};

/// The divisor of a second: a limit on the rate lets this part of a second's messages through at a
/// time.
const SHARE_OF_A_SECOND: u32 = 10;

/// Delivers the messages of topics that a selector chooses, within limits. It ends after the last
/// one.
pub(super) struct Missing {
    selector: Selector,
    limits: ReplayLimits,
    state: Mutex<Remaining>,
    counts: Arc<DeliveryCounts>,
}

/// The limits on what is delivered.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ReplayLimits {
    /// The most messages.
    pub(super) messages: Option<u64>,
    /// The most messages a second.
    pub(super) per_second: Option<u32>,
}

struct Remaining {
    readers: VecDeque<TopicReader>,
    /// Messages that were read and are not examined yet. They stay here while their records are
    /// read, because the future of a receive may be dropped.
    unexamined: Vec<Message>,
    selected: VecDeque<Message>,
    /// The time from which the next message may be delivered.
    next_at: Instant,
}

/// The numbers of messages that were delivered, and that are finished.
#[derive(Debug, Default)]
pub(super) struct DeliveryCounts {
    delivered: AtomicU64,
    finished: AtomicU64,
    is_at_end: AtomicBool,
}

impl DeliveryCounts {
    pub(super) fn delivered(&self) -> u64 {
        self.delivered.load(Relaxed)
    }

    pub(super) fn unfinished(&self) -> u64 {
        self.delivered().saturating_sub(self.finished.load(Relaxed))
    }

    /// Returns whether all messages of the topics were read.
    pub(super) fn is_at_end(&self) -> bool {
        self.is_at_end.load(Relaxed)
    }
}

impl Missing {
    pub(super) fn new(readers: Vec<TopicReader>, selector: Selector, limits: ReplayLimits) -> Self {
        let state = Remaining {
            readers: readers.into(),
            unexamined: Vec::new(),
            selected: VecDeque::new(),
            next_at: Instant::now(),
        };
        Self {
            selector,
            limits,
            state: Mutex::new(state),
            counts: Arc::default(),
        }
    }

    pub(super) fn counts(&self) -> Arc<DeliveryCounts> {
        Arc::clone(&self.counts)
    }

    /// Returns the number of messages that may still be delivered.
    fn left(&self) -> u64 {
        self.limits.messages.map_or(u64::MAX, |most| {
            most.saturating_sub(self.counts.delivered())
        })
    }

    /// Reads until there is something to deliver; `false` at the end. Dropping the future loses
    /// nothing.
    async fn fill(&self, state: &mut Remaining) -> Result<bool, SourceError> {
        while state.selected.is_empty() {
            if !state.unexamined.is_empty() {
                let selected = self
                    .selector
                    .select(&state.unexamined)
                    .await
                    .map_err(unread)?;
                state.unexamined.clear();
                state.selected.extend(selected);
                continue;
            }
            let Some(reader) = state.readers.front_mut() else {
                self.counts.is_at_end.store(true, Relaxed);
                return Ok(false);
            };
            match reader.next_batch().await? {
                Some(messages) => state.unexamined = messages,
                None => drop(state.readers.pop_front()),
            }
        }
        Ok(true)
    }
}

fn unread(error: StoreError) -> SourceError {
    SourceError::caused("the records of the messages cannot be read", error)
}

#[async_trait]
impl Source for Missing {
    async fn open(&self, _: Arc<dyn Observer>) -> Result<(), SourceError> {
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let mut state = self.state.lock().await;
        let left = usize::try_from(self.left()).unwrap_or(usize::MAX);
        if left == 0 {
            // Only the end of the topics says whether there are more.
            self.fill(&mut state).await?;
            return Ok(None);
        }
        if !self.fill(&mut state).await? {
            return Ok(None);
        }
        let mut most = most.min(left);
        if let Some(per_second) = self.limits.per_second {
            sleep_until(state.next_at).await;
            most = most.min((per_second / SHARE_OF_A_SECOND).max(1) as usize);
        }
        let count = most.min(state.selected.len());
        if let Some(per_second) = self.limits.per_second {
            let took = Duration::from_secs_f64(count as f64 / f64::from(per_second));
            state.next_at = state.next_at.max(Instant::now()) + took;
        }
        self.counts.delivered.fetch_add(count as u64, Relaxed);
        let deliveries = state.selected.drain(..count).map(|message| Delivery {
            message,
            ack_handle: Arc::new(Finishing {
                counts: Arc::clone(&self.counts),
            }),
        });
        Ok(Some(deliveries.collect()))
    }

    async fn close(&self, _: Duration) -> Result<(), SourceError> {
        Ok(())
    }
}

impl fmt::Debug for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Missing")
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Counts a message as finished. There is no offset to commit: the records say what is done.
#[derive(Debug)]
struct Finishing {
    counts: Arc<DeliveryCounts>,
}

impl AckHandle for Finishing {
    fn start(&self) -> bool {
        true
    }

    fn ack(&self) {
        self.counts.finished.fetch_add(1, Relaxed);
    }

    fn stop(&self) {}
}
