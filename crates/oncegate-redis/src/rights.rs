//! The minimal rights that a Redis user needs, and the check that it has them.

use std::collections::BTreeSet;
use std::time::Duration;

use oncegate_core::key::{Digest, Scope, StoreKey};
use oncegate_core::record::Token;
use oncegate_core::rules::Operation;
use oncegate_core::store::{Command, Store, StoreError};
use parking_lot::MutexGuard;

use super::request::Request;
use super::{RedisStore, pipe_of};

/// The lease of the test record.
const PROBE_LEASE: Duration = Duration::from_secs(1);

/// A record that the check of the rights leaves behind expires after this time.
const PROBE_LEFT: Duration = Duration::from_secs(1);

/// The rights that every server must grant: for the scripts, for what they call, and for the check
/// of the server.
const ALWAYS: &str = "+evalsha +script|load +get +set +pttl +pexpire +pexpiretime +time +info";

/// The additional rights for a cluster node.
const IN_A_CLUSTER: &str = "+cluster|slots +asking";

/// The additional rights for buckets.
const IN_BUCKETS: &str = "+hget +hset +hdel +hlen +hgetall +del +pexpireat";

/// The key of the test record in a scope. No message has this digest.
pub(super) fn probe(scope: &Scope) -> StoreKey {
    StoreKey::new(scope, Digest::from_bytes(*b"oncegate: rights"))
}

impl RedisStore {
    /// The rules for `ACL SETUSER` that let a user work on this scope and on nothing else.
    ///
    /// They are the minimum for this store's topology and durability. Give them to the user on
    /// every server, replicas included: `ACL SETUSER billing on >password` and then these. When the
    /// gate opens the scope, the store tries each right. If one is missing, opening fails, and the
    /// error contains these rules.
    pub fn acl_rules(&self, scope: &Scope) -> String {
        let mut rules = format!("~{}:* -@all {ALWAYS}", scope.as_str());
        if self.is_cluster() {
            rules = format!("{rules} {IN_A_CLUSTER}");
        }
        if self.inner.scripts.buckets().is_some() {
            rules = format!("{rules} {IN_BUCKETS}");
        }
        rules + self.inner.settings.durability.rights()
    }

    /// Checks that the user may do everything that a gate of this scope needs: tries it on a test
    /// record, which expires after a second. A gate that opens does so itself.
    ///
    /// # Errors
    /// When a right is missing. The text has the [rules](Self::acl_rules) that the user needs.
    pub async fn check_rights(&self, scope: &Scope) -> Result<(), StoreError> {
        self.try_each_right(scope).await
    }

    /// Runs every operation on a test record, so that a missing right is found before the first
    /// message.
    ///
    /// Done once per scope, because the descriptor of a scope is also written while messages are
    /// handled.
    pub(super) async fn try_rights(&self, scope: &Scope) -> Result<(), StoreError> {
        if self.tried().contains(scope) {
            return Ok(());
        }
        self.try_each_right(scope).await?;
        self.tried().insert(scope.clone());
        Ok(())
    }

    fn tried(&self) -> MutexGuard<'_, BTreeSet<Scope>> {
        self.inner.tried.lock()
    }

    async fn try_each_right(&self, scope: &Scope) -> Result<(), StoreError> {
        // A user without rights leaves one record behind at most.
        let key = probe(scope);
        let [owner, other] = [
            Token::from_bits(fastrand::u128(1..)),
            Token::from_bits(fastrand::u128(1..)),
        ];
        let complete = Operation::Complete {
            token: owner,
            fingerprint: None,
            result: b"".as_slice().into(),
            retention: PROBE_LEFT,
        };
        // The first claim calls TIME, the second PTTL, and the last PEXPIREAT if a durability is
        // required.
        let mut refusal = None;
        for operation in [
            claim(owner, true),
            claim(other, false),
            Operation::Extend {
                token: owner,
                lease: PROBE_LEASE,
            },
        ] {
            refusal = refusal.or(self.refusal_of(&key, operation).await);
        }
        let read = self
            .read(vec![key.clone()])
            .await
            .into_iter()
            .find_map(Result::err);
        refusal = refusal.or(read.filter(is_refusal));
        for operation in [complete, claim(other, false)] {
            refusal = refusal.or(self.refusal_of(&key, operation).await);
        }
        if self.inner.scripts.buckets().is_some() {
            // Only some completions need these.
            for (verb, field) in [("HGETALL", None), ("HDEL", Some("none"))] {
                let answer = self
                    .ask_about(&format!("{}:rights", scope.as_str()), |key| {
                        let mut cmd = redis::cmd(verb);
                        cmd.arg(*key).arg(field);
                        Request::plain(cmd)
                    })
                    .await;
                refusal = refusal.or(answer.err().filter(is_refusal));
            }
        }
        refusal.map_or(Ok(()), |refusal| {
            let rules = self.acl_rules(scope);
            let why = match &refusal {
                StoreError::Refused { reason } => reason.to_string(),
                other => other.to_string(),
            };
            Err(StoreError::refused(format!(
                "{why}. The user needs the rules `{rules}`"
            )))
        })
    }

    async fn refusal_of(&self, key: &StoreKey, operation: Operation) -> Option<StoreError> {
        // Not with `execute`, which refuses claims after a loss.
        let command = Command {
            key: key.clone(),
            operation,
        };
        let answers = self.apply(pipe_of(&command), &[&command]).await;
        answers.into_iter().find_map(Result::err).filter(is_refusal)
    }
}

fn claim(token: Token, fenced: bool) -> Operation {
    Operation::Claim {
        token,
        lease: PROBE_LEASE,
        fingerprint: None,
        fenced,
        longest_lease: Duration::MAX,
    }
}

/// Returns whether the error concerns rights: one of a full or unreachable server does not.
fn is_refusal(error: &StoreError) -> bool {
    matches!(error, StoreError::Refused { .. })
}
