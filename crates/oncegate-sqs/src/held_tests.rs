use super::*;

const VISIBILITY: Duration = Duration::from_secs(60);

struct World {
    held: Held,
    start: Instant,
}

impl World {
    fn new() -> Self {
        Self {
            held: Held::new(VISIBILITY),
            start: Instant::now(),
        }
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    fn admit(&mut self, seconds: u64, id: &str) -> Admitted {
        self.admit_grouped(seconds, id, None).expect("not held yet")
    }

    fn admit_grouped(&mut self, seconds: u64, id: &str, group: Option<Group>) -> Option<Admitted> {
        let handle = format!("{id}@{seconds}").into();
        self.held.admit(self.at(seconds), &id.into(), handle, group)
    }

    fn due(&mut self, seconds: u64) -> DueWork {
        self.held.due(self.at(seconds))
    }

    fn may_start(&mut self, seconds: u64, id: &str, admitted: &Admitted) -> bool {
        self.held
            .may_start(self.at(seconds), &id.into(), admitted.delivery)
    }

    fn give_back(&mut self, seconds: u64, id: &str, admitted: &Admitted, delay_seconds: u64) {
        let delay = Duration::from_secs(delay_seconds);
        self.held
            .give_back(self.at(seconds), &id.into(), admitted.delivery, delay);
    }

    fn changed(&mut self, seconds: u64, change: &Change, answer: EntryResult) -> bool {
        let now = self.at(seconds);
        self.held.note_change(now, now, change, answer, 0.0)
    }

    fn returns(&mut self, seconds: u64) -> Vec<Change> {
        self.held
            .take_returns(self.at(seconds), true)
            .into_iter()
            .flatten()
            .collect()
    }

    fn deletes(&mut self, seconds: u64) -> Vec<Target> {
        self.held
            .take_deletes(self.at(seconds), true)
            .into_iter()
            .flatten()
            .collect()
    }
}

#[test]
fn a_visibility_is_extended_when_half_of_it_is_over_and_goes_on() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    assert!(world.due(29).extends.is_empty());
    for round in 1..=10 {
        let due = world.due(30 * round);
        let [batch] = &due.extends[..] else {
            panic!("one batch at round {round}")
        };
        assert_eq!(
            (batch.len(), batch[0].visibility, batch[0].keep),
            (1, VISIBILITY, true)
        );
        assert!(
            world.due(30 * round + 1).extends.is_empty(),
            "one at a time"
        );
        assert!(!world.changed(30 * round, &batch[0], EntryResult::Done));
    }
    assert!(!admitted.lost.is_cancelled());
    assert!(world.may_start(300, "a", &admitted));
}

#[test]
fn extensions_travel_together_ten_to_a_call() {
    let mut world = World::new();
    let admitted: Vec<Admitted> = (0..12).map(|n| world.admit(0, &format!("a{n}"))).collect();
    let _later: Vec<Admitted> = (0..30).map(|n| world.admit(8, &format!("b{n}"))).collect();
    let sizes: Vec<usize> = world.due(30).extends.iter().map(Vec::len).collect();
    assert_eq!(
        sizes,
        [10, 10],
        "the second call takes along who would need one soon"
    );
    drop(admitted);
}

// invariant: delete-after-loss
#[test]
fn an_unextended_message_is_lost_in_time_and_only_once() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    let due = world.due(30);
    world.changed(31, &due.extends[0][0], EntryResult::Failed);
    assert!(world.due(36).extends.is_empty());
    assert_eq!(
        world.due(37).extends.len(),
        1,
        "repeated after a tenth of the visibility"
    );
    assert_eq!(world.due(47).lost, 0);
    assert_eq!(world.due(48).lost, 1, "while a fifth is left");
    assert!(admitted.lost.is_cancelled());
    assert_eq!(world.due(49).lost, 0);
    assert!(!world.may_start(49, "a", &admitted));
    world.held.ack(world.at(50), &"a".into(), admitted.delivery);
    assert!(
        world.deletes(50).is_empty(),
        "nothing is deleted that was lost"
    );
}

#[test]
fn a_handle_that_is_no_longer_good_loses_the_message_at_once() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    let due = world.due(30);
    assert!(world.changed(30, &due.extends[0][0], EntryResult::Gone));
    assert!(admitted.lost.is_cancelled());
}

