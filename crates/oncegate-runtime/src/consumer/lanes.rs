//! The order of messages: which ones are before which.
//!
//! Pure bookkeeping: no broker, no store, no clock. A message joins one or two lanes (that of its
//! order and that of its idempotency key), and may run when it is first in each. All messages join
//! their lanes in the order of arrival, so two messages can never wait for each other.
//!
//! The lanes link each message to the next one of each lane. How many messages are still before a
//! message is part of its state, which this module does not know.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A lane's name: a hash of what it stands for. If two lanes share one by accident, their messages
/// merely wait longer.
pub(super) type LaneId = u64;

/// The most lanes that one message joins.
const LANES_PER_MESSAGE: usize = 2;

/// Messages in lanes. `T` is the content of a message.
#[derive(Debug)]
pub(super) struct Lanes<T> {
    places: Vec<Option<LanePlace<T>>>,
    free: Vec<usize>,
    /// The last message of each lane.
    last: HashMap<LaneId, PlaceId, BuildHasherDefault<IsHash>>,
}

/// A message's number while it is in the lanes; it is reused afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PlaceId(usize);

#[derive(Debug)]
struct LanePlace<T> {
    content: T,
    lanes: [Option<LaneLink>; LANES_PER_MESSAGE],
}

#[derive(Clone, Copy, Debug)]
struct LaneLink {
    lane: LaneId,
    next: Option<PlaceId>,
}

impl<T> Lanes<T> {
    pub(super) fn new() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            last: HashMap::default(),
        }
    }

    /// Returns in how many of these lanes another message is. A message that joined them now would
    /// wait for as many.
    pub(super) fn occupied(&self, lanes: [Option<LaneId>; LANES_PER_MESSAGE]) -> usize {
        distinct(lanes)
            .into_iter()
            .flatten()
            .filter(|lane| self.last.contains_key(lane))
            .count()
    }

    /// Puts a message at the end of its lanes. It may run when as many messages have left as lanes
    /// were [occupied](Self::occupied).
    pub(super) fn join(
        &mut self,
        content: T,
        lanes: [Option<LaneId>; LANES_PER_MESSAGE],
    ) -> PlaceId {
        let lanes = distinct(lanes);
        let links = lanes.map(|lane| lane.map(|lane| LaneLink { lane, next: None }));
        let place = LanePlace {
            content,
            lanes: links,
        };
        let id = if let Some(free) = self.free.pop() {
            PlaceId(free)
        } else {
            PlaceId(self.places.len())
        };
        match self.places.get_mut(id.0) {
            Some(slot) => *slot = Some(place),
            None => self.places.push(Some(place)),
        }
        for lane in lanes.into_iter().flatten() {
            if let Some(before) = self.last.insert(lane, id) {
                self.link(before, lane, id);
            }
        }
        id
    }

    fn link(&mut self, from: PlaceId, lane: LaneId, to: PlaceId) {
        let Some(Some(place)) = self.places.get_mut(from.0) else {
            return;
        };
        for link in place
            .lanes
            .iter_mut()
            .flatten()
            .filter(|link| link.lane == lane)
        {
            debug_assert!(
                link.next.is_none(),
                "only the last in a lane gets a follower"
            );
            link.next = Some(to);
        }
    }

    pub(super) fn get(&self, id: PlaceId) -> Option<&T> {
        Some(&self.places.get(id.0)?.as_ref()?.content)
    }

    pub(super) fn get_mut(&mut self, id: PlaceId) -> Option<&mut T> {
        Some(&mut self.places.get_mut(id.0)?.as_mut()?.content)
    }

    /// Every message, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (PlaceId, &T)> {
        let places = self.places.iter().enumerate();
        places.filter_map(|(n, place)| Some((PlaceId(n), &place.as_ref()?.content)))
    }

    /// Removes a message that is first in each of its lanes. Returns the next message of each lane:
    /// for each of them one message less is ahead.
    pub(super) fn leave(&mut self, id: PlaceId) -> [Option<PlaceId>; LANES_PER_MESSAGE] {
        let Some(place) = self.places.get_mut(id.0).and_then(Option::take) else {
            return [None; LANES_PER_MESSAGE];
        };
        self.free.push(id.0);
        place.lanes.map(|link| {
            let link = link?;
            if link.next.is_none() {
                self.last.remove(&link.lane);
            }
            link.next
        })
    }
}

