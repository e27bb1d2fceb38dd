//! Every short history of one key: all interleavings of three attempts over a small clock, with
//! crashes, repeats and late arrivals, judged against what callers may conclude from the replies
//! alone.
//!
//! A worker that crashes is one that sends nothing more; a lost reply is a command that is sent
//! again; a late arrival is a command of an attempt that is long over. So all of them are covered
//! by letting every attempt send every command at any time. `history.rs` keeps the books and
//! judges, `mutants` has the bugs that it must find.

#![allow(clippy::indexing_slicing, reason = "a test that goes wrong may panic")]

mod history;
mod mutants;
mod step;

use std::collections::HashSet;
use std::fmt;

use oncegate_core::record::{Record, StoreTime, TAIL};
use oncegate_core::rules::{self, Operation, Reply};

use history::{History, Violation};
use step::{Attempt, Step};

/// The rules, or a mutant of them.
type Rules = fn(StoreTime, Option<Record>, &Operation) -> (Option<Record>, Reply);

/// The time at which the clock starts, in milliseconds.
const START_MS: u64 = 10;

/// The number of milliseconds that pass one by one; enough for two leases and a retention.
const TICKS: u64 = 6;

/// Everything that the future depends on.
#[derive(Clone, PartialEq, Eq, Hash)]
struct World {
    now_ms: u64,
    /// A microsecond passes with every grant: two of them never fall on the same instant.
    grants_this_ms: u64,
    ticks: u64,
    slept: bool,
    record: Option<Record>,
    history: History,
}

impl World {
    fn new() -> Self {
        let history = History::default();
        Self {
            now_ms: START_MS,
            grants_this_ms: 0,
            ticks: 0,
            slept: false,
            record: None,
            history,
        }
    }

    fn now(&self) -> StoreTime {
        StoreTime::from_micros(self.now_ms * 1_000 + self.grants_this_ms)
    }

    /// The world after a step, or what is wrong with it; `None` if the step cannot be made here.
    fn after(
        &self,
        step: &Step,
        rules: Rules,
        attempts: &[Attempt],
    ) -> Option<Result<Self, Violation>> {
        let mut next = self.clone();
        match step {
            Step::Tick if self.ticks < TICKS => {
                (next.now_ms, next.ticks, next.grants_this_ms) =
                    (self.now_ms + 1, self.ticks + 1, 0);
            }
            Step::Sleep if !self.slept => {
                let tail_ms = u64::try_from(TAIL.as_millis()).expect("thirty days");
                next.now_ms = self.now_ms + tail_ms;
                next.slept = true;
                next.grants_this_ms = 0;
            }
            Step::Tick | Step::Sleep => return None,
            step => {
                let operation = step.operation(attempts, &self.history, self.record.as_ref())?;
                let now = self.now();
                let (record, reply) = rules(now, self.record.clone(), &operation);
                let before = self.record.as_ref().filter(|record| record.kept(now));
                if let Err(violation) =
                    next.history
                        .judge(now, step, attempts, before, record.as_ref(), &reply)
                {
                    return Some(Err(violation));
                }
                next.grants_this_ms += 1;
                next.record = record;
            }
        }
        next.history.forget(next.now_ms);
        // Worlds that differ only in what no operation can observe any more are the same.
        let now = next.now();
        next.record = next.record.filter(|record| record.kept(now));
        Some(Ok(next))
    }
}

/// The results of an exploration.
struct Explored {
    worlds: usize,
}

/// A broken promise, and how to get there.
struct Broken {
    promise: Violation,
    path: Vec<Step>,
}

impl fmt::Debug for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {:?}", self.promise, self.path)
    }
}

/// A world, and how it came about.
struct Visited {
    world: World,
    from: Option<(usize, Step)>,
    depth: usize,
}

/// Goes through all histories of at most `depth` steps, the shortest first.
fn explore(rules: Rules, attempts: &[Attempt], depth: usize) -> Result<Explored, Broken> {
    let steps = Step::all(attempts.len());
    let mut seen = HashSet::from([World::new()]);
    let mut visited = vec![Visited {
        world: World::new(),
        from: None,
        depth: 0,
    }];
    let mut index = 0;
    while index < visited.len() && visited[index].depth < depth {
        let world = visited[index].world.clone();
        let made = visited[index].depth;
        for step in &steps {
            let next = match world.after(step, rules, attempts) {
                None => continue,
                Some(Err(promise)) => {
                    return Err(Broken {
                        promise,
                        path: path(&visited, index, *step),
                    });
                }
                Some(Ok(next)) => next,
            };
            if seen.insert(next.clone()) {
                visited.push(Visited {
                    world: next,
                    from: Some((index, *step)),
                    depth: made + 1,
                });
            }
        }
        index += 1;
    }
    Ok(Explored {
        worlds: visited.len(),
    })
}

/// The steps to a world, and one more.
fn path(visited: &[Visited], mut index: usize, last: Step) -> Vec<Step> {
    let mut path = vec![last];
    while let Some((from, step)) = visited[index].from {
        path.push(step);
        index = from;
    }
    path.reverse();
    path
}

/// Sets of attempts: the fingerprint of each, and whether it asks for a fencing token.
fn casts() -> [Vec<Attempt>; 3] {
    [
        vec![
            attempt(None, true),
            attempt(None, true),
            attempt(None, true),
        ],
        vec![
            attempt(Some((1, 1)), false),
            attempt(Some((1, 2)), true),
            attempt(Some((1, 1)), false),
        ],
        vec![
            attempt(Some((1, 1)), true),
            attempt(Some((2, 2)), true),
            attempt(None, false),
        ],
    ]
}

/// An attempt with this specification and content of its fingerprint.
fn attempt(fingerprint: Option<(u8, u8)>, fenced: bool) -> Attempt {
    Attempt {
        fingerprint,
        fenced,
    }
}

/// The longest histories that a test run has the time for. The rules have passed 12, in a minute.
const DEPTH: usize = 8;

fn check(cast: usize) {
    let explored =
        explore(rules::apply, &casts()[cast], DEPTH).expect("the rules keep their promises");
    assert!(
        explored.worlds > 10_000,
        "{} worlds are too few to prove anything",
        explored.worlds
    );
}

// invariant: stale-owner
#[test]
fn the_rules_keep_every_promise_with_fencing_tokens() {
    check(0);
}

#[test]
fn the_rules_keep_every_promise_with_other_content() {
    check(1);
}

#[test]
fn the_rules_keep_every_promise_with_another_specification() {
    check(2);
}

// invariant: stale-owner, late-hand-over
#[test]
fn every_mutant_breaks_a_promise() {
    for (name, mutant) in mutants::ALL {
        let found = casts()
            .iter()
            .find_map(|cast| explore(*mutant, cast, DEPTH).err());
        match found {
            Some(broken) => eprintln!("{name}: {broken:?}"),
            None => panic!("no check noticed the mutant {name}"),
        }
    }
}
