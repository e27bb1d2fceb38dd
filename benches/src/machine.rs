//! The machine of a run. Figures cannot be interpreted without it.

use std::fmt;
use std::fs;
use std::process::Command;

use serde::Serialize;

/// The properties of the machine that the figures depend on.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    cores: usize,
    cpu: String,
    kernel: String,
    redis: String,
    kafka: String,
    postgres: String,
    /// The load average of the last minute before the run. Above zero, the figures are noisy.
    load_before: f64,
}

impl Machine {
    pub(crate) fn look() -> Self {
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            cpu: line_of("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned()),
            kernel: read("/proc/sys/kernel/osrelease"),
            redis: redis_version(),
            kafka: kafka_version(),
            postgres: oncegate_testkit::postgres_version(),
            load_before: read("/proc/loadavg")
                .split(' ')
                .next()
                .and_then(|one| one.parse().ok())
                .unwrap_or(0.0),
        }
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cores,
            cpu,
            kernel,
            redis,
            kafka,
            postgres,
            load_before,
        } = self;
        write!(
            f,
            "{cores} cores ({cpu}), Linux {kernel}, Redis {redis}, Kafka {kafka}, PostgreSQL {postgres}, load before \
             {load_before}"
        )
    }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}

/// The value after the colon in the first line of a file that begins with `name`.
fn line_of(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    line.split_once(':')
        .map(|(_, value)| value.trim().to_owned())
}

/// Parses the version from `Redis server v=7.0.15 sha=…`.
fn redis_version() -> String {
    let output = Command::new("redis-server").arg("--version").output();
    let output = output
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    output
        .split(' ')
        .find_map(|word| word.strip_prefix("v="))
        .unwrap_or("unknown")
        .to_owned()
}

/// The version that `scripts/fetch-servers` downloads.
fn kafka_version() -> String {
    let pom = include_str!("../../scripts/kafka-pom.xml");
    let version = pom
        .split_once("<kafka.version>")
        .and_then(|(_, rest)| rest.split_once('<'));
    version.map_or("unknown", |(version, _)| version).to_owned()
}

/// The processor time that this process has used so far, in microseconds, in steps of 10 ms.
pub(crate) fn own_cpu_micros() -> f64 {
    // `man 5 proc`: after the name in brackets, user and system time are the 12th and 13th field,
    // in hundredths of a second on every Linux.
    const MICROS_PER_TICK: f64 = 10_000.0;
    let stat = read("/proc/self/stat");
    let (_, fields) = stat
        .rsplit_once(") ")
        .expect("the kernel reports the times");
    let ticks = fields
        .split(' ')
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<f64>().ok());
    ticks.sum::<f64>() * MICROS_PER_TICK
}
