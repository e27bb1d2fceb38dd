//! Finds out the answers that claims of many messages would get, with bulk reads by separate tasks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{
    CompiledFingerprint, CompiledKey, Descriptor, Digest, Fingerprint, FingerprintSpec, Key,
    KeyError, PrepareError, Scope, StoreKey,
};
use oncegate_core::record::{State, StoreTime, Token};
use oncegate_core::rules::{Operation, Reply, Verdict, apply};
use oncegate_core::store::{RecordSnapshot, ScopeDescriptor, Store, StoreError};
use serde::Deserialize;
use tokio_util::task::AbortOnDropHandle;

use super::report::Standing;
use super::{DryRunError, Known};
use oncegate_runtime::backoff::Backoff;
use oncegate_runtime::message::{Message, Origin};

/// The number of keys of one read.
const LOOK_KEYS_MAX: usize = 1_000;

/// The most reads in flight.
const LOOKS_IN_FLIGHT_MAX: usize = 8;

/// The most tries of a read without an answer, with the waits of [`PATIENCE`] between: some ten
/// seconds in all.
pub(crate) const LOOK_TRIES: u32 = 8;
pub(crate) const PATIENCE: Backoff =
    Backoff::new(Duration::from_millis(100), Duration::from_secs(4));

/// The subject of an examination.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) scope: String,
    pub(crate) key: Key,
    pub(crate) fingerprint: Option<FingerprintSpec>,
    pub(crate) store: Arc<dyn Store>,
}

/// Reads the records of messages while more are fetched. Dropping it ends the reads.
#[derive(Debug)]
pub(crate) struct Lookups {
    judge: Arc<Judge>,
    known: Known,
    in_flight: VecDeque<AbortOnDropHandle<Result<Vec<MessageFinding>, StoreError>>>,
}

impl Lookups {
    /// Checks the specifications, and compares them with those that the scope's records were made
    /// with.
    pub(crate) async fn open(subject: Subject) -> Result<Self, DryRunError> {
        let Subject {
            scope: name,
            key,
            fingerprint,
            store,
        } = subject;
        let scope = Scope::new(&name)?;
        let compiled = key.compile(&scope)?;
        let content = fingerprint
            .as_ref()
            .map(|spec| spec.compile(&key))
            .transpose()?;
        let ours = Descriptor::new(&key, fingerprint.as_ref())?;
        let known = match store.descriptor(&scope).await? {
            None => Known::Nothing,
            Some(held) => {
                let held = ScopeDescriptor::parse(&scope, &held)?.keys;
                compare(&held, &ours, fingerprint.is_some()).ok_or_else(|| {
                    DryRunError::OtherKey {
                        scope: name,
                        held,
                        ours: ours.to_string(),
                    }
                })?
            }
        };
        let judge = Arc::new(Judge {
            key: compiled,
            fingerprint: content,
            store,
        });
        Ok(Self {
            judge,
            known,
            in_flight: VecDeque::new(),
        })
    }

    /// Returns the store's knowledge of the scope.
    pub(crate) fn known(&self) -> Known {
        self.known
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.judge.store)
    }

    pub(super) fn judge(&self) -> Arc<Judge> {
        Arc::clone(&self.judge)
    }

    /// The scope of the keys.
    pub(crate) fn scope(&self) -> &Scope {
        self.judge.key.scope()
    }

    /// Examines messages; waits while more than a few thousand are in flight. Calls `each` for
    /// those that are examined, in the order of the messages.
    pub(crate) async fn add(
        &mut self,
        messages: Vec<Message>,
        mut each: impl FnMut(MessageFinding) + Send,
    ) -> Result<(), DryRunError> {
        let mut messages = messages.into_iter();
        loop {
            let some: Vec<Message> = messages.by_ref().take(LOOK_KEYS_MAX).collect();
            if some.is_empty() {
                return Ok(());
            }
            while self.in_flight.len() >= LOOKS_IN_FLIGHT_MAX {
                self.settle_oldest(&mut each).await?;
            }
            let judge = Arc::clone(&self.judge);
            let look = tokio::spawn(async move { judge.examine(some).await });
            self.in_flight.push_back(AbortOnDropHandle::new(look));
        }
    }

    /// Waits for all messages in flight.
    pub(crate) async fn finish(
        &mut self,
        mut each: impl FnMut(MessageFinding) + Send,
    ) -> Result<(), DryRunError> {
        while !self.in_flight.is_empty() {
            self.settle_oldest(&mut each).await?;
        }
        Ok(())
    }

    async fn settle_oldest(
        &mut self,
        each: &mut (impl FnMut(MessageFinding) + Send),
    ) -> Result<(), DryRunError> {
        let Some(oldest) = self.in_flight.front_mut() else {
            return Ok(());
        };
        let findings = match oldest.await {
            Ok(findings) => findings?,
            Err(ended) if ended.is_panic() => std::panic::resume_unwind(ended.into_panic()),
            Err(_) => return Err(StoreError::unavailable("the runtime is shutting down").into()),
        };
        self.in_flight.pop_front();
        findings.into_iter().for_each(each);
        Ok(())
    }
}