#[test]
fn twelve_hours_after_its_receive_nothing_is_extended() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    let mut last_extended = 0;
    for seconds in 0..=12 * 3_600 {
        for change in world.due(seconds).extends.into_iter().flatten() {
            world.changed(seconds, &change, EntryResult::Done);
            last_extended = seconds;
        }
    }
    assert!(last_extended + VISIBILITY.as_secs() / 2 < 12 * 3_600);
    assert!(last_extended > 12 * 3_600 - 180);
    assert!(
        admitted.lost.is_cancelled(),
        "and it counts as lost before the message becomes visible"
    );
}

#[test]
fn the_last_extension_takes_what_is_left_of_twelve_hours() {
    const HOUR: u64 = 3_600;
    for visibility in [10, 60, 1_000, 3 * HOUR, 5 * HOUR, 6 * HOUR] {
        let mut world = World {
            held: Held::new(Duration::from_secs(visibility)),
            start: Instant::now(),
        };
        let admitted = world.admit(0, "a");
        let mut hidden_until = visibility;
        let mut lost_at = None;
        let mut calls = 0;
        for seconds in 0..12 * HOUR {
            for change in world.due(seconds).extends.into_iter().flatten() {
                world.changed(seconds, &change, EntryResult::Done);
                hidden_until = seconds + change.visibility.as_secs();
                calls += 1;
            }
            if admitted.lost.is_cancelled() {
                lost_at.get_or_insert(seconds);
            }
        }
        assert_eq!(
            hidden_until,
            HOLD_MOST.as_secs(),
            "{visibility} s: hidden for as long as the queue allows"
        );
        let lost_at = lost_at.expect("it is lost");
        assert_eq!(
            lost_at,
            HOLD_MOST.as_secs() - visibility / 5,
            "{visibility} s: lost when a fifth is left"
        );
        assert!(
            calls <= 2 * 12 * HOUR / visibility + 2,
            "{visibility} s: {calls} calls"
        );
    }
}

// invariant: delete-that-failed
#[test]
fn deletes_use_the_newest_handle_and_repeat_until_they_succeed() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    world.held.ack(world.at(1), &"a".into(), admitted.delivery);
    assert_eq!((world.held.in_hand(), world.held.undeleted()), (0, 1));
    let first = world.deletes(1);
    assert_eq!(&*first[0].handle, "a@0");
    assert!(
        world.admit_grouped(2, "a", None).is_none(),
        "received again while its delete is under way"
    );
    assert!(
        !world
            .held
            .note_delete(world.at(2), &first[0], EntryResult::Done, 0.0)
    );
    let second = world.deletes(2);
    assert_eq!(&*second[0].handle, "a@2");
    assert!(
        !world
            .held
            .note_delete(world.at(3), &second[0], EntryResult::Failed, 0.0)
    );
    assert!(world.deletes(3).is_empty(), "not before its back-off");
    assert_eq!(world.deletes(4).len(), 1);
    assert!(
        !world
            .held
            .note_delete(world.at(4), &second[0], EntryResult::Done, 0.0)
    );
    assert!(world.held.is_empty() && world.held.undeleted() == 0);
}

#[test]
fn a_delete_with_an_outdated_handle_is_not_taken_for_success() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    world.held.ack(world.at(1), &"a".into(), admitted.delivery);
    let target = world.deletes(1).remove(0);
    assert!(
        world
            .held
            .note_delete(world.at(2), &target, EntryResult::Gone, 0.0)
    );
    assert!(world.held.is_empty());
}

// invariant: delete-that-failed
#[test]
fn a_delete_that_never_succeeds_is_counted_at_visibility_end() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    world.held.ack(world.at(1), &"a".into(), admitted.delivery);
    assert!(
        world.due(40).extends.is_empty(),
        "finished messages are not extended"
    );
    assert_eq!(world.due(59).undeleted, 0);
    assert_eq!(world.due(60).undeleted, 1);
    assert!(world.held.is_empty());
}

#[test]
fn a_held_message_received_again_is_not_handed_out_twice() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    assert!(world.admit_grouped(20, "a", None).is_none());
    assert!(
        world.due(40).extends.is_empty(),
        "its visibility timeout began again"
    );
    world.held.ack(world.at(41), &"a".into(), admitted.delivery);
    assert_eq!(&*world.deletes(41)[0].handle, "a@20");
}

