//! The proof: computed from what was produced and from the tables, nothing else.

use std::fmt;

use oncegate::BoxError;
use oncegate_examples::crew::Progress;
use oncegate_examples::database::Database;
use oncegate_examples::payments::Payments;
use serde::Serialize;

/// The proof, in numbers.
#[derive(Debug, Serialize)]
pub(crate) struct Proof {
    schema: &'static str,
    messages: u64,
    distinct_payments: u64,
    connections_cut: u64,
    charges: u64,
    answered_from_the_store: u64,
    taken_back: u64,
    lost: u64,
    charged_twice: u64,
    wrong_answers: u64,
    replay_charges: u64,
    replay_answered: u64,
}

impl Proof {
    /// Compares the tables with what was produced.
    pub(crate) fn new(
        database: &Database,
        run: &str,
        produced: &Payments,
        before_replay: Progress,
        connections_cut: u64,
        taken_back: u64,
    ) -> Result<Self, BoxError> {
        let count = |question| database.count(question, &[&run]);
        let charged = count("SELECT count(DISTINCT order_id) FROM charges WHERE run = $1")?;
        Ok(Self {
            schema: "oncegate.example.payments_postgres.v1",
            messages: produced.messages(),
            distinct_payments: produced.distinct(),
            connections_cut,
            charges: before_replay.charges,
            answered_from_the_store: before_replay.answers,
            taken_back,
            lost: produced.distinct().saturating_sub(charged),
            charged_twice: count(
                "SELECT count(*) FROM (SELECT FROM charges WHERE run = $1 GROUP BY order_id HAVING count(*) > 1) AS t",
            )?,
            wrong_answers: count(
                "SELECT count(*) FROM answers AS a WHERE run = $1 AND NOT EXISTS (SELECT FROM charges AS c \
                 WHERE (c.run, c.order_id, c.charge) = (a.run, a.order_id, a.charge))",
            )?,
            replay_charges: count("SELECT count(*) FROM charges WHERE run = $1")?
                - before_replay.charges,
            replay_answered: count("SELECT count(*) FROM answers WHERE run = $1")?
                - before_replay.answers,
        })
    }

    /// Returns whether nothing was lost, nothing charged twice, and nothing charged by the replay.
    pub(crate) fn holds(&self) -> bool {
        self.taken_back == 1
            && self.lost == 0
            && self.charged_twice == 0
            && self.charges == self.distinct_payments
            && self.wrong_answers == 0
            && self.replay_charges == 0
            && self.replay_answered >= self.messages
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: [(&str, u64, &str); 13] = [
            ("first pass, three workers, one killed", 0, ""),
            ("messages", self.messages, ""),
            ("distinct payments", self.distinct_payments, ""),
            (
                "connections cut",
                self.connections_cut,
                "those of the other workers, after the kill",
            ),
            (
                "charges in the table",
                self.charges,
                "must be the distinct payments",
            ),
            (
                "duplicates answered from the store",
                self.answered_from_the_store,
                "",
            ),
            (
                "charges taken back",
                self.taken_back,
                "by the kill in their transaction; must be 1",
            ),
            ("lost", self.lost, "must be 0"),
            ("charged twice", self.charged_twice, "must be 0"),
            ("wrong answers", self.wrong_answers, "must be 0"),
            ("replay of the whole topic", 0, ""),
            ("charges in the table", self.replay_charges, "must be 0"),
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
                writeln!(f, "    {name:36} {count:>8}   {note}")?;
            }
        }
        let verdict = if self.holds() {
            "The proof holds."
        } else {
            "THE PROOF FAILS."
        };
        write!(f, "\n  {verdict}")
    }
}
