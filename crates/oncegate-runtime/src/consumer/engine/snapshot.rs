//! Counts everything that waits in the engine, once a second, for the monitor, and drops what no
//! longer is this consumer's.

use std::cmp::Reverse;
use std::sync::Arc;

use tokio::time::Instant;

use super::super::item::Item;
use super::super::schedule::MessageState;
use super::super::watch::{Seen, SeenOutage, Snapshot, see};
use super::Engine;
use crate::health::{Messages, Stage, WaitCause};

/// The most waiting messages that are listed.
const MOST_WAITING: usize = 16;

impl Engine {
    /// Counts what waits and why, and drops what another consumer has now. Attempts in progress
    /// have notes of their own.
    pub(super) fn publish_snapshot(&mut self) {
        let gathering = self.schedule.gathering(super::now());
        let asked = self
            .schedule
            .asked()
            .map(|(shard, at)| (shard, Instant::from_std(at)))
            .collect();
        let mut snapshot = Snapshot {
            asked,
            outages: self.seen_outages(),
            gathering,
            ..Snapshot::default()
        };
        let mut revoked = Vec::new();
        for (place, item, state) in self.schedule.waiting() {
            if !item.delivery.ack_handle.is_ours() {
                revoked.push(place);
            }
            let Some(seen) = seen(item, state) else {
                continue;
            };
            count(&mut snapshot.messages, seen.stage);
            let is_worth_knowing = matches!(
                seen.stage,
                Stage::Parked(
                    WaitCause::Busy
                        | WaitCause::Lapse
                        | WaitCause::Later
                        | WaitCause::Unreadable
                        | WaitCause::Result
                        | WaitCause::Alone
                )
            );
            if is_worth_knowing {
                snapshot.waiting.push(seen.clone());
            }
            if seen.failures.is_some() {
                snapshot.failing.push(seen.clone());
            }
            see(&mut snapshot.partitions, seen);
        }
        // A message that comes again would wait behind a delivery that is over.
        revoked
            .into_iter()
            .for_each(|place| self.schedule.revoke(place));
        // Thousands may be wanted later, and nothing is wrong with them: they take no place of the
        // others.
        snapshot
            .waiting
            .sort_by_key(|seen| (seen.stage == Stage::Parked(WaitCause::Later), seen.since));
        snapshot.waiting.truncate(MOST_WAITING);
        keep_most_failed(&mut snapshot.failing);
        let free = self.shared.permits.free();
        self.shared.watch.publish(snapshot, free);
    }

    fn seen_outages(&self) -> Vec<SeenOutage> {
        let outages = self.schedule.outages();
        outages
            .map(|(shard, outage, waiting)| SeenOutage {
                route: shard.route,
                shard: shard.number,
                since: Instant::from_std(outage.since),
                error: Arc::clone(&outage.error),
                waiting,
                open: outage.is_bypassed,
            })
            .collect()
    }
}

/// Returns what the monitor knows of a message in this state; `None` while a task has it.
fn seen(item: &Item, state: MessageState) -> Option<Seen> {
    let mut until = None;
    let (stage, since) = match state {
        MessageState::Behind { .. } => (Stage::Behind, item.received_at),
        MessageState::Ready | MessageState::Found => (Stage::Ready, item.received_at),
        MessageState::Delayed(delay) => {
            until = Some(Instant::from_std(delay.until));
            (Stage::Parked(delay.cause), Instant::from_std(delay.since))
        }
        MessageState::TenantFull => (Stage::Parked(WaitCause::Tenant), item.received_at),
        MessageState::StoreAway { .. } | MessageState::EveryStoreAway => {
            (Stage::HeldBack, item.received_at)
        }
        MessageState::HandlerPaused if item.route.gate.is_paused() => {
            (Stage::Parked(WaitCause::Operator), item.received_at)
        }
        MessageState::HandlerPaused => (Stage::Parked(WaitCause::Breaker), item.received_at),
        MessageState::Running { .. } | MessageState::Answering | MessageState::Gone => return None,
    };
    Some(Seen {
        route: item.route.number,
        origin: item.delivery.message.origin().clone(),
        stage,
        since,
        received_at: item.received_at,
        until,
        key: item
            .identity
            .as_ref()
            .ok()
            .map(|identity| identity.key.clone()),
        failures: item.past.failures.clone(),
    })
}

/// Keeps the messages that have failed most often, those first.
pub(in crate::consumer) fn keep_most_failed(failing: &mut Vec<Seen>) {
    // The one that was received first, of those that have failed as often.
    failing.sort_by_key(|seen| (Reverse(seen.times_failed()), seen.received_at));
    failing.truncate(MOST_WAITING);
}

fn count(messages: &mut Messages, stage: Stage) {
    match stage {
        Stage::Behind => messages.behind += 1,
        Stage::Parked(_) => messages.parked += 1,
        Stage::HeldBack => messages.held_back += 1,
        _ => messages.ready += 1,
    }
}
