//! The settings of a source that are the same for every broker and queue.

use oncegate_core::settings::Finding;
use oncegate_runtime::Ordering;

/// The settings of an [`AmqpSource`](crate::AmqpSource), besides its queue and the way to the
/// broker.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct AmqpSettings {
    /// The number of messages that the broker delivers before the first of them is acknowledged, 1
    /// to 65,535.
    ///
    /// Messages that run or wait for a handler count. With fewer than the consumer's `concurrency`,
    /// handlers stay idle; many more are kept from other consumers. While most of them wait for
    /// retries, the broker delivers more. With `in_order` it is 1.
    pub prefetch: u16,
    /// The consumer's priority among those of the queue.
    ///
    /// The broker delivers to consumers of a lower priority only while those of a higher one have
    /// their prefetch full.
    pub priority: i32,
    /// The messages of the queue run one after another, as the queue has them, and are delivered
    /// one at a time. Across several consumers that is an order only with
    /// `x-single-active-consumer`.
    ///
    /// Those behind a message that waits for a retry, or for the lease of a consumer that died,
    /// wait as well. A message that is given up is in the dead letters when the next one runs.
    /// Without it, messages run concurrently, because RabbitMQ has no key by which the consumer's
    /// ordering could keep an order.
    pub in_order: bool,
    /// The URL of the management plugin, such as `http://localhost:15672`: the limits of the queues
    /// are known at the start.
    ///
    /// Those that lose messages or dead letters are logged as warnings, and a message is sent again
    /// before its queue's delivery limit drops it.
    /// It is asked with the user and the password of the broker, and without TLS. The user needs
    /// the tag `management`. A plugin that does not answer is logged, and nothing else.
    pub management: Option<String>,
    /// A dead letter that is consumed keeps its first route: for queues to which oncegate alone
    /// writes.
    ///
    /// Each message's route comes from its header `oncegate-origin`, if present, instead of the
    /// queue's name. So do those of messages that were redriven.
    pub routes_from_headers: bool,
}

impl AmqpSettings {
    /// The defaults. The prefetch is twice the concurrency that a consumer has by default.
    pub const DEFAULT: Self = Self {
        prefetch: 128,
        priority: 0,
        in_order: false,
        management: None,
        routes_from_headers: false,
    };

    /// Returns what is wrong with the ordering of the consumer of this source, if anything.
    pub fn check_ordering(&self, ordering: Ordering) -> Option<Finding> {
        match ordering {
            Ordering::Unordered if self.in_order => Some(Finding::new(
                "in_order",
                "`in_order` keeps no order with the ordering `unordered`: remove one of them",
            )),
            Ordering::Partition if !self.in_order => Some(Finding::new(
                "in_order",
                "a queue of RabbitMQ has no partitions: set `in_order` instead of the ordering `partition`",
            )),
            _ => None,
        }
    }

    /// Returns what is wrong with these settings.
    pub fn check(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.prefetch == 0 {
            findings.push(Finding::new(
                "prefetch",
                "`prefetch` is 0, which means no limit; it must be from 1 to 65,535",
            ));
        }
        findings
    }
}

impl Default for AmqpSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}