/// Returns the lanes without a repetition: a message that is in one lane twice is in it once.
fn distinct(lanes: [Option<LaneId>; LANES_PER_MESSAGE]) -> [Option<LaneId>; LANES_PER_MESSAGE] {
    if lanes[0] == lanes[1] {
        [lanes[0], None]
    } else {
        lanes
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

    /// Messages that each know how many are ahead of them.
    struct Waiting(Lanes<usize>);

    impl Waiting {
        /// Joins the lanes, and returns whether the message may run at once.
        fn join(&mut self, lanes: [Option<LaneId>; 2]) -> (PlaceId, bool) {
            let ahead = self.0.occupied(lanes);
            (self.0.join(ahead, lanes), ahead == 0)
        }

        /// Leaves the lanes, and returns the messages that may run now.
        fn leave(&mut self, id: PlaceId) -> Vec<PlaceId> {
            assert_eq!(
                self.0.get(id),
                Some(&0),
                "only a message that is first leaves"
            );
            let mut ready = Vec::new();
            for next in self.0.leave(id).into_iter().flatten() {
                let ahead = self.0.get_mut(next).unwrap();
                *ahead -= 1;
                if *ahead == 0 {
                    ready.push(next);
                }
            }
            ready
        }
    }

    #[test]
    fn a_message_waits_for_everyone_before_it_in_either_lane() {
        let mut lanes = Waiting(Lanes::new());
        let (a, a_runs) = lanes.join([Some(1), Some(10)]);
        let (b, b_runs) = lanes.join([Some(2), Some(20)]);
        let (c, c_runs) = lanes.join([Some(1), Some(20)]);
        assert!(a_runs && b_runs && !c_runs);
        assert_eq!(lanes.leave(a), []);
        assert_eq!(lanes.leave(b), [c]);
        assert_eq!(lanes.leave(c), []);
        assert_eq!(lanes.0.iter().count(), 0);
        assert_eq!(lanes.0.occupied([Some(1), Some(20)]), 0);
    }

    #[test]
    fn two_equal_lanes_are_one() {
        let mut lanes = Waiting(Lanes::new());
        let (a, _) = lanes.join([Some(7), Some(7)]);
        let (b, runs) = lanes.join([Some(7), Some(7)]);
        assert!(!runs);
        assert_eq!(lanes.leave(a), [b]);
    }

    fn share_a_lane(a: &[Option<LaneId>; 2], b: &[Option<LaneId>; 2]) -> bool {
        a.iter().flatten().any(|lane| b.contains(&Some(*lane)))
    }

    /// Against the plainest model there is: a list, in which a message may run when no earlier one
    /// shares a lane.
    // invariant: messages-wait-for-each-other
    #[test]
    fn it_agrees_with_a_plain_list() {
        let seed = fastrand::u64(..);
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut lanes = Waiting(Lanes::new());
        let mut list: Vec<(PlaceId, [Option<LaneId>; 2])> = Vec::new();
        let mut ready: Vec<PlaceId> = Vec::new();
        for step in 0..20_000 {
            if list.len() < 30 && rng.bool() {
                let joined = [
                    rng.bool().then(|| rng.u64(..5)),
                    rng.bool().then(|| rng.u64(10..15)),
                ];
                let (id, runs) = lanes.join(joined);
                list.push((id, joined));
                if runs {
                    ready.push(id);
                }
            } else if !ready.is_empty() {
                let id = ready.swap_remove(rng.usize(..ready.len()));
                ready.extend(lanes.leave(id));
                list.retain(|(other, _)| *other != id);
            }
            let free = list.iter().enumerate().filter(|(n, (_, joined))| {
                !list[..*n]
                    .iter()
                    .any(|(_, earlier)| share_a_lane(earlier, joined))
            });
            let mut expected: Vec<PlaceId> = free.map(|(_, (id, _))| *id).collect();
            expected.sort_unstable();
            ready.sort_unstable();
            assert_eq!(ready, expected, "seed {seed}, step {step}");
        }
    }
}
