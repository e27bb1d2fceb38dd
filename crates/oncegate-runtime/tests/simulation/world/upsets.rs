//! What happens to the workers and to the store, and how often it did.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::sleep;

use super::World;
use crate::pay::hold_the_thread;
use crate::steps::{Amid, Step};

impl World {
    /// The faults that have happened, by name.
    pub(super) fn faults(&self) -> BTreeMap<&'static str, u64> {
        let injected = self.store.injected();
        let mut faults = BTreeMap::from([
            ("unavailable", injected.unavailable),
            ("reply_lost", injected.reply_lost),
            ("request_lost", injected.request_lost),
            ("stray", injected.strays),
            ("slow", injected.slow),
            ("outage", injected.outage),
            ("crash", self.crashes),
            ("stall", self.stalls),
            ("taken_back", self.taken_back),
            ("store_loss", self.losses().into()),
            ("copied", self.broker.copied()),
        ]);
        for step in Step::ALL {
            for amid in [Amid::Crash, Amid::Revoke] {
                let count = self.amid_units.get(&(step, amid)).copied().unwrap_or(0);
                faults.insert(amid.name(step), count);
            }
        }
        faults.extend(
            self.lost_answers
                .lock()
                .unwrap()
                .iter()
                .map(|(name, count)| (*name, *count)),
        );
        faults.extend(self.till.fates());
        faults
    }

    /// Something happens to the workers or the store.
    pub(super) async fn upset(&mut self) {
        match self.rng.u32(..16) {
            12.. => self.upset_amid_a_unit().await,
            0..4 => self.crash(),
            4..6 => self.start_worker(),
            6 => self.stop_one().await,
            7 => {
                self.store.begin_outage();
                sleep(Duration::from_millis(self.rng.u64(10..6_000))).await;
                self.store.end_outage();
            }
            10..12 => self.taken_back += u64::from(self.broker.lose_one(self.rng.usize(..64))),
            // The machine stands still, for about a lease.
            8 if self.rng.bool() => {
                self.stalls += 1;
                hold_the_thread(self.rng.u64(300..3_000));
            }
            8..10 if self.rng.u32(..4) == 0 => {
                self.till.lose_everything();
                self.store_losses.fetch_add(1, Relaxed);
            }
            _ => {}
        }
        if self.workers.is_empty() {
            self.start_worker();
        }
    }

    /// Something happens to a worker between two steps of a unit with several members.
    pub(super) async fn upset_amid_a_unit(&mut self) {
        if self.workers.is_empty() {
            return;
        }
        let which = self.rng.usize(..self.workers.len());
        // Members seldom end together where they are not quick.
        let steps = if self.is_quick() {
            &Step::ALL[2..]
        } else {
            &Step::ALL[..]
        };
        let step = steps[self.rng.usize(..steps.len())];
        let amid = if self.rng.bool() {
            Amid::Crash
        } else {
            Amid::Revoke
        };
        if !self.workers[which].steps.come_to(step).await {
            return;
        }
        *self.amid_units.entry((step, amid)).or_default() += 1;
        match amid {
            Amid::Crash => self.crash_of(which),
            // Another member gets some of its messages, or the queue takes one of them back.
            Amid::Revoke => {
                self.taken_back += u64::from(self.broker.lose_one(self.rng.usize(..64)));
                self.start_worker();
            }
        }
    }

    fn crash(&mut self) {
        if !self.workers.is_empty() {
            let which = self.rng.usize(..self.workers.len());
            self.crash_of(which);
        }
    }

    /// The process is gone from one instruction to the next.
    fn crash_of(&mut self, which: usize) {
        let worker = self.workers.swap_remove(which);
        self.uncounted_discards += worker.steps.unknown_discards() as u64;
        worker.running.abort();
        self.broker.leave(worker.member);
        self.crashes += 1;
    }
}
