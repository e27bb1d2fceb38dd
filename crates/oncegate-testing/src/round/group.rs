//! The source of a round's messages for its processes: the embedded broker, or a topic of a real
//! one.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate_runtime::BoxError;
use oncegate_runtime::source::Source;
use tokio::sync::futures::Notified;

/// The consumer group of a round.
#[async_trait]
pub(crate) trait Group: Send + Sync {
    /// Does what has to be done while the round is played, and returns only when that fails.
    async fn drive(&self) -> BoxError;

    /// The connection of a process.
    fn member(self: Arc<Self>, process: u32) -> Arc<dyn Source>;

    /// A process that stood still goes on, and gets its share of the partitions.
    fn join(&self, process: u32);

    /// A process is gone or stands still: others get what it has not finished.
    fn leave(&self, process: u32);

    /// Takes partitions from their owners, and gives them to others.
    fn rotate(&self);

    /// Lets others get a message that `process` has.
    fn copy_to_others(&self, message: usize, process: u32);

    /// Delivers a message again only after one of these was acknowledged, if one of them is in
    /// another partition. A real broker cannot: there, chance decides which comes first.
    fn hold_back(&self, message: usize, until: &[usize]) {
        let _ = (message, until);
    }

    /// Delivers every message again.
    fn rewind(&self);

    /// The messages that are not acknowledged.
    fn unacked(&self) -> Vec<usize>;

    /// Resolves after the next change. The returned future must be made before the group is looked
    /// at.
    fn moved(&self) -> Notified<'_>;
}
