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

// invariant (all tests): loss-undetected

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime};

use oncegate_core::store::StoreLoss;
use redis::{Cmd, Value};

use super::checkup::Info;
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
    /// Why no claim is granted until the loss is accepted.
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
    /// Whether both are the same server with the same history.
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
        let (replication, offset) = (
            info.get("master_replid")?,
            info.number("master_repl_offset")?,
        );
        Some(Self {
            replication: replication.to_owned(),
            offset,
        })
    }

    /// Whether it has reached at least the offset of `other`, which is the same history.
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

    /// Locks the state. Every change leaves it consistent, so a poisoned lock is ignored.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// Why no claim is granted, if so.
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
            // Not reported by another connection yet.
            let is_news = |now: &Known| {
                now.address == known.address
                    && now
                        .history
                        .as_ref()
                        .is_some_and(|history| history.includes(before))
            };
            let bytes = before
                .offset
                .checked_sub(kept)
                .filter(|bytes| *bytes > IDLE_TALK_BYTES);
            bytes.filter(|_| state.servers.iter().any(is_news))
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
    let find = |replication: &str| {
        servers
            .iter()
            .find(|known| known.replication() == Some(replication))
    };
    if let Some(same) = info.get("master_replid").and_then(find) {
        return Some((same, info.number("master_repl_offset")?));
    }
    if let Some(left) = info.get("master_replid2").and_then(find) {
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

impl State {
    /// Whether a server's values for the question's keys contradict one of the witnesses. Each is
    /// used once.
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
mod tests {
    use std::time::Duration;

    use oncegate_core::record::TokenTag;
    use redis::Arg;

    use super::super::witnesses::EARLIER_WITNESSES;
    use super::*;

    const A: &str = "aaaa";
    const B: &str = "bbbb";
    const BEYOND: u64 = IDLE_TALK_BYTES + 1;

    fn info(replication: &str, offset: u64, left: Option<(&str, u64)>) -> String {
        let (left, second) = left.unwrap_or(("0000", 0));
        format!(
            "role:master\r\nmaster_replid:{replication}\r\nmaster_replid2:{left}\r\nmaster_repl_offset:{offset}\r\n\
             second_repl_offset:{second}\r\nmaxmemory_policy:noeviction\r\n"
        )
    }

    fn hear(losses: &Losses, address: &str, info: &str, held: &[Value]) {
        losses.judge(&losses.question(|_| true), address, &Info(info), held);
    }

    fn losses() -> Losses {
        let losses = Losses::new(false, true);
        hear(&losses, "one", &info(A, 100, None), &[]);
        assert_eq!(losses.loss(), None);
        losses
    }

    #[test]
    fn a_history_that_goes_on_raises_no_alarm_and_one_that_went_back_does() {
        let losses = losses();
        hear(&losses, "one", &info(A, 100, None), &[]);
        hear(&losses, "one", &info(A, 150, None), &[]);
        assert_eq!((losses.loss(), losses.refusal()), (None, None));
        hear(&losses, "one", &info(A, 150 + BEYOND, None), &[]);
        hear(&losses, "one", &info(A, 150, None), &[]);
        assert!(losses.loss().is_some());
        let why = losses.refusal().unwrap();
        assert!(
            why.contains(&format!("{BEYOND} bytes")) && why.contains("lost records"),
            "{why}"
        );
    }

    #[test]
    fn a_replica_that_takes_over_says_where_it_left() {
        // The server has everything: the first offset that is not shared comes after the last one
        // seen.
        let clean = losses();
        hear(&clean, "two", &info(B, 130, Some((A, 101))), &[]);
        hear(&clean, "two", &info(B, 140, Some((A, 101))), &[]);
        assert_eq!(clean.loss(), None);
        // Pings and messages of sentinels are not records.
        let idle = losses();
        hear(&idle, "two", &info(B, 130, Some((A, 1))), &[]);
        assert_eq!(idle.loss(), None);
        let lossy = losses();
        hear(&lossy, "one", &info(A, 100 + BEYOND, None), &[]);
        hear(&lossy, "two", &info(B, 130, Some((A, 101))), &[]);
        assert!(lossy.loss().is_some());
    }

    #[test]
    fn an_answer_that_was_overtaken_by_another_one_raises_no_alarm() {
        let losses = losses();
        let early = losses.question(|_| true);
        hear(&losses, "one", &info(A, 200 + BEYOND, None), &[]);
        losses.judge(&early, "one", &Info(&info(A, 120, None)), &[]);
        assert_eq!(losses.loss(), None);
        // And the later one still counts.
        hear(&losses, "one", &info(A, 200, None), &[]);
        assert!(losses.loss().is_some());
    }

    fn witness_of(key: &str, retention: Duration) -> Witness {
        Witness::new(
            0,
            vec![b"GET".to_vec(), key.into()],
            TokenTag(*b"0123"),
            retention,
        )
        .unwrap()
    }

    #[test]
    fn a_completion_that_is_gone_raises_an_alarm_once() {
        let witness = || witness_of("key", Duration::from_secs(3_600));
        let bytes = |record: &[u8]| Value::BulkString(record.to_vec());
        for (held, lost) in [
            (Value::Nil, true),
            (bytes(b"P0123456789abcdef"), true),
            (bytes(b"P9999999999999999"), false),
            (bytes(b"C0123"), false),
            (
                bytes(b"1700000000000000 1700000000000 P0123456789abcdef"),
                true,
            ),
            (bytes(b"1700000000000000 1700000000000 C0123 P0123"), false),
            (bytes(b"Soooo"), false),
            (Value::Okay, false),
        ] {
            let losses = losses();
            losses.note_completed("one", witness());
            assert_eq!(losses.question(|_| true).commands().count(), 1);
            hear(
                &losses,
                "one",
                &info(B, 1, None),
                std::slice::from_ref(&held),
            );
            assert_eq!(losses.loss().is_some(), lost, "{held:?}");
            assert_eq!(
                losses.question(|_| true).commands().count(),
                usize::from(!lost)
            );
        }
        // An expired record is not a loss.
        let losses = losses();
        losses.note_completed("one", witness_of("key", Duration::ZERO));
        assert_eq!(losses.question(|_| true).commands().count(), 0);
    }

    #[test]
    fn a_busy_server_that_was_emptied_raises_an_alarm_once() {
        let losses = losses();
        let witness = |key: &str| witness_of(key, Duration::from_secs(3_600));
        let asked = |question: &Question| -> Vec<Vec<u8>> {
            let last_word = |cmd: Cmd| match cmd.args_iter().last().unwrap() {
                Arg::Simple(word) => word.to_vec(),
                other => panic!("{other:?}"),
            };
            question.commands().map(last_word).collect()
        };
        let held = Value::BulkString(b"C0123".to_vec());
        losses.note_completed("one", witness("before"));
        hear(
            &losses,
            "one",
            &info(A, 150, None),
            std::slice::from_ref(&held),
        );
        // The server loses everything, and the next message is completed before the next check.
        losses.note_completed("one", witness("after"));
        let question = losses.question(|_| true);
        assert_eq!(asked(&question), [&b"after"[..], b"before"]);
        losses.judge(
            &question,
            "one",
            &Info(&info(A, 200, None)),
            &[held.clone(), Value::Nil],
        );
        assert!(losses.loss().is_some());
        assert_eq!(asked(&losses.question(|_| true)), [b"after"]);
        hear(&losses, "one", &info(A, 250, None), &[held]);
        assert_eq!(
            asked(&losses.question(|_| true)),
            [b"after"],
            "and asked for once"
        );
    }

    #[test]
    fn a_loss_is_noticed_although_the_newest_records_have_run_again_since() {
        let losses = losses();
        let bytes = |record: &[u8]| Value::BulkString(record.to_vec());
        let there = vec![bytes(b"C0123"); EARLIER_WITNESSES + 1];
        for number in 0..2 * EARLIER_WITNESSES {
            losses.note_completed(
                "one",
                witness_of(&number.to_string(), Duration::from_secs(3_600)),
            );
            hear(&losses, "one", &info(A, 150, None), &there);
        }
        assert_eq!(
            losses.question(|_| true).commands().count(),
            EARLIER_WITNESSES
        );
        let (again, running) = (bytes(b"C9999"), bytes(b"P9999999999999999"));
        hear(
            &losses,
            "one",
            &info(A, 150, None),
            &[again.clone(), running, again],
        );
        assert_eq!(losses.loss(), None);
        let others = [
            bytes(b"C9999"),
            bytes(b"C9999"),
            bytes(b"C9999"),
            Value::Nil,
        ];
        hear(&losses, "one", &info(A, 150, None), &others);
        assert!(losses.loss().is_some());
    }

    #[test]
    fn a_server_that_shows_no_history_is_judged_by_its_witnesses_alone() {
        const HIDDEN: &str = "role:master\r\nmaxmemory_policy:noeviction\r\n";
        let losses = Losses::new(false, true);
        hear(&losses, "one", HIDDEN, &[]);
        losses.note_completed("one", witness_of("key", Duration::from_secs(3_600)));
        hear(
            &losses,
            "one",
            HIDDEN,
            &[Value::BulkString(b"C0123".to_vec())],
        );
        // A proxy in front of several servers may show a history now and then.
        hear(
            &losses,
            "one",
            &info(A, 100 + BEYOND, None),
            &[Value::BulkString(b"C0123".to_vec())],
        );
        hear(
            &losses,
            "one",
            HIDDEN,
            &[Value::BulkString(b"C0123".to_vec())],
        );
        assert_eq!(losses.loss(), None);
        hear(&losses, "one", HIDDEN, &[Value::Nil]);
        assert!(losses.loss().is_some());
    }

    #[test]
    fn an_evicting_policy_refuses_claims_until_it_is_gone() {
        let losses = losses();
        let evicting = info(A, 100, None).replace("noeviction", "allkeys-lru");
        hear(&losses, "one", &evicting, &[]);
        assert!(
            losses
                .refusal()
                .is_some_and(|why| why.contains("allkeys-lru"))
        );
        hear(&losses, "one", &info(A, 100, None), &[]);
        assert_eq!((losses.refusal(), losses.loss()), (None, None));
    }

    #[test]
    fn who_goes_on_after_a_loss_is_not_refused() {
        let losses = Losses::new(false, false);
        hear(&losses, "one", &info(A, 100 + BEYOND, None), &[]);
        hear(&losses, "one", &info(A, 100, None), &[]);
        assert!(losses.loss().is_some() && losses.refusal().is_none());
    }
}
