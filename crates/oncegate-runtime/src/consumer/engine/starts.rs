//! Gathers what starts at one time into units, and holds the permits for them.

use std::sync::Arc;

use super::super::item::Item;
use super::super::lanes::PlaceId;
use super::super::member::Member;
use super::super::permits::Permit;
use super::super::schedule::Shard;
use super::super::shared::{Route, Shared};
use super::super::unit::{self, Tasks};

/// Messages that start now, by route and by the shard of the store that they ask.
pub(super) struct Starts {
    tasks: Arc<Tasks>,
    units: Vec<Unit>,
    /// A permit that is not used yet.
    spare: Option<Permit>,
}

/// Messages that start together, and the permits for them.
struct Unit {
    members: Vec<Member>,
    /// The shard that its members with a key ask; `None` while none has a key.
    asks: Option<Option<Shard>>,
    permits: Vec<Permit>,
    /// The number of further members that the permits are for.
    room: usize,
    most: usize,
}

impl Starts {
    pub(super) fn new(tasks: &Arc<Tasks>) -> Self {
        Self {
            tasks: Arc::clone(tasks),
            units: Vec::new(),
            spare: None,
        }
    }

    /// Returns whether a permit is free for what starts next, and keeps it for that.
    pub(super) fn has_permit(&mut self) -> bool {
        if self.spare.is_none() {
            self.spare = self.shared().permits.try_one();
        }
        self.spare.is_some()
    }

    /// Returns whether a message can begin within the bound of its route's pace: its unit has a
    /// permit for it, or one is free.
    pub(super) fn has_room(&mut self, item: &Item, asks: Option<Shard>) -> bool {
        let is_within_unit = self
            .units
            .iter()
            .any(|unit| unit.takes(item, asks) && unit.room > 0);
        if !is_within_unit && self.spare.is_none() {
            self.spare = self.shared().permits.try_for(&item.route.pace);
        }
        is_within_unit || self.spare.is_some()
    }

    /// A message for which [`has_room`](Self::has_room) was true.
    pub(super) fn one(&mut self, member: Member) {
        let route = Arc::clone(&member.item.route);
        let found = self
            .units
            .iter()
            .position(|unit| unit.takes(&member.item, member.asks));
        let mut unit = match found {
            Some(place) => self.units.swap_remove(place),
            None => Unit::of(&route),
        };
        if unit.room == 0 {
            unit.room = per_permit(&route);
            unit.permits.extend(self.spare.take());
        }
        unit.room = unit.room.saturating_sub(1);
        if member.item.identity.is_ok() {
            unit.asks = Some(member.asks);
        }
        unit.members.push(member);
        if unit.members.len() >= unit.most {
            self.start_unit(unit);
        } else {
            self.units.push(unit);
        }
    }

    /// A batch, under the permit of which [`has_room`](Self::has_room) has told.
    pub(super) fn batch(&mut self, mut members: Vec<Member>) {
        if members.is_empty() {
            return;
        }
        let permit = self.spare.take();
        for member in &mut members {
            member.in_batch = true;
            member.permit.clone_from(&permit);
        }
        self.start(members);
    }

    /// Messages that were found completed, and are answered one after another under a permit of
    /// which [`has_permit`](Self::has_permit) has told.
    pub(super) fn answers(&mut self, found: Vec<(PlaceId, Box<Item>)>) {
        let mut members: Vec<Member> = found
            .into_iter()
            .map(|(place, item)| Member::new(place, item, None))
            .collect();
        if let Some(first) = members.first_mut() {
            first.permit = self.spare.take();
        }
        self.start(members);
    }

    /// Starts what is gathered.
    pub(super) fn end(mut self) {
        for unit in std::mem::take(&mut self.units) {
            self.start_unit(unit);
        }
    }

    /// Starts a unit. Its first members carry the permits.
    fn start_unit(&self, unit: Unit) {
        let Unit {
            mut members,
            permits,
            ..
        } = unit;
        for (member, permit) in members.iter_mut().zip(permits) {
            member.permit = Some(permit);
        }
        self.start(members);
    }

    fn start(&self, mut members: Vec<Member>) {
        let Some(first) = members.first() else {
            return;
        };
        let route = Arc::clone(&first.item.route);
        let watch = &self.shared().watch;
        let note = watch.begin(&route.gate, route.number, first.in_batch);
        for member in &mut members {
            let Item {
                delivery,
                received_at,
                past,
                ..
            } = &*member.item;
            let failures = past.failures.as_ref();
            member.item.attempt = Some(note.begin(&delivery.message, *received_at, failures));
        }
        unit::start(&self.tasks, members);
    }

    fn shared(&self) -> &Shared {
        &self.tasks.shared
    }
}

impl Unit {
    fn of(route: &Route) -> Self {
        // The members of a unit with transactions of their own would wait for the database, one
        // after another.
        let most = if route.transactional.is_some() {
            1
        } else {
            route.pace.unit_most()
        };
        Self {
            members: Vec::with_capacity(most),
            asks: None,
            permits: Vec::new(),
            room: 0,
            most,
        }
    }

    /// Returns whether a message may join: it is of the same route, and of the same shard of its
    /// store. One without a key asks no shard, and ends when those before it have.
    fn takes(&self, item: &Item, asks: Option<Shard>) -> bool {
        let is_same_shard = item.identity.is_err() || self.asks.is_none_or(|ours| ours == asks);
        self.members
            .first()
            .is_some_and(|first| first.item.route.number == item.route.number)
            && is_same_shard
    }
}

/// Returns how many members of a unit are claimed for one permit.
fn per_permit(route: &Route) -> usize {
    if route.transactional.is_some() {
        1
    } else {
        route.pace.per_permit()
    }
}
