//! Which cores clients and servers run on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Where the threads of a benchmark run, and its servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cores {
    /// Wherever the system puts them.
    Shared,
    /// Servers on the first core, clients on the others: nobody takes from a server what its clients spend. It is how a
    /// server that is the bound is measured, for on machines of their own they would not share either.
    Apart,
}

impl Cores {
    /// Runs `work` so. Threads that it starts stay on these cores, and so do servers. A machine of one core has no choice.
    pub(crate) fn run<T>(self, work: impl FnOnce() -> T) -> T {
        let all = sched_getaffinity(None).expect("a thread may ask where it runs");
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core));
        let (Cores::Apart, Some(first), Some(_)) = (self, cores.next(), cores.next()) else { return work() };
        let mut others = all;
        others.unset(first);
        oncegate_tests::run_servers_on(Some(first));
        sched_setaffinity(None, &others).expect("a thread may leave a core");
        let done = work();
        sched_setaffinity(None, &all).expect("a thread may come back");
        oncegate_tests::run_servers_on(None);
        done
    }
}
