//! Detects that a server has lost records.
//!
//! There are two kinds of witnesses.
//!
//! - Completions of this process on each server. Replicas and files hold a prefix of the log: if the last completion
//!   survives, all earlier ones do. Some completions that were present at earlier checks are read as well: when a
//!   server is emptied, the last completion may be younger than that, and a key that has run again since shows nothing.
//! - The replication history, for writes of other processes. An offset never goes back, and a replica that takes over
//!   reports the offset at which its history left the old one.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use oncegate_core::key::StoreKey;
use oncegate_core::record::TokenTag;
use oncegate_core::store::StoreLoss;
use redis::{Cmd, Value};

use super::checkup::Info;

/// The most servers that are remembered: in a cluster, those that were primaries.
const MAX_SERVERS: usize = 256;

/// The number of completions of earlier checks that are read.
const EARLIER_WITNESSES: usize = 4;

/// The bytes of history that may be missing after a failover without counting as lost records.
///
/// Servers ping their replicas, and sentinels write through the old primary until it steps down, some 100 B/s each.
const IDLE_TALK_BYTES: u64 = 16 * 1_024;

/// The known state of every server that holds records.
#[derive(Debug)]
pub(super) struct Losses {
    evicting_policy_allowed: bool,
    refuses_after_loss: bool,
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

/// The known replication history of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    address: String,
    replication: String,
    offset: u64,
    witnesses: Witnesses,
}

/// The completions that a server must still hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Witnesses {
    /// The last completion: a server that has lost the end of its log has lost this one.
    last: Option<Witness>,
    /// The completions that were present at earlier checks, the newest first.
    ///
    /// On a busy server, the last completion is always younger than the loss.
    earlier: VecDeque<Witness>,
}

impl Witnesses {
    fn iter(&self) -> impl Iterator<Item = &Witness> {
        self.last.iter().chain(&self.earlier)
    }

    fn forget(&mut self, witness: &Witness) {
        self.last.take_if(|kept| kept == witness);
        self.earlier.retain(|kept| kept != witness);
    }

    /// Records that the completion that was the last at the time of the check is present.
    fn confirm(&mut self, asked: Option<&Known>, witness: &Witness) {
        let was_last = asked.is_some_and(|asked| asked.witnesses.last.as_ref() == Some(witness));
        if was_last && !self.earlier.contains(witness) {
            self.earlier.push_front(witness.clone());
            self.earlier.truncate(EARLIER_WITNESSES);
        }
    }
}

/// A completion in flight.
#[derive(Debug)]
pub(super) struct Completed {
    pub(super) key: StoreKey,
    pub(super) tag: TokenTag,
    pub(super) retention_ms: u64,
}

/// A completion that the server has confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Witness {
    /// The arguments of the command that reads the record.
    question: Vec<Vec<u8>>,
    tag: [u8; 4],
    /// Until then the record has certainly not expired, even if clocks differ.
    until: Instant,
}

impl Witness {
    /// Only half of the retention is used, as a margin for clocks.
    pub(super) fn new(question: Vec<Vec<u8>>, TokenTag(tag): TokenTag, retention: Duration) -> Option<Self> {
        let until = Instant::now().checked_add(retention / 2)?;
        Some(Self { question, tag, until })
    }

    /// Whether the server's current value proves that it has lost that completion.
    fn is_contradicted_by(&self, held: &Value) -> bool {
        match held {
            Value::Nil => true,
            // Our own claim: the server has lost what came after it. A record begins with a letter; a script returns
            // the time first.
            Value::BulkString(said) => {
                let is_script = said.first().is_some_and(u8::is_ascii_digit);
                let record = said
                    .splitn(if is_script { 3 } else { 1 }, |byte| *byte == b' ')
                    .last()
                    .unwrap_or_default();
                matches!(record.first(), Some(b'P' | b'Q' | b'R')) && record.get(1..5) == Some(&self.tag)
            }
            // The key is on another server now, or the server returned an error.
            _ => false,
        }
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
        self.witnesses.iter().map(|witness| {
            let mut cmd = Cmd::new();
            for word in &witness.question {
                cmd.arg(word);
            }
            cmd
        })
    }
}

impl Losses {
    pub(super) fn new(evicting_policy_allowed: bool, refuses_after_loss: bool) -> Self {
        Self { evicting_policy_allowed, refuses_after_loss, state: Mutex::default() }
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
        let evicting = state.evicting.first().filter(|_| !self.evicting_policy_allowed);
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
        if let Some(known) = state.servers.iter_mut().find(|known| known.address == address) {
            known.witnesses.last = Some(witness);
        }
    }

