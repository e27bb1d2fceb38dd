//! The promise of each store: the rows of the table in `docs/STORES.md`.

use std::fmt;

/// The faults that a completion survives after the store has confirmed it, from the least to the
/// most.
///
/// A store reports the variant that applies to it at start-up, in [`Checkup`](super::Checkup). It
/// depends on the settings of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Survives {
    /// The server may evict records while it runs.
    Evictable,
    /// Records are in the memory of the process that wrote them.
    Process,
    /// Records are in the memory of a server.
    Memory,
    /// The server saves its memory as snapshots.
    Snapshots,
    /// The operating system decides when it writes to the disk.
    Unsynced,
    /// Records reach the disk shortly after the reply.
    Moments,
    /// The completion is synced to the disk.
    Disk,
    /// A service keeps the completion durably by its own means, as the user of the store has
    /// declared.
    Declared,
    /// The completion is synced to the disk and is on another machine too.
    Replicated,
}

/// A row of the table: what is promised, what still makes a handler run again, and how that is
/// detected.
///
/// No store can prevent a run after a crash between the effect and its completion, a lease lost
/// while the handler runs, the end of the retention, or an operator's reset. These runs apply to
/// every row but [`SAME_TRANSACTION`](Self::SAME_TRANSACTION).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise {
    /// The row's name, one lower-case word.
    pub name: &'static str,
    /// The guarantee for a completion that the store has confirmed.
    pub holds: &'static str,
    /// The events that still make a handler run again.
    pub adds_a_run: &'static str,
    /// The sign by which such an event is detected.
    pub noticed_by: &'static str,
}

/// Every gate checks for a loss of records, whichever store it uses.
const AT_COMPLETION: &str =
    "`store_losses` and `extra_runs{store_loss}`; by default the scope halts";

impl Survives {
    /// Every variant, from the least to the most.
    pub const ALL: [Self; 9] = [
        Self::Evictable,
        Self::Process,
        Self::Memory,
        Self::Snapshots,
        Self::Unsynced,
        Self::Moments,
        Self::Disk,
        Self::Declared,
        Self::Replicated,
    ];

    /// Returns one lower-case word, the name of its row.
    pub const fn as_str(self) -> &'static str {
        self.promise().name
    }

    /// The row that applies when the effect happens outside the store's transaction.
    pub const fn promise(self) -> Promise {
        let (name, holds, adds_a_run, noticed_by) = match self {
            Self::Evictable => (
                "evictable",
                "nothing: records may go at any time",
                "memory running short, and all that adds a run in the rows below",
                "the server's `evicted_keys`, and a warning at start-up",
            ),
            Self::Process => (
                "process",
                "it is kept until its process ends",
                "the end of the process",
                "not at all: everything looks new",
            ),
            Self::Memory => (
                "memory",
                "it survives its worker; the server's end takes everything",
                "a restart or crash of the server, a failover",
                AT_COMPLETION,
            ),
            Self::Snapshots => (
                "snapshots",
                "it survives its worker; the server's crash takes what came after the last snapshot",
                "a crash of the server, a power cut, a failover",
                AT_COMPLETION,
            ),
            Self::Unsynced => (
                "unsynced",
                "it survives a crash of the worker and of the server; a power cut may take any part",
                "a power cut, loss of the disk, a failover",
                AT_COMPLETION,
            ),
            Self::Moments => (
                "moments",
                "it survives its worker; a crash of the server or a power cut may take the last moments",
                "a crash of the server or a power cut, for what was completed just before; loss of the disk, a failover",
                AT_COMPLETION,
            ),
            Self::Disk => (
                "disk",
                "it survives crashes and power cuts",
                "loss of the disk, a backup that is put back, a failover to a copy that lags",
                AT_COMPLETION,
            ),
            Self::Declared => (
                "declared",
                "it survives crashes, power cuts and the loss of one machine, if the service keeps what it promises: \
                 oncegate cannot check that",
                "a loss in the service, a backup that is put back",
                AT_COMPLETION,
            ),
            Self::Replicated => (
                "replicated",
                "it survives crashes, power cuts and the loss of one machine",
                "loss of all its machines, a backup that is put back",
                AT_COMPLETION,
            ),
        };
        Promise {
            name,
            holds,
            adds_a_run,
            noticed_by,
        }
    }
}

impl Promise {
    /// The row that applies when the effect is committed in the store's own transaction, whatever
    /// the store survives: a loss of the record is a loss of its effect as well.
    pub const SAME_TRANSACTION: Self = Self {
        name: "same-transaction",
        holds: "exactly one committed effect: it and its record are there together, or neither is",
        adds_a_run: "crashes, lost leases and data that is lost run the handler again, and commit nothing twice; the \
                     end of the retention and a reset do commit again",
        noticed_by: "`extra_runs{crash_takeover}`, `extra_runs{lease_lost}`; the record is read back before the ack",
    };

    /// Returns all rows of the table, in its order.
    pub fn all() -> impl Iterator<Item = Self> {
        Survives::ALL
            .into_iter()
            .map(Survives::promise)
            .chain([Self::SAME_TRANSACTION])
    }
}

impl fmt::Display for Survives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Promise {
    /// `disk: it survives crashes and power cuts`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.holds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn promises_are_in_the_order_of_the_table_with_unique_names() {
        assert!(Survives::ALL.is_sorted());
        let names: std::collections::BTreeSet<_> = Promise::all().map(|row| row.name).collect();
        assert_eq!(names.len(), Promise::all().count());
        assert!(
            names
                .iter()
                .all(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '-'))
        );
        assert!(
            Promise::all().all(|row| !row.holds.contains('|') && !row.adds_a_run.contains('|'))
        );
    }
}
