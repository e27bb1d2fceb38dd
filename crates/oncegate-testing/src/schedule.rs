//! The faults of a round, and their times: a pure function of the seed and the round's number.

use std::collections::BTreeSet;

use fastrand::Rng;

use crate::fault::Fault;
use crate::history::Form;

/// The number of samples in a round, besides the first round, which has all.
const SAMPLES_PER_ROUND: usize = 6;
/// The most partitions of the embedded broker.
const MOST_PARTITIONS: usize = 3;
/// The most faults that overlap in one round.
const MOST_OVERLAPPING: usize = 4;
/// The number of faults of the downstream service that one message may meet in one round. Together
/// with the other faults of a round that is less than the attempts that a message has.
const MOST_STRIKES: u32 = 2;
/// The length of a fault, in tenths of a lease.
const SHORT_TENTHS: u32 = 5;
const LONG_TENTHS: u32 = 25;

/// The plan of one round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The round's number; round 0 has no faults besides duplicates.
    pub round: u64,
    /// The faults.
    pub faults: Vec<Fault>,
    /// The number of consumers at the beginning.
    pub consumers: u32,
    /// The number of handlers that each consumer runs at a time, at most.
    pub concurrency: u32,
    /// The number of partitions of the broker.
    pub partitions: usize,
    /// The messages, in the order in which they are sent.
    pub messages: Vec<PlannedMessage>,
    /// The samples to which the round was reduced; empty when it has all that were chosen for it.
    pub only_samples: Vec<usize>,
    /// The faults that begin with a call or a completion.
    pub strikes: Vec<Strike>,
    /// The seed of everything else in the round.
    pub seed: u64,
}

/// A message that is sent in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedMessage {
    /// The sample that it is made of, from 1.
    pub sample: usize,
    /// The form in which it is sent.
    pub form: Form,
    /// The partition that it is sent to.
    pub partition: usize,
}

/// A fault that begins with a call for a sample, or with its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strike {
    /// The fault.
    pub fault: Fault,
    /// The sample whose call or completion it waits for, from 1.
    pub sample: usize,
    /// The length of the fault, in tenths of a lease.
    pub tenths: u32,
}

