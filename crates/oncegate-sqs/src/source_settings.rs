//! The settings of a source that are the same for every queue.

use std::time::Duration;

use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::Time;

/// The way in which the body of a message is read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Body {
    /// The body is the payload. The default; also for SNS with raw message delivery, and for
    /// EventBridge, whose bodies are JSON.
    #[default]
    Raw,
    /// The body is an SNS envelope, and the payload is the message in it. Any other body is bad
    /// input, and becomes a dead letter.
    Sns,
}

/// The settings of an [`SqsSource`](crate::SqsSource), besides its queue and how that is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct SqsSettings {
    /// How long the queue hides a message without a heartbeat; no shorter than the lease. Whole
    /// seconds, 1s to 6h.
    ///
    /// It is set with every receive, whatever the queue's own setting is. It is also how long a
    /// message waits after its worker was killed.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub visibility: Duration,
    /// How long a receive waits on an empty queue. Whole seconds, 1s to 20s.
    ///
    /// Cancelling a receive would hide its messages for the visibility timeout. So this is also how
    /// long an idle consumer may take to stop, and it is kept a second below the consumer's
    /// `stop_deadline`.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub wait: Duration,
    /// What bodies are: `raw` payloads, or envelopes of `sns`.
    pub body: Body,
    /// A dead letter that is consumed keeps its first route: for queues to which oncegate alone
    /// writes.
    ///
    /// Each message's route comes from its attribute `oncegate-origin`, if present, instead of the
    /// queue's name.
    pub routes_from_attributes: bool,
}

const VISIBILITY_MIN: Duration = Duration::from_secs(1);
const VISIBILITY_MAX: Duration = Duration::from_secs(6 * 3_600);
pub(crate) const WAIT_MIN: Duration = Duration::from_secs(1);
/// The longest wait that SQS allows.
const WAIT_MAX: Duration = Duration::from_secs(20);

impl SqsSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        visibility: Duration::from_secs(60),
        wait: WAIT_MAX,
        body: Body::Raw,
        routes_from_attributes: false,
    };

    /// Returns what is wrong with these settings.
    pub fn check(&self) -> Vec<Finding> {
        let Self {
            visibility, wait, ..
        } = *self;
        let mut findings = Vec::new();
        if !(VISIBILITY_MIN..=VISIBILITY_MAX).contains(&visibility) || !is_whole(visibility) {
            findings.push(Finding::new(
                "visibility",
                format!(
                    "`visibility` is {visibility:?}; it must be whole seconds, from 1 s to 6 h"
                ),
            ));
        }
        if !(WAIT_MIN..=WAIT_MAX).contains(&wait) || !is_whole(wait) {
            findings.push(Finding::new(
                "wait",
                format!("`wait` is {wait:?}; it must be whole seconds, from 1 s to 20 s"),
            ));
        }
        findings
    }
}

impl Default for SqsSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

fn is_whole(duration: Duration) -> bool {
    duration.subsec_nanos() == 0
}
