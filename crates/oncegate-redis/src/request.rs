//! A request to the server, before it is part of a pipeline.

use redis::Cmd;

use super::first_attempt::FirstAttempt;
use super::witnesses::Completed;
use oncegate_store_toolkit::batch::Item;

/// Approximate bytes of a request on the wire besides its key and its payload.
pub(super) const OVERHEAD_BYTES: usize = 160;

/// A command to send to the server.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) what: What,
    /// The node answers only after ASKING: the key's slot is being moved there.
    pub(super) asking: bool,
    /// The answer counts only when the required durability is confirmed for everything before it.
    pub(super) confirm: bool,
    /// The completion that it writes.
    pub(super) completed: Option<Completed>,
    bytes: usize,
}

/// A request on the wire.
#[derive(Debug)]
pub(super) enum What {
    /// A command by itself.
    Cmd(Cmd),
    /// A command, or a part of one, depending on the other requests of the pipeline.
    First(FirstAttempt),
}

impl Request {
    pub(super) fn new(cmd: Cmd, bytes: usize) -> Self {
        Self {
            what: What::Cmd(cmd),
            asking: false,
            confirm: false,
            completed: None,
            bytes,
        }
    }

    pub(super) fn first(first: FirstAttempt) -> Self {
        let bytes = first.bytes();
        Self {
            what: What::First(first),
            asking: false,
            confirm: true,
            completed: None,
            bytes,
        }
    }

    pub(super) fn confirmed(self) -> Self {
        Self {
            confirm: true,
            ..self
        }
    }

    /// The same request for a node that a redirection named for this request only.
    pub(super) fn asking(self, asking: bool) -> Self {
        Self { asking, ..self }
    }

    /// A plain read of a record, without its expiry.
    pub(super) fn get(key: &str) -> Self {
        let mut cmd = Cmd::with_capacity(2, key.len() + 4);
        cmd.arg("GET").arg(key);
        Self::new(cmd, key.len() + 24)
    }

    /// A small query.
    pub(super) fn plain(cmd: Cmd) -> Self {
        Self::new(cmd, OVERHEAD_BYTES)
    }

    /// The query for the server's persistence settings, which not every user may read.
    pub(super) fn persistence() -> Self {
        let mut cmd = redis::cmd("CONFIG");
        cmd.arg("GET").arg("appendfsync").arg("save");
        Self::new(cmd, 48)
    }

    /// The query for INFO.
    pub(super) fn info() -> Self {
        Self::new(redis::cmd("INFO"), 16)
    }
}

impl Item for Request {
    fn bytes(&self) -> usize {
        self.bytes
    }
}
