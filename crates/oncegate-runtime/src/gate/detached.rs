//! Operations of owners in other processes, by the token of their claim.
//!
//! No state of a claim is in this process: there is no heartbeat, and no operation goes on when its
//! caller is gone. The caller repeats what has had no answer, with the same token.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::key::{Fingerprint, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::{Grant, Operation, Reply};
use oncegate_core::store::{Command, RecordSnapshot, StoreError};
use tokio::time::Instant;

use super::{Claimed, Identity, OpenGate};
use crate::message::Message;
use crate::observe::{Event, ExtraRunCause};

/// A claim that was granted to another process.
pub(crate) struct GrantedAway {
    pub(crate) identity: Identity,
    pub(crate) token: Token,
    pub(crate) grant: Grant,
}

impl OpenGate {
    /// Claims the key of `message` for another process. `Err(claimed)` in the inner result is any
    /// other answer than a grant.
    pub(crate) async fn claim_away(
        self: &Arc<Self>,
        message: &Message,
        identity: &Identity,
        lease: Duration,
        token: Option<Token>,
    ) -> Result<Result<GrantedAway, Claimed>, StoreError> {
        let mut claim = self.new_claim(identity).lasting(lease);
        if let Some(token) = token {
            claim = claim.repeated_by_caller(token);
        }
        Ok(match self.send_until_known(&mut claim, message).await? {
            Claimed::Granted(lease) => {
                let (identity, token, grant) = lease.detach();
                Ok(GrantedAway {
                    identity,
                    token,
                    grant,
                })
            }
            other => Err(other),
        })
    }

    /// The identity of a message whose fingerprint is that of something else, or none.
    pub(crate) fn identify_with(
        &self,
        message: &Message,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Identity, oncegate_core::key::KeyError> {
        let identity = self.identify(message)?;
        Ok(Identity {
            fingerprint,
            ..identity
        })
    }

    /// Extends claims of other processes by one call of the store. Returns the replies in their
    /// order.
    pub(crate) async fn extend_away(
        &self,
        claims: impl Iterator<Item = (StoreKey, Token, Duration)>,
    ) -> Vec<Result<Reply, StoreError>> {
        let extends = claims.map(|(key, token, lease)| Command {
            key,
            operation: Operation::Extend { token, lease },
        });
        let replies = self.execute_all(extends.collect()).await;
        for error in replies.iter().filter_map(|reply| reply.as_ref().err()) {
            self.note_store_error(error);
        }
        replies
    }

    /// Ends a claim of another process: sends the operation once.
    pub(crate) async fn end_away(
        &self,
        key: &StoreKey,
        operation: Operation,
    ) -> Result<Reply, StoreError> {
        let command = Command {
            key: key.clone(),
            operation,
        };
        let reply = self.execute(key, command.operation.clone()).await;
        match &reply {
            Ok(reply) => self.note_ended_away(&command, reply),
            Err(error) => self.note_store_error(error),
        }
        reply
    }

    fn note_ended_away(&self, command: &Command, reply: &Reply) {
        let scope = self.scope();
        if let Operation::Complete {
            token,
            result,
            retention,
            ..
        } = &command.operation
        {
            match reply {
                Reply::Applied { recreated } => {
                    if *recreated {
                        let cause = ExtraRunCause::StoreLoss;
                        self.observe(Event::ExtraRun { scope, cause });
                    }
                    let result_bytes = result.len() as u64;
                    self.observe(Event::Completed {
                        scope,
                        result_bytes,
                    });
                    self.note_kept(&command.key, token, *retention);
                }
                Reply::NotOwner | Reply::Verdict { .. } => {
                    self.observe(Event::CompleteLost { scope });
                }
            }
        }
        self.notes.note_ended(command, reply);
    }

    /// Notes a completed record as one that the store must hold from now on.
    fn note_kept(&self, key: &StoreKey, token: &Token, retention: Duration) {
        if let Some(losses) = &self.losses {
            losses.note_completed();
            losses
                .witnesses
                .note_completed(key, token, Instant::now(), retention);
        }
    }

    fn note_store_error(&self, error: &StoreError) {
        self.observe(Event::StoreError {
            scope: self.scope(),
            class: error.class(),
        });
    }

    /// Reads the record of a key, and changes nothing.
    pub(crate) async fn read_record(
        &self,
        key: &StoreKey,
    ) -> Result<Option<RecordSnapshot>, StoreError> {
        let found = self.store.read(vec![key.clone()]).await.into_iter().next();
        let found = found.unwrap_or_else(|| Err(StoreError::unknown("the store gave no answer")));
        if let Err(error) = &found {
            self.note_store_error(error);
        }
        found
    }
}
