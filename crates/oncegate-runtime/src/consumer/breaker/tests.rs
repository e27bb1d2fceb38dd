//! The breaker's rules, and how it counts.

use super::*;

const LIMITS: Breaker = Breaker {
    on: true,
    keys: 4,
    share: 0.5,
    first: Duration::from_secs(1),
    most: Duration::from_secs(4),
};

const FAILED: RunResult = RunResult::Failure;

/// A breaker whose clock moves only on request.
struct Bench {
    now: Instant,
    state: State,
}

impl Bench {
    fn new() -> Self {
        Self {
            now: Instant::now(),
            state: State::default(),
        }
    }

    fn tell(&mut self, event: BreakerEvent) -> CircuitPhase {
        self.state = apply(self.now, &LIMITS, std::mem::take(&mut self.state), event);
        self.state.phase
    }

    fn ran(&mut self, key: u64, ran: RunResult) -> CircuitPhase {
        self.tell(BreakerEvent::Ran {
            key,
            ran,
            pause: None,
            fraction: 0.0,
        })
    }

    fn opened() -> Self {
        let mut bench = Self::new();
        for key in 1..=4 {
            bench.ran(key, FAILED);
        }
        assert_ne!(bench.state.phase, CircuitPhase::Closed);
        bench
    }

    fn probe(&mut self, after_ms: u64, key: u64) -> CircuitPhase {
        self.now += Duration::from_millis(after_ms);
        self.tell(BreakerEvent::Asks { key })
    }
}

#[test]
fn it_opens_when_half_of_enough_distinct_keys_failed() {
    let mut bench = Bench::new();
    bench.ran(1, RunResult::Success);
    bench.ran(2, RunResult::Success);
    assert_eq!(
        bench.ran(3, FAILED),
        CircuitPhase::Closed,
        "three keys are not enough to judge"
    );
    let probe_at = bench.now + Duration::from_secs(1);
    assert_eq!(
        bench.ran(4, FAILED),
        CircuitPhase::Open {
            probe_at,
            pauses: 1
        }
    );
}

#[test]
fn a_few_bad_messages_open_nothing_however_often_they_fail() {
    let mut bench = Bench::new();
    for _ in 0..100 {
        for key in 1..=3 {
            assert_eq!(bench.ran(key, FAILED), CircuitPhase::Closed);
        }
    }
    let mut bench = Bench::new();
    for key in 1..100 {
        bench.ran(0, FAILED);
        assert_eq!(
            bench.ran(key, RunResult::Success),
            CircuitPhase::Closed,
            "one key in four"
        );
    }
}

#[test]
fn a_marked_start_probes_at_once_then_after_the_first_pause() {
    let mut bench = Bench::new();
    bench.state = State::marked_open(bench.now);
    assert_eq!(
        bench.probe(0, 1),
        CircuitPhase::HalfOpen {
            probe: 1,
            pauses: 0
        }
    );
    assert_eq!(
        bench.probe(60_000, 2),
        CircuitPhase::HalfOpen {
            probe: 1,
            pauses: 0
        },
        "one at a time"
    );
    let probe_at = bench.now + LIMITS.first;
    assert_eq!(
        bench.ran(1, FAILED),
        CircuitPhase::Open {
            probe_at,
            pauses: 1
        }
    );
    bench.probe(1_000, 2);
    assert_eq!(
        bench.ran(2, RunResult::Success),
        CircuitPhase::Closed,
        "a mark out of date costs one probe"
    );
}

#[test]
fn a_few_bad_messages_open_nothing_even_without_successes() {
    let mut bench = Bench::new();
    for _ in 0..100 {
        for key in 1..=3 {
            assert_eq!(
                bench.ran(key, FAILED),
                CircuitPhase::Closed,
                "three keys are not enough to judge"
            );
        }
    }
}

#[test]
fn only_one_message_probes_and_its_success_closes() {
    let mut bench = Bench::opened();
    assert!(
        matches!(bench.probe(999, 5), CircuitPhase::Open { .. }),
        "not yet"
    );
    assert_eq!(
        bench.probe(1, 5),
        CircuitPhase::HalfOpen {
            probe: 5,
            pauses: 1
        }
    );
    assert_eq!(
        bench.probe(60_000, 6),
        CircuitPhase::HalfOpen {
            probe: 5,
            pauses: 1
        },
        "one at a time"
    );
    // A run that began before the change is no evidence about now.
    assert_eq!(
        bench.ran(1, RunResult::Success),
        CircuitPhase::HalfOpen {
            probe: 5,
            pauses: 1
        }
    );
    assert_eq!(
        bench.ran(1, FAILED),
        CircuitPhase::HalfOpen {
            probe: 5,
            pauses: 1
        }
    );
    assert_eq!(bench.ran(5, RunResult::Success), CircuitPhase::Closed);
    for key in 10..13 {
        assert_eq!(
            bench.ran(key, FAILED),
            CircuitPhase::Closed,
            "what was before is forgotten"
        );
    }
}

#[test]
fn a_failed_probe_makes_the_pause_longer_up_to_its_limit() {
    let mut bench = Bench::opened();
    for (key, wait_s) in [(5, 1), (6, 2), (7, 4), (8, 4)] {
        assert!(
            matches!(
                bench.probe(wait_s * 1_000 - 1, key),
                CircuitPhase::Open { .. }
            ),
            "{key}"
        );
        assert!(
            matches!(bench.probe(1, key), CircuitPhase::HalfOpen { .. }),
            "{key}"
        );
        bench.ran(key, FAILED);
        // The end of an attempt whose handler has run changes nothing more.
        assert!(matches!(
            bench.tell(BreakerEvent::Over { key }),
            CircuitPhase::Open { .. }
        ));
    }
}

#[test]
fn a_requested_pause_replaces_the_doubled_one_within_limits() {
    let mut bench = Bench::opened();
    bench.probe(1_000, 5);
    for (key, requested_ms, wait_ms) in [
        (5, 2_500, 2_500),
        (6, 2_500, 2_500),
        (7, 0, 1_000),
        (8, 9_000, 4_000),
    ] {
        let ran = FAILED;
        let pause = Some(Duration::from_millis(requested_ms));
        bench.tell(BreakerEvent::Ran {
            key,
            ran,
            pause,
            fraction: 0.0,
        });
        assert!(
            matches!(bench.probe(wait_ms - 1, key + 1), CircuitPhase::Open { .. }),
            "{key}"
        );
        assert!(
            matches!(bench.probe(1, key + 1), CircuitPhase::HalfOpen { .. }),
            "{key}"
        );
    }
}

#[test]
fn a_probe_that_never_ran_leaves_its_turn_to_the_next() {
    let mut bench = Bench::opened();
    bench.probe(1_000, 5);
    bench.tell(BreakerEvent::Over { key: 5 });
    assert_eq!(
        bench.probe(0, 6),
        CircuitPhase::HalfOpen {
            probe: 6,
            pauses: 1
        }
    );
}

fn wrong(keys: u32, share: f64) -> Vec<&'static str> {
    let limits = Breaker {
        keys,
        share,
        ..LIMITS
    };
    let findings = limits.check().into_iter();
    findings.map(|finding| finding.setting).collect()
}

#[test]
fn limits_that_make_no_sense_are_named() {
    assert!(wrong(20, 0.5).is_empty());
    assert_eq!(wrong(1, 0.5), ["breaker.keys"]);
    for share in [0.0, 1.1, f64::NAN] {
        assert_eq!(wrong(20, share), ["breaker.share"]);
    }
    assert_eq!(wrong(0, 0.0), ["breaker.keys", "breaker.share"]);
}
