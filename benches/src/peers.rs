//! Compares consumers of oncegate with what users pick instead: Spring, Apache Camel and Watermill,
//! each as its documentation describes it.
//!
//! All consume one topic of 12 partitions, take the idempotency key from a header, and have an
//! empty effect. The peers handle the messages of a partition one after the other, as their
//! libraries do. Their programs are in `benches/peers`, with their settings.
//!
//! A figure covers the effects after a warm-up of the same process, because a JVM compiles its code
//! while it runs. The word in brackets says what happens to messages:
//!
//! - `safe`: a message whose handler crashed or failed runs again, and no two runs overlap while
//!   the lease holds.
//! - `loses`: the key is marked before the handler runs. What removes the mark differs, see
//!   [`Safety`].
//! - `overlaps`: the key is marked after the handler, without a claim before it. Nothing is lost,
//!   but two copies that are handled at the same time both run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use oncegate::consumer::ConsumerSettings;
use oncegate::kafka::KafkaSource;
use oncegate::redis::RedisStore;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, MemoryStore, Message, OnStoreLoss};
use oncegate_testkit::{KafkaBroker, Record, RedisServer, unique};
use serde::Deserialize;
use tokio::sync::Notify;

use crate::bare::Bare;
use crate::cores::Cores;
use crate::figure::{Figure, Unit};
use crate::machine::own_cpu_micros;
use crate::messages::{ROUTE, broker_key, fresh_scope, payload};
use crate::rounds::{Plan, Rounds};
use crate::{BENCH_REDIS, Benchmark};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "peers",
    question: "oncegate beside Spring, Camel and Watermill: how fast, and what do they lose? (only when named)",
    cores: Cores::Shared,
    run: |plan| Box::pin(run(plan)),
};

async fn run(plan: &Plan) -> Vec<Figure> {
    let contestants: Vec<(Contestant, Runner)> = CONTESTANTS
        .into_iter()
        .filter_map(|contestant| Some((contestant, contestant.runner()?)))
        .collect();
    for (contestant, _) in &contestants {
        eprintln!("{}: {}", contestant.name, contestant.safety.sentence());
    }
    let redis = RedisServer::start_with(&BENCH_REDIS).await;
    let broker = KafkaBroker::start_for_long().await;
    let mut bare = Bare::connect(&redis).await;
    let warm_up = plan.size(100_000, 500);
    let count = plan.size(400_000, 2_000);
    let topic = Topic {
        brokers: broker.bootstrap().to_owned(),
        name: broker.new_topic(ROUTE, PARTITIONS).await,
        redis: redis.url().to_owned(),
        warm_up,
        count,
    };
    let records = (0..warm_up + count).map(|n| {
        let order_id = format!("A-{n:012}");
        Record::new(payload(n))
            .key(broker_key(n))
            .header(KEY_HEADER, order_id)
    });
    broker.produce(&topic.name, records).await;

    let names: Vec<&'static str> = contestants.iter().map(|(one, _)| one.name).collect();
    // Each measurement has its own warm-up.
    let mut rounds = plan.cold_rounds("peers", &names);
    while rounds.next() {
        for (contestant, runner) in &contestants {
            bare.flush().await;
            contestant.measure(runner, &topic, &mut rounds).await;
        }
    }
    figures(&rounds, &contestants)
}

/// The rates and the processor times, each compared with the first contestant.
fn figures(rounds: &Rounds, contestants: &[(Contestant, Runner)]) -> Vec<Figure> {
    let compared = |name, baseline, unit| {
        if name == baseline {
            rounds.figure(name, unit)
        } else {
            rounds.against(name, unit, baseline)
        }
    };
    let rates = contestants
        .iter()
        .map(|(one, _)| compared(one.name, BASELINE.name, Unit::MessagesPerSecond));
    let cpu = contestants
        .iter()
        .map(|(one, _)| compared(one.cpu, BASELINE.cpu, Unit::MicrosPerMessage));
    rates.chain(cpu).collect()
}

