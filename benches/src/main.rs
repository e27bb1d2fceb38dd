//! The benchmarks. `scripts/bench` builds and starts this program.
//!
//! Each benchmark runs its contestants in turns, so that a slow moment of the machine affects all
//! of them. Every figure is a ratio to a baseline of the same run.

mod audit;
mod bare;
mod by_hand;
mod cores;
mod figure;
mod machine;
mod messages;
mod report;
mod resident;
mod rounds;
mod stopwatch;

mod amqp;
mod batches;
mod contention;
mod gate;
mod handler;
mod held;
mod http;
mod in_flight;
mod kafka;
mod key;
mod memory;
mod neighbours;
mod one_commit;
mod peers;
mod postgres;
mod rates;
mod replay;
mod server_cpu;
mod sizes;
mod sqlite;
mod sqs;
mod sustained;
mod workers;

use std::process::ExitCode;

use clap::Parser;
use futures_util::future::BoxFuture;

use cores::Cores;
use figure::Figure;
use report::Report;
use rounds::Plan;

/// A benchmark: the question, and the function that measures the answer.
struct Benchmark {
    name: &'static str,
    question: &'static str,
    cores: Cores,
    run: for<'a> fn(&'a Plan) -> BoxFuture<'a, Vec<Figure>>,
}

const BENCHMARKS: [Benchmark; 24] = [
    gate::BENCHMARK,
    in_flight::BENCHMARK,
    held::BENCHMARK,
    replay::BENCHMARK,
    audit::BENCHMARK,
    contention::BENCHMARK,
    server_cpu::BENCHMARK,
    memory::BENCHMARK,
    kafka::BENCHMARK,
    handler::BENCHMARK,
    neighbours::BENCHMARK,
    rates::BENCHMARK,
    batches::BENCHMARK,
    workers::BENCHMARK,
    sqs::BENCHMARK,
    amqp::BENCHMARK,
    sqlite::BENCHMARK,
    postgres::BENCHMARK,
    one_commit::BENCHMARK,
    sustained::BENCHMARK,
    sizes::BENCHMARK,
    http::BENCHMARK,
    key::BENCHMARK,
    peers::BENCHMARK,
];

/// The benchmarks that run only when named: they need more than this repository's own tools.
const ONLY_WHEN_NAMED: [&str; 1] = ["peers"];

/// Settings of every Redis server: no rewrite of the append-only file during a measurement.
const BENCH_REDIS: [&str; 2] = ["--auto-aof-rewrite-percentage", "0"];

/// Runs the benchmarks, each beside its baseline, and prints one line per figure.
#[derive(Debug, Parser)]
struct Arguments {
    /// The benchmarks to run. Default: all but `peers`.
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print one JSON document instead of lines.
    #[arg(long)]
    json: bool,
    /// The number of measurements of each contestant, after a warm-up.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repetitions: u32,
    /// Use small sizes, to check that the benchmarks work. The figures have no meaning.
    #[arg(long)]
    quick: bool,
    /// List the benchmarks.
    #[arg(long)]
    list: bool,
    /// The work of a process that a benchmark has started.
    #[arg(long, hide = true, value_name = "JSON")]
    task: Option<String>,
}

impl Arguments {
    /// Whether the benchmark with this name runs.
    fn runs(&self, name: &str) -> bool {
        if self.names.is_empty() {
            return !ONLY_WHEN_NAMED.contains(&name);
        }
        self.names.iter().any(|named| named == name)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(task) = arguments.task {
        let task = serde_json::from_str(&task).expect("this program has written it");
        let runtime = tokio::runtime::Runtime::new().expect("the machine has threads");
        runtime.block_on(rates::work(&task));
        return ExitCode::SUCCESS;
    }
    if arguments.list {
        BENCHMARKS
            .iter()
            .for_each(|one| println!("{:<12} {}", one.name, one.question));
        return ExitCode::SUCCESS;
    }
    if let Some(name) = arguments
        .names
        .iter()
        .find(|name| !BENCHMARKS.iter().any(|one| one.name == **name))
    {
        eprintln!("there is no benchmark `{name}`; `--list` lists the benchmarks");
        return ExitCode::from(2);
    }
    let plan = Plan {
        repetitions: arguments.repetitions,
        quick: arguments.quick,
    };
    let mut report = Report::new(plan);
    if !arguments.json {
        println!("{}", report.head());
    }
    for benchmark in BENCHMARKS.iter().filter(|one| arguments.runs(one.name)) {
        let figures = benchmark.cores.run(|| {
            // The runtime's threads inherit the cores of this thread.
            let runtime = tokio::runtime::Runtime::new().expect("the machine has threads");
            runtime.block_on((benchmark.run)(&plan))
        });
        let lines = report.add(benchmark.name, benchmark.question, figures);
        if !arguments.json {
            println!("{lines}");
        }
    }
    if arguments.json {
        println!("{}", report.to_json());
    }
    ExitCode::SUCCESS
}