    /// The question for a server.
    pub(super) fn question(&self) -> Question {
        let servers = self.lock().servers.clone();
        let now = Instant::now();
        let mut witnesses: Vec<Witness> = Vec::new();
        for witness in servers.iter().flat_map(|known| known.witnesses.iter()) {
            if witness.until > now && !witnesses.contains(witness) {
                witnesses.push(witness.clone());
            }
        }
        Question { servers, witnesses }
    }

    /// Checks the answers of the server at `address`: its INFO, and its values for the question's keys.
    pub(super) fn judge(&self, question: &Question, address: &str, info: &Info<'_>, held: &[Value]) {
        self.note_policy(address, info);
        let (replication, offset) = (info.get("master_replid"), info.number("master_repl_offset"));
        let (Some(replication), Some(offset), false) = (replication, offset, info.is_replica()) else {
            return;
        };
        let earlier = earlier(&question.servers, address, info);
        let mut state = self.lock();
        let is_forgotten = state.hear(question, held);
        let cut_off = earlier.and_then(|(known, kept)| {
            // Not reported by another connection yet.
            let is_news = |now: &Known| {
                now.address == known.address
                    && now.replication == known.replication
                    && now.offset >= known.offset
            };
            let bytes = known.offset.checked_sub(kept).filter(|bytes| *bytes > IDLE_TALK_BYTES);
            bytes.filter(|_| state.servers.iter().any(is_news))
        });
        let why = match (is_forgotten, cut_off) {
            (_, Some(bytes)) => Some(format!("{bytes} bytes of its history are missing")),
            (true, None) => Some("a record that it had completed is missing".to_owned()),
            (false, None) => None,
        };
        state.remember(address, replication, offset, earlier.map(|(known, _)| known), why.is_some());
        if let Some(why) = why {
            tracing::error!(node = address, why, "a Redis server has lost records");
            state.loss = Some(StoreLoss { at: SystemTime::now(), reason: why.into() });
            state.halted = self.refuses_after_loss;
        }
    }

    /// Logs a policy that may evict as an error once; afterwards every refusal names it.
    fn note_policy(&self, address: &str, info: &Info<'_>) {
        let Some(policy) = info.get("maxmemory_policy") else { return };
        let mut state = self.lock();
        let before = state.evicting.iter().position(|(known, _)| known == address);
        match (policy, before) {
            ("noeviction", Some(place)) => {
                state.evicting.swap_remove(place);
                tracing::info!(node = address, "maxmemory-policy is noeviction again");
            }
            ("noeviction", None) | (_, Some(_)) => {}
            (policy, None) => {
                state.evicting.push((address.to_owned(), policy.to_owned()));
                tracing::error!(node = address, policy, "maxmemory-policy may evict records now");
            }
        }
    }
}

/// The known history that a server continues, and the offset up to which it has it; `None` if it continues none.
fn earlier<'a>(servers: &'a [Known], address: &str, info: &Info<'_>) -> Option<(&'a Known, u64)> {
    let find = |replication: &str| servers.iter().find(|known| known.replication == replication);
    if let Some(same) = info.get("master_replid").and_then(find) {
        return Some((same, info.number("master_repl_offset")?));
    }
    if let Some(left) = info.get("master_replid2").and_then(find) {
        // The first offset that the two histories do not share.
        return Some((left, info.number("second_repl_offset")?.saturating_sub(1)));
    }
    // The server has begun a new history, as after a restart from a file: offsets prove nothing.
    servers.iter().find(|known| known.address == address).map(|known| (known, u64::MAX))
}

