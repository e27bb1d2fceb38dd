//! Partitions that are assigned, revoked, read anew and reported on.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::*;
use crate::partitions::assignment::PLACEHOLDER;
use crate::partitions::standing::LogEnd;

pub(crate) fn partition(number: i32) -> Partition {
    Partition {
        topic: "orders".into(),
        number,
    }
}

pub(crate) fn assigned(number: i32) -> (Assignments, Arc<Assignment>) {
    let assignments = Assignments::default();
    assignments.assign([partition(number)], Begin::Begun);
    let [assignment] = assignments.all().try_into().expect("one");
    (assignments, assignment)
}

pub(crate) fn positions(assignments: &Assignments) -> BTreeMap<i32, i64> {
    assignments
        .due()
        .iter()
        .map(|due| (due.partition().number, due.position))
        .collect()
}

fn commit(assignments: &Assignments) -> BTreeMap<i32, i64> {
    let due = assignments.due();
    let positions = due
        .iter()
        .map(|due| (due.partition().number, due.position))
        .collect();
    assignments.committed(&due);
    positions
}

/// Tells the end of a partition that the client reads.
fn ends_at(assignments: &Assignments, partition: &str, stable: i64, next: i64, queued: u64) {
    let (topic, number) = partition.split_once('/').expect("topic/number");
    let report = PartitionReport {
        end: Some(LogEnd {
            stable,
            last: stable,
            next,
            queued,
        }),
        has_begun: true,
    };
    assignments.reported(topic, number.parse().expect("a number"), report);
}

// invariant: commit-of-revoked-partition
#[test]
fn nothing_of_a_revoked_partition_is_committed() {
    let (assignments, assignment) = assigned(7);
    let [first, second] = [10, 11].map(|offset| assignment.receive(offset).expect("ours").receipt);
    assert!(assignment.complete(first));
    let late = assignments.due();

    let revoked = assignments.begin_revoke(&[partition(7)]);
    assert_eq!(
        commit(&assignments),
        BTreeMap::from([(7, 11)]),
        "the revoke itself may commit"
    );
    assignments.end(&revoked);

    assert!(!assignment.complete(second), "its epoch is over");
    assert!(
        assignment.receive(12).is_none(),
        "what comes late was not asked for"
    );
    assert!(positions(&assignments).is_empty());

    assignments.assign([partition(7)], Begin::Begun);
    assignments.committed(&late);
    let again = assignments.all().remove(0);
    let receipt = again.receive(10).expect("ours").receipt;
    assert!(!assignment.complete(first) && again.complete(receipt));
    assert_eq!(
        commit(&assignments),
        BTreeMap::from([(7, 11)]),
        "the old epoch's commit does not count"
    );
    assert!(
        commit(&assignments).is_empty(),
        "what has not moved is not committed again"
    );
}

#[test]
fn a_revoke_waits_for_what_has_started_and_for_nothing_else() {
    // The waiting thread cannot report that it sleeps. So the race between its sleep and the last
    // stop runs often enough to see both outcomes.
    for round in 0..500_u32 {
        let (assignments, assignment) = assigned(0);
        assert!(assignment.start() && assignment.start());
        let revoked = assignments.begin_revoke(&[partition(0)]);
        assert!(!assignment.start(), "nothing starts any more");
        assert_eq!(
            assignments.wait_drained(&revoked, Instant::now()),
            2,
            "the deadline holds"
        );

        let begun = AtomicU32::new(0);
        let far = Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                begun.store(1, Ordering::SeqCst);
                assignments.wait_drained(&revoked, far)
            });
            while begun.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            (0..round * 20).for_each(|_| std::hint::spin_loop());
            assignment.stop();
            assignment.stop();
            assert_eq!(waiting.join().expect("no panic"), 0);
        });
        assert!(Instant::now() < far, "it was woken");
    }
}

