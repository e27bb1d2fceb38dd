//! A bounded queue for a thread, in which heartbeats overtake and similar jobs are taken together.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use oncegate_core::store::StoreError;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// The most commands or keys in the queue; further ones fail with "unavailable".
const MAX_WAITING: usize = 65_536;

/// From this size on, a turn takes the jobs of one class only.
const ALIKE: usize = 64;

/// The class of a job in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobClass {
    /// Overtakes all others, and can share a turn with any of them.
    Urgent,
    Early,
    /// After the early jobs. When there are many, they have separate turns.
    Late,
}

/// A unit of work that a thread does for a caller.
pub(super) trait Job {
    /// Returns its class in the queue.
    fn class(&self) -> JobClass;

    /// Returns its size, as part of a batch.
    fn size(&self) -> usize;

    /// Returns whether it must be alone in its turn.
    fn alone(&self) -> bool;
}

/// A queue between the callers and one thread.
pub(super) struct Queue<J> {
    waiting: Mutex<Waiting<J>>,
    arrived: Condvar,
}

struct Waiting<J> {
    urgent: VecDeque<J>,
    early: VecDeque<J>,
    late: VecDeque<J>,
    size: usize,
    /// The size at which the thread must be woken; set while it sleeps and has not been woken yet.
    wanted: Option<usize>,
    closed: bool,
}

/// The content of a turn so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct SoFar {
    pub(super) size: usize,
    /// The class of the last job.
    pub(super) class: JobClass,
}

/// The next work of a thread.
pub(super) enum Turn<J> {
    /// Jobs, urgent ones first. Never empty.
    Jobs(Vec<J>),
    /// Nothing has arrived in time.
    Idle,
    /// The queue is closed and empty.
    Closed,
}

impl<J: Job> Queue<J> {
    pub(super) fn new() -> Self {
        let waiting = Waiting {
            urgent: VecDeque::new(),
            early: VecDeque::new(),
            late: VecDeque::new(),
            size: 0,
            wanted: None,
            closed: false,
        };
        Self {
            waiting: Mutex::new(waiting),
            arrived: Condvar::new(),
        }
    }

    /// Queues a job.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] when the queue is full, or the thread has ended.
    pub(super) fn push(&self, job: J) -> Result<(), StoreError> {
        let mut waiting = self.waiting();
        if waiting.closed {
            return Err(StoreError::unavailable("the SQLite store is closed"));
        }
        if waiting.size.saturating_add(job.size()) > MAX_WAITING {
            return Err(StoreError::unavailable(
                "too many commands wait for the SQLite file",
            ));
        }
        waiting.size += job.size();
        let class = job.class();
        waiting.class(class).push_back(job);
        let size = waiting.size;
        let sleeper = waiting
            .wanted
            .take_if(|wanted| class == JobClass::Urgent || size >= *wanted);
        drop(waiting);
        // Notifying is a system call even when no thread sleeps.
        if sleeper.is_some() {
            self.arrived.notify_one();
        }
        Ok(())
    }

    /// Takes the queued jobs, up to `most` in size. Waits at most `patience` for the first one.
    pub(super) fn take(&self, most: usize, patience: Duration) -> Turn<J> {
        let mut waiting = self.until(self.waiting(), 1, patience);
        match (waiting.is_empty(), waiting.closed) {
            (false, _) => Turn::Jobs(waiting.take(most, None)),
            (true, false) => Turn::Idle,
            (true, true) => Turn::Closed,
        }
    }

    /// Takes further jobs for a turn that has begun, up to `most` in size.
    ///
    /// Waits at most `patience` for jobs of the size `wanted`, but not while an urgent job is
    /// queued. Returns no jobs if none arrived that may share the turn.
    pub(super) fn take_more(
        &self,
        so_far: SoFar,
        most: usize,
        wanted: usize,
        patience: Duration,
    ) -> Vec<J> {
        self.until(self.waiting(), wanted, patience)
            .take(most, Some(so_far))
    }

    /// Waits until jobs of this size or an urgent job have arrived, the queue is closed, or the
    /// time is up.
    fn until<'a>(
        &'a self,
        mut waiting: MutexGuard<'a, Waiting<J>>,
        wanted: usize,
        patience: Duration,
    ) -> MutexGuard<'a, Waiting<J>> {
        let deadline = Instant::now().checked_add(patience);
        while waiting.size < wanted && waiting.urgent.is_empty() && !waiting.closed {
            let left = deadline.map_or(patience, |end| {
                end.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                break;
            }
            waiting.wanted = Some(wanted);
            self.arrived.wait_for(&mut waiting, left);
        }
        waiting.wanted = None;
        waiting
    }

    /// The size of the queue.
    pub(super) fn size(&self) -> usize {
        self.waiting().size
    }

    /// Closes the queue. Queued jobs are still executed.
    pub(super) fn close(&self) {
        self.waiting().closed = true;
        self.arrived.notify_all();
    }

    /// Closes the queue and drops the queued jobs, so that their callers get an error.
    pub(super) fn abandon(&self) {
        let mut waiting = self.waiting();
        waiting.closed = true;
        for class in [JobClass::Urgent, JobClass::Early, JobClass::Late] {
            waiting.class(class).clear();
        }
    }

    /// Locks the queue. Each change leaves it consistent, so a panic elsewhere does no harm.
    fn waiting(&self) -> MutexGuard<'_, Waiting<J>> {
        self.waiting.lock()
    }
}

