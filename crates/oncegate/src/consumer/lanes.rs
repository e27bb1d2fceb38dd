//! Which messages may run now, and which wait for another.
//!
//! Pure bookkeeping: no broker, no store, no clock. A message joins one or two lanes (that of its order and that of its
//! idempotency key), and may run when it is first in each. All messages join their lanes in the order of
//! arrival, so two messages can never wait for each other.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A lane's name: a hash of what it stands for. If two lanes share one by accident, their messages merely wait longer.
pub(super) type LaneId = u64;

/// The most lanes that one message joins.
const LANES_PER_MESSAGE: usize = 2;

/// Messages in lanes. `T` is the content of a message.
#[derive(Debug)]
pub(super) struct Lanes<T> {
    places: Vec<Option<Place<T>>>,
    free: Vec<usize>,
    ends: HashMap<LaneId, Ends, BuildHasherDefault<IsHash>>,
}

/// A message's number while it is in the lanes; it is reused afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PlaceId(usize);

#[derive(Debug)]
struct Place<T> {
    content: Option<T>,
    lanes: [Option<Link>; LANES_PER_MESSAGE],
    /// In how many lanes another message is before it.
    waiting: usize,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    lane: LaneId,
    next: Option<PlaceId>,
}

#[derive(Debug)]
struct Ends {
    last: PlaceId,
}

impl<T> Lanes<T> {
    pub(super) fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new(), ends: HashMap::default() }
    }

    /// How many messages are in the lanes.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether a message that joined these lanes now would be first in each.
    pub(super) fn are_empty(&self, lanes: [Option<LaneId>; LANES_PER_MESSAGE]) -> bool {
        lanes.into_iter().flatten().all(|lane| !self.ends.contains_key(&lane))
    }

    /// Puts a message at the end of its lanes; `true` when it is first in each and may run at once.
    pub(super) fn join(&mut self, content: T, lanes: [Option<LaneId>; LANES_PER_MESSAGE]) -> (PlaceId, bool) {
        let lanes = if lanes[0] == lanes[1] { [lanes[0], None] } else { lanes };
        let links = lanes.map(|lane| lane.map(|lane| Link { lane, next: None }));
        let place = Place { content: Some(content), lanes: links, waiting: 0 };
        let id = if let Some(free) = self.free.pop() { PlaceId(free) } else { PlaceId(self.places.len()) };
        match self.places.get_mut(id.0) {
            Some(slot) => *slot = Some(place),
            None => self.places.push(Some(place)),
        }
        let mut waiting = 0;
        for lane in lanes.into_iter().flatten() {
            if let Some(before) = self.ends.insert(lane, Ends { last: id }) {
                waiting += 1;
                self.link(before.last, lane, id);
            }
        }
        if let Some(Some(place)) = self.places.get_mut(id.0) {
            place.waiting = waiting;
        }
        (id, waiting == 0)
    }

    fn link(&mut self, from: PlaceId, lane: LaneId, to: PlaceId) {
        let Some(Some(place)) = self.places.get_mut(from.0) else { return };
        for link in place.lanes.iter_mut().flatten().filter(|link| link.lane == lane) {
            debug_assert!(link.next.is_none(), "only the last in a lane gets a follower");
            link.next = Some(to);
        }
    }

    /// Takes the message out of its place to run it. The place stays, and with it the order of all messages.
    pub(super) fn take(&mut self, id: PlaceId) -> Option<T> {
        self.places.get_mut(id.0)?.as_mut()?.content.take()
    }

    /// Puts a message back that has to run again.
    pub(super) fn put_back(&mut self, id: PlaceId, content: T) {
        if let Some(Some(place)) = self.places.get_mut(id.0) {
            place.content = Some(content);
        }
    }

    /// Every message that is in its place, and whether it is behind another.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&T, bool)> {
        let places = self.places.iter().flatten();
        places.filter_map(|place| Some((place.content.as_ref()?, place.waiting > 0)))
    }

    /// Leaves the lanes for good; calls `ready` for every message that may run now.
    pub(super) fn leave(&mut self, id: PlaceId, mut ready: impl FnMut(PlaceId)) {
        let Some(place) = self.places.get_mut(id.0).and_then(Option::take) else { return };
        debug_assert_eq!(place.waiting, 0, "only a message that is first leaves");
        self.free.push(id.0);
        for link in place.lanes.into_iter().flatten() {
            let Some(next) = link.next else {
                self.ends.remove(&link.lane);
                continue;
            };
            if let Some(Some(follower)) = self.places.get_mut(next.0) {
                follower.waiting -= 1;
                if follower.waiting == 0 {
                    ready(next);
                }
            }
        }
    }

    /// Empties the lanes and drops the messages in them.
    pub(super) fn clear(&mut self) {
        *self = Self::new();
    }
}