// invariant: attempt-after-revoke
#[test]
fn a_start_and_a_revoke_at_once_never_miss_each_other() {
    for _ in 0..2_000 {
        let (assignments, assignment) = assigned(0);
        let running = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while assignment.start() {
                    running.store(1, Ordering::SeqCst);
                    running.store(0, Ordering::SeqCst);
                    assignment.stop();
                }
            });
            let revoked = assignments.begin_revoke(&[partition(0)]);
            let far = Instant::now() + Duration::from_secs(60);
            assert_eq!(assignments.wait_drained(&revoked, far), 0);
            assert_eq!(
                running.load(Ordering::SeqCst),
                0,
                "an attempt runs behind the drain"
            );
        });
    }
}

// invariant: recreated-topic
#[test]
fn a_partition_read_anew_tells_the_broker_its_beginning() {
    let (assignments, former) = assigned(3);
    let receipt = former.receive(100).expect("ours").receipt;
    assert!(former.complete(receipt) && former.start());
    assert_eq!(positions(&assignments), BTreeMap::from([(3, 101)]));
    let late = assignments.due();

    assert!(assignments.restart(&partition(3)));
    assert!(former.is_revoked() && former.receive(101).is_none() && !former.complete(receipt));
    assignments.committed(&late);
    assert_eq!(
        positions(&assignments),
        BTreeMap::from([(3, 0)]),
        "the old position must not stay"
    );

    let [anew] = assignments.all().try_into().expect("one");
    let [first, second] = [0, 1].map(|offset| anew.receive(offset).expect("ours").receipt);
    assert!(anew.complete(second));
    assert_eq!(commit(&assignments), BTreeMap::from([(3, 0)]));
    assert!(commit(&assignments).is_empty(), "once is enough");
    assert!(anew.complete(first));
    assert_eq!(commit(&assignments), BTreeMap::from([(3, 2)]));

    assert!(!assignments.restart(&partition(4)), "it is not ours");
}

// invariant: commit-by-removed-member
#[test]
fn a_member_that_is_none_any_more_commits_nothing() {
    let (assignments, assignment) = assigned(1);
    let receipt = assignment.receive(5).expect("ours").receipt;
    assert!(assignment.complete(receipt));
    assert_eq!(assignments.end_all(), 1);
    assert!(assignments.is_empty() && assignments.due().is_empty() && !assignment.start());
}

#[test]
fn what_stands_where_is_told_without_the_broker() {
    let (assignments, assignment) = assigned(2);
    let standing = || assignments.standings().pop().expect("one");
    let fresh = standing();
    assert_eq!(
        (
            fresh.received,
            fresh.watermark,
            fresh.committed,
            fresh.lag(),
            fresh.undelivered()
        ),
        Default::default()
    );

    let [first, second] = [10, 11].map(|offset| assignment.receive(offset).expect("ours").receipt);
    ends_at(&assignments, "orders/2", 20, 15, 3);
    ends_at(&assignments, "others/2", 99, 0, 0);
    let received = standing();
    assert_eq!(
        (received.received, received.watermark),
        (Some(11), Some(10))
    );
    assert_eq!(
        (received.lag(), received.undelivered()),
        (Some(10), Some(8))
    );
    assert!(received.oldest_unfinished.is_some() && received.uncommitted_for.is_none());

    assert!(assignment.complete(first));
    let half = standing();
    assert_eq!(
        (half.watermark, half.committed, half.lag()),
        (Some(11), None, Some(9))
    );
    assert!(half.uncommitted_for.is_some() && half.oldest_unfinished.is_some());

    assert!(assignment.complete(second));
    assert_eq!(commit(&assignments), BTreeMap::from([(2, 12)]));
    // The rest of the log is transaction markers, and the client has moved past them.
    ends_at(&assignments, "orders/2", 20, 20, 0);
    let done = standing();
    assert_eq!((done.committed, done.undelivered()), (Some(12), Some(0)));
    assert!(done.uncommitted_for.is_none() && done.oldest_unfinished.is_none());
}