impl<J> Waiting<J> {
    fn class(&mut self, class: JobClass) -> &mut VecDeque<J> {
        match class {
            JobClass::Urgent => &mut self.urgent,
            JobClass::Early => &mut self.early,
            JobClass::Late => &mut self.late,
        }
    }

    fn is_empty(&self) -> bool {
        self.urgent.is_empty() && self.early.is_empty() && self.late.is_empty()
    }

    /// The class of the next job of a turn, if one may join it.
    fn next_class(&self, so_far: Option<SoFar>) -> Option<JobClass> {
        let has_enough = so_far.is_some_and(|so_far| so_far.size >= ALIKE);
        let last = so_far.map(|so_far| so_far.class).filter(|_| has_enough);
        // A turn that is large enough takes further jobs of its last class only.
        let may = |class| last.is_none_or(|last| last == class || last == JobClass::Urgent);
        if !self.urgent.is_empty() {
            Some(JobClass::Urgent)
        } else if !self.early.is_empty() && may(JobClass::Early) {
            Some(JobClass::Early)
        } else if !self.late.is_empty() && may(JobClass::Late) {
            Some(JobClass::Late)
        } else {
            None
        }
    }
}

impl<J: Job> Waiting<J> {
    fn take(&mut self, most: usize, mut so_far: Option<SoFar>) -> Vec<J> {
        let mut jobs: Vec<J> = Vec::new();
        let mut size = 0;
        while let Some(class) = self.next_class(so_far) {
            let Some(job) = self.class(class).pop_front_if(|job| {
                so_far.is_none() || (size + job.size() <= most && !job.alone())
            }) else {
                break;
            };
            self.size = self.size.saturating_sub(job.size());
            size += job.size();
            so_far = Some(SoFar {
                size: so_far.map_or(0, |so_far| so_far.size) + job.size(),
                class,
            });
            let alone = job.alone();
            jobs.push(job);
            if alone {
                break;
            }
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Numbered {
        number: usize,
        size: usize,
        class: JobClass,
        alone: bool,
    }

    impl Job for Numbered {
        fn class(&self) -> JobClass {
            self.class
        }

        fn size(&self) -> usize {
            self.size
        }

        fn alone(&self) -> bool {
            self.alone
        }
    }

    fn job(number: usize, size: usize) -> Numbered {
        Numbered {
            number,
            size,
            class: JobClass::Early,
            alone: false,
        }
    }

    fn taken(queue: &Queue<Numbered>) -> Vec<usize> {
        match queue.take(10, Duration::ZERO) {
            Turn::Jobs(jobs) => numbers(&jobs),
            Turn::Idle => Vec::new(),
            Turn::Closed => vec![usize::MAX],
        }
    }

    fn check(jobs: impl IntoIterator<Item = Numbered>, turns: &[&[usize]]) {
        let queue = Queue::new();
        for job in jobs {
            queue.push(job).unwrap();
        }
        for turn in turns {
            assert_eq!(taken(&queue), *turn);
        }
        assert!(taken(&queue).is_empty(), "nothing is left");
    }

    #[test]
    fn what_fits_is_taken_together() {
        check(
            [job(1, 4), job(2, 4), job(3, 4), job(4, 1)],
            &[&[1, 2], &[3, 4]],
        );
    }

    #[test]
    fn what_is_too_large_goes_by_itself() {
        check([job(1, 40), job(2, 1)], &[&[1], &[2]]);
    }

    fn urgent(number: usize) -> Numbered {
        Numbered {
            class: JobClass::Urgent,
            ..job(number, 1)
        }
    }

    #[test]
    fn what_is_urgent_overtakes() {
        check(
            [job(1, 4), job(2, 4), urgent(3), job(4, 1), urgent(5)],
            &[&[3, 5, 1, 2], &[4]],
        );
    }

    #[test]
    fn what_is_alone_shares_no_turn() {
        let alone = Numbered {
            alone: true,
            ..job(2, 1)
        };
        check([job(1, 1), alone, job(3, 1)], &[&[1], &[2], &[3]]);
    }

    fn more(queue: &Queue<Numbered>, wanted: usize) -> Vec<usize> {
        let so_far = SoFar {
            size: 1,
            class: JobClass::Early,
        };
        let jobs = queue.take_more(so_far, 10, wanted, Duration::from_secs(600));
        numbers(&jobs)
    }

    #[test]
    fn a_turn_waits_for_who_comes_back_soon() {
        let queue = Queue::new();
        let jobs = std::thread::scope(|scope| {
            let jobs = scope.spawn(|| more(&queue, 3));
            while queue.waiting().wanted != Some(3) {
                std::thread::yield_now();
            }
            queue.push(job(1, 1)).unwrap();
            queue.push(job(2, 2)).unwrap();
            jobs.join().unwrap()
        });
        assert_eq!(jobs, [1, 2]);
    }

    #[test]
    fn an_arrival_wakes_the_waiting_thread() {
        const PUSHERS: usize = 4;
        const EACH: usize = 2_000;
        let queue = Queue::new();
        let patience = Duration::from_secs(60);
        std::thread::scope(|scope| {
            for _ in 0..PUSHERS {
                scope.spawn(|| {
                    for number in 0..EACH {
                        let class = if number % 50 == 0 {
                            JobClass::Urgent
                        } else {
                            JobClass::Early
                        };
                        queue
                            .push(Numbered {
                                class,
                                ..job(number, 1)
                            })
                            .unwrap();
                        if number % 3 == 0 {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            let mut taken = 0;
            while taken < PUSHERS * EACH {
                let Turn::Jobs(jobs) = queue.take(10, patience) else {
                    panic!("{taken} in all, then no more")
                };
                taken += jobs.len();
                let so_far = SoFar {
                    size: jobs.len(),
                    class: JobClass::Early,
                };
                let wanted = 3.min(PUSHERS * EACH - taken);
                let asked = Instant::now();
                taken += queue.take_more(so_far, 10, wanted, patience).len();
                assert!(asked.elapsed() < patience, "{taken} in all, then it slept");
            }
        });
    }

    #[test]
    fn a_turn_with_something_urgent_waits_for_no_more() {
        let queue = Queue::new();
        queue.push(urgent(1)).unwrap();
        assert_eq!(more(&queue, 5), [1]);
    }

    #[test]
    fn what_cannot_share_a_turn_under_way_waits_for_the_next() {
        let queue = Queue::new();
        queue
            .push(Numbered {
                alone: true,
                ..job(1, 1)
            })
            .unwrap();
        assert!(more(&queue, 1).is_empty());
        assert_eq!(taken(&queue), [1]);
        queue.push(job(2, 40)).unwrap();
        assert!(more(&queue, 1).is_empty(), "it would be too large");
        assert_eq!(taken(&queue), [2]);
        let so_far = SoFar {
            size: 1,
            class: JobClass::Late,
        };
        assert!(queue.take_more(so_far, 10, 1, Duration::ZERO).is_empty());
    }

    fn late(number: usize, size: usize) -> Numbered {
        Numbered {
            class: JobClass::Late,
            ..job(number, size)
        }
    }

    fn numbers(jobs: &[Numbered]) -> Vec<usize> {
        jobs.iter().map(|job| job.number).collect()
    }

    #[test]
    fn few_go_together_and_of_many_what_is_alike() {
        check(
            [late(1, 1), job(2, 1), late(3, 1), job(4, 1)],
            &[&[2, 4, 1, 3]],
        );

        let queue = Queue::new();
        let most = 10 * ALIKE;
        for job in [late(1, 1), job(2, ALIKE), late(3, ALIKE), job(4, ALIKE)] {
            queue.push(job).unwrap();
        }
        let Turn::Jobs(first) = queue.take(most, Duration::ZERO) else {
            panic!("four are there")
        };
        assert_eq!(numbers(&first), [2, 4]);
        let early = SoFar {
            size: 2 * ALIKE,
            class: JobClass::Early,
        };
        let more = queue.take_more(early, most, 1, Duration::ZERO);
        assert!(more.is_empty());
        let late = SoFar {
            size: ALIKE,
            class: JobClass::Late,
        };
        let more = queue.take_more(late, most, 1, Duration::ZERO);
        assert_eq!(numbers(&more), [1, 3]);
    }

    #[test]
    fn too_much_is_refused_until_something_is_taken() {
        let queue = Queue::new();
        queue.push(job(1, MAX_WAITING)).unwrap();
        assert!(matches!(
            queue.push(job(2, 1)),
            Err(StoreError::Unavailable { .. })
        ));
        assert_eq!(taken(&queue), [1]);
        queue.push(job(3, 1)).unwrap();
    }

    #[test]
    fn a_closed_queue_is_worked_off() {
        let queue = Queue::new();
        queue.push(job(1, 1)).unwrap();
        queue.close();
        assert!(queue.push(job(2, 1)).is_err());
        assert_eq!(taken(&queue), [1]);
        assert_eq!(taken(&queue), [usize::MAX]);
    }
}
