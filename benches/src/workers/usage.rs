//! The processor time and the context switches of other processes.

use std::collections::BTreeMap;
use std::fs;

use oncegate_testkit::process;

/// The usage of some processes so far, by their ids.
#[derive(Debug)]
pub(super) struct Usage(BTreeMap<u32, Spent>);

/// The usage of one process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    /// In steps of 10 ms.
    pub(super) cpu_micros: f64,
    /// Times that a thread has waited for something. Those of ended threads are missing.
    pub(super) switches: f64,
}

impl Usage {
    pub(super) fn now(ids: impl IntoIterator<Item = u32>) -> Self {
        Self(ids.into_iter().map(|id| (id, used(id))).collect())
    }

    /// Returns what the processes of `self` have used since an earlier time, all together.
    pub(super) fn since(&self, earlier: &Self) -> Spent {
        let mut sum = Spent::default();
        for (id, now) in &self.0 {
            let before = earlier.0.get(id).copied().unwrap_or_default();
            sum.cpu_micros += now.cpu_micros - before.cpu_micros;
            sum.switches += now.switches - before.switches;
        }
        sum
    }
}

/// The ids of the processes that a process has started, and of theirs.
pub(super) fn descendants(id: u32) -> Vec<u32> {
    let mut found = children(id);
    let mut place = 0;
    while let Some(next) = found.get(place).copied() {
        found.extend(children(next));
        place += 1;
    }
    found
}

/// Those that any thread of the process has started. There are none when it has ended meanwhile.
fn children(id: u32) -> Vec<u32> {
    files_of_threads(id, "children")
        .flat_map(|listed| {
            let ids = listed.split_whitespace().map(str::parse);
            ids.filter_map(Result::ok).collect::<Vec<u32>>()
        })
        .collect()
}

fn used(id: u32) -> Spent {
    let switches = files_of_threads(id, "status").filter_map(|status| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<f64>().ok()
    });
    Spent {
        cpu_micros: process::cpu_time(id, false).as_secs_f64() * 1e6,
        switches: switches.sum(),
    }
}

/// The text of a file that the kernel has for each thread of a process.
fn files_of_threads(id: u32, name: &str) -> impl Iterator<Item = String> {
    let threads = fs::read_dir(format!("/proc/{id}/task"))
        .into_iter()
        .flatten();
    threads.filter_map(move |thread| fs::read_to_string(thread.ok()?.path().join(name)).ok())
}
