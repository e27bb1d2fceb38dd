//! Removes the records of a scope that only tests have used.

use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::store::StoreError;

use super::link::PipeName;
use super::request::Request;
use super::rights::probe;
use super::{RedisStore, descriptor_key, replies, slots};

impl RedisStore {
    /// Removes these records, whatever their states, and the descriptor of their scope.
    ///
    /// For a scope that a test had for itself: a message whose record is removed runs again when it
    /// is delivered again. In addition to the [rules](Self::acl_rules) of the scope, the user needs
    /// `+unlink`. A [compact](super::RedisBuilder::compact) store keeps the completions that have
    /// moved to buckets.
    ///
    /// # Errors
    /// When a server does not answer, or refuses. Some of the records may be removed then; it can
    /// be repeated.
    pub async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        let mut names: Vec<String> = keys.iter().map(|key| key.as_str().to_owned()).collect();
        names.extend([descriptor_key(scope), probe(scope).as_str().to_owned()]);
        let answers = self
            .inner
            .topology
            .ask(PipeName::Bulk, &names, |name| slots::slot(name), unlink)
            .await;
        answers
            .into_iter()
            .try_for_each(|answer| replies::value(answer).map(drop))
    }
}

fn unlink(name: &String) -> Request {
    let mut unlink = redis::cmd("UNLINK");
    unlink.arg(name);
    Request::plain(unlink)
}
