//! Encodes results for a record and fetches them again, with a result store for the large ones.

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, warn};

use super::lease::Lease;
use super::pending::REPEAT_BACKOFF;
use super::{Gate, GateError, GateSettings, OpenGate};
use crate::codec::not_kept;
use crate::failure::BoxError;
use crate::observe::Event;
use crate::results::{self, Reference, ResultStore, ResultStoreError, Sweep, Swept};

/// The longest time that one call to the result store may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(15);

/// The time for which a write to a result store that does not answer is repeated, before the work
/// is recorded without its result.
const PUT_PATIENCE: Duration = Duration::from_secs(30);

/// A result in the form that a record will hold.
pub(crate) struct Storable {
    pub(crate) stored: Bytes,
    /// The reason why the result itself is not kept.
    pub(crate) trouble: Option<BoxError>,
}

impl Storable {
    fn without(trouble: BoxError) -> Self {
        Self {
            stored: not_kept(),
            trouble: Some(trouble),
        }
    }
}

/// The reason why a duplicate's result is not available.
#[derive(Debug)]
pub(crate) enum Unfetched {
    /// The result is missing or damaged: asking again does not help.
    Lost(BoxError),
    /// The result store does not answer.
    NoAnswer(ResultStoreError),
}

impl Unfetched {
    fn lost(what: impl Into<BoxError>) -> Self {
        Self::Lost(what.into())
    }
}

impl Gate {
    /// The time beyond the retention for which a sweep keeps large results, two days: a result is
    /// stored before its record is completed, and the completion may have to wait for the end of an
    /// outage.
    pub const SWEEP_MARGIN: Duration = Duration::from_secs(2 * 86_400);

    /// Deletes the large results of this scope whose records are over: those older than the
    /// retention and two days.
    ///
    /// Call it from a timer, once a day for example, in one process. It lists every object of the
    /// scope. It also deletes results of processes that were killed before they could complete. If
    /// the scope had a longer retention before, some records outlive their results: their
    /// duplicates then go to
    /// [`Handler::undecodable_duplicate`](crate::Handler::undecodable_duplicate).
    ///
    /// # Errors
    /// Returns an error when the gate cannot be opened, has no
    /// [`large_results`](Self::large_results), or the result store does not answer. It may be
    /// called again at any time.
    pub async fn sweep_results(&self) -> Result<Swept, GateError> {
        let gate = self.opened().await?;
        let Some(results) = &gate.results else {
            let what = "there is nothing to sweep: set `large_results`".to_owned();
            return Err(GateError::Settings {
                scope: gate.scope().to_owned(),
                what,
            });
        };
        let older_than = gate.settings.retention + Self::SWEEP_MARGIN;
        Ok(results
            .sweep(&gate.scope, older_than, Sweep::Delete)
            .await?)
    }
}

impl Lease {
    /// Returns the bytes to store for an encoded result: the result, a reference once the result
    /// store has it, or a "not kept" marker. The effect has happened, so it always returns one of
    /// them.
    ///
    /// Heartbeats continue in the meantime. If this future is dropped, the work is recorded as done
    /// without its result.
    pub(crate) async fn storable(&self, encoded: Result<Bytes, BoxError>) -> Storable {
        let settings = self.gate.settings();
        let storable = match encoded {
            Ok(stored) if stored.len() <= settings.max_result_bytes => {
                return Storable {
                    stored,
                    trouble: None,
                };
            }
            Ok(stored) => {
                let unfinished = self.ending(self.completion(not_kept()));
                // Boxed: few results are large, and otherwise every message's task would be larger.
                let storable = Box::pin(self.put(stored)).await;
                unfinished.finished();
                storable
            }
            Err(error) => Storable::without(error),
        };
        if let Some(error) = &storable.trouble {
            let scope = self.gate.scope();
            self.gate.observe(Event::ResultNotKept { scope });
            warn!(scope, origin = %self.message().origin(), %error, "the work is recorded without its result");
        }
        storable
    }

