//! The proof of the Rust workers, and what the Python worker has charged beside them.

use std::collections::BTreeSet;
use std::fmt;

use oncegate_examples::payments::{Payments, Proof};
use serde::Serialize;

#[derive(Debug, Serialize)]
pub(crate) struct ProofWithPython {
    #[serde(flatten)]
    rust: Proof,
    python_charges: u64,
    python_lost: u64,
    python_charged_twice: u64,
    python_replay_charges: u64,
}

impl ProofWithPython {
    pub(crate) fn new(
        rust: Proof,
        produced: &Payments,
        charged: &[String],
        again: &[String],
    ) -> Self {
        let orders: BTreeSet<&String> = charged.iter().collect();
        Self {
            rust,
            python_charges: charged.len() as u64,
            python_lost: produced
                .orders
                .iter()
                .filter(|order| !orders.contains(order))
                .count() as u64,
            python_charged_twice: (charged.len() - orders.len()) as u64,
            python_replay_charges: again.len() as u64,
        }
    }

    pub(crate) fn holds(&self) -> bool {
        self.rust.holds()
            && self.python_lost == 0
            && self.python_charged_twice == 0
            && self.python_replay_charges == 0
    }
}

impl fmt::Display for ProofWithPython {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}\n\n  the same topic, a Python worker under `oncegate run`",
            self.rust
        )?;
        for (name, count, note) in [
            ("charges", self.python_charges, "runs of the worker"),
            ("lost", self.python_lost, "must be 0"),
            ("charged twice", self.python_charged_twice, "must be 0"),
            (
                "charges by a replay",
                self.python_replay_charges,
                "must be 0",
            ),
        ] {
            writeln!(f, "    {name:36} {count:>8}   {note}")?;
        }
        let verdict = if self.holds() {
            "Both proofs hold."
        } else {
            "A PROOF FAILS."
        };
        write!(f, "\n  {verdict}")
    }
}