/// Compares two descriptors; `None` when the keys differ. A custom key is compared by its name and
/// version only.
fn compare(held: &str, ours: &Descriptor, fingerprinted: bool) -> Option<Known> {
    /// The parts of a [`Descriptor`].
    #[derive(Deserialize, PartialEq)]
    struct Parts {
        format: u64,
        key: serde_json::Value,
    }
    if held == ours.as_str() {
        return Some(Known::Same);
    }
    // With another fingerprint than the gate's, every comparison would be meaningless.
    if fingerprinted {
        return None;
    }
    let held: Parts = serde_json::from_str(held).ok()?;
    let ours: Parts = serde_json::from_str(ours.as_str()).ok()?;
    (held == ours).then_some(Known::OtherFingerprint)
}

/// The result for one message.
#[derive(Debug)]
pub(crate) struct MessageFinding {
    pub(crate) origin: Origin,
    pub(crate) digest: Option<Digest>,
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) standing: Standing,
    pub(crate) uncompared: bool,
}

/// Finds out the answer that a claim would get.
#[derive(Debug)]
pub(super) struct Judge {
    key: CompiledKey,
    fingerprint: Option<CompiledFingerprint>,
    store: Arc<dyn Store>,
}

/// The identity of a message.
type KeyAndFingerprint = (StoreKey, Option<Fingerprint>);

impl Judge {
    pub(super) async fn examine(
        &self,
        messages: Vec<Message>,
    ) -> Result<Vec<MessageFinding>, StoreError> {
        self.prepare(&messages).await?;
        let identified: Vec<(Origin, Result<KeyAndFingerprint, KeyError>)> = messages
            .iter()
            .map(|message| (message.origin().clone(), self.identify(message)))
            .collect();
        // The payloads are not needed any more, and reads may take long.
        drop(messages);
        let keys = identified
            .iter()
            .filter_map(|(_, identity)| Some(identity.as_ref().ok()?.0.clone()));
        let mut records = self.read(keys.collect()).await?.into_iter();
        let mut findings = Vec::with_capacity(identified.len());
        for (origin, identity) in identified {
            findings.push(match identity {
                Ok((key, fingerprint)) => {
                    let record = records.next().expect("there is one answer for each key");
                    let (standing, uncompared) = judge(record, fingerprint);
                    MessageFinding {
                        origin,
                        digest: Some(key.digest()),
                        fingerprint,
                        standing,
                        uncompared,
                    }
                }
                Err(error) => MessageFinding {
                    origin,
                    digest: None,
                    fingerprint: None,
                    standing: Standing::Undecodable {
                        kind: error.kind(),
                        why: error.to_string(),
                    },
                    uncompared: false,
                },
            });
        }
        Ok(findings)
    }

    /// Fetches the data that the keys of these messages need from elsewhere, such as schemas.
    async fn prepare(&self, messages: &[Message]) -> Result<(), StoreError> {
        if !self.key.has_format() {
            return Ok(());
        }
        for message in messages {
            let mut failures = 0;
            while let Err(error) = self.prepare_one(message).await {
                failures += 1;
                if failures == LOOK_TRIES {
                    return Err(StoreError::unavailable(error.what));
                }
                tokio::time::sleep(PATIENCE.wait(failures, fastrand::f64())).await;
            }
        }
        Ok(())
    }