// invariant: commit-before-arrival
#[test]
fn offsets_without_a_message_are_committed_past_and_are_no_lag() {
    let (assignments, assignment) = assigned(1);
    let standing = || assignments.standings().pop().expect("one");
    ends_at(&assignments, "orders/1", 10, 0, 0);
    assert_eq!(
        standing().lag(),
        Some(10),
        "it is known before anything has come"
    );
    assert!(assignments.may_pass(), "there may be nothing but markers");

    // It is not known yet that the client's position is from after the assignment.
    assignment.passes(5);
    assert!(positions(&assignments).is_empty());
    assignment.has_no_position();
    assignment.passes(5);
    assert_eq!(
        commit(&assignments),
        BTreeMap::from([(1, 5)]),
        "nothing but markers so far"
    );

    let [first, second] = [7, 8].map(|offset| assignment.receive(offset).expect("ours").receipt);
    assignment.passes(10);
    ends_at(&assignments, "orders/1", 10, 10, 0);
    assert!(!assignments.may_pass(), "messages are unfinished");
    assert_eq!(
        (standing().lag(), positions(&assignments)),
        (Some(2), BTreeMap::from([(1, 7)]))
    );
    assert!(assignment.complete(second));
    assert_eq!(
        positions(&assignments),
        BTreeMap::from([(1, 7)]),
        "never past an unfinished one"
    );
    assert!(assignment.complete(first));
    assert_eq!(
        (standing().lag(), commit(&assignments)),
        (Some(0), BTreeMap::from([(1, 10)]))
    );
    assert!(
        assignment.receive(9).expect("ours").rewound,
        "the log went back behind the markers"
    );
}

#[test]
fn the_position_is_asked_when_a_log_may_end_without_messages() {
    let (assignments, assignment) = assigned(1);
    let receipt = assignment.receive(3).expect("ours").receipt;
    let end = |next, queued| ends_at(&assignments, "orders/1", 9, next, queued);
    assert!(assignment.complete(receipt));
    end(4, 0);
    assert!(!assignments.may_pass(), "it stands behind its last message");
    end(9, 5);
    assert!(!assignments.may_pass(), "messages are to come");
    end(9, 0);
    assert!(
        assignments.may_pass() && !assignments.may_pass(),
        "once is enough"
    );
}

// invariant: begin-at-the-end
#[test]
fn nothing_is_received_before_a_partitions_begin_is_committed() {
    let assignments = Assignments::default();
    assignments.assign([partition(0), partition(1)], Begin::Unresolved);
    assert_eq!(assignments.unresolved().len(), 2);
    let [new, known] = [0, 1].map(|number| assignments.get(&partition(number)).expect("ours"));
    known.resolve(40, true);
    new.resolve(90, false);
    assert!(assignments.unresolved().is_empty() && !new.has_begun());
    assert_eq!(
        (known.begins_at(), new.begins_at()),
        (Some(40), None),
        "the broker does not have it"
    );
    known.passes(50);
    assert!(
        new.receive(95).is_none() && known.receive(45).is_none(),
        "the client is somewhere else"
    );
    assert_eq!(commit(&assignments), BTreeMap::from([(0, 90)]));
    assert_eq!(new.begins_at(), Some(90));

    new.begun();
    known.begun();
    new.resolve(7, false);
    assert!(
        new.has_begun() && positions(&assignments).is_empty(),
        "it is decided once"
    );
    let receipt = new.receive(90).expect("ours").receipt;
    assert!(new.complete(receipt));
    assert_eq!(commit(&assignments), BTreeMap::from([(0, 91)]));
}

// invariant: begin-at-the-end
#[test]
fn a_client_that_falls_back_to_the_placeholder_seeks_again() {
    let assignments = Assignments::default();
    assignments.assign([partition(0)], Begin::Unresolved);
    assignments.assign([partition(1)], Begin::Begun);
    let [held, plain] = [0, 1].map(|number| assignments.get(&partition(number)).expect("ours"));
    held.resolve(40, true);
    assert_eq!(
        held.seeks_again_after(PLACEHOLDER),
        None,
        "it will be sought anyway"
    );
    held.begun();
    assert_eq!(held.seeks_again_after(PLACEHOLDER), Some(40));
    assert_eq!(
        held.seeks_again_after(40),
        None,
        "messages from its own position are gone"
    );
    assert_eq!(
        plain.seeks_again_after(PLACEHOLDER),
        None,
        "the client has decided"
    );
    assert_eq!(held.seeks_again_before(45), Some(40));
    assert_eq!(held.seeks_again_before(40), None, "it is there");
    assert_eq!(plain.seeks_again_before(45), None, "the client has decided");
    held.receive(45).expect("ours");
    assert_eq!(held.seeks_again_after(PLACEHOLDER), None, "it is read");
    assert_eq!(held.seeks_again_before(50), None, "it is read");
}

