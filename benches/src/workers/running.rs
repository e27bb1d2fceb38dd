//! A process of `oncegate run` over a whole topic.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use oncegate_testkit::{HttpClient, Kafka, LoopbackPort, Process, Redis, Sent, process, unique};

use super::programs::{self, Programs};
use super::rows::Kind;
use super::usage::{Usage, descendants};
use crate::messages::fresh_scope;

/// The share of the messages that are complete when the measurement begins: by then, every process
/// of the worker has started.
const WARM_UP: f64 = 0.05;
/// The shortest and the longest time between two looks at the metrics. A look costs about a
/// millisecond.
const LOOK_AFTER_MIN: Duration = Duration::from_millis(10);
const LOOK_AFTER_MAX: Duration = Duration::from_millis(250);
/// The time in which some message must be completed.
const STUCK_AFTER: Duration = Duration::from_secs(60);
/// The time for an orderly stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// What every worker is measured with: the servers, and a topic to consume from its beginning.
pub(super) struct Setting<'a> {
    pub(super) kafka: &'a Kafka,
    pub(super) redis: &'a Redis,
    pub(super) programs: &'a Programs,
    pub(super) topic: String,
    pub(super) dead_letters: String,
    pub(super) count: usize,
}

/// The measurements of one run.
#[derive(Debug)]
pub(super) struct Costs {
    /// Messages per second.
    pub(super) rate: f64,
    /// Processor time per message.
    pub(super) oncegate_micros: f64,
    pub(super) worker_micros: f64,
    /// Voluntary context switches of the command per message.
    pub(super) switches: f64,
}

impl Setting<'_> {
    /// Runs the command with a worker over the whole topic, in a new group and a new scope.
    pub(super) async fn costs(&self, worker: Kind) -> Costs {
        let folder = tempfile::tempdir().expect("a folder");
        let port = LoopbackPort::reserve();
        let behind_http = self
            .programs
            .start(worker, &port, &folder.path().join("worker.log"));
        let page = LoopbackPort::reserve();
        let mut command = self.command(&page);
        command.args(Programs::flags(worker, &port));
        let mut watched = Watched::start(command, behind_http, &page, folder.path());
        let warm_up = (self.count as f64 * WARM_UP) as usize;
        let first = watched.reached(warm_up).await;
        let last = watched.reached(self.count).await;
        watched.stop().await;
        assert_eq!(last.completed, self.count, "each message is completed once");
        last.since(&first)
    }

    /// The command without the flags of the worker.
    fn command(&self, page: &LoopbackPort) -> Command {
        let mut command = process::bound_to_parent(programs::oncegate(), "KILL");
        for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ONCEGATE_")) {
            command.env_remove(name);
        }
        command
            .env("PYTHONPATH", programs::python_library())
            .env("PYTHONDONTWRITEBYTECODE", "1");
        let listen = format!("127.0.0.1:{}", page.number());
        command
            .args(["run", "--config", "/dev/null"])
            .args(["--brokers", self.kafka.bootstrap()])
            .args(["--topic", &self.topic, "--group", &unique("bench")])
            .args(["--dead-letters", &self.dead_letters])
            .args(["--store", self.redis.url(), "--scope", &fresh_scope()])
            .args(["--key", "order_id,customer.id", "--listen", &listen]);
        command
    }
}

/// The command at work, and the worker that it did not start itself.
struct Watched {
    oncegate: Process,
    behind_http: Option<Process>,
    client: HttpClient,
}

/// The state at one moment.
#[derive(Debug)]
struct Sample {
    at: Instant,
    completed: usize,
    oncegate: Usage,
    worker: Usage,
}

impl Watched {
    fn start(
        command: Command,
        behind_http: Option<Process>,
        page: &LoopbackPort,
        folder: &Path,
    ) -> Self {
        let log = folder.join("oncegate.log");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, page.number()));
        Self {
            oncegate: Process::spawn_logged("oncegate run", command, &log),
            behind_http,
            client: HttpClient::http1(address),
        }
    }

    /// Waits until so many messages are completed.
    async fn reached(&mut self, count: usize) -> Sample {
        let started = Instant::now();
        let mut moved = (self.completed().await, started);
        let begun_at = moved.0;
        while moved.0 < count {
            let done = moved.0 - begun_at;
            let share = (count - moved.0) as f64 / done.max(1) as f64;
            // Half of the time that the rest will take, so that the last look comes in time.
            let half_of_the_rest = started.elapsed().as_secs_f64() * share / 2.0;
            let half_of_the_rest = Duration::try_from_secs_f64(half_of_the_rest);
            let pause = half_of_the_rest
                .unwrap_or(LOOK_AFTER_MIN)
                .clamp(LOOK_AFTER_MIN, LOOK_AFTER_MAX);
            tokio::time::sleep(if done == 0 { LOOK_AFTER_MIN } else { pause }).await;
            let completed = self.completed().await;
            if completed > moved.0 {
                moved = (completed, Instant::now());
            }
            assert!(
                self.oncegate.try_wait().is_none() && moved.1.elapsed() < STUCK_AFTER,
                "`oncegate run` has ended or is stuck after {completed} messages{}",
                self.oncegate.log_tail()
            );
        }
        self.sample(moved.0)
    }

    fn sample(&self, completed: usize) -> Sample {
        let id = self.oncegate.id();
        let started = self.behind_http.as_ref().map(Process::id);
        let mut workers = descendants(started.unwrap_or(id));
        workers.extend(started);
        Sample {
            at: Instant::now(),
            completed,
            oncegate: Usage::now([id]),
            worker: Usage::now(workers),
        }
    }

    /// The number of completed messages, zero before the metrics are served.
    async fn completed(&self) -> usize {
        const COMPLETIONS: &str = "oncegate_completions_total{";
        let asked = Sent::post("/metrics", "", "").method("GET").unkeyed();
        let Ok(answer) = self.client.try_send(asked).await else {
            return 0;
        };
        String::from_utf8_lossy(&answer.body)
            .lines()
            .filter(|line| line.starts_with(COMPLETIONS))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<usize>().ok())
            .sum()
    }

    async fn stop(mut self) {
        self.oncegate.signal("TERM");
        let status = self.oncegate.end_within(STOP_LIMIT).await;
        assert!(
            status.success(),
            "`oncegate run` ended with {status}{}",
            self.oncegate.log_tail()
        );
    }
}

impl Sample {
    fn since(&self, first: &Self) -> Costs {
        let messages = (self.completed - first.completed) as f64;
        let oncegate = self.oncegate.since(&first.oncegate);
        Costs {
            rate: messages / self.at.duration_since(first.at).as_secs_f64(),
            oncegate_micros: oncegate.cpu_micros / messages,
            worker_micros: self.worker.since(&first.worker).cpu_micros / messages,
            switches: oncegate.switches / messages,
        }
    }
}
