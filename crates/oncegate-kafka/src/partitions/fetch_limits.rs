//! Decides when a partition is paused because of what has been received from it, and when it is
//! resumed.

// invariant (all tests): unbounded-queue

use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

/// The number of a retry topic's messages, per partition, that wait in memory until they are due.
const WAITING_MAX: usize = 64;

/// The limit on the unfinished messages of all partitions together, as a multiple of the limit for
/// one.
const FULL_PARTITIONS_MAX: usize = 10;

/// The counts that the members of a source and of its retry topics share: one limit applies to all
/// of them.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    /// The number of received messages, counted from each partition's first unfinished one.
    span: AtomicUsize,
    partitions: AtomicUsize,
}

impl Totals {
    /// Counts that the span of a partition has changed.
    pub(crate) fn span_changed(&self, before: usize, after: usize) {
        match after.checked_sub(before) {
            Some(more) => self.span.fetch_add(more, Relaxed),
            None => self.span.fetch_sub(before - after, Relaxed),
        };
    }

    pub(crate) fn partition_assigned(&self) {
        self.partitions.fetch_add(1, Relaxed);
    }

    pub(crate) fn partition_ended(&self) {
        self.partitions.fetch_sub(1, Relaxed);
    }

    /// Returns the backlog of a partition with this span, in which so many messages are not due.
    pub(crate) fn backlog(&self, span: usize, waiting: usize) -> Backlog {
        Backlog {
            span,
            total: self.span.load(Relaxed),
            partitions: self.partitions.load(Relaxed),
            waiting,
        }
    }
}

/// The limits on messages that have been received and are not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FetchLimits {
    /// Of one partition, from its first unfinished message on.
    span: usize,
    /// Of all partitions together, those of the retry topics included.
    total: usize,
}

/// The unfinished messages of a partition, and of all partitions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Backlog {
    /// The number of messages received from the partition, counted from the first unfinished one.
    pub(crate) span: usize,
    /// The same for all partitions together.
    pub(crate) total: usize,
    /// The number of partitions.
    pub(crate) partitions: usize,
    /// The number of the partition's messages that are not due.
    pub(crate) waiting: usize,
}

/// The limit that a partition has reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Excess {
    Span,
    NotDue,
}

impl FetchLimits {
    /// Limits a partition to `span` unfinished messages, and all partitions together to ten times
    /// as many.
    pub(crate) fn new(span: usize) -> Self {
        let span = span.max(1);
        Self {
            span,
            total: span.saturating_mul(FULL_PARTITIONS_MAX),
        }
    }

    /// Returns the limit that the partition has reached, so that it must be paused.
    ///
    /// While all partitions together are over their limit, those with more than an equal share of
    /// it are paused. So one partition whose messages do not finish does not stop the others.
    pub(crate) fn excess(self, backlog: Backlog) -> Option<Excess> {
        let over_share =
            backlog.total > self.total && backlog.span > self.share(backlog.partitions);
        if backlog.span > self.span || over_share {
            Some(Excess::Span)
        } else {
            (backlog.waiting >= WAITING_MAX).then_some(Excess::NotDue)
        }
    }

    /// Returns whether a paused partition may be resumed: it has half of what is allowed, so that
    /// it is not paused again at once.
    pub(crate) fn has_room(self, backlog: Backlog) -> bool {
        let total_has_room =
            backlog.total <= self.total / 2 || backlog.span <= self.share(backlog.partitions) / 2;
        backlog.span <= self.span / 2 && total_has_room && backlog.waiting <= WAITING_MAX / 2
    }

    fn share(self, partitions: usize) -> usize {
        self.total / partitions.max(1)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::partitions::assignment::{Assignment, Begin};
    use crate::partitions::assignments::Assignments;
    use crate::partitions::partition::Partition;

    fn partition(number: i32) -> Partition {
        Partition {
            topic: "orders".into(),
            number,
        }
    }

    const LIMITS: FetchLimits = FetchLimits {
        span: 100,
        total: 1_000,
    };

    #[test]
    fn a_partition_is_paused_over_its_limit_and_resumed_at_half() {
        let one = |span| Backlog {
            span,
            total: span,
            partitions: 1,
            waiting: 0,
        };
        assert_eq!(LIMITS.excess(one(100)), None);
        assert_eq!(LIMITS.excess(one(101)), Some(Excess::Span));
        assert!(!LIMITS.has_room(one(51)) && LIMITS.has_room(one(50)));
    }

    #[test]
    fn over_the_total_limit_partitions_above_their_share_are_paused() {
        let of_fifty = |span, total| Backlog {
            span,
            total,
            partitions: 50,
            waiting: 0,
        };
        assert_eq!(LIMITS.excess(of_fifty(90, 1_000)), None);
        assert_eq!(LIMITS.excess(of_fifty(90, 1_001)), Some(Excess::Span));
        assert_eq!(LIMITS.excess(of_fifty(20, 1_001)), None, "its share");
        assert!(!LIMITS.has_room(of_fifty(21, 501)), "not down to half");
        assert!(LIMITS.has_room(of_fifty(10, 501)) && LIMITS.has_room(of_fifty(21, 500)));
    }

    #[test]
    fn a_retry_partition_is_paused_while_many_messages_are_not_due() {
        let of = |waiting| Backlog {
            span: waiting,
            total: waiting,
            partitions: 1,
            waiting,
        };
        assert_eq!(LIMITS.excess(of(WAITING_MAX - 1)), None);
        assert_eq!(LIMITS.excess(of(WAITING_MAX)), Some(Excess::NotDue));
        assert!(!LIMITS.has_room(of(WAITING_MAX / 2 + 1)) && LIMITS.has_room(of(WAITING_MAX / 2)));
    }

    #[test]
    fn members_with_shared_totals_count_together_while_assigned() {
        let totals = Arc::new(Totals::default());
        let [main, retries] = [(); 2].map(|()| Assignments::counted_in(Arc::clone(&totals)));
        main.assign([partition(0), partition(1)], Begin::Begun);
        retries.assign([partition(0)], Begin::Begun);
        let of = |assignments: &Assignments| assignments.get(&partition(0)).expect("ours");
        let first = of(&main);
        let second = of(&retries);
        let receipt = first.receive(7).expect("ours").receipt;
        assert!((0..3).all(|offset| second.receive(offset).is_some()));
        let known = |assignment: &Assignment| {
            let backlog = assignment.backlog(assignment.span());
            (backlog.span, backlog.total, backlog.partitions)
        };
        assert_eq!((known(&first), known(&second)), ((1, 4, 3), (3, 4, 3)));
        assert!(first.complete(receipt) && main.restart(&partition(1)));
        assert_eq!(
            known(&second),
            (3, 3, 3),
            "a partition that begins again is the same one"
        );
        assert_eq!(main.end_all(), 2);
        assert_eq!(known(&second), (3, 3, 1));
        retries.end_all();
        assert_eq!(known(&second), (0, 0, 0));
    }
}