impl Schedule {
    /// Returns the schedule of a round. The same arguments always give the same schedule.
    ///
    /// Round 0 has every sample and, if they are among `enabled`, producer duplicates; the next
    /// rounds have each fault by itself, and later ones some of them at the same time.
    pub fn new(seed: u64, round: u64, samples: usize, enabled: &[Fault]) -> Self {
        // Neighbouring rounds must not have neighbouring seeds: the generator would give similar
        // numbers.
        let mut rng = Rng::with_seed(seed ^ (round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        rng.u64(..);
        let faults = faults_of(round, enabled, &mut rng);
        let mut chosen: Vec<usize> = (1..=samples).collect();
        rng.shuffle(&mut chosen);
        if round > 0 {
            chosen.truncate(SAMPLES_PER_ROUND);
        }
        let partitions = rng.usize(1..=MOST_PARTITIONS);
        // A duplicate that is to come first must not stand behind its original.
        let partitions = if faults.contains(&Fault::KillThenDuplicate) {
            partitions.max(2)
        } else {
            partitions
        };
        let consumers = if faults.iter().any(|fault| fault.needs_two_consumers()) {
            2
        } else {
            rng.u32(1..=2)
        };
        let strikes = strikes(&faults, &chosen, &mut rng);
        let mut messages = messages(&faults, &chosen, partitions, &mut rng);
        add_other_positions(&mut messages, &strikes, partitions);
        // A handler with state that is not meant for several messages at a time shows it only with
        // several.
        let concurrency = 1 << rng.u32(..3);
        let only_samples = Vec::new();
        let seed = rng.u64(..);
        Self {
            round,
            faults,
            consumers,
            concurrency,
            partitions,
            messages,
            only_samples,
            strikes,
            seed,
        }
    }

    /// Returns the same schedule without one of its faults. The order of the messages stays as it
    /// is.
    #[must_use]
    pub fn without(mut self, fault: Fault) -> Self {
        self.faults.retain(|other| *other != fault);
        self.strikes.retain(|strike| strike.fault != fault);
        if matches!(fault, Fault::ProducerDuplicates | Fault::KillThenDuplicate)
            && !self.has(Fault::ProducerDuplicates)
        {
            let needed = other_positions(&self.strikes);
            self.messages
                .retain(|of| of.form != Form::Duplicate || needed.contains(&of.sample));
        }
        let left_out = match fault {
            Fault::Poison => Some(Form::Poison),
            Fault::Malformed => Some(Form::Malformed),
            _ => None,
        };
        self.messages
            .retain(|message| Some(message.form) != left_out);
        self
    }

    /// Returns the same schedule with these samples alone. Messages that stand for no event stay.
    #[must_use]
    pub fn with_only(mut self, samples: &[usize]) -> Self {
        self.messages.retain(|message| {
            matches!(message.form, Form::Poison | Form::Malformed)
                || samples.contains(&message.sample)
        });
        self.strikes
            .retain(|strike| samples.contains(&strike.sample));
        self.only_samples = samples.to_vec();
        self
    }

    /// Returns the same schedule with at most this number of samples: first those that its faults
    /// begin with.
    #[must_use]
    pub(crate) fn with_most(self, most: usize) -> Self {
        let struck = self.strikes.iter().map(|strike| strike.sample);
        let mut kept = BTreeSet::new();
        for sample in struck.chain(self.messages.iter().map(|message| message.sample)) {
            if kept.len() < most {
                kept.insert(sample);
            }
        }
        if kept.len() >= self.samples().len() {
            return self;
        }
        let kept: Vec<usize> = kept.into_iter().collect();
        self.with_only(&kept)
    }

    /// The samples whose events are sent.
    pub fn samples(&self) -> BTreeSet<usize> {
        self.messages
            .iter()
            .filter(|message| message.form == Form::Original)
            .map(|message| message.sample)
            .collect()
    }

    /// Returns whether the round has the fault.
    pub fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }
}

fn faults_of(round: u64, enabled: &[Fault], rng: &mut Rng) -> Vec<Fault> {
    let Some(place) = round.checked_sub(1) else {
        return enabled
            .iter()
            .copied()
            .filter(|fault| *fault == Fault::ProducerDuplicates)
            .collect();
    };
    // Each by itself first, in the order of the list.
    let alone = usize::try_from(place)
        .ok()
        .and_then(|place| enabled.get(place));
    if let Some(fault) = alone {
        return vec![*fault];
    }
    let mut faults = enabled.to_vec();
    rng.shuffle(&mut faults);
    faults.truncate(rng.usize(2..=MOST_OVERLAPPING));
    faults
}

/// The samples of which an event at another position comes before the one whose process was killed.
fn other_positions(strikes: &[Strike]) -> BTreeSet<usize> {
    strikes
        .iter()
        .filter(|strike| strike.fault == Fault::KillThenDuplicate)
        .map(|strike| strike.sample)
        .collect()
}

/// Sends each event that needs it to another partition, too.
fn add_other_positions(messages: &mut Vec<PlannedMessage>, strikes: &[Strike], partitions: usize) {
    for sample in other_positions(strikes) {
        let Some(place) = messages
            .iter()
            .position(|of| of.sample == sample && of.form == Form::Original)
        else {
            continue;
        };
        let Some(original) = messages.get(place).copied() else {
            continue;
        };
        let partition = (original.partition + 1)
            .checked_rem(partitions)
            .unwrap_or_default();
        messages.insert(
            place + 1,
            PlannedMessage {
                sample,
                form: Form::Duplicate,
                partition,
            },
        );
    }
}

fn strikes(faults: &[Fault], chosen: &[usize], rng: &mut Rng) -> Vec<Strike> {
    let mut strikes = Vec::new();
    for fault in faults.iter().copied() {
        if !fault.strikes_a_call() && !fault.strikes_a_completion() {
            continue;
        }
        let ends_a_process = matches!(
            fault,
            Fault::KillBeforeEffect
                | Fault::KillAfterEffect
                | Fault::KillBeforeCompleted
                | Fault::KillAfterCompleted
        );
        // One of a kind: several that wait for each other would wait for ever.
        let is_single = matches!(fault, Fault::KillThenDuplicate | Fault::OverlappingRuns);
        let is_long = matches!(fault, Fault::Freeze | Fault::NoAnswer | Fault::LateAnswer);
        let samples = match fault {
            _ if is_single => 1,
            Fault::Freeze | Fault::StoreOutage | Fault::StoreLoss | Fault::Rebalance => 1,
            _ if ends_a_process => rng.usize(1..=2),
            Fault::NoAnswer | Fault::LateAnswer => rng.usize(1..=2),
            _ => rng.usize(1..=3),
        };
        let mut targets = chosen.to_vec();
        rng.shuffle(&mut targets);
        for sample in targets.into_iter().take(samples) {
            let times = match fault {
                Fault::Refused | Fault::AnswerLost => rng.u32(1..=MOST_STRIKES),
                _ => 1,
            };
            for _ in 0..times {
                let least = if is_long { LONG_TENTHS } else { SHORT_TENTHS };
                strikes.push(Strike {
                    fault,
                    sample,
                    tenths: rng.u32(least..=LONG_TENTHS),
                });
            }
        }
    }
    rng.shuffle(&mut strikes);
    strikes
}

fn messages(
    faults: &[Fault],
    chosen: &[usize],
    partitions: usize,
    rng: &mut Rng,
) -> Vec<PlannedMessage> {
    let is_reordered = faults.contains(&Fault::Reordering);
    let mut messages = Vec::new();
    for sample in chosen.iter().copied() {
        // The duplicates of an event are sent to its partition, unless they may overtake it.
        let partition = rng.usize(..partitions);
        messages.push(PlannedMessage {
            sample,
            form: Form::Original,
            partition,
        });
        let duplicates = if faults.contains(&Fault::ProducerDuplicates) {
            rng.usize(1..=2)
        } else {
            0
        };
        for _ in 0..duplicates {
            let partition = if is_reordered {
                rng.usize(..partitions)
            } else {
                partition
            };
            messages.push(PlannedMessage {
                sample,
                form: Form::Duplicate,
                partition,
            });
        }
    }
    // A message that no handler can take may come before any event.
    let mut is_shuffled = is_reordered;
    for (fault, form) in [
        (Fault::Poison, Form::Poison),
        (Fault::Malformed, Form::Malformed),
    ] {
        if faults.contains(&fault) {
            is_shuffled = true;
            let sample = chosen.first().copied().unwrap_or(1);
            messages.push(PlannedMessage {
                sample,
                form,
                partition: rng.usize(..partitions),
            });
        }
    }
    if is_shuffled {
        rng.shuffle(&mut messages);
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_alone_decides() {
        let seed = fastrand::u64(..);
        for round in 0..100 {
            let one = Schedule::new(seed, round, 9, &Fault::ALL);
            assert_eq!(
                one,
                Schedule::new(seed, round, 9, &Fault::ALL),
                "seed {seed}"
            );
        }
        let others: BTreeSet<u64> = (0..100)
            .map(|round| Schedule::new(seed, round, 9, &Fault::ALL).seed)
            .collect();
        assert_eq!(others.len(), 100, "seed {seed}");
    }

    #[test]
    fn each_fault_comes_by_itself_before_several_overlap() {
        let seed = fastrand::u64(..);
        assert_eq!(Schedule::new(seed, 0, 3, &[Fault::Refused]).faults, []);
        for (round, fault) in (1..).zip(Fault::ALL) {
            let schedule = Schedule::new(seed, round, 3, &Fault::ALL);
            assert_eq!(schedule.faults, [fault], "seed {seed}");
            let strikes = fault.strikes_a_call() || fault.strikes_a_completion();
            assert_eq!(
                !schedule.strikes.is_empty(),
                strikes,
                "seed {seed}: {fault}"
            );
            assert!(
                schedule.consumers == 2 || !fault.needs_two_consumers(),
                "seed {seed}: {fault}"
            );
        }
        let overlapping = Schedule::new(seed, 1_000, 3, &Fault::ALL);
        assert!(
            (2..=MOST_OVERLAPPING).contains(&overlapping.faults.len()),
            "seed {seed}"
        );
    }

    #[test]
    fn a_fault_that_is_left_out_leaves_nothing_behind() {
        let seed = fastrand::u64(..);
        for round in 20..60 {
            let mut schedule = Schedule::new(seed, round, 9, &Fault::ALL);
            for fault in schedule.faults.clone() {
                schedule = schedule.without(fault);
                assert!(!schedule.has(fault), "seed {seed}");
            }
            assert!(schedule.strikes.is_empty(), "seed {seed}");
            assert!(
                schedule
                    .messages
                    .iter()
                    .all(|message| message.form == Form::Original),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn an_event_at_another_position_is_sent_with_its_fault() {
        let seed = fastrand::u64(..);
        let enabled = [Fault::KillThenDuplicate, Fault::ProducerDuplicates];
        for round in 1..40 {
            let schedule =
                Schedule::new(seed, round, 9, &enabled).without(Fault::ProducerDuplicates);
            let Some(strike) = schedule.strikes.first() else {
                continue;
            };
            let [original, duplicate] = [Form::Original, Form::Duplicate].map(|form| {
                schedule
                    .messages
                    .iter()
                    .filter(|of| of.sample == strike.sample && of.form == form)
                    .map(|of| of.partition)
                    .collect::<Vec<_>>()
            });
            assert!(
                duplicate.iter().any(|place| !original.contains(place)),
                "seed {seed}"
            );
        }
    }

    #[test]
    fn a_smaller_round_keeps_what_its_faults_begin_with() {
        let seed = fastrand::u64(..);
        for round in 1..60 {
            let schedule = Schedule::new(seed, round, 9, &Fault::ALL).with_most(1);
            assert_eq!(schedule.samples().len(), 1, "seed {seed}");
            let whole = Schedule::new(seed, round, 9, &Fault::ALL);
            assert_eq!(
                schedule.strikes.is_empty(),
                whole.strikes.is_empty(),
                "seed {seed}"
            );
            assert_eq!(
                whole.clone().with_most(9),
                whole,
                "seed {seed}: nothing is to be left out"
            );
        }
    }

    #[test]
    fn a_round_of_fewer_samples_has_nothing_of_the_others() {
        let seed = fastrand::u64(..);
        for round in 20..60 {
            let schedule = Schedule::new(seed, round, 9, &Fault::ALL);
            let samples: Vec<usize> = schedule.samples().into_iter().take(2).collect();
            let few = schedule.clone().with_only(&samples);
            assert_eq!(
                few.samples().into_iter().collect::<Vec<_>>(),
                samples,
                "seed {seed}"
            );
            assert!(
                few.strikes
                    .iter()
                    .all(|strike| samples.contains(&strike.sample)),
                "seed {seed}"
            );
            let [few, all] = [&few, &schedule].map(|schedule| {
                schedule
                    .messages
                    .iter()
                    .filter(|message| matches!(message.form, Form::Poison | Form::Malformed))
                    .count()
            });
            assert_eq!(few, all, "seed {seed}: poison belongs to no sample");
        }
    }

    #[test]
    fn the_first_round_has_every_sample_and_later_ones_a_few() {
        let [first, later] = [0, 30].map(|round| {
            let schedule = Schedule::new(7, round, 50, &Fault::ALL);
            schedule
                .messages
                .iter()
                .map(|message| message.sample)
                .collect::<BTreeSet<_>>()
                .len()
        });
        assert_eq!(first, 50);
        assert!((1..=SAMPLES_PER_ROUND).contains(&later));
    }
}
