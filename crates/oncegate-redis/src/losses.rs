//! Detects that a server has lost records.
//!
//! There are two kinds of witnesses.
//!
//! - Completions of this process on each server. Replicas and files hold a prefix of the log: if
//!   the last completion survives, all earlier ones do. Some completions that were present at
//!   earlier checks are read as well: when a server is emptied, the last completion may be younger
//!   than that, and a key that has run again since shows nothing.
//! - The replication history, for writes of other processes. An offset never goes back, and a
//!   replica that takes over reports the offset at which its history left the old one.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Instant, SystemTime};

use oncegate_core::store::StoreLoss;
use parking_lot::{Mutex, MutexGuard};
use redis::{Cmd, Value};

use super::info::Info;
use super::witnesses::{Witness, Witnesses};

/// The most servers that are remembered: in a cluster, those that were primaries.
const MAX_SERVERS: usize = 256;

/// The bytes of history that may be missing after a failover without counting as lost records.
///
/// Servers ping their replicas, and sentinels write through the old primary until it steps down,
/// some 100 B/s each.
const IDLE_TALK_BYTES: u64 = 16 * 1_024;

/// The known state of every server that holds records.
#[derive(Debug)]
pub(super) struct Losses {
    evicting_policy_allowed: bool,
    refuses_after_loss: bool,
    /// By how much checks are less frequent, because the servers have many clients.
    spacing: AtomicU32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    servers: Vec<Known>,
    loss: Option<StoreLoss>,
    /// `true` while no claim is granted, until the loss is accepted.
    halted: bool,
    /// The servers whose policy may evict records now, with the policy.
    evicting: Vec<(String, String)>,
}

/// The known state of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    address: String,
    /// `None` when the server's INFO does not show it; then only the witnesses detect a loss.
    history: Option<History>,
    witnesses: Witnesses,
}

impl Known {
    /// Returns whether both are the same server with the same history.
    fn continues(&self, other: &Self) -> bool {
        self.address == other.address && self.replication() == other.replication()
    }

    fn replication(&self) -> Option<&str> {
        self.history
            .as_ref()
            .map(|history| history.replication.as_str())
    }
}

/// A replication history, and the offset that it has reached.
#[derive(Clone, Debug, PartialEq, Eq)]
struct History {
    replication: String,
    offset: u64,
}

impl History {
    /// The history in an INFO; some managed servers show none.
    fn of(info: &Info<'_>) -> Option<Self> {
        let replication = info.get("master_replid")?;
        let offset = info.number("master_repl_offset")?;
        Some(Self {
            replication: replication.to_owned(),
            offset,
        })
    }

    /// Returns whether it has reached at least the offset of `other`, of the same history.
    fn includes(&self, other: &Self) -> bool {
        self.replication == other.replication && self.offset >= other.offset
    }
}

/// The state before a server was asked: its answer may be older than what is learned meanwhile.
#[derive(Debug)]
pub(super) struct Question {
    servers: Vec<Known>,
    witnesses: Vec<Witness>,
}

impl Question {
    /// The commands to send after INFO.
    pub(super) fn commands(&self) -> impl Iterator<Item = Cmd> {
        self.witnesses.iter().map(Witness::command)
    }
}

impl Losses {
    pub(super) fn new(evicting_policy_allowed: bool, refuses_after_loss: bool) -> Self {
        let spacing = AtomicU32::new(1);
        Self {
            evicting_policy_allowed,
            refuses_after_loss,
            spacing,
            state: Mutex::default(),
        }
    }

    /// By how much checks are less frequent, because the servers have many clients.
    pub(super) fn spacing(&self) -> u32 {
        self.spacing.load(Ordering::Relaxed)
    }

    pub(super) fn set_spacing(&self, spacing: u32) {
        self.spacing.store(spacing, Ordering::Relaxed);
    }

    /// Locks the state. Every change leaves it consistent, so a panic elsewhere does no harm.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The last loss that was detected, accepted or not.
    pub(super) fn loss(&self) -> Option<StoreLoss> {
        self.lock().loss.clone()
    }

    /// Grants claims again, and forgets the state of the servers before the loss.
    pub(super) fn accept_loss(&self) {
        let mut state = self.lock();
        if std::mem::take(&mut state.halted) {
            state.servers.clear();
        }
    }

    /// Returns why no claim is granted, if so.
    pub(super) fn refusal(&self) -> Option<String> {
        let state = self.lock();
        let evicting = state
            .evicting
            .first()
            .filter(|_| !self.evicting_policy_allowed);
        let evicting = evicting.map(|(address, policy)| {
            format!(
                "maxmemory-policy of {address} is {policy} now, which may evict records: set it to noeviction"
            )
        });
        let lost = state.loss.as_ref().filter(|_| state.halted);
        lost.map(|loss| {
            format!(
                "the store has lost records ({}): no claim is granted until the loss is accepted",
                loss.reason
            )
        })
        .or(evicting)
    }

    /// Remembers the last completion that the server at `address` has confirmed.
    pub(super) fn note_completed(&self, address: &str, witness: Witness) {
        let mut state = self.lock();
        if let Some(known) = state
            .servers
            .iter_mut()
            .find(|known| known.address == address)
        {
            known.witnesses.note(witness);
        }
    }

    /// The question for the server that holds the slots for which `holds` is true.
    pub(super) fn question(&self, holds: impl Fn(u16) -> bool) -> Question {
        let servers = self.lock().servers.clone();
        let now = Instant::now();
        let mut witnesses: Vec<Witness> = Vec::new();
        for witness in servers.iter().flat_map(|known| known.witnesses.iter()) {
            if witness.counts(now) && holds(witness.slot()) && !witnesses.contains(witness) {
                witnesses.push(witness.clone());
            }
        }
        Question { servers, witnesses }
    }

