//! Limits how many handlers each tenant occupies. Pure bookkeeping: messages over the limit wait for the tenant's
//! others.

use std::collections::{HashMap, VecDeque};

use super::lanes::PlaceId;

/// The tenants that have something running or waiting.
#[derive(Debug)]
pub(super) struct Tenants {
    /// `None`: no limit.
    limit: Option<u32>,
    busy: HashMap<u64, Busy>,
    running: HashMap<PlaceId, u64>,
}

#[derive(Debug, Default)]
struct Busy {
    running: u32,
    waiting: VecDeque<PlaceId>,
}

impl Tenants {
    pub(super) fn new(limit: Option<u32>) -> Self {
        Self { limit, busy: HashMap::new(), running: HashMap::new() }
    }

    /// Whether the tenant is at its limit.
    pub(super) fn is_full(&self, tenant: Option<u64>) -> bool {
        let busy = tenant.and_then(|tenant| self.busy.get(&tenant));
        busy.is_some_and(|busy| self.limit.is_some_and(|limit| busy.running >= limit))
    }

    /// Makes the message wait until another one of the tenant has ended.
    pub(super) fn wait(&mut self, tenant: Option<u64>, place: PlaceId) {
        if let Some(tenant) = tenant {
            self.busy.entry(tenant).or_default().waiting.push_back(place);
        }
    }

    /// Notes that a message begins to run.
    pub(super) fn enter(&mut self, tenant: Option<u64>, place: PlaceId) {
        if let (Some(tenant), Some(_)) = (tenant, self.limit) {
            self.busy.entry(tenant).or_default().running += 1;
            self.running.insert(place, tenant);
        }
    }

    /// Notes that a message has ended, and returns the one that may run in its place.
    pub(super) fn leave(&mut self, place: PlaceId) -> Option<PlaceId> {
        let tenant = self.running.remove(&place)?;
        let busy = self.busy.get_mut(&tenant)?;
        busy.running = busy.running.saturating_sub(1);
        let next = busy.waiting.pop_front();
        if busy.running == 0 && busy.waiting.is_empty() && next.is_none() {
            self.busy.remove(&tenant);
        }
        next
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.limit);
    }
}
