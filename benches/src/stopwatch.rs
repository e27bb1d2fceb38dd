//! Measures the time from the first message to the last ack.

use std::sync::atomic::{
    AtomicUsize,
    Ordering::{AcqRel, Acquire},
};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate::source::{AckHandle, Delivery, Source, SourceError, Supply, Terms};
use oncegate::{Event, Observer};
use tokio::sync::Notify;

/// Starts when the first message is received, and stops after a given number of acks.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    expected: usize,
    acked: AtomicUsize,
    runs: AtomicUsize,
    started: OnceLock<Instant>,
    stopped: OnceLock<Instant>,
    over: Notify,
}

impl Stopwatch {
    pub(crate) fn new(expected: usize) -> Arc<Self> {
        let acked = AtomicUsize::new(0);
        let runs = AtomicUsize::new(0);
        let started = OnceLock::new();
        let stopped = OnceLock::new();
        Arc::new(Self {
            expected,
            acked,
            runs,
            started,
            stopped,
            over: Notify::new(),
        })
    }

    pub(crate) fn received(&self) {
        self.started.get_or_init(Instant::now);
    }

    pub(crate) fn acked(&self, count: usize) {
        if self.acked.fetch_add(count, AcqRel) + count >= self.expected {
            self.stopped.get_or_init(Instant::now);
            self.over.notify_one();
        }
    }

    /// Resolves after the last ack.
    pub(crate) async fn over(self: Arc<Self>) {
        self.over.notified().await;
    }

    /// The number of handlers that have run.
    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Acquire)
    }

    /// Messages per second.
    pub(crate) fn rate(&self) -> f64 {
        let times = self.started.get().zip(self.stopped.get());
        let (started, stopped) = times.expect("every message was acknowledged");
        self.expected as f64 / stopped.duration_since(*started).as_secs_f64()
    }
}

impl Observer for Stopwatch {
    fn observe(&self, event: Event<'_>) {
        if let Event::HandlerRan { .. } = event {
            self.runs.fetch_add(1, AcqRel);
        }
    }
}

/// A source that starts the stopwatch with its first message and reports every ack to it.
#[derive(Debug)]
pub(crate) struct Timed<S> {
    pub(crate) source: S,
    pub(crate) stopwatch: Arc<Stopwatch>,
}

#[async_trait]
impl<S: Source> Source for Timed<S> {
    fn agree(&self, terms: &Terms) -> Supply {
        self.source.agree(terms)
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.source.open(observer).await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let Some(received) = self.source.receive(most).await? else {
            return Ok(None);
        };
        self.stopwatch.received();
        Ok(Some(
            received
                .into_iter()
                .map(
                    |Delivery {
                         message,
                         ack_handle,
                     }| {
                        let ack_handle = TimedTicket {
                            ack_handle,
                            stopwatch: Arc::clone(&self.stopwatch),
                        };
                        Delivery {
                            message,
                            ack_handle: Arc::new(ack_handle),
                        }
                    },
                )
                .collect(),
        ))
    }

    fn stop_receiving(&self) {
        self.source.stop_receiving();
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        self.source.close(deadline).await
    }
}

#[derive(Debug)]
struct TimedTicket {
    ack_handle: Arc<dyn AckHandle>,
    stopwatch: Arc<Stopwatch>,
}

impl AckHandle for TimedTicket {
    fn start(&self) -> bool {
        self.ack_handle.start()
    }

    fn is_ours(&self) -> bool {
        self.ack_handle.is_ours()
    }

    fn order(&self) -> Option<u64> {
        self.ack_handle.order()
    }

    fn ack(&self) {
        self.ack_handle.ack();
        self.stopwatch.acked(1);
    }

    fn stop(&self) {
        self.ack_handle.stop();
    }

    fn nack_after(&self, delay: Duration) -> bool {
        self.ack_handle.nack_after(delay)
    }
}
