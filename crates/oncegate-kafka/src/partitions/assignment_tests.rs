//! Compares the watermark and the epochs with a simple model.

use std::collections::BTreeMap;

use super::*;
use crate::partitions::assignments::Assignments;
use crate::partitions::assignments::tests::{assigned, partition, positions};

// invariant: commit-past-unfinished
#[test]
fn every_order_of_completions_commits_the_first_incomplete_one() {
    const OFFSETS: [i64; 6] = [0, 1, 5, 6, 1_000_000_000_000, 1_000_000_000_001];
    for order in permutations(OFFSETS.len()) {
        let (assignments, assignment) = assigned(0);
        let receipts = OFFSETS.map(|offset| assignment.receive(offset).expect("ours").receipt);
        let mut done = [false; OFFSETS.len()];
        for index in &order {
            assert!(assignment.complete(receipts[*index]));
            done[*index] = true;
            let first = done.iter().position(|done| !done);
            let expected = match first {
                Some(0) => None,
                Some(first) => Some(OFFSETS[first]),
                None => Some(OFFSETS[OFFSETS.len() - 1] + 1),
            };
            assert_eq!(
                positions(&assignments).get(&0).copied(),
                expected,
                "{order:?} at {index}"
            );
            assert_eq!(
                assignment.span(),
                first.map_or(0, |first| OFFSETS.len() - first)
            );
        }
    }
}

fn permutations(length: usize) -> Vec<Vec<usize>> {
    if length == 0 {
        return vec![Vec::new()];
    }
    let insert = |shorter: Vec<usize>| {
        (0..length).map(move |at| {
            let mut longer = shorter.clone();
            longer.insert(at, length - 1);
            longer
        })
    };
    permutations(length - 1)
        .into_iter()
        .flat_map(insert)
        .collect()
}

/// The simple model of one partition in one epoch.
#[derive(Debug, Default)]
struct Epoch {
    received: BTreeMap<i64, bool>,
    committed: Option<i64>,
    /// `true` if it began with a log that went back, so that its start is committed.
    rewound: bool,
}

impl Epoch {
    fn due(&self) -> Option<i64> {
        let first = *self.received.first_key_value()?.0;
        let incomplete = self
            .received
            .iter()
            .find(|(_, done)| !**done)
            .map(|(offset, _)| *offset);
        let position = incomplete.or(self.received.last_key_value().map(|(last, _)| last + 1))?;
        let due = position > first || self.rewound;
        (due && self.committed.is_none_or(|committed| position > committed)).then_some(position)
    }
}

/// An ack handle of the run: the real one, and its place in the model.
struct Given {
    assignment: Arc<Assignment>,
    receipt: Receipt,
    partition: i32,
    epoch: usize,
    offset: i64,
}

#[derive(Default)]
struct Run {
    assignments: Assignments,
    /// The epochs by number, in the order in which they began.
    epochs: Vec<Epoch>,
    current: BTreeMap<i32, usize>,
    given: Vec<Given>,
    /// A commit that is decided and not yet answered, as in the commit thread.
    in_flight: Option<(Vec<Due>, BTreeMap<i32, usize>)>,
}

const PARTITIONS: std::ops::Range<i32> = 0..3;

impl Run {
    fn step(&mut self, random: &mut fastrand::Rng) {
        let number = random.i32(PARTITIONS);
        match random.u8(..100) {
            0..4 => self.assign(number),
            4..7 => self.revoke(number),
            7..50 => self.receive(number, random),
            50..85 => self.complete(random),
            85..93 => self.decide(),
            _ => self.answer(random.bool()),
        }
        self.check();
    }

    fn assign(&mut self, number: i32) {
        self.assignments.assign([partition(number)], Begin::Begun);
        self.epochs.push(Epoch::default());
        self.current.insert(number, self.epochs.len() - 1);
    }

    fn revoke(&mut self, number: i32) {
        let revoked = self.assignments.begin_revoke(&[partition(number)]);
        assert_eq!(
            revoked.len(),
            usize::from(self.current.contains_key(&number))
        );
        assert!(
            revoked
                .iter()
                .all(|assignment| !assignment.start() && assignment.is_revoked())
        );
        // A revoke that drains still commits; check() verifies that here.
        self.check();
        self.assignments.end(&revoked);
        self.current.remove(&number);
    }

