//! The processor time and the context switches of this process, by its threads.

use std::collections::BTreeMap;
use std::fs;

use serde::{Deserialize, Serialize};

/// The groups of threads that are told apart.
pub(super) const GROUPS: [&str; 5] = ["runtime", "store", "poll", "librdkafka", "other"];

/// The usage of the threads of one name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Used {
    pub(super) group: String,
    pub(super) cpu_micros: f64,
    pub(super) switches: f64,
}

/// The usage of each thread so far. A thread that has ended is missing, so measure while all of
/// them live.
#[derive(Debug)]
pub(super) struct Snapshot {
    threads: BTreeMap<u32, Used>,
}

impl Snapshot {
    pub(super) fn now() -> Self {
        let tasks = fs::read_dir("/proc/self/task").expect("the kernel lists the threads");
        let numbers = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        Self {
            threads: numbers
                .filter_map(|number: u32| Some((number, used(number)?)))
                .collect(),
        }
    }

    /// Returns the usage since an earlier snapshot.
    pub(super) fn since(&self, earlier: &Self) -> Vec<Used> {
        self.threads
            .iter()
            .map(|(number, now)| {
                let before = earlier.threads.get(number);
                let (cpu, switches) =
                    before.map_or((0.0, 0.0), |used| (used.cpu_micros, used.switches));
                Used {
                    cpu_micros: now.cpu_micros - cpu,
                    switches: now.switches - switches,
                    ..now.clone()
                }
            })
            .collect()
    }
}

/// `None` for a thread that has ended meanwhile.
fn used(number: u32) -> Option<Used> {
    const NANOS_PER_MICRO: f64 = 1_000.0;
    let read = |file: &str| fs::read_to_string(format!("/proc/self/task/{number}/{file}")).ok();
    // `man 5 proc`: the first number is the time on the processor, in nanoseconds.
    let nanos: f64 = read("schedstat")?.split(' ').next()?.parse().ok()?;
    let status = read("status")?;
    let switches = status.lines().filter_map(|line| {
        line.split_once("ctxt_switches:")?
            .1
            .trim()
            .parse::<f64>()
            .ok()
    });
    let group = group_of(read("comm")?.trim());
    Some(Used {
        group: group.to_owned(),
        cpu_micros: nanos / NANOS_PER_MICRO,
        switches: switches.sum(),
    })
}

fn group_of(name: &str) -> &'static str {
    match name {
        _ if name.starts_with("tokio") => "runtime",
        "oncegate-poll" => "poll",
        // The kernel keeps the first 15 letters of a name.
        "oncegate-redis" | "oncegate-sqlite" | "oncegate-postgr" => "store",
        _ if name.starts_with("rdk:") => "librdkafka",
        _ => "other",
    }
}
