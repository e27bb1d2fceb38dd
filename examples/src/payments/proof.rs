//! The proof: computed from what was produced, the bank's charges and the ledgers, nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::{Entry, Payments};

/// The proof, in numbers.
#[derive(Debug, Serialize)]
pub struct Proof {
    schema: &'static str,
    messages: u64,
    distinct_payments: u64,
    charges_asked_for: u64,
    charges: u64,
    answered_from_the_store: u64,
    recoveries: u64,
    lost: u64,
    asked_for_twice: u64,
    asked_for_twice_explained_by_the_kill: u64,
    charged_twice: u64,
    wrong_answers: u64,
    replay_charges_asked_for: u64,
    replay_answered: u64,
    killed_worker: u32,
    /// The requests for the payments that were asked for twice without the kill.
    unexplained: Vec<Entry>,
}

impl Proof {
    /// Compares the bank's charges (their idempotency keys) and the ledgers of both passes with
    /// what was produced.
    pub fn new(
        produced: &Payments,
        killed: u32,
        bank: &BTreeSet<String>,
        first: &[Entry],
        replay: &[Entry],
    ) -> Self {
        let requests: Vec<&Entry> = first.iter().filter(|entry| entry.asked).collect();
        let mut by_order: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
        requests
            .iter()
            .for_each(|request| by_order.entry(&request.order).or_default().push(request));
        let twice = by_order.values().filter(|requests| requests.len() > 1);
        let (explained, unexplained): (Vec<_>, Vec<_>) =
            twice.partition(|requests| is_explained_by_the_kill(requests, killed));
        // Replayed requests are counted too: one of them may have a key that the bank did not know.
        let charges: BTreeSet<(&str, &str)> = (first.iter().chain(replay))
            .filter(|entry| entry.asked && bank.contains(&entry.charge))
            .map(|entry| (&*entry.order, &*entry.charge))
            .collect();
        let mut per_order: BTreeMap<&str, u64> = BTreeMap::new();
        charges
            .iter()
            .for_each(|(order, _)| *per_order.entry(order).or_default() += 1);
        let lost = produced
            .orders
            .iter()
            .filter(|order| !per_order.contains_key(order.as_str()));
        let wrong = first
            .iter()
            .chain(replay)
            .filter(|entry| !charges.contains(&(&*entry.order, &*entry.charge)));
        Self {
            schema: "oncegate.example.payments.v1",
            messages: produced.messages(),
            distinct_payments: produced.distinct(),
            charges_asked_for: requests.len() as u64,
            charges: bank.len() as u64,
            answered_from_the_store: answers(first),
            recoveries: requests.iter().filter(|request| request.recovered).count() as u64,
            lost: lost.count() as u64,
            asked_for_twice: (explained.len() + unexplained.len()) as u64,
            asked_for_twice_explained_by_the_kill: explained.len() as u64,
            charged_twice: per_order.values().filter(|charges| **charges > 1).count() as u64,
            wrong_answers: wrong.count() as u64,
            replay_charges_asked_for: replay.iter().filter(|entry| entry.asked).count() as u64,
            replay_answered: answers(replay),
            killed_worker: killed,
            unexplained: (unexplained.into_iter().flatten().copied().cloned()).collect(),
        }
    }

    /// Returns whether nothing was lost, nothing charged twice, nothing asked for twice without the
    /// kill, and nothing asked for by the replay.
    pub fn holds(&self) -> bool {
        self.lost == 0
            && self.charged_twice == 0
            && self.asked_for_twice == self.asked_for_twice_explained_by_the_kill
            && self.wrong_answers == 0
            && self.replay_charges_asked_for == 0
            && self.replay_answered >= self.messages
    }
}

/// Returns whether the killed worker asked first, and the attempt that recovered the payment again.
fn is_explained_by_the_kill(requests: &[&Entry], killed: u32) -> bool {
    requests.len() == 2
        && requests
            .iter()
            .any(|request| request.pid == killed && !request.recovered)
        && requests.iter().any(|request| request.recovered)
}