    async fn put(&self, object: Bytes) -> Storable {
        let settings = self.gate.settings();
        let size = object.len();
        let Some(results) = &self.gate.results else {
            let most = settings.max_result_bytes;
            return Storable::without(
                format!("the result has {size} bytes, `max_result_bytes` is {most}, and there are no `large_results`").into(),
            );
        };
        if size > settings.max_large_result_bytes {
            let most = settings.max_large_result_bytes;
            return Storable::without(
                format!("the result has {size} bytes, `max_large_result_bytes` is {most}").into(),
            );
        }
        let reference = Reference::to(results::name(self.store_key(), self.token()), &object);
        let put = self.put_patiently(&**results, &reference.name, object);
        let put = tokio::select! {
            biased;
            put = put => put,
            // The completion matters more than its result.
            () = self.discarded().cancelled() => {
                Err("the result store has not answered, and the run must end".into())
            }
        };
        match put {
            Ok(()) => Storable {
                stored: reference.encode(),
                trouble: None,
            },
            Err(error) => Storable::without(error),
        }
    }

    /// Repeats until the result store has it, or the patience is over.
    async fn put_patiently(
        &self,
        results: &dyn ResultStore,
        name: &str,
        object: Bytes,
    ) -> Result<(), BoxError> {
        let give_up_at = Instant::now() + PUT_PATIENCE;
        let mut failures = 0;
        loop {
            let Err(error) = within_limit(results.put(name, object.clone())).await else {
                return Ok(());
            };
            self.gate.observe(Event::ResultStoreError {
                scope: self.gate.scope(),
                operation: "put",
            });
            failures += 1;
            let wait = REPEAT_BACKOFF.wait(failures, self.gate.fraction());
            if Instant::now() + wait >= give_up_at {
                return Err(error.into());
            }
            sleep(wait).await;
        }
    }
}

impl OpenGate {
    /// Returns a stored result, and fetches it from the result store if it is a reference.
    pub(crate) async fn fetch(&self, stored: &Bytes) -> Result<Bytes, Unfetched> {
        if !Reference::is(stored) {
            return Ok(stored.clone());
        }
        let fetched = Box::pin(self.fetch_referred(stored)).await;
        let scope = self.scope();
        match &fetched {
            Ok(_) => {}
            Err(Unfetched::Lost(error)) => {
                error!(scope, %error, "the work was done, and its result is lost");
                self.observe(Event::ResultLost { scope });
            }
            Err(Unfetched::NoAnswer(error)) => {
                warn!(scope, %error, "the result store does not answer; the duplicate waits");
                self.observe(Event::ResultStoreError {
                    scope,
                    operation: "get",
                });
            }
        }
        fetched
    }

    async fn fetch_referred(&self, stored: &[u8]) -> Result<Bytes, Unfetched> {
        let Some(reference) = Reference::decode(stored) else {
            return Err(Unfetched::lost(
                "the record's reference to the result store is damaged",
            ));
        };
        let name = &reference.name;
        let Some(results) = &self.results else {
            return Err(Unfetched::lost(format!(
                "the result is in a result store, as {name}: set `Gate::large_results`"
            )));
        };
        if reference.size_bytes > GateSettings::MOST_LARGE_RESULT_BYTES as u64 {
            let size = reference.size_bytes;
            return Err(Unfetched::lost(format!(
                "the result {name} should have {size} bytes, which is over the limit"
            )));
        }
        match within_limit(results.get(name, reference.size_bytes)).await {
            Ok(Some(object)) if reference.fits(&object) => Ok(object),
            Ok(Some(_)) => Err(Unfetched::lost(format!(
                "the result {name} is damaged: its digest is another one"
            ))),
            Ok(None) => Err(Unfetched::lost(format!(
                "the result {name} is not in the result store"
            ))),
            Err(error) => Err(Unfetched::NoAnswer(error)),
        }
    }

    /// Checks that the result store can be written and read, before the first message is received.
    pub(super) async fn check_results(&self) -> Result<(), ResultStoreError> {
        let Some(results) = &self.results else {
            return Ok(());
        };
        let name = format!("{}/opened", self.scope);
        let bytes = Bytes::from_static(b"a gate was opened");
        within_limit(results.put(&name, bytes.clone())).await?;
        match within_limit(results.get(&name, bytes.len() as u64)).await? {
            Some(found) if found == bytes => Ok(()),
            _ => Err(ResultStoreError::new(format!(
                "{name} is not what was just put there"
            ))),
        }
    }
}

/// Limits one call to the result store: no answer in time is an error.
async fn within_limit<T>(
    answer: impl Future<Output = Result<T, ResultStoreError>>,
) -> Result<T, ResultStoreError> {
    timeout(ANSWER_LIMIT, answer).await.unwrap_or_else(|_| {
        Err(ResultStoreError::new(format!(
            "no answer within {ANSWER_LIMIT:?}"
        )))
    })
}
