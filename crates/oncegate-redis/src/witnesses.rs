//! Completions that a server has confirmed, and that it must still hold.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use oncegate_core::key::StoreKey;
use oncegate_core::record::TokenTag;
use redis::{Cmd, Value};

/// The number of completions of earlier checks that are read.
pub(super) const EARLIER_WITNESSES: usize = 4;

/// The completions that a server must still hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Witnesses {
    /// The last completion: a server that has lost the end of its log has lost this one.
    last: Option<Witness>,
    /// The completions that were present at earlier checks, the newest first.
    ///
    /// On a busy server, the last completion is always younger than the loss.
    earlier: VecDeque<Witness>,
}

impl Witnesses {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Witness> {
        self.last.iter().chain(&self.earlier)
    }

    /// Remembers the last completion that the server has confirmed.
    pub(super) fn note(&mut self, witness: Witness) {
        self.last = Some(witness);
    }

    pub(super) fn forget(&mut self, witness: &Witness) {
        self.last.take_if(|kept| kept == witness);
        self.earlier.retain(|kept| kept != witness);
    }

    /// Records that a completion is present. It is kept if it was the last one when the server was
    /// `asked`.
    pub(super) fn confirm(&mut self, asked: Option<&Self>, witness: &Witness) {
        let was_last = asked.is_some_and(|asked| asked.last.as_ref() == Some(witness));
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

impl Completed {
    pub(super) fn of(key: &StoreKey, tag: TokenTag, retention_ms: u64) -> Self {
        Self {
            key: key.clone(),
            tag,
            retention_ms,
        }
    }
}

/// A completion that the server has confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Witness {
    /// The slot of the record in a cluster.
    slot: u16,
    /// The arguments of the command that reads the record.
    question: Vec<Vec<u8>>,
    tag: [u8; 4],
    /// Until then the record has certainly not expired, even if clocks differ.
    until: Instant,
}

impl Witness {
    /// Only half of the retention is used, as a margin for clocks.
    pub(super) fn new(
        slot: u16,
        question: Vec<Vec<u8>>,
        TokenTag(tag): TokenTag,
        retention: Duration,
    ) -> Option<Self> {
        let until = Instant::now().checked_add(retention / 2)?;
        Some(Self {
            slot,
            question,
            tag,
            until,
        })
    }

    /// Returns whether its absence would be a loss at `now`.
    pub(super) fn counts(&self, now: Instant) -> bool {
        self.until > now
    }

    pub(super) fn slot(&self) -> u16 {
        self.slot
    }

    /// The command that reads the record.
    pub(super) fn command(&self) -> Cmd {
        let mut cmd = Cmd::new();
        for word in &self.question {
            cmd.arg(word);
        }
        cmd
    }

    /// Returns whether the server's current value proves that it has lost that completion.
    pub(super) fn is_contradicted_by(&self, held: &Value) -> bool {
        match held {
            Value::Nil => true,
            // Our own claim: the server has lost what came after it. A record begins with a letter;
            // a script returns the time first.
            Value::BulkString(said) => {
                let is_script = said.first().is_some_and(u8::is_ascii_digit);
                let record = said
                    .splitn(if is_script { 3 } else { 1 }, |byte| *byte == b' ')
                    .last()
                    .unwrap_or_default();
                matches!(record.first(), Some(b'P' | b'Q' | b'R'))
                    && record.get(1..5) == Some(&self.tag)
            }
            // The key is on another server now, or the server returned an error.
            _ => false,
        }
    }
}