/// The number of duplicates that were answered from the store.
fn answers(entries: &[Entry]) -> u64 {
    entries.iter().filter(|entry| !entry.asked).count() as u64
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let asked_twice = format!(
            "explained by the kill: {}",
            self.asked_for_twice_explained_by_the_kill
        );
        let rows: [(&str, u64, &str); 14] = [
            ("first pass, three workers, one killed", 0, ""),
            ("messages", self.messages, ""),
            ("distinct payments", self.distinct_payments, ""),
            (
                "charges asked for",
                self.charges_asked_for,
                "runs of the handler",
            ),
            (
                "charges made by the bank",
                self.charges,
                "it honours the idempotency key of a request",
            ),
            (
                "duplicates answered from the store",
                self.answered_from_the_store,
                "",
            ),
            (
                "recoveries",
                self.recoveries,
                "payments that the killed worker had begun",
            ),
            ("lost", self.lost, "must be 0"),
            ("asked for twice", self.asked_for_twice, &asked_twice),
            ("charged twice", self.charged_twice, "must be 0"),
            ("wrong answers", self.wrong_answers, "must be 0"),
            ("replay of the whole topic", 0, ""),
            (
                "charges asked for",
                self.replay_charges_asked_for,
                "must be 0",
            ),
            (
                "answered from the store",
                self.replay_answered,
                "at least every message",
            ),
        ];
        for (name, count, note) in rows {
            if name.starts_with("first pass") || name.starts_with("replay of") {
                writeln!(f, "\n  {name}")?;
            } else {
                let line = format!("    {name:36} {count:>8}   {note}");
                writeln!(f, "{}", line.trim_end())?;
            }
        }
        // A lease that a worker on a stalled machine has lost looks otherwise than a promise that
        // was broken: its second request has recovered the payment.
        for request in &self.unexplained {
            writeln!(
                f,
                "    {} was asked for at {} ms by process {}, recovered: {}",
                request.order, request.at, request.pid, request.recovered
            )?;
        }
        let verdict = if self.holds() {
            "The proof holds."
        } else {
            "THE PROOF FAILS."
        };
        write!(f, "\n  {verdict}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without_counts(text: &str) -> String {
        text.split_whitespace()
            .filter(|word| word.parse::<u64>().is_err())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn requests_that_the_kill_does_not_explain_are_shown() {
        const KILLED: u32 = 1;
        let request = |order: &str, pid, recovered| Entry {
            pid,
            ..Entry::request(order.to_owned(), "charge", recovered)
        };
        let explained = [request("a", KILLED, false), request("a", 2, true)];
        let by_others = [request("b", 2, false), request("b", 3, true)];
        let first = [explained, by_others].concat();
        let payments = Payments::new(0, 7);
        let proof = Proof::new(&payments, KILLED, &BTreeSet::new(), &first, &[]);
        assert!(!proof.holds());
        let shown: Vec<String> = (proof.to_string().lines())
            .filter(|line| line.contains("was asked for at"))
            .map(str::to_owned)
            .collect();
        assert_eq!(shown.len(), 2, "{shown:?}");
        assert!(shown.iter().all(|line| line.contains(" b was")));
    }

    #[test]
    #[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
    fn the_document_shows_this_table() {
        let document = include_str!("../../../docs/PROOFS.md");
        let blocks = document
            .split("```text\n")
            .skip(1)
            .filter_map(|rest| rest.split("```").next());
        let shown = blocks
            .into_iter()
            .find(|block| block.contains("charges asked for"))
            .unwrap();
        // The counts differ from run to run, the lines do not.
        let proof = Proof::new(&Payments::new(0, 7), 0, &BTreeSet::new(), &[], &[]);
        assert_eq!(without_counts(shown), without_counts(&proof.to_string()));
    }
}