// invariant: stall-unreported
#[test]
fn a_partition_is_unread_from_its_first_report_until_it_is_read() {
    let start = Instant::now();
    let passed = Arc::new(AtomicU64::new(0));
    let clock = Arc::clone(&passed);
    let assignments =
        Assignments::with_clock(move || start + Duration::from_secs(clock.load(Ordering::Relaxed)));
    assignments.assign([partition(0), partition(1)], Begin::Begun);
    let report = |number, has_begun| {
        assignments.reported(
            "orders",
            number,
            PartitionReport {
                end: None,
                has_begun,
            },
        );
    };
    let unread_at = |second| {
        passed.store(second, Ordering::Relaxed);
        (0..2).for_each(|number| report(number, number == 0));
        match assignments.reading() {
            Some(ReadState::Unread { lasts, .. }) => Some(lasts.as_secs()),
            _ => None,
        }
    };
    assert_eq!(assignments.reading(), None, "nothing is known");
    assert_eq!(
        (unread_at(5), unread_at(10), unread_at(65)),
        (Some(0), Some(5), Some(60))
    );
    assert_eq!(assignments.reading(), None, "there is no new report");
    report(1, true);
    assert_eq!(assignments.reading(), Some(ReadState::All));
    assert_eq!(
        (unread_at(70), unread_at(75)),
        (Some(0), Some(5)),
        "it was read meanwhile"
    );

    let revoked = assignments.begin_revoke(&[partition(1)]);
    assert_eq!(unread_at(80), None, "it is about to go");
    assignments.end(&revoked);
    assert_eq!(unread_at(85), None, "it is not ours");
    assignments.assign([partition(1)], Begin::Begun);
    assert_eq!(unread_at(90), Some(0), "another epoch");
}

/// 2^32 milliseconds are 49.7 days. An assignment can live longer, and a stall must be detected
/// then as well.
// invariant: stall-unreported
#[test]
fn ages_go_on_past_two_to_the_32_milliseconds_of_one_assignment() {
    const WRAP_MS: u64 = 1 << 32;
    for assigned_for_ms in [
        WRAP_MS - 45_000,
        WRAP_MS - 1,
        WRAP_MS,
        WRAP_MS + 1,
        3 * WRAP_MS + 7,
    ] {
        let start = Instant::now();
        let passed_ms = Arc::new(AtomicU64::new(0));
        let clock = Arc::clone(&passed_ms);
        let now = move || start + Duration::from_millis(clock.load(Ordering::Relaxed));
        let assignments = Assignments::with_clock(now);
        assignments.assign([partition(0)], Begin::Begun);
        let [assignment] = assignments.all().try_into().expect("one");
        passed_ms.store(assigned_for_ms, Ordering::Relaxed);
        let first = assignment.receive(1).expect("ours").receipt;
        assignment.receive(2).expect("ours");
        assert!(assignment.complete(first));
        passed_ms.fetch_add(90_000, Ordering::Relaxed);
        let standing = assignments.standings().pop().expect("one");
        let age = Duration::from_secs(90);
        assert_eq!(
            standing.delivered_ago, age,
            "delivered, after {assigned_for_ms} ms"
        );
        assert_eq!(
            standing.oldest_unfinished,
            Some(age),
            "unfinished, after {assigned_for_ms} ms"
        );
        assert_eq!(
            standing.uncommitted_for,
            Some(age),
            "uncommitted, after {assigned_for_ms} ms"
        );
    }
}
