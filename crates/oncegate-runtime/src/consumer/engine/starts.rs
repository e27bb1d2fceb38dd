//! Gathers what starts at one time into units.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::super::item::Item;
use super::super::lanes::PlaceId;
use super::super::member::{Member, Permit};
use super::super::unit::{self, Tasks};

/// The most messages of a unit.
const UNIT_MOST: usize = 256;

/// The least number of units that share the permits, so that several threads have work.
const UNITS_AT_LEAST: usize = 4;

/// Messages that start now, by route and by the shard of the store that they ask.
pub(super) struct Starts {
    tasks: Arc<Tasks>,
    units: Vec<Vec<Member>>,
}

impl Starts {
    pub(super) fn new(tasks: &Arc<Tasks>) -> Self {
        Self {
            tasks: Arc::clone(tasks),
            units: Vec::new(),
        }
    }

    /// A message that starts under its own permit.
    pub(super) fn one(&mut self, mut member: Member, permit: OwnedSemaphorePermit) {
        member.permit = Some(Permit::Own(permit));
        let most = self.most(&member);
        let found = self.units.iter().position(|unit| takes(unit, &member));
        let mut unit = found.map_or_else(
            || Vec::with_capacity(most),
            |place| self.units.swap_remove(place),
        );
        unit.push(member);
        if unit.len() >= most {
            self.start(unit);
        } else {
            self.units.push(unit);
        }
    }

    /// A batch, under one permit.
    pub(super) fn batch(&mut self, mut members: Vec<Member>, permit: OwnedSemaphorePermit) {
        let permit = Arc::new(permit);
        for member in &mut members {
            member.permit = Some(Permit::OfBatch(Arc::clone(&permit)));
        }
        self.start(members);
    }

    /// Messages that were found completed, and are answered under one permit.
    pub(super) fn answers(
        &mut self,
        found: Vec<(PlaceId, Box<Item>)>,
        permit: OwnedSemaphorePermit,
    ) {
        let permit = Arc::new(permit);
        let members = found.into_iter().map(|(place, item)| Member {
            place,
            item,
            asks: None,
            permit: Some(Permit::OfBatch(Arc::clone(&permit))),
        });
        unit::start_answers(&self.tasks, members.collect());
    }

    /// Starts what is gathered.
    pub(super) fn end(mut self) {
        for unit in std::mem::take(&mut self.units) {
            self.start(unit);
        }
    }

    /// A unit whose members run in transactions of their own has one member: all of them wait for
    /// the database.
    fn most(&self, member: &Member) -> usize {
        if member.item.route.transactional.is_some() {
            return 1;
        }
        let share = self.tasks.shared.settings.concurrency as usize / UNITS_AT_LEAST;
        share.clamp(1, UNIT_MOST)
    }

    fn start(&self, mut members: Vec<Member>) {
        let Some(route) = members.first().map(|member| Arc::clone(&member.item.route)) else {
            return;
        };
        let note = self.tasks.shared.watch.begin(&route.gate, route.number);
        for member in &mut members {
            let Item {
                delivery,
                received_at,
                ..
            } = &*member.item;
            member.item.attempt = Some(note.begin(&delivery.message, *received_at));
        }
        unit::start(&self.tasks, members);
    }
}

/// Returns whether the member may join the unit: the same route, and the same shard of its store.
fn takes(unit: &[Member], member: &Member) -> bool {
    unit.first().is_some_and(|first| {
        first.asks == member.asks && first.item.route.number == member.item.route.number
    })
}
