//! The judgement of what one order has left behind.

use oncegate_testing::promise::{OffsetCommit, ProducedMessage};

use super::*;

/// What one order has left behind: workers 7 and 8 are of the members 70 and 80. Times are in
/// milliseconds.
#[derive(Default)]
struct Left {
    entries: Vec<Entry>,
    ledger: Vec<Effect>,
    commits: Vec<OffsetCommit>,
    is_dead_lettered: bool,
}

impl Left {
    fn at(mut self, at_ms: u64, pid: u32, what: Occurrence) -> Self {
        self.entries.push(Entry {
            at_us: at_ms * 1_000,
            pid,
            what,
        });
        self
    }

    fn begun(self, at_ms: u64, pid: u32, attempt: u32) -> Self {
        let key = "k".to_owned();
        let origin = "t/0@0".to_owned();
        let content = "1".to_owned();
        self.at(
            at_ms,
            pid,
            Occurrence::Begun {
                key,
                origin,
                attempt,
                fencing_token: None,
                content,
            },
        )
    }

    fn ended(self, at_ms: u64, pid: u32, outcome: &str) -> Self {
        let key = "k".to_owned();
        let origin = "t/0@0".to_owned();
        let outcome = outcome.to_owned();
        self.at(
            at_ms,
            pid,
            Occurrence::Ended {
                key,
                origin,
                attempt: 1,
                outcome,
            },
        )
    }

    fn fault(self, fault: Fault, pid: u32, (from_ms, to_ms): (u64, u64)) -> Self {
        let fault = || fault.name().to_owned();
        self.at(from_ms, pid, Occurrence::FaultBegins { fault: fault() })
            .at(to_ms, 0, Occurrence::FaultEnds { fault: fault() })
    }

    fn paid(mut self, at_ms: u64, pid: u32) -> Self {
        self.ledger.push(Effect {
            effect: "1/1".to_owned(),
            pid,
            at_us: at_ms * 1_000,
        });
        self
    }

    fn committed(mut self, at_ms: i64, offset: i64) -> Self {
        self.commits.push(OffsetCommit {
            partition: 0,
            offset,
            at_ms,
        });
        self
    }

    /// A run by worker 7 from 1,000 to 1,500 ms with its effect.
    fn first_run() -> Self {
        Self::default()
            .begun(1_000, 7, 1)
            .paid(1_400, 7)
            .ended(1_500, 7, SUCCEEDED)
    }

    /// Another run by worker 8, long after.
    fn and_again(self) -> Self {
        self.begun(20_000, 8, 2)
            .paid(20_400, 8)
            .ended(20_500, 8, SUCCEEDED)
    }

    fn judged(self) -> PromiseReport {
        let effect = EffectName::new("1", "1");
        let one = ProducedMessage {
            origin: "t/0@0".into(),
            effect: effect.clone(),
            key: Some("k".into()),
        };
        let dead_lettered = self.is_dead_lettered.then(|| one.origin.clone());
        let evidence = Evidence {
            entries: self.entries,
            produced: vec![one],
            effects: BTreeMap::from([(effect, self.ledger.len() as u64)]),
            dead_letters: dead_lettered.into_iter().collect(),
            topic: "t".to_owned(),
            commits: self.commits,
            ..Evidence::default()
        };
        let members = BTreeMap::from([(7, 70), (8, 80)]);
        judge_programs(&Seen {
            evidence: &evidence,
            ledger: &self.ledger,
            members: &members,
        })
    }
}

fn check(left: Left, broken: &[&str]) {
    let report = left.judged();
    let found: Vec<&str> = report.broken.iter().map(|one| one.invariant).collect();
    assert_eq!(found, broken, "{report:?}");
}

// invariant: one-judge-of-effects
#[test]
fn only_a_fault_of_the_first_run_explains_a_second_effect() {
    check(Left::first_run().committed(2_000, 1), &[]);
    assert_eq!(Left::first_run().and_again().judged().second_effects, 1);
    check(Left::first_run().and_again(), &["S8"]);
    let hung = |outcome| {
        Left::default()
            .begun(1_000, 7, 1)
            .paid(1_400, 7)
            .ended(1_500, 7, outcome)
    };
    check(hung(HUNG).and_again(), &[]);
    check(hung(LATE).and_again(), &[]);
    let during = (1_200, 1_600);
    for (fault, pid, explains) in [
        (Fault::Kill, 70, true),
        (Fault::Kill, 80, false),
        (Fault::Freeze, 70, true),
        (Fault::Freeze, 80, false),
        (Fault::StoreKill, 0, true),
        (Fault::Silence, 0, true),
        (Fault::BrokerKill, 0, false),
        (Fault::GroupSignal, 70, false),
        (Fault::Rebalance, 0, false),
    ] {
        let broken: &[&str] = if explains { &[] } else { &["S8"] };
        check(
            Left::first_run().fault(fault, pid, during).and_again(),
            broken,
        );
    }
    let frozen = Left::default()
        .begun(1_000, 7, 1)
        .fault(Fault::Freeze, 70, (1_100, 5_000));
    let taken_over = frozen
        .begun(3_000, 8, 2)
        .paid(3_100, 8)
        .ended(3_200, 8, SUCCEEDED);
    check(taken_over.paid(3_400, 7).ended(3_500, 7, SUCCEEDED), &[]);
    check(
        Left::first_run()
            .fault(Fault::StoreKill, 0, (9_000, 9_500))
            .and_again(),
        &["S8"],
    );
}

#[test]
fn a_worker_that_is_cut_off_needs_a_fault_that_ends_it() {
    let cut_off = |fault, pid| {
        let left = Left::default()
            .begun(1_000, 7, 1)
            .fault(fault, pid, (1_200, 1_600));
        left.begun(20_000, 8, 2)
            .paid(20_400, 8)
            .ended(20_500, 8, SUCCEEDED)
    };
    check(cut_off(Fault::Kill, 70), &[]);
    check(cut_off(Fault::Kill, 80), &["S8"]);
    check(cut_off(Fault::GroupSignal, 70), &["S8"]);
    check(cut_off(Fault::Hang, 8), &["S8"]);
}

#[test]
fn what_no_worker_was_given_is_no_attempt_and_no_dead_letter() {
    let second = || {
        Left::default()
            .begun(1_000, 7, 2)
            .paid(1_400, 7)
            .ended(1_500, 7, SUCCEEDED)
    };
    check(second(), &["S22"]);
    let claimed = Left::default().fault(Fault::Kill, 80, (500, 600));
    check(
        claimed
            .begun(1_000, 7, 2)
            .paid(1_400, 7)
            .ended(1_500, 7, SUCCEEDED),
        &[],
    );
    let dead_lettered = || Left {
        is_dead_lettered: true,
        ..Left::default()
    };
    check(dead_lettered(), &["S22"]);
    check(
        dead_lettered()
            .begun(1_000, 7, 1)
            .ended(1_500, 7, "gave_up"),
        &[],
    );
}

#[test]
fn what_is_committed_was_paid_before() {
    check(Left::default(), &["S2"]);
    check(Left::first_run().committed(1_300, 1), &["S10"]);
    check(
        Left::first_run().committed(2_000, 1).committed(2_100, 0),
        &["S11"],
    );
}