    async fn prepare_one(&self, message: &Message) -> Result<(), PrepareError> {
        self.key.prepare(message).await?;
        match &self.fingerprint {
            Some(fingerprint) => fingerprint.prepare(message).await,
            None => Ok(()),
        }
    }

    /// Derives key and fingerprint as a gate does.
    fn identify(&self, message: &Message) -> Result<KeyAndFingerprint, KeyError> {
        let key = self.key.derive(message.route(), message)?;
        let fingerprint = self
            .fingerprint
            .as_ref()
            .map(|fingerprint| fingerprint.derive(message))
            .transpose()?;
        Ok((key, fingerprint))
    }

    /// The records of the keys, in their order; an unreadable record is an answer too.
    async fn read(&self, keys: Vec<StoreKey>) -> Result<Vec<ReadRecord>, StoreError> {
        let mut seen: Vec<Option<ReadRecord>> = keys.iter().map(|_| None).collect();
        let mut failures = 0;
        loop {
            let open: Vec<StoreKey> = keys
                .iter()
                .zip(&seen)
                .filter(|(_, seen)| seen.is_none())
                .map(|(key, _)| key.clone())
                .collect();
            if open.is_empty() {
                return Ok(seen.into_iter().flatten().collect());
            }
            let asked = open.len();
            let answers = self.store.read(open).await;
            if answers.len() != asked {
                return Err(StoreError::refused(format!(
                    "it gave {} answers for {asked} keys",
                    answers.len()
                )));
            }
            let mut unanswered = None;
            for (slot, answer) in seen.iter_mut().filter(|slot| slot.is_none()).zip(answers) {
                match answer {
                    Ok(record) => *slot = Some(Ok(record)),
                    Err(StoreError::Unreadable { reason, .. }) => *slot = Some(Err(reason)),
                    Err(error @ StoreError::Refused { .. }) => return Err(error),
                    Err(error) => unanswered = Some(error),
                }
            }
            if let Some(error) = unanswered {
                failures += 1;
                if failures == LOOK_TRIES {
                    return Err(error);
                }
                tokio::time::sleep(PATIENCE.wait(failures, fastrand::f64())).await;
            }
        }
    }
}

/// A record, or the reason that it cannot be read.
type ReadRecord = Result<Option<RecordSnapshot>, Arc<str>>;

/// Returns the answer that a claim would get by the rules, and discards its changes.
///
/// The second value is `true` when the contents could not be compared although a fingerprint was
/// given.
pub(super) fn judge(seen: ReadRecord, fingerprint: Option<Fingerprint>) -> (Standing, bool) {
    let snapshot = match seen {
        Ok(snapshot) => snapshot,
        Err(reason) => return (Standing::Unreadable(reason.as_ref().to_owned()), false),
    };
    // Without a record, no lease is compared with the time.
    let now = snapshot
        .as_ref()
        .map_or(StoreTime::default(), |snapshot| snapshot.now);
    let record = snapshot.map(|snapshot| snapshot.record);
    let (granted, busy) = match record.as_ref().map(|record| &record.state) {
        None => (Standing::WithoutRecord, Standing::Waiting),
        Some(State::Pending { .. }) => (Standing::Abandoned, Standing::InProgress),
        Some(_) => (Standing::RetryDue, Standing::Waiting),
    };
    // No owner has this token, because tokens are random.
    let stranger = Token::from_bits(0);
    let claim = Operation::Claim {
        token: stranger,
        lease: Duration::ZERO,
        fingerprint,
        fenced: false,
        longest_lease: Duration::MAX,
    };
    let (
        _,
        Reply::Verdict {
            verdict,
            uncompared,
        },
    ) = apply(now, record, &claim)
    else {
        unreachable!("the answer to a claim is a verdict");
    };
    let standing = match verdict {
        Verdict::Granted(_) => granted,
        Verdict::Busy { .. } => busy,
        Verdict::Completed { .. } => Standing::Completed,
        Verdict::Failed { handed_over, .. } => Standing::Failed { handed_over },
        Verdict::Mismatch => Standing::Mismatched,
    };
    (standing, uncompared && fingerprint.is_some())
}