    fn receive(&mut self, number: i32, random: &mut fastrand::Rng) {
        let all = self.assignments.all();
        let Some(assignment) = all.iter().find(|one| one.partition.number == number) else {
            assert!(!self.current.contains_key(&number));
            return;
        };
        let mut epoch = self.current[&number];
        let last = self.epochs[epoch]
            .received
            .last_key_value()
            .map(|(last, _)| *last);
        let rewinds = last.is_some() && random.u8(..40) == 0;
        let offset = match last {
            Some(last) if rewinds => random.i64(0..=last),
            Some(last) => last + if random.bool() { 1 } else { random.i64(1..50) },
            None => random.i64(0..100),
        };
        if rewinds {
            self.epochs.push(Epoch {
                rewound: true,
                ..Epoch::default()
            });
            epoch = self.epochs.len() - 1;
            self.current.insert(number, epoch);
        }
        let received = assignment.receive(offset).expect("ours");
        assert_eq!(received.rewound, rewinds);
        self.epochs[epoch].received.insert(offset, false);
        let incomplete = self.epochs[epoch]
            .received
            .iter()
            .find(|(_, done)| !**done)
            .expect("this one");
        assert_eq!(
            received.span,
            self.epochs[epoch].received.range(incomplete.0..).count()
        );
        let receipt = received.receipt;
        self.given.push(Given {
            assignment: Arc::clone(assignment),
            receipt,
            partition: number,
            epoch,
            offset,
        });
    }

    /// Completes any message ever received, of any epoch, possibly a second time.
    fn complete(&mut self, random: &mut fastrand::Rng) {
        if self.given.is_empty() {
            return;
        }
        let recent = self.given.len().saturating_sub(12);
        let index = if random.u8(..10) == 0 {
            random.usize(..self.given.len())
        } else {
            random.usize(recent..self.given.len())
        };
        let given = &self.given[index];
        let ours = self.current.get(&given.partition) == Some(&given.epoch);
        let done = self.epochs[given.epoch]
            .received
            .get_mut(&given.offset)
            .expect("it was received");
        let news = ours && !*done;
        assert_eq!(given.assignment.complete(given.receipt), news);
        if ours {
            *done = true;
        }
    }

    fn decide(&mut self) {
        if self.in_flight.is_none() {
            self.in_flight = Some((self.assignments.due(), self.current.clone()));
        }
    }

    /// Answers a commit, possibly long after other events.
    fn answer(&mut self, well: bool) {
        let Some((due, epochs)) = self.in_flight.take() else {
            return;
        };
        if !well {
            return;
        }
        self.assignments.committed(&due);
        for due in due {
            let epoch = &mut self.epochs[epochs[&due.partition().number]];
            assert!(epoch.committed < Some(due.position), "a commit went back");
            epoch.committed = Some(due.position);
        }
    }

    fn check(&self) {
        let due = |(number, epoch): (&i32, &usize)| Some((*number, self.epochs[*epoch].due()?));
        let expected: BTreeMap<_, _> = self.current.iter().filter_map(due).collect();
        assert_eq!(positions(&self.assignments), expected);
    }
}

// invariant: commit-past-unfinished
#[test]
fn random_runs_commit_what_the_model_commits() {
    const RUNS: u64 = 3_000;
    const STEPS: usize = 200;
    let base = fastrand::u64(..);
    let mut committed = 0;
    for seed in (0..RUNS).map(|run| base.wrapping_add(run)) {
        let mut random = fastrand::Rng::with_seed(seed);
        let run = std::panic::AssertUnwindSafe(|| {
            let mut run = Run::default();
            (0..STEPS).for_each(|_| run.step(&mut random));
            run.epochs
                .iter()
                .filter(|epoch| epoch.committed.is_some())
                .count()
        });
        match std::panic::catch_unwind(run) {
            Ok(count) => committed += count,
            Err(panic) => {
                eprintln!("seed {seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(
        committed > 1_000,
        "the runs hardly commit anything: {committed}"
    );
}
