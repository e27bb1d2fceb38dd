//! The judgement of a run: every ack is justified, nothing is lost, and extra effects are
//! explained.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use oncegate::core::key::Scope;
use oncegate::core::record::{Record, State};
use oncegate::{AfterUnknown, Message, Origin};
use oncegate_testing::judge_effects;

use super::{World, key};
use crate::broker::Judge;
use crate::pay::Payment;

impl World {
    /// An ack is justified when the key's record is COMPLETED, the message is dead-lettered, or a
    /// copy of it waits.
    pub(super) fn judge(&self) -> Judge {
        let memory = Arc::clone(&self.memory);
        let ledger = Arc::clone(&self.ledger);
        let seed = self.seed;
        let broker = Arc::clone(&self.broker);
        let losses = Arc::clone(&self.store_losses);
        let key = key().compile(&Scope::new("sim").unwrap()).unwrap();
        let fails_open = self.fails_open_after().is_some();
        Arc::new(move |n| {
            let message = Message::new(
                "payments",
                Origin::Other("".into()),
                Some(broker.payload(n).into()),
            );
            let store_key = key.derive("payments", &message).ok();
            let records = memory.records();
            let completed = records
                .iter()
                .any(|(key, record)| Some(key) == store_key.as_ref() && is_finished(record));
            let given_up = ledger.letters.lock().unwrap().contains_key(&n.to_string());
            // A store that lost its data may have lost this record between its completion and the
            // ack.
            let lost = losses.load(Relaxed) > 0;
            // Without a record, its handler must have run. What shares the store's transaction
            // cannot.
            let ran_open = fails_open
                && payment_id(&broker.payload(n))
                    .is_some_and(|id| ledger.effects.lock().unwrap().contains_key(&id));
            assert!(
                completed || given_up || lost || ran_open || broker.is_copied(n),
                "seed {seed}: message {n} was acknowledged without COMPLETED, a dead letter or a copy"
            );
        })
    }

    /// Returns the payments that were given up.
    pub(super) fn given_up(&self) -> BTreeSet<u64> {
        given_up(
            &self.ledger.letters.lock().unwrap(),
            &self.broker.payloads(),
        )
    }

    /// Asserts that every key has an effect or all of its messages are dead letters, and that more
    /// than one effect is explained.
    pub(super) fn judge_effects(&self) {
        let wrong = self.ledger.wrong.lock().unwrap().clone();
        assert!(wrong.is_empty(), "seed {}: {wrong:?}", self.seed);
        let letters = self.ledger.letters.lock().unwrap();
        // What ran without the store has left nothing there.
        let lost = self.losses() > 0 || self.fail_open() > 0;
        // A key has one dead letter: later messages of a key that was given up get none.
        let payloads = self.broker.payloads();
        let given_up = given_up(&letters, &payloads);
        let ids: BTreeSet<u64> = payloads
            .iter()
            .filter_map(|payload| payment_id(payload))
            .collect();
        self.judge_charges(&ids, &given_up, lost);
        self.judge_runs(&ids, &given_up);
        for (n, payload) in payloads.iter().enumerate() {
            assert!(
                payment_id(payload).is_some() || letters.contains_key(&n.to_string()),
                "seed {}: message {n} is lost",
                self.seed
            );
        }
        for (id, results) in &*self.ledger.results.lock().unwrap() {
            let same = results.windows(2).all(|pair| pair[0] == pair[1]);
            assert!(
                same || lost,
                "seed {}: duplicates of {id} got {results:?}",
                self.seed
            );
        }
    }

    /// Judges the effects that share a transaction with the records.
    fn judge_charges(&self, ids: &BTreeSet<u64>, given_up: &BTreeSet<u64>, lost: bool) {
        let charges = counts(&self.till.charges());
        // No fault explains a second one.
        let charged = judge_effects(&self.wanted(ids, given_up, true), ids, &charges, |_| 0);
        assert!(
            charged.repeated.is_empty(),
            "seed {}: charged {:?}",
            self.seed,
            charged.repeated
        );
        assert!(
            charged.lost.is_empty() || lost,
            "seed {}: {:?} are lost",
            self.seed,
            charged.lost
        );
        let both: Vec<&u64> = charges.keys().filter(|id| given_up.contains(id)).collect();
        assert!(
            both.is_empty() || lost,
            "seed {}: {both:?} are charged and given up",
            self.seed
        );
    }

    /// Judges the effects that share no transaction with the records.
    fn judge_runs(&self, ids: &BTreeSet<u64>, given_up: &BTreeSet<u64>) {
        let effects = counts(&self.ledger.effects.lock().unwrap());
        // Which key a counted extra run was of is not known: all of them together explain all
        // second effects.
        let wanted = self.wanted(ids, given_up, false);
        let had = judge_effects(&wanted, ids, &effects, |_| u64::MAX);
        assert!(
            had.lost.is_empty(),
            "seed {}: {:?} are lost",
            self.seed,
            had.lost
        );
        assert!(
            had.unasked.is_empty(),
            "seed {}: nothing asked for {:?}",
            self.seed,
            had.unasked
        );
        let extra = had.second_effects();
        if self.after_unknown() == AfterUnknown::GiveUp {
            // Whatever is killed when: only a loss of records lets a key begin again.
            assert!(
                extra == 0 || self.losses() > 0,
                "seed {}: second effects after an unknown outcome: {:?}",
                self.seed,
                had.repeated
            );
            // A transaction that is not committed is known not to have happened.
            let undecided = self.counters.get("dead_letters", "outcome_unknown");
            assert!(
                undecided == 0 || !self.gives_transactions(),
                "seed {}: {undecided} transactions have no outcome",
                self.seed
            );
        }
        let explained = self.counters.total("extra_runs") + self.uncounted_discards;
        assert!(
            extra <= explained || self.losses() > 0,
            "seed {}: {extra} extra effects, {explained} explained: {:?}; counted: {:?}",
            self.seed,
            had.repeated,
            self.counters
        );
    }

    /// The payments that must have had an effect, in a transaction with the records or not.
    fn wanted(
        &self,
        ids: &BTreeSet<u64>,
        given_up: &BTreeSet<u64>,
        in_a_transaction: bool,
    ) -> BTreeSet<u64> {
        let mut wanted = ids - given_up;
        wanted.retain(|id| self.transacts(*id) == in_a_transaction);
        wanted
    }
}

/// The payment of a message; `None` if its payload is none.
fn payment_id(payload: &str) -> Option<u64> {
    let payment = serde_json::from_str::<Payment>(payload).ok()?;
    Some(payment.id)
}

fn is_finished(record: &Record) -> bool {
    matches!(
        record.state,
        State::Completed { .. }
            | State::Failed {
                handed_over: true,
                ..
            }
    )
}

/// How often each payment was made.
fn counts(effects: &BTreeMap<u64, u32>) -> BTreeMap<u64, u64> {
    effects
        .iter()
        .map(|(id, times)| (*id, u64::from(*times)))
        .collect()
}

/// The payments with a dead letter, of whichever of their messages.
fn given_up(letters: &BTreeMap<String, String>, payloads: &[String]) -> BTreeSet<u64> {
    letters
        .keys()
        .filter_map(|n| payment_id(&payloads[n.parse::<usize>().unwrap()]))
        .collect()
}
