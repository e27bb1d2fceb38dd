//! The settings of a gate, and their check.

use std::time::Duration;

use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::{Size, Time};

use crate::codec::Codec;
use crate::running::policy::AfterUnknown;

/// The reaction of a gate whose store has lost records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum OnStoreLoss {
    /// Refuse every claim of the scope, in every process, until `oncegate accept loss` (or
    /// `oncegate::admin::accept_loss`) permits the messages to run again. Running
    /// handlers may end, and their outcomes are recorded. The default.
    #[default]
    Halt,
    /// Report the loss and continue: messages whose records are lost run again when they are
    /// delivered again. Choose the same for every process of a scope.
    Continue,
}

/// The reaction of a gate to messages of another broker than those that the records of its scope
/// were made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema)
)]
#[non_exhaustive]
pub enum OtherBroker {
    /// The source is not opened: an equal key may be that of another message. The default.
    #[default]
    #[cfg_attr(feature = "config", serde(rename = "refused"))]
    Refused,
    /// The other broker has the same messages, as a mirror or a failover has: its brokers become
    /// known to the scope.
    #[cfg_attr(feature = "config", serde(rename = "same stream"))]
    SameStream,
}

/// The settings of a gate, which never change while it is open.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct GateSettings {
    /// The lease: how long a claim lasts without a heartbeat, and so how long a message waits after
    /// its worker was killed; 100ms to 1d.
    ///
    /// Heartbeats, sent from a separate thread, renew the lease for handlers that take longer.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub lease: Duration,
    /// How long one run may take, up to 1d.
    ///
    /// After that its heartbeats stop, its cancellation fires, and its lease lapses.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub max_run: Duration,
    /// How long a completed record is kept, up to ten years. It must cover the longest replay.
    ///
    /// A message that is delivered again after its record has expired runs again.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub retention: Duration,
    /// Whether workers get a fencing token, a number that only grows per key.
    ///
    /// It costs about a tenth of the store's throughput.
    pub fenced: bool,
    /// Whether every handler must finish by `Attempt::commit_with` or `Attempt::completing`.
    ///
    /// A handler that returns `Ok` without either has then failed, and its message is tried again:
    /// the handler may have rolled its transaction back or forgotten it, and a plain completion
    /// would lose the effect.
    #[cfg_attr(feature = "config", serde(skip))]
    pub transactional: bool,
    /// The consequence of an attempt that ended without an outcome: `retry` runs the message again,
    /// `give_up` never does, and makes it a dead letter of the cause `outcome_unknown`.
    ///
    /// An outcome is unknown when the process of an attempt ended, its lease was lost, its handler
    /// did not end in time, or the worker's answer says so. Choose `give_up` for an effect that
    /// must not happen twice and whose downstream service takes no idempotency key and cannot be
    /// asked: a person decides then, by `oncegate complete` or a redrive. It costs a dead letter
    /// for each message that was claimed when its process was killed, also where the handler had
    /// not begun. A loss of records in the store is not covered: see `on_store_loss`.
    ///
    /// With a transactional handler it changes nothing: a transaction that is not committed is
    /// known not to have happened.
    pub after_unknown: AfterUnknown,
    /// What happens when the store has lost records: `halt` runs nothing until
    /// `oncegate accept loss`, `continue` runs messages again whose records are lost.
    ///
    /// Every process that has opened the scope notices a loss within seconds, whether or not it has
    /// written the lost records: the scope's descriptor in the store is gone or was created again,
    /// an earlier state of the store was restored, a shard was emptied, or a record that this
    /// process has completed or found completed is missing. A process that starts later notices it
    /// by what Kafka holds with the group's commits. With SQS, HTTP and your own loops, a process
    /// that starts after the loss cannot notice it, unless another process runs that knew the store
    /// before.
    pub on_store_loss: OnStoreLoss,
    /// The meaning of another broker than that of the scope's records: `refused` does not start,
    /// `same stream` takes it for one with the same messages.
    ///
    /// Two clusters, regions, accounts or virtual hosts may have a topic or queue of one name. With
    /// one scope in one store, messages of the second with the same keys would be taken for
    /// duplicates of the first's. Choose `same stream` for a mirror, a failover, or a broker that
    /// was set up again; otherwise give each its own scope, or its own `route`.
    #[cfg_attr(feature = "config", serde(rename = "broker"))]
    pub other_broker: OtherBroker,
    /// The encoding of results.
    #[cfg_attr(feature = "config", serde(skip))]
    pub codec: Codec,
    /// The largest result that a record keeps.
    ///
    /// A larger one is stored in the large results. Without them it is not kept: the record holds
    /// that the work is done, and duplicates go to `Handler::undecodable_duplicate`.
    #[cfg_attr(feature = "config", serde(rename = "max_result", with = "Size"))]
    pub max_result_bytes: usize,
    /// The largest result that goes to the large results, up to 1GiB. A larger one is not kept.
    ///
    /// It is held in memory as a whole.
    #[cfg_attr(feature = "config", serde(rename = "max_large_result", with = "Size"))]
    pub max_large_result_bytes: usize,
}

