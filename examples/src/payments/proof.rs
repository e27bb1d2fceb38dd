//! The proof: computed from what was produced and from the ledgers, nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::{Entry, Payments};

/// What happened, in numbers.
#[derive(Debug, Serialize)]
pub struct Proof {
    schema: &'static str,
    messages: u64,
    distinct_payments: u64,
    charges: u64,
    answered_from_the_store: u64,
    recoveries: u64,
    lost: u64,
    charged_twice: u64,
    charged_twice_explained_by_the_kill: u64,
    wrong_answers: u64,
    replay_charges: u64,
    replay_answered: u64,
}

impl Proof {
    /// Compares the ledgers of both passes with what was produced.
    pub fn new(produced: &Payments, killed: u32, first: &[Entry], replay: &[Entry]) -> Self {
        let charges: Vec<&Entry> = first.iter().filter(|entry| entry.charged).collect();
        let mut by_order: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
        charges.iter().for_each(|charge| by_order.entry(&charge.order).or_default().push(charge));
        let twice = by_order.values().filter(|charges| charges.len() > 1);
        let explained = |charges: &&Vec<&Entry>| {
            let by_killed = charges.iter().any(|charge| charge.pid == killed && !charge.recovered);
            charges.len() == 2 && by_killed && charges.iter().any(|charge| charge.recovered)
        };
        let lost = produced.orders.iter().filter(|order| !by_order.contains_key(order.as_str()));
        let known: BTreeSet<(&str, &str)> =
            charges.iter().map(|entry| (&*entry.order, &*entry.charge)).collect();
        let answers = |entries: &'_ [Entry]| entries.iter().filter(|entry| !entry.charged).count() as u64;
        let wrong =
            first.iter().chain(replay).filter(|entry| !known.contains(&(&*entry.order, &*entry.charge)));
        Self {
            schema: "oncegate.example.payments.v1",
            messages: produced.messages(),
            distinct_payments: produced.distinct(),
            charges: charges.len() as u64,
            answered_from_the_store: answers(first),
            recoveries: charges.iter().filter(|charge| charge.recovered).count() as u64,
            lost: lost.count() as u64,
            charged_twice: twice.clone().count() as u64,
            charged_twice_explained_by_the_kill: twice.filter(explained).count() as u64,
            wrong_answers: wrong.count() as u64,
            replay_charges: replay.iter().filter(|entry| entry.charged).count() as u64,
            replay_answered: answers(replay),
        }
    }

    /// Whether nothing was lost, nothing charged twice without the kill, and nothing charged by the replay.
    pub fn holds(&self) -> bool {
        self.lost == 0
            && self.charged_twice == self.charged_twice_explained_by_the_kill
            && self.wrong_answers == 0
            && self.replay_charges == 0
            && self.replay_answered >= self.messages
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let twice = format!("explained by the kill: {}", self.charged_twice_explained_by_the_kill);
        let rows: [(&str, u64, &str); 12] = [
            ("first pass, three workers, one killed", 0, ""),
            ("messages", self.messages, ""),
            ("distinct payments", self.distinct_payments, ""),
            ("charges in the ledger", self.charges, ""),
            ("duplicates answered from the store", self.answered_from_the_store, ""),
            ("recoveries", self.recoveries, "payments that the killed worker had begun"),
            ("lost", self.lost, "must be 0"),
            ("charged twice", self.charged_twice, &twice),
            ("wrong answers", self.wrong_answers, "must be 0"),
            ("replay of the whole topic", 0, ""),
            ("charges in the ledger", self.replay_charges, "must be 0"),
            ("answered from the store", self.replay_answered, "at least every message"),
        ];
        for (name, count, note) in rows {
            match (count, note, name.starts_with("first pass") || name.starts_with("replay of")) {
                (.., true) => writeln!(f, "\n  {name}")?,
                (count, note, false) => writeln!(f, "    {name:36} {count:>8}   {note}")?,
            }
        }
        let verdict = if self.holds() { "The proof holds." } else { "THE PROOF FAILS." };
        write!(f, "\n  {verdict}")
    }
}