impl State {
    /// Whether a server's values for the question's keys contradict one of the witnesses. Each is used once.
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
            let asked = question.servers.iter().find(|asked| asked.address == known.address);
            let there = others.iter().filter(|(_, held)| matches!(held, Value::BulkString(_)));
            there.for_each(|(witness, _)| known.witnesses.confirm(asked, witness));
        }
        is_forgotten
    }

    /// Stores the answers of the server at `address`. Of the history that it continues, only the witnesses are kept.
    fn remember(
        &mut self,
        address: &str,
        replication: &str,
        offset: u64,
        earlier: Option<&Known>,
        lost: bool,
    ) {
        let same =
            |known: &Known, old: &Known| known.address == old.address && known.replication == old.replication;
        let goes_on = earlier.and_then(|old| self.servers.iter().find(|known| same(known, old)));
        let witnesses = goes_on.map(|known| known.witnesses.clone()).unwrap_or_default();
        self.servers.retain(|known| known.address == address || !earlier.is_some_and(|old| same(known, old)));
        let is_room = self.servers.len() < MAX_SERVERS;
        match self.servers.iter_mut().find(|known| known.address == address) {
            // The answer may be older than one that another connection has received meanwhile.
            Some(known) if known.replication == replication && !lost => {
                known.offset = known.offset.max(offset);
            }
            Some(known) => {
                known.replication = replication.to_owned();
                known.offset = offset;
            }
            None if is_room => {
                let (address, replication) = (address.to_owned(), replication.to_owned());
                self.servers.push(Known { address, replication, offset, witnesses });
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
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
        losses.judge(&losses.question(), address, &Info(info), held);
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
        assert!(why.contains(&format!("{BEYOND} bytes")) && why.contains("lost records"), "{why}");
    }

    #[test]
    fn a_replica_that_takes_over_says_where_it_left() {
        // The server has everything: the first offset that is not shared comes after the last one seen.
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
        let early = losses.question();
        hear(&losses, "one", &info(A, 200 + BEYOND, None), &[]);
        losses.judge(&early, "one", &Info(&info(A, 120, None)), &[]);
        assert_eq!(losses.loss(), None);
        // And the later one still counts.
        hear(&losses, "one", &info(A, 200, None), &[]);
        assert!(losses.loss().is_some());
    }

    fn witness_of(key: &str, retention: Duration) -> Witness {
        Witness::new(vec![b"GET".to_vec(), key.into()], TokenTag(*b"0123"), retention).unwrap()
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
            (bytes(b"1700000000000000 1700000000000 P0123456789abcdef"), true),
            (bytes(b"1700000000000000 1700000000000 C0123 P0123"), false),
            (bytes(b"Soooo"), false),
            (Value::Okay, false),
        ] {
            let losses = losses();
            losses.note_completed("one", witness());
            assert_eq!(losses.question().commands().count(), 1);
            hear(&losses, "one", &info(B, 1, None), std::slice::from_ref(&held));
            assert_eq!(losses.loss().is_some(), lost, "{held:?}");
            assert_eq!(losses.question().commands().count(), usize::from(!lost));
        }
        // An expired record is not a loss.
        let losses = losses();
        losses.note_completed("one", witness_of("key", Duration::ZERO));
        assert_eq!(losses.question().commands().count(), 0);
    }

    #[test]
    fn a_busy_server_that_was_emptied_raises_an_alarm_once() {
        let losses = losses();
        let witness = |key: &str| witness_of(key, Duration::from_secs(3_600));
        let asked = |question: &Question| -> Vec<Vec<u8>> {
            question.witnesses.iter().map(|witness| witness.question.last().unwrap().clone()).collect()
        };
        let held = Value::BulkString(b"C0123".to_vec());
        losses.note_completed("one", witness("before"));
        hear(&losses, "one", &info(A, 150, None), std::slice::from_ref(&held));
        // The server loses everything, and the next message is completed before the next check.
        losses.note_completed("one", witness("after"));
        let question = losses.question();
        assert_eq!(asked(&question), [&b"after"[..], b"before"]);
        losses.judge(&question, "one", &Info(&info(A, 200, None)), &[held.clone(), Value::Nil]);
        assert!(losses.loss().is_some());
        assert_eq!(asked(&losses.question()), [b"after"]);
        hear(&losses, "one", &info(A, 250, None), &[held]);
        assert_eq!(asked(&losses.question()), [b"after"], "and asked for once");
    }

    #[test]
    fn a_loss_is_noticed_although_the_newest_records_have_run_again_since() {
        let losses = losses();
        let bytes = |record: &[u8]| Value::BulkString(record.to_vec());
        let there = vec![bytes(b"C0123"); EARLIER_WITNESSES + 1];
        for number in 0..2 * EARLIER_WITNESSES {
            losses.note_completed("one", witness_of(&number.to_string(), Duration::from_secs(3_600)));
            hear(&losses, "one", &info(A, 150, None), &there);
        }
        assert_eq!(losses.question().commands().count(), EARLIER_WITNESSES);
        let (again, running) = (bytes(b"C9999"), bytes(b"P9999999999999999"));
        hear(&losses, "one", &info(A, 150, None), &[again.clone(), running, again]);
        assert_eq!(losses.loss(), None);
        let others = [bytes(b"C9999"), bytes(b"C9999"), bytes(b"C9999"), Value::Nil];
        hear(&losses, "one", &info(A, 150, None), &others);
        assert!(losses.loss().is_some());
    }

    #[test]
    fn an_evicting_policy_refuses_claims_until_it_is_gone() {
        let losses = losses();
        let evicting = info(A, 100, None).replace("noeviction", "allkeys-lru");
        hear(&losses, "one", &evicting, &[]);
        assert!(losses.refusal().is_some_and(|why| why.contains("allkeys-lru")));
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
