//! The store under test, and what the cases need of it.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::key::{Fingerprint, Scope, StoreKey};
use crate::record::{Record, Token};
use crate::rules::{Grant, Operation, ReleaseCause, Reply, Verdict};
use crate::store::{Command, Store, StoreError};

/// The store under test, with hooks that the suite needs besides the [`Store`] trait.
#[async_trait]
pub trait Bench: Send + Sync {
    /// The store. Called once for every case.
    fn store(&self) -> Arc<dyn Store>;

    /// Simulates that `time` passes for `key`, and possibly for other keys, without waiting: moves
    /// the record's expiry towards now, or advances the store's clock.
    async fn pass(&self, key: &StoreKey, time: Duration);

    /// Stores a value under `key` that is not a record of a known format. Returns `false` if the
    /// store cannot hold such a value; then the case about it proves nothing for this store.
    async fn spoil(&self, key: &StoreKey) -> bool;

    /// The most bytes of a result that the store can hold, for one that has a limit. A larger
    /// result must be refused, and leave the claim as it was.
    fn most_result_bytes(&self) -> usize {
        usize::MAX
    }

    /// The key of this name. On a shared server, the bench makes its keys distinct from those of
    /// others.
    fn key(&self, name: &str) -> StoreKey {
        crate::testing::key(name)
    }

    /// The scope of this name, made distinct in the same way.
    fn scope(&self, name: &str) -> Scope {
        crate::testing::scope(name)
    }
}

/// The unit of time in the cases.
pub(super) const STEP: Duration = Duration::from_secs(10);

/// A lease of one and a half steps: it is live after one step and has expired after two.
pub(super) const LEASE: Duration = Duration::from_secs(15);

/// A retention longer than any case takes.
pub(super) const RETENTION: Duration = Duration::from_secs(86_400);

/// The real time that may pass without an influence on a case: half a step.
pub(super) const SLACK: Duration = Duration::from_secs(5);

pub(super) const APPLIED: Reply = Reply::Applied { recreated: false };

/// The store under test, with short methods for the operations of the cases.
pub(super) struct StoreUnderTest<'a> {
    pub(super) bench: &'a dyn Bench,
    pub(super) store: Arc<dyn Store>,
    pub(super) case: &'static str,
    pub(super) tokens: AtomicU64,
}