/// A consumer that is measured.
#[derive(Clone, Copy, Debug)]
struct Contestant {
    name: &'static str,
    /// The name of its processor time.
    cpu: &'static str,
    kind: Kind,
    safety: Safety,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    OncegateRedis {
        concurrency: u32,
    },
    OncegateMemory,
    Peer {
        program: Program,
        receiver: &'static str,
    },
}

/// What happens to a message when its handler does not end well. Each peer's sentence was checked
/// in the code of the measured version, and by a crash and by an error in the handler.
#[derive(Clone, Copy, Debug)]
enum Safety {
    Claims,
    ClaimsInMemory,
    MarksFirst,
    MarksFirstInMemory,
    MarksFirstAndRemoves,
    LooksFirst,
}

impl Safety {
    fn sentence(self) -> &'static str {
        match self {
            Self::Claims => "safe: after a crash or an error, the message runs again",
            Self::ClaimsInMemory => {
                "safe in one process: after a crash or an error, the message runs again; a restart \
                 forgets the keys"
            }
            Self::MarksFirst => {
                "marks the key before the handler: after a crash or an error in it, the \
                 redelivered message is dropped as a duplicate"
            }
            Self::MarksFirstInMemory => {
                "marks the key before the handler: after an error in it, the redelivered message \
                 is dropped as a duplicate; a restart forgets the keys"
            }
            Self::MarksFirstAndRemoves => {
                "marks the key before the handler and removes it after an error: after a crash, \
                 the redelivered message is dropped as a duplicate"
            }
            Self::LooksFirst => {
                "marks the key after the handler: nothing is lost, but two copies at the same time \
                 both run"
            }
        }
    }
}

const BASELINE: Contestant = Contestant {
    name: "oncegate, Redis, 64 [safe]",
    cpu: "CPU, oncegate, Redis, 64 [safe]",
    kind: Kind::OncegateRedis {
        concurrency: ConsumerSettings::DEFAULT.concurrency,
    },
    safety: Safety::Claims,
};

const CONTESTANTS: [Contestant; 9] = [
    BASELINE,
    Contestant {
        name: "oncegate, Redis, 1,024 [safe]",
        cpu: "CPU, oncegate, Redis, 1,024 [safe]",
        kind: Kind::OncegateRedis { concurrency: 1_024 },
        safety: Safety::Claims,
    },
    Contestant {
        name: "oncegate, memory [safe]",
        cpu: "CPU, oncegate, memory [safe]",
        kind: Kind::OncegateMemory,
        safety: Safety::ClaimsInMemory,
    },
    Contestant {
        name: "Spring metadata store [loses]",
        cpu: "CPU, Spring metadata store [loses]",
        kind: Kind::Peer {
            program: SPRING,
            receiver: "metadata-store",
        },
        safety: Safety::MarksFirst,
    },
    Contestant {
        name: "Spring SET NX [loses]",
        cpu: "CPU, Spring SET NX [loses]",
        kind: Kind::Peer {
            program: SPRING,
            receiver: "set-nx",
        },
        safety: Safety::MarksFirst,
    },
    Contestant {
        name: "Camel, eager [loses]",
        cpu: "CPU, Camel, eager [loses]",
        kind: Kind::Peer {
            program: CAMEL,
            receiver: "eager",
        },
        safety: Safety::MarksFirstAndRemoves,
    },
    Contestant {
        name: "Camel, not eager [overlaps]",
        cpu: "CPU, Camel, not eager [overlaps]",
        kind: Kind::Peer {
            program: CAMEL,
            receiver: "not-eager",
        },
        safety: Safety::LooksFirst,
    },
    Contestant {
        name: "Watermill, Redis [loses]",
        cpu: "CPU, Watermill, Redis [loses]",
        kind: Kind::Peer {
            program: Program::Go("watermill"),
            receiver: "redis",
        },
        safety: Safety::MarksFirst,
    },
    Contestant {
        name: "Watermill, memory [loses]",
        cpu: "CPU, Watermill, memory [loses]",
        kind: Kind::Peer {
            program: Program::Go("watermill"),
            receiver: "memory",
        },
        safety: Safety::MarksFirstInMemory,
    },
];