    /// Checks the answers of the server at `address`: its INFO, and its values for the question's
    /// keys.
    pub(super) fn judge(
        &self,
        question: &Question,
        address: &str,
        info: &Info<'_>,
        held: &[Value],
    ) {
        self.note_policy(address, info);
        if info.is_replica() {
            return;
        }
        let earlier = earlier(&question.servers, address, info);
        let mut state = self.lock();
        let is_forgotten = state.hear(question, held);
        let cut_off = earlier.and_then(|(known, kept)| {
            let before = known.history.as_ref()?;
            // Another connection may have reported it meanwhile.
            let is_news = state.servers.iter().any(|now| {
                now.address == known.address
                    && now
                        .history
                        .as_ref()
                        .is_some_and(|history| history.includes(before))
            });
            let bytes = before.offset.checked_sub(kept)?;
            (is_news && bytes > IDLE_TALK_BYTES).then_some(bytes)
        });
        let why = match (is_forgotten, cut_off) {
            (_, Some(bytes)) => Some(format!("{bytes} bytes of its history are missing")),
            (true, None) => Some("a record that it had completed is missing".to_owned()),
            (false, None) => None,
        };
        state.remember(
            address,
            History::of(info),
            earlier.map(|(known, _)| known),
            why.is_some(),
        );
        if let Some(why) = why {
            tracing::error!(node = address, why, "a Redis server has lost records");
            state.loss = Some(StoreLoss {
                at: SystemTime::now(),
                reason: why.into(),
            });
            state.halted = self.refuses_after_loss;
        }
    }

    /// Logs a policy that may evict as an error once; afterwards every refusal names it.
    fn note_policy(&self, address: &str, info: &Info<'_>) {
        let Some(policy) = info.get("maxmemory_policy") else {
            return;
        };
        let mut state = self.lock();
        let before = state
            .evicting
            .iter()
            .position(|(known, _)| known == address);
        match (policy, before) {
            ("noeviction", Some(place)) => {
                state.evicting.swap_remove(place);
                tracing::info!(node = address, "maxmemory-policy is noeviction again");
            }
            ("noeviction", None) | (_, Some(_)) => {}
            (policy, None) => {
                state.evicting.push((address.to_owned(), policy.to_owned()));
                tracing::error!(
                    node = address,
                    policy,
                    "maxmemory-policy may evict records now"
                );
            }
        }
    }
}

/// The known history that a server continues, and the offset up to which it has it; `None` if it
/// continues none.
fn earlier<'a>(servers: &'a [Known], address: &str, info: &Info<'_>) -> Option<(&'a Known, u64)> {
    if let Some(same) = with_history(servers, info.get("master_replid")) {
        return Some((same, info.number("master_repl_offset")?));
    }
    if let Some(left) = with_history(servers, info.get("master_replid2")) {
        // The first offset that the two histories do not share.
        return Some((left, info.number("second_repl_offset")?.saturating_sub(1)));
    }
    // The server has begun a new history, as after a restart from a file, or shows none: offsets
    // prove nothing.
    servers
        .iter()
        .find(|known| known.address == address)
        .map(|known| (known, u64::MAX))
}

/// The server that had this replication history.
fn with_history<'a>(servers: &'a [Known], replication: Option<&str>) -> Option<&'a Known> {
    let replication = replication?;
    servers
        .iter()
        .find(|known| known.replication() == Some(replication))
}

impl State {
    /// Returns whether a server's values for the question's keys contradict one of the witnesses.
    /// Each is used once.
    fn hear(&mut self, question: &Question, held: &[Value]) -> bool {
        let heard = question.witnesses.iter().zip(held);
        let (contradicted, others): (Vec<_>, Vec<_>) =
            heard.partition(|(witness, held)| witness.is_contradicted_by(held));
        let mut is_forgotten = false;
        for known in &mut self.servers {
            for (witness, _) in &contradicted {
                is_forgotten |= known.witnesses.iter().any(|kept| kept == *witness);
                known.witnesses.forget(witness);
            }
            let asked = question
                .servers
                .iter()
                .find(|asked| asked.address == known.address);
            let there = others
                .iter()
                .filter(|(_, held)| matches!(held, Value::BulkString(_)));
            there.for_each(|(witness, _)| {
                known
                    .witnesses
                    .confirm(asked.map(|asked| &asked.witnesses), witness);
            });
        }
        is_forgotten
    }

    /// Stores the answers of the server at `address`. Of the history that it continues, only the
    /// witnesses are kept.
    fn remember(
        &mut self,
        address: &str,
        history: Option<History>,
        earlier: Option<&Known>,
        lost: bool,
    ) {
        let goes_on =
            earlier.and_then(|old| self.servers.iter().find(|known| known.continues(old)));
        let witnesses = goes_on
            .map(|known| known.witnesses.clone())
            .unwrap_or_default();
        self.servers.retain(|known| {
            known.address == address || !earlier.is_some_and(|old| known.continues(old))
        });
        let is_room = self.servers.len() < MAX_SERVERS;
        match self
            .servers
            .iter_mut()
            .find(|known| known.address == address)
        {
            Some(known) => {
                let newer = known.history.as_ref().zip(history.as_ref());
                // The answer may be older than one that another connection has received meanwhile.
                if lost || !newer.is_some_and(|(known, answer)| known.includes(answer)) {
                    known.history = history;
                }
            }
            None if is_room => {
                self.servers.push(Known {
                    address: address.to_owned(),
                    history,
                    witnesses,
                });
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests;
