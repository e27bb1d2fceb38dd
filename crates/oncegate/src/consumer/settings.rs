//! The settings of a consumer, and their check: a setting that makes no sense is refused by its name.

use std::time::Duration;

#[cfg(feature = "otel")]
use super::TraceParent;
use super::{Breaker, Consumer, ConsumerError, Gate};
use crate::backoff::Backoff;

/// In which order messages run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ordering {
    /// One after another within a partition (or a queue's group).
    Partition,
    /// One after another within a broker key; messages without a key have no order. The default.
    #[default]
    Key,
    /// Any order.
    Unordered,
}

/// What happens to a message of which no key can be made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BadKeys {
    /// It is sent to the dead letters. The default.
    #[default]
    DeadLetter,
    /// The consumer stops at it, and does not acknowledge it.
    Refuse,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) concurrency: u32,
    pub(super) ordering: Ordering,
    pub(super) max_attempts: u32,
    pub(super) backoff: Backoff,
    pub(super) bad_keys: BadKeys,
    pub(super) tenant_limit: Option<u32>,
    pub(super) stop_deadline: Duration,
    pub(super) start_patience: Duration,
    pub(super) overtaking_retries: bool,
    pub(super) fail_open_after: Option<Duration>,
    #[cfg(feature = "otel")]
    pub(super) trace_parent: TraceParent,
}

impl Consumer {
    pub(super) fn check_settings(&self) -> Result<(), ConsumerError> {
        let refuse = |what: &str| Err(ConsumerError::Settings(what.to_owned()));
        let Settings { concurrency, max_attempts, .. } = self.settings;
        if concurrency == 0 || concurrency > 100_000 {
            return refuse("`concurrency` must be between 1 and 100,000");
        }
        if max_attempts == 0 || max_attempts > 254 {
            return refuse("`max_attempts` must be between 1 and 254");
        }
        if self.most_messages == 0 || self.most_bytes == 0 {
            return refuse("`in_flight` must let at least one message and one byte in");
        }
        let ordering = self.settings.ordering;
        let is_ordered = ordering != Ordering::Unordered && !self.settings.overtaking_retries;
        if is_ordered && self.source.retry_queue().is_some() {
            return refuse(&format!(
                "`ordering` is {ordering:?}, and a message that waits in a retry topic is overtaken: choose \
                 `Ordering::Unordered`, or accept it by `overtaking_retries`"
            ));
        }
        if self.settings.fail_open_after.is_some() {
            let bound = |gate: &Gate| gate.settings().transactional || gate.settings().fenced;
            if let Some((_, gate, _)) = self.routes.iter().find(|(_, gate, _)| bound(gate)) {
                let scope = gate.scope();
                return refuse(&format!(
                    "`fail_open_after` is set, and the gate `{scope}` is transactional or fenced: without its store \
                     there is no transaction and no fence"
                ));
            }
        }
        if self.settings.tenant_limit == Some(0) {
            return refuse("`tenant_limit` must be at least 1");
        }
        let without_tenant = self.routes.iter().find(|(_, gate, _)| !gate.key().has_tenant());
        if let (Some(_), Some((_, gate, _))) = (self.settings.tenant_limit, without_tenant) {
            let scope = gate.scope();
            return refuse(&format!(
                "`tenant_limit` is set, and the key of `{scope}` has no tenant: set `Key::tenant`"
            ));
        }
        if let Some(defect) = self.breaker.as_ref().and_then(Breaker::defect) {
            return refuse(defect);
        }
        let named = self.routes.iter().filter_map(|(name, ..)| name.as_deref());
        let mut names: Vec<&str> = named.collect();
        names.sort_unstable();
        match names.windows(2).find(|pair| pair.first() == pair.last()) {
            Some(pair) => {
                refuse(&format!("the route `{}` is given twice", pair.first().copied().unwrap_or_default()))
            }
            None => Ok(()),
        }
    }
}
