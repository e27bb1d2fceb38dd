//! The progress of a trial.

/// Is called after each round.
pub(crate) type ProgressHook = dyn Fn(&Progress) + Send + Sync;

/// The progress of a trial.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The number of rounds that have ended.
    pub rounds: u64,
    /// The number of messages that were sent in them.
    pub messages: u64,
    /// The number of faults that have begun in them.
    pub faults: u64,
    /// The number of different kinds of defects that were found.
    pub defects: usize,
}
