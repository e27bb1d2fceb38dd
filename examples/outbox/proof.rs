//! The proof: computed from what was produced, from the tables, and from the broker.

use std::fmt;

use oncegate::BoxError;
use oncegate_examples::broker::Broker;
use oncegate_examples::crew::Progress;
use oncegate_examples::database::Database;
use serde::Serialize;

/// The proof, in numbers.
#[derive(Debug, Serialize)]
pub(crate) struct Proof {
    schema: &'static str,
    messages: u64,
    orders: u64,
    shipments: u64,
    shipped_twice: u64,
    relay_crashes: u64,
    published: u64,
    published_again: u64,
    notices: u64,
    noticed_twice: u64,
    out_of_order: u64,
    left_in_the_outbox: u64,
}

/// Returns how many orders are shipped, and how many notices a listener has received.
pub(crate) fn progress(database: &Database, run: &str) -> Result<Progress, BoxError> {
    let charges = database.count("SELECT count(*) FROM shipments WHERE run = $1", &[&run])?;
    let answers = database.count(
        "SELECT count(DISTINCT order_id) FROM notices WHERE run = $1",
        &[&run],
    )?;
    Ok(Progress { charges, answers })
}

impl Proof {
    /// Compares the tables and the topic with what was produced.
    pub(crate) fn new(
        database: &Database,
        broker: &Broker,
        run: &str,
        messages: u64,
        orders: u64,
        crashes: u32,
    ) -> Result<Self, BoxError> {
        let count = |question| database.count(question, &[&run]);
        let published = broker.count(&format!("{run}-shipments"))?;
        Ok(Self {
            schema: "oncegate.example.outbox.v1",
            messages,
            orders,
            shipments: count("SELECT count(*) FROM shipments WHERE run = $1")?,
            shipped_twice: count(
                "SELECT count(*) FROM (SELECT FROM shipments WHERE run = $1 GROUP BY order_id HAVING count(*) > 1) AS t",
            )?,
            relay_crashes: crashes.into(),
            published,
            published_again: published.saturating_sub(orders),
            notices: count("SELECT count(*) FROM notices WHERE run = $1")?,
            noticed_twice: count(
                "SELECT count(*) FROM (SELECT FROM notices WHERE run = $1 GROUP BY order_id HAVING count(*) > 1) AS t",
            )?,
            out_of_order: count(
                "SELECT count(*) FROM (SELECT sequence, lag(sequence) OVER (PARTITION BY customer ORDER BY made) \
                 AS before FROM notices WHERE run = $1) AS t WHERE sequence < before",
            )?,
            left_in_the_outbox: count(
                "SELECT count(*) FROM oncegate_outbox WHERE outbox = $1 AND sent_at_ms IS NULL",
            )?,
        })
    }

    /// Returns whether every order was shipped once and noticed once, in order, although some were
    /// published again.
    pub(crate) fn holds(&self) -> bool {
        self.shipments == self.orders
            && self.shipped_twice == 0
            && self.notices == self.orders
            && self.noticed_twice == 0
            && self.out_of_order == 0
            && self.left_in_the_outbox == 0
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: [(&str, u64, &str); 11] = [
            ("messages about orders", self.messages, ""),
            ("distinct orders", self.orders, ""),
            ("shipments", self.shipments, "must be the distinct orders"),
            ("shipped twice", self.shipped_twice, "must be 0"),
            (
                "crashes of the relay",
                self.relay_crashes,
                "each between publishing and noting it",
            ),
            ("published messages", self.published, ""),
            ("published again", self.published_again, "after the crashes"),
            (
                "notices by the next consumer",
                self.notices,
                "must be the distinct orders",
            ),
            ("noticed twice", self.noticed_twice, "must be 0"),
            (
                "out of order for their customer",
                self.out_of_order,
                "must be 0",
            ),
            ("left in the outbox", self.left_in_the_outbox, "must be 0"),
        ];
        writeln!(f)?;
        for (name, count, note) in rows {
            writeln!(f, "    {name:36} {count:>8}   {note}")?;
        }
        let verdict = if self.holds() {
            "The proof holds."
        } else {
            "THE PROOF FAILS."
        };
        write!(f, "\n  {verdict}")
    }
}
