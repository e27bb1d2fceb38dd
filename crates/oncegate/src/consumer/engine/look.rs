//! Counts everything that waits in the engine, once a second, for the monitor.

use std::sync::Arc;

use tokio::time::Instant;

use super::super::watch::{Look, Seen, SeenOutage, see};
use super::super::{Item, watch};
use super::{Engine, shard_of};
use crate::health::{Messages, Stage, WaitCause};

/// The most waiting messages that are listed.
const MOST_WAITING: usize = 16;

impl Engine {
    /// Counts what waits and why. Attempts in progress have notes of their own.
    pub(super) fn look(&mut self) {
        let mut look = Look { shards: self.asked_shards(), outages: self.seen_outages(), ..Look::default() };
        for (item, is_behind) in self.lanes.iter() {
            let seen = self.seen(item, is_behind);
            count(&mut look.messages, seen.stage);
            let is_worth_knowing = matches!(
                seen.stage,
                Stage::Parked(WaitCause::Busy | WaitCause::Lapse | WaitCause::Unreadable | WaitCause::Result)
            );
            if is_worth_knowing {
                look.waiting.push(seen.clone());
            }
            see(&mut look.partitions, seen);
        }
        for item in &self.found {
            look.messages.ready += 1;
            see(&mut look.partitions, self.seen(item, false));
        }
        look.waiting.sort_by_key(|seen| seen.since);
        look.waiting.truncate(MOST_WAITING);
        let free = self.shared.permits.available_permits();
        let watch: &watch::Watch = &self.shared.watch;
        watch.looked(look, free);
    }

    fn seen(&self, item: &Item, is_behind: bool) -> Seen {
        let (stage, since) = match &item.wait {
            Some(wait) if wait.until > Instant::now() => (Stage::Parked(wait.cause), wait.since),
            _ if is_behind => (Stage::Behind, item.received_at),
            _ if shard_of(item)
                .is_some_and(|shard| self.outages.get(&shard).is_some_and(|outage| !outage.open)) =>
            {
                (Stage::HeldBack, item.received_at)
            }
            _ if self.tenants.is_full(item.tenant) => (Stage::Parked(WaitCause::Tenant), item.received_at),
            _ if item.identity.is_ok() && !item.route.breaker.is_closed() => {
                (Stage::Parked(WaitCause::Breaker), item.received_at)
            }
            _ => (Stage::Ready, item.received_at),
        };
        Seen {
            route: item.route.number,
            origin: item.delivery.message.origin().clone(),
            stage,
            since,
            received_at: item.received_at,
        }
    }

    fn asked_shards(&self) -> Vec<(usize, u32)> {
        let of_route = |number: usize| {
            let asked = self.shards.iter().filter(|shard| shard.route == number).count();
            (number, u32::try_from(asked).unwrap_or(u32::MAX))
        };
        self.shared.routes().map(|route| of_route(route.number)).collect()
    }

    fn seen_outages(&self) -> Vec<SeenOutage> {
        let outages = self.outages.iter();
        outages
            .map(|(shard, outage)| SeenOutage {
                route: shard.route,
                shard: shard.number,
                since: outage.since,
                error: Arc::clone(&outage.error),
                waiting: outage.waiting.len() + usize::from(outage.probing.is_some()),
                open: outage.open,
            })
            .collect()
    }
}

fn count(messages: &mut Messages, stage: Stage) {
    match stage {
        Stage::Behind => messages.behind += 1,
        Stage::Parked(_) => messages.parked += 1,
        Stage::HeldBack => messages.held_back += 1,
        _ => messages.ready += 1,
    }
}