#[test]
fn a_message_that_returns_during_its_handler_is_held_again() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    assert_eq!(world.due(48).lost, 1);
    assert!(world.due(70).extends.is_empty());
    assert!(
        world.admit_grouped(80, "a", None).is_none(),
        "a second delivery would only wait for the first"
    );
    let due = world.due(110);
    assert_eq!(
        due.extends.len(),
        1,
        "or each visibility timeout would use up a receive"
    );
    assert!(
        !world.may_start(111, "a", &admitted),
        "nothing begins that was cancelled"
    );
    world
        .held
        .ack(world.at(112), &"a".into(), admitted.delivery);
    assert_eq!(
        &*world.deletes(112)[0].handle,
        "a@80",
        "it is finished, and the queue hides it for us"
    );
    assert_eq!(due.lost, 0);
}

// invariant: retry-visibility
#[test]
fn a_retry_is_set_after_the_heartbeat_that_is_under_way() {
    let mut world = World::new();
    let admitted = world.admit(0, "a");
    let heartbeat = world.due(30).extends.remove(0).remove(0);
    world.give_back(30, "a", &admitted, 10);
    assert!(world.returns(31).is_empty(), "it would be overwritten");
    assert!(!world.changed(32, &heartbeat, EntryResult::Done));
    let [change] = &world.returns(32)[..] else {
        panic!("one")
    };
    assert_eq!(
        (change.visibility, change.keep),
        (Duration::from_secs(8), false),
        "what is left of the delay"
    );
    assert!(!world.changed(33, change, EntryResult::Failed));
    let [change] = &world.returns(34)[..] else {
        panic!("again")
    };
    world.changed(34, change, EntryResult::Done);
    assert!(world.held.is_empty() && world.due(50).extends.is_empty());
}

#[test]
fn a_delivery_that_is_over_changes_nothing_of_the_next_one() {
    let mut world = World::new();
    let first = world.admit(0, "a");
    world.give_back(1, "a", &first, 0);
    let change = world.returns(1).remove(0);
    let second = world.admit(2, "a");
    assert!(!world.changed(2, &change, EntryResult::Done));
    world.give_back(3, "a", &first, 0);
    world.held.ack(world.at(3), &"a".into(), first.delivery);
    assert!(world.returns(3).is_empty() && world.deletes(3).is_empty());
    assert!(world.may_start(3, "a", &second) && !world.may_start(3, "a", &first));
}

// invariant: fifo-order
#[test]
fn nothing_later_of_a_group_starts_after_a_return_or_a_loss() {
    for lost in [true, false] {
        let mut world = World::new();
        let group = Group::default();
        let first = world
            .admit_grouped(0, "a", Some(Arc::clone(&group)))
            .unwrap();
        let second = world.admit_grouped(0, "b", Some(group)).unwrap();
        let other = world.admit_grouped(0, "c", Some(Group::default())).unwrap();
        assert!(world.may_start(1, "a", &first) && world.may_start(1, "b", &second));
        if lost {
            for change in world.due(30).extends.into_iter().flatten() {
                let answer = if &*change.target.id == "a" {
                    EntryResult::Gone
                } else {
                    EntryResult::Done
                };
                world.changed(30, &change, answer);
            }
        } else {
            world.give_back(30, "a", &first, 5);
        }
        assert!(!world.may_start(31, "b", &second));
        assert!(world.may_start(31, "c", &other), "other groups continue");
        world.give_back(31, "b", &second, 0);
        assert!(
            world
                .returns(31)
                .iter()
                .any(|change| &*change.target.id == "b")
        );
    }
}

#[test]
fn trickling_deletes_are_batched_and_leave_time_for_repeats() {
    let mut world = World::new();
    let mut batches = Vec::new();
    let mut now = 0;
    for n in 0..10 {
        now = n;
        let id = format!("a{n}");
        let admitted = world.admit(now, &id);
        world
            .held
            .ack(world.at(now), &id.as_str().into(), admitted.delivery);
        batches.extend(world.held.take_deletes(world.at(now), false));
    }
    now += 5;
    batches.extend(world.held.take_deletes(world.at(now), false));
    let sizes: Vec<usize> = batches.iter().map(Vec::len).collect();
    assert_eq!(sizes, [6, 4], "a delete waits five seconds for others");
    assert_eq!(world.held.next_wake(), None);

    // Two seconds before its margin, a message waits for two seconds only.
    let late = world.admit(100, "late");
    world.held.ack(world.at(146), &"late".into(), late.delivery);
    assert_eq!(world.held.next_wake(), Some(world.at(148)));

    // The later messages of a group wait for its delete.
    let mut world = World::new();
    let first = world.admit_grouped(0, "g", Some(Group::default())).unwrap();
    world.held.ack(world.at(1), &"g".into(), first.delivery);
    assert_eq!(world.held.take_deletes(world.at(1), false).len(), 1);
}
