//! Assigns clients and servers to cores.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores of a benchmark's threads and servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cores {
    /// The operating system decides.
    Shared,
    /// Servers run on the first core, clients on the others, so clients take no processor time from
    /// the server. This measures a server that is the bottleneck: in production, it would not share
    /// a machine with its clients either.
    Apart,
}

impl Cores {
    /// Runs `work` with this assignment. Its threads and servers stay on their cores. Has no effect
    /// on a machine with one core.
    pub(crate) fn run<T>(self, work: impl FnOnce() -> T) -> T {
        let all = sched_getaffinity(None).expect("a thread may read its affinity");
        let mut cores = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core));
        let (Cores::Apart, Some(first), Some(_)) = (self, cores.next(), cores.next()) else {
            return work();
        };
        let mut others = all;
        others.unset(first);
        oncegate_testkit::run_servers_on(Some(first));
        sched_setaffinity(None, &others).expect("a thread may set its affinity");
        let done = work();
        sched_setaffinity(None, &all).expect("a thread may restore its affinity");
        oncegate_testkit::run_servers_on(None);
        done
    }
}