const SPRING: Program = Program::Java("spring", "oncegate.peers.SpringPeer");
const CAMEL: Program = Program::Java("camel", "oncegate.peers.CamelPeer");

const PARTITIONS: i32 = 12;
/// The header with the idempotency key. The peers' programs have the same name.
const KEY_HEADER: &str = "order-id";
/// The maximum time of one measurement of a peer.
const PEER_LIMIT: Duration = Duration::from_secs(600);

/// The way to run a contestant.
#[derive(Debug)]
enum Runner {
    Here,
    /// The beginning of a command line.
    Process(Vec<OsString>),
}

impl Contestant {
    /// Builds the contestant's program. Returns `None`, and says why on the standard error, when it
    /// cannot be built here.
    fn runner(&self) -> Option<Runner> {
        let Kind::Peer { program, .. } = self.kind else {
            return Some(Runner::Here);
        };
        match program.build() {
            Ok(command) => Some(Runner::Process(command)),
            Err(reason) => {
                eprintln!("{} is left out: {reason}", self.name);
                None
            }
        }
    }

    async fn measure(&self, runner: &Runner, topic: &Topic, rounds: &mut Rounds) {
        let mut cpu_micros = f64::NAN;
        let rate = async {
            let used = match (self.kind, runner) {
                (Kind::Peer { receiver, .. }, Runner::Process(command)) => {
                    topic.through_process(command, receiver).await
                }
                (Kind::OncegateRedis { concurrency }, _) => {
                    // The benchmark itself flushes the server, which the store would report as a
                    // loss.
                    let store = RedisStore::connect(&topic.redis).await;
                    let store = store.expect("the server may be used");
                    let gate = Gate::new(fresh_scope(), Key::header(KEY_HEADER), store);
                    let gate = gate.on_store_loss(OnStoreLoss::Continue);
                    topic.through_gate(gate, concurrency).await
                }
                _ => {
                    let store = MemoryStore::new();
                    let gate = Gate::new(fresh_scope(), Key::header(KEY_HEADER), store);
                    let concurrency = ConsumerSettings::DEFAULT.concurrency;
                    topic.through_gate(gate, concurrency).await
                }
            };
            cpu_micros = used.cpu_micros / topic.count as f64;
            topic.count as f64 / used.seconds
        };
        rounds.measure(self.name, rate).await;
        rounds.note(self.cpu, cpu_micros);
    }
}

/// The time and the processor time between the last effect of the warm-up and the last effect. The
/// peers print it as a line of JSON.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Used {
    seconds: f64,
    cpu_micros: f64,
}

/// The messages to consume from the beginning, with a new consumer group each time.
#[derive(Debug)]
struct Topic {
    brokers: String,
    name: String,
    redis: String,
    warm_up: usize,
    count: usize,
}

impl Topic {
    async fn through_gate(&self, gate: Gate, concurrency: u32) -> Used {
        let meter = Meter::new(self.warm_up, self.count);
        let source = KafkaSource::new(&*self.brokers, unique("peers"), [&*self.name]);
        let effects = Arc::clone(&meter);
        let effect = move |_: Message, _: Attempt| {
            effects.effect();
            async { Ok::<(), Failure>(()) }
        };
        Consumer::new(source, gate, effect)
            .concurrency(concurrency)
            .run_until(Arc::clone(&meter).over())
            .await
            .expect("the consumer runs to the end");
        meter.used()
    }

