//! State that the connections of a store share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::durability::Durability;
use super::losses::Losses;
use super::scripts::Scripts;

/// State shared by the pipes of all nodes.
#[derive(Clone)]
pub(super) struct Shared {
    pub(super) scripts: Arc<Scripts>,
    /// Time limit for a pipeline, without what its size adds.
    pub(super) response_timeout: Duration,
    pub(super) durability: Durability,
    pub(super) losses: Arc<Losses>,
    /// `true` once a server has refused a call with keys of several slots, although its INFO says
    /// that it is not in cluster mode: it is a proxy in front of several servers. From then on, no
    /// call has more than one key.
    pub(super) is_sharded: Arc<AtomicBool>,
}