impl StoreUnderTest<'_> {
    /// A key of this case.
    pub(super) fn key(&self, name: &str) -> StoreKey {
        self.bench.key(&format!("{}-{name}", self.case))
    }

    /// A token that no other call in this case returns. Its tag is unique too.
    pub(super) fn token(&self) -> Token {
        let count = u128::from(self.tokens.fetch_add(1, Ordering::Relaxed));
        Token::from_bits((count << 96) | count)
    }

    /// Simulates that time passes for a key.
    pub(super) async fn pass(&self, key: &StoreKey, time: Duration) {
        self.bench.pass(key, time).await;
    }

    pub(super) async fn try_apply(
        &self,
        key: &StoreKey,
        operation: Operation,
    ) -> Result<Reply, StoreError> {
        self.store
            .execute_one(Command {
                key: key.clone(),
                operation,
            })
            .await
    }

    pub(super) async fn apply(&self, key: &StoreKey, operation: Operation) -> Reply {
        self.try_apply(key, operation)
            .await
            .expect("the store answers")
    }

    pub(super) async fn claim_as(
        &self,
        key: &StoreKey,
        token: Token,
        fingerprint: Option<Fingerprint>,
    ) -> Reply {
        self.apply(
            key,
            Operation::Claim {
                token,
                lease: LEASE,
                fingerprint,
                fenced: false,
                longest_lease: Duration::MAX,
            },
        )
        .await
    }

    pub(super) async fn claim(&self, key: &StoreKey, token: Token) -> Verdict {
        match self.claim_as(key, token, None).await {
            Reply::Verdict {
                verdict,
                uncompared: false,
            } => verdict,
            other => panic!("unexpected reply to a claim: {other:?}"),
        }
    }

    /// A claim by another owner, for a scope in which no lease is longer. It must be busy.
    pub(super) async fn busy_within(&self, key: &StoreKey, longest_lease: Duration) -> Duration {
        let token = self.token();
        let claim = Operation::Claim {
            token,
            lease: LEASE,
            fingerprint: None,
            fenced: false,
            longest_lease,
        };
        match self.apply(key, claim).await {
            Reply::Verdict {
                verdict: Verdict::Busy { retry_in },
                ..
            } => retry_in,
            other => panic!("expected busy, got {other:?}"),
        }
    }

    /// A claim that must be granted.
    pub(super) async fn granted(&self, key: &StoreKey, token: Token) -> Grant {
        match self.claim(key, token).await {
            Verdict::Granted(grant) => grant,
            other => panic!("expected a grant, got {other:?}"),
        }
    }

    /// A fenced claim that must be granted.
    pub(super) async fn granted_fenced(&self, key: &StoreKey, token: Token) -> Grant {
        let claim = Operation::Claim {
            token,
            lease: LEASE,
            fingerprint: None,
            fenced: true,
            longest_lease: Duration::MAX,
        };
        match self.apply(key, claim).await {
            Reply::Verdict {
                verdict: Verdict::Granted(grant),
                ..
            } => grant,
            other => panic!("expected a grant, got {other:?}"),
        }
    }

    /// A claim that must be busy. Returns how long to wait.
    pub(super) async fn busy(&self, key: &StoreKey) -> Duration {
        match self.claim(key, self.token()).await {
            Verdict::Busy { retry_in } => retry_in,
            other => panic!("expected busy, got {other:?}"),
        }
    }

    pub(super) async fn extend(&self, key: &StoreKey, token: Token, lease: Duration) -> Reply {
        self.apply(key, Operation::Extend { token, lease }).await
    }

    pub(super) async fn complete(
        &self,
        key: &StoreKey,
        token: Token,
        result: &'static str,
    ) -> Reply {
        self.apply(key, completion(token, result)).await
    }

    pub(super) async fn release(
        &self,
        key: &StoreKey,
        token: Token,
        delay: Duration,
        end: ReleaseCause,
    ) -> Reply {
        self.apply(
            key,
            Operation::Release {
                token,
                delay,
                end,
                reason: "later".to_owned(),
            },
        )
        .await
    }

    pub(super) async fn fail(&self, key: &StoreKey, token: Token, reason: &str) -> Reply {
        self.apply(
            key,
            Operation::Fail {
                token,
                reason: reason.to_owned(),
                retention: RETENTION,
            },
        )
        .await
    }

    pub(super) async fn read(&self, key: &StoreKey) -> Option<Record> {
        let mut answers = self.store.read(vec![key.clone()]).await;
        assert_eq!(answers.len(), 1, "one key, one answer");
        answers
            .pop()
            .expect("one answer")
            .expect("the store answers")
            .map(|snapshot| snapshot.record)
    }

    /// The record's fingerprint and state, without its expiry, which depends on the store's clock.
    pub(super) async fn content(
        &self,
        key: &StoreKey,
    ) -> Option<(Option<Fingerprint>, crate::record::State)> {
        self.read(key)
            .await
            .map(|record| (record.fingerprint, record.state))
    }

    /// Brings a new key into each state, for rules that hold in all states.
    ///
    /// States that need time to pass come first, because on some benches time passes for all keys.
    pub(super) async fn in_every_state(
        &self,
        fingerprint: Option<Fingerprint>,
    ) -> Vec<(StoreKey, &'static str)> {
        let names = ["over", "due", "pending", "released", "completed", "failed"];
        let mut keys = Vec::new();
        for name in names {
            let token = self.token();
            let key = self.key(&format!("{name}-{}", self.tokens.load(Ordering::Relaxed)));
            self.claim_as(&key, token, fingerprint).await;
            match name {
                "over" => self.pass(&key, 2 * STEP).await,
                "released" => {
                    assert_eq!(
                        self.release(&key, token, LEASE, ReleaseCause::Failed).await,
                        APPLIED
                    );
                }
                "due" => {
                    assert_eq!(
                        self.release(&key, token, LEASE, ReleaseCause::Failed).await,
                        APPLIED
                    );
                    self.pass(&key, 2 * STEP).await;
                }
                "completed" => assert_eq!(self.complete(&key, token, "done").await, APPLIED),
                "failed" => assert_eq!(self.fail(&key, token, "broken").await, APPLIED),
                _ => {}
            }
            keys.push((key, name));
        }
        keys
    }
}

/// A completion with the usual retention.
pub(super) fn completion(token: Token, result: &'static str) -> Operation {
    let result = Bytes::from_static(result.as_bytes());
    Operation::Complete {
        token,
        fingerprint: None,
        result,
        retention: RETENTION,
    }
}

/// The reply to a claim of a completed key.
pub(super) fn done(result: &'static str) -> Verdict {
    Verdict::Completed {
        result: Bytes::from_static(result.as_bytes()),
    }
}

/// Runs all futures concurrently. Returns their outputs in order.
///
/// The suite must run on every async runtime, so it spawns no tasks.
pub(super) async fn join_all<T>(
    futures: impl IntoIterator<Item = impl Future<Output = T> + Send>,
) -> Vec<T> {
    let mut running: Vec<_> = futures
        .into_iter()
        .map(|future| (Box::pin(future), None))
        .collect();
    poll_fn(|context| {
        let mut pending = false;
        for (future, output) in &mut running {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(ready) => *output = Some(ready),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    })
    .await;
    running
        .into_iter()
        .filter_map(|(_, output)| output)
        .collect()
}