    /// Runs a peer's program to its end.
    async fn through_process(&self, command: &[OsString], receiver: &str) -> Used {
        let (program, first) = command.split_first().expect("a command has a program");
        let running = tokio::process::Command::new(program)
            .args(first)
            .args([receiver, &self.brokers, &self.name, &unique("peers")])
            .arg(&self.redis)
            .args([self.warm_up.to_string(), self.count.to_string()])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .kill_on_drop(true)
            .output();
        let ended = tokio::time::timeout(PEER_LIMIT, running)
            .await
            .unwrap_or_else(|_| panic!("{receiver} has not seen every message in {PEER_LIMIT:?}"))
            .expect("the program was built");
        assert!(ended.status.success(), "{receiver} has failed: {ended:?}");
        serde_json::from_slice(&ended.stdout)
            .unwrap_or_else(|error| panic!("{receiver} has printed no figures: {error}: {ended:?}"))
    }
}

/// Counts effects, and measures from the last one of the warm-up to the last one.
#[derive(Debug)]
struct Meter {
    warm_up: usize,
    last: usize,
    effects: AtomicUsize,
    started: OnceLock<(Instant, f64)>,
    stopped: OnceLock<(Instant, f64)>,
    over: Notify,
}

impl Meter {
    fn new(warm_up: usize, count: usize) -> Arc<Self> {
        Arc::new(Self {
            warm_up,
            last: warm_up + count,
            effects: AtomicUsize::new(0),
            started: OnceLock::new(),
            stopped: OnceLock::new(),
            over: Notify::new(),
        })
    }

    fn effect(&self) {
        let effect = self.effects.fetch_add(1, AcqRel) + 1;
        if effect == self.warm_up {
            self.started.get_or_init(times);
        } else if effect == self.last {
            self.stopped.get_or_init(times);
            self.over.notify_one();
        }
    }

    /// Resolves after the last effect.
    async fn over(self: Arc<Self>) {
        self.over.notified().await;
    }

    fn used(&self) -> Used {
        let ended = self.started.get().zip(self.stopped.get());
        let ((started, cpu_before), (stopped, cpu_after)) = ended.expect("every message has run");
        Used {
            seconds: stopped.duration_since(*started).as_secs_f64(),
            cpu_micros: cpu_after - cpu_before,
        }
    }
}

/// The time, and the processor time of this process so far in microseconds.
fn times() -> (Instant, f64) {
    (Instant::now(), own_cpu_micros())
}

/// A program of a peer: its folder, and what builds and starts it.
#[derive(Clone, Copy, Debug)]
enum Program {
    /// Also the main class.
    Java(&'static str, &'static str),
    Go(&'static str),
}

impl Program {
    /// Returns the beginning of the program's command line, or why there is none.
    fn build(self) -> Result<Vec<OsString>, String> {
        match self {
            Self::Java(folder, main_class) => {
                let folder = folder_of(folder);
                succeed(Command::new("java").arg("-version"))?;
                succeed(
                    Command::new("mvn")
                        .args(["--batch-mode", "--quiet", "compile"])
                        .args(["dependency:build-classpath", "-DincludeScope=runtime"])
                        .arg("-Dmdep.outputFile=target/classpath")
                        .current_dir(&folder),
                )?;
                let mut class_path = folder.join("target/classes").into_os_string();
                class_path.push(":");
                let libraries = std::fs::read_to_string(folder.join("target/classpath"));
                class_path.push(libraries.map_err(|error| format!("no class path: {error}"))?);
                Ok(vec![
                    "java".into(),
                    "-cp".into(),
                    class_path,
                    main_class.into(),
                ])
            }
            Self::Go(folder) => {
                let folder = folder_of(folder);
                let program = folder.join("target").join("peer");
                succeed(
                    Command::new("go")
                        .args(["build", "-o"])
                        .arg(&program)
                        .arg(".")
                        .current_dir(&folder),
                )?;
                Ok(vec![program.into_os_string()])
            }
        }
    }
}

fn folder_of(program: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("peers")
        .join(program)
}

/// Runs a command of a build. Its output is shown only if it fails.
fn succeed(command: &mut Command) -> Result<(), String> {
    let tool = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{tool} cannot be started: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let [printed, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    Err(format!("{tool} has failed: {printed}{errors}"))
}
