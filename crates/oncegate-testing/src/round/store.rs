//! A process's connection to the store: it is cut when the process is killed, and waits while the
//! process stands still.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::record::State;
use oncegate_core::rules::{Operation, Reply, Verdict};
use oncegate_core::store::{Checkup, Command, RecordSnapshot, Store, StoreError};

use super::Round;
use super::faults::CompletionFault;
use super::process::Process;
use crate::history::What;

/// The store as one process reaches it.
pub(crate) struct ProcessStore {
    pub(crate) round: Arc<Round>,
    pub(crate) process: Arc<Process>,
    pub(crate) inner: Arc<dyn Store>,
}

impl fmt::Debug for ProcessStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessStore")
            .field("process", &self.process.number)
            .finish_non_exhaustive()
    }
}

impl ProcessStore {
    /// Waits while the process stands still.
    ///
    /// # Errors
    /// When the process was killed, or the store is away.
    async fn reach(&self) -> Result<(), StoreError> {
        self.process.thawed().await;
        if self.process.is_killed() {
            return Err(StoreError::unavailable("the process was killed"));
        }
        if self.round.is_store_away() {
            return Err(StoreError::unavailable("the store is away"));
        }
        Ok(())
    }

    async fn one(&self, command: Command) -> Result<Reply, StoreError> {
        self.reach().await?;
        let key = command.key.clone();
        let completes = matches!(command.operation, Operation::Complete { .. });
        let claims = matches!(command.operation, Operation::Claim { .. });
        let fault = if completes {
            self.round.completion_fault(&key, self.process.number)
        } else {
            None
        };
        if fault == Some(CompletionFault::KillBefore) {
            self.round.kill(&self.process);
            return Err(StoreError::unknown("the process was killed"));
        }
        let reply = self
            .inner
            .execute_one(command)
            .await
            .map(|reply| self.with_result(&key, reply));
        // Noted before a kill: the store has the change, whatever becomes of the process.
        match (&reply, self.round.name_of(&key)) {
            (Ok(Reply::Verdict { verdict, .. }), Some(key)) if claims => {
                self.round.recorder.note(
                    self.process.number,
                    What::Claimed {
                        key,
                        verdict: word(verdict),
                    },
                );
            }
            (Ok(reply), Some(key)) if completes => {
                let applied = matches!(reply, Reply::Applied { .. });
                self.round
                    .recorder
                    .note(self.process.number, What::Completed { key, applied });
            }
            _ => {}
        }
        match fault {
            Some(CompletionFault::KillAfter) => {
                self.round.kill(&self.process);
                Err(StoreError::unknown("the process was killed"))
            }
            Some(CompletionFault::Loss) => {
                self.round.lose_records();
                reply
            }
            Some(CompletionFault::Undecodable) => {
                self.round.spoil_result(key);
                reply
            }
            _ => reply,
        }
    }

    fn with_result(&self, key: &StoreKey, mut reply: Reply) -> Reply {
        if let Reply::Verdict {
            verdict: Verdict::Completed { result, .. },
            ..
        } = &mut reply
        {
            *result = self.round.result_of(key, std::mem::take(result));
        }
        reply
    }

    fn with_result_of(&self, key: &StoreKey, snapshot: RecordSnapshot) -> RecordSnapshot {
        let mut snapshot = snapshot;
        if let State::Completed { result, .. } = &mut snapshot.record.state {
            *result = self.round.result_of(key, std::mem::take(result));
        }
        snapshot
    }
}

fn word(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Granted(_) => "granted",
        Verdict::Completed { .. } => "completed",
        Verdict::Busy { .. } => "busy",
        Verdict::Failed { .. } => "failed",
        Verdict::Mismatch => "mismatch",
    }
}

#[async_trait]
impl Store for ProcessStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let mut replies = Vec::with_capacity(commands.len());
        for command in commands {
            replies.push(self.one(command).await);
        }
        replies
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        match self.reach().await {
            Ok(()) => {
                let read = self.inner.read(keys.clone()).await;
                read.into_iter()
                    .zip(&keys)
                    .map(|(read, key)| Ok(read?.map(|snapshot| self.with_result_of(key, snapshot))))
                    .collect()
            }
            Err(error) => keys.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        self.reach().await?;
        self.inner.describe(scope, expected, proposed).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.reach().await?;
        self.inner.descriptor(scope).await
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        self.reach().await?;
        self.inner.check().await
    }
}