/// The keys of the map are hashes already.
#[derive(Debug, Default)]
struct IsHash(u64);

impl Hasher for IsHash {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leave(lanes: &mut Lanes<u32>, id: PlaceId) -> Vec<PlaceId> {
        let mut ready = Vec::new();
        lanes.leave(id, |id| ready.push(id));
        ready
    }

    #[test]
    fn a_message_waits_for_everyone_before_it_in_either_lane() {
        let mut lanes = Lanes::new();
        let (a, a_runs) = lanes.join(0, [Some(1), Some(10)]);
        let (b, b_runs) = lanes.join(1, [Some(2), Some(20)]);
        let (c, c_runs) = lanes.join(2, [Some(1), Some(20)]);
        assert!(a_runs && b_runs && !c_runs);
        assert_eq!(leave(&mut lanes, a), []);
        assert_eq!(leave(&mut lanes, b), [c]);
        assert_eq!(leave(&mut lanes, c), []);
        assert_eq!(lanes.len(), 0);
        assert!(lanes.are_empty([Some(1), Some(20)]));
    }

    #[test]
    fn two_equal_lanes_are_one() {
        let mut lanes = Lanes::new();
        let (a, _) = lanes.join(0, [Some(7), Some(7)]);
        let (b, runs) = lanes.join(1, [Some(7), Some(7)]);
        assert!(!runs);
        assert_eq!(leave(&mut lanes, a), [b]);
    }

    /// Against the plainest model there is: a list, in which a message may run when no earlier one shares a lane.
    #[test]
    fn it_agrees_with_a_plain_list() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut lanes = Lanes::new();
        let mut list: Vec<(PlaceId, [Option<LaneId>; 2])> = Vec::new();
        let mut ready: Vec<PlaceId> = Vec::new();
        for step in 0..20_000 {
            if list.len() < 30 && rng.bool() {
                let joined = [rng.bool().then(|| rng.u64(..5)), rng.bool().then(|| rng.u64(10..15))];
                let (id, runs) = lanes.join(step, joined);
                list.push((id, joined));
                if runs {
                    ready.push(id);
                }
            } else if !ready.is_empty() {
                let id = ready.swap_remove(rng.usize(..ready.len()));
                lanes.leave(id, |id| ready.push(id));
                list.retain(|(other, _)| *other != id);
            }
            let shares = |a: &[Option<LaneId>; 2], b: &[Option<LaneId>; 2]| {
                a.iter().flatten().any(|x| b.contains(&Some(*x)))
            };
            let free = |(n, (id, joined)): (usize, &(PlaceId, [Option<LaneId>; 2]))| {
                (!list[..n].iter().any(|(_, earlier)| shares(earlier, joined))).then_some(*id)
            };
            let mut expected: Vec<PlaceId> = list.iter().enumerate().filter_map(free).collect();
            expected.sort_unstable();
            ready.sort_unstable();
            assert_eq!(ready, expected, "seed {seed}, step {step}");
        }
    }
}