impl GateSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        lease: Duration::from_secs(30),
        max_run: Duration::from_secs(15 * 60),
        retention: Duration::from_secs(7 * 86_400),
        fenced: false,
        transactional: false,
        after_unknown: AfterUnknown::Retry,
        on_store_loss: OnStoreLoss::Halt,
        other_broker: OtherBroker::Refused,
        codec: Codec::Json,
        max_result_bytes: 64 * 1024,
        max_large_result_bytes: 8 * 1024 * 1024,
    };

    /// The shortest lease: with a shorter one, a busy machine would lose leases for no reason.
    const MIN_LEASE: Duration = Duration::from_millis(100);
    /// The longest lease and run: a day.
    const MAX_LEASE: Duration = Duration::from_secs(86_400);
    /// The longest retention: ten years.
    const MAX_RETENTION: Duration = Duration::from_secs(10 * 365 * 86_400);
    /// The largest result that is requested from a result store, whichever process stored it: 1
    /// GiB.
    pub(super) const MOST_LARGE_RESULT_BYTES: usize = 1024 * 1024 * 1024;

    /// Returns what follows an attempt without an outcome, which a transaction always has: it is
    /// committed with its record, or it has not happened.
    pub(crate) fn after_unknown(&self) -> AfterUnknown {
        if self.transactional {
            AfterUnknown::Retry
        } else {
            self.after_unknown
        }
    }

    /// Returns what is wrong with these settings. None means that a gate accepts them.
    pub fn check(&self) -> Vec<Finding> {
        let Self {
            lease,
            retention,
            max_run,
            max_large_result_bytes,
            ..
        } = *self;
        let mut findings = Vec::new();
        let is_lease_wrong = lease < Self::MIN_LEASE || lease > Self::MAX_LEASE;
        // Times are not compared with a wrong lease.
        let shortest = if is_lease_wrong {
            Duration::ZERO
        } else {
            lease
        };
        if is_lease_wrong {
            findings.push(Finding::new(
                "lease",
                format!("`lease` is {lease:?}; it must be between 100 ms and a day"),
            ));
        }
        if retention < shortest || retention > Self::MAX_RETENTION {
            findings.push(Finding::new(
                "retention",
                format!(
                    "`retention` is {retention:?}; it must be between the lease ({lease:?}) and ten years"
                ),
            ));
        }
        if max_run < shortest || max_run > Self::MAX_LEASE {
            findings.push(Finding::new(
                "max_run",
                format!(
                    "`max_run` is {max_run:?}; it must be between the lease ({lease:?}) and a day"
                ),
            ));
        }
        if max_large_result_bytes > Self::MOST_LARGE_RESULT_BYTES {
            findings.push(Finding::new(
                "max_large_result",
                format!(
                    "`max_large_result_bytes` is {max_large_result_bytes}; it must be at most 1 GiB"
                ),
            ));
        }
        findings
    }
}

impl Default for GateSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}
