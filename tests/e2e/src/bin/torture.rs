//! Runs workers under faults for as long as one likes, and judges every run. `scripts/torture`
//! calls it.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate_testkit::KafkaBroker;
use oncegate_testkit::fire::{Fault, Plan, Report, StoreKind, Summary, run};

const USAGE: &str = "\
torture [--minutes N] [--seed S] [--store redis|sqlite|postgres] [--faults NAME,NAME] [--json] [--report FILE]

  --minutes N      for how long: 10 by default. A run that has begun is finished. Once every kind of run has had its
                   turn, others follow until all has been reached, for at most half as long again.
  --seed S         decides everything that is left to chance; another one each time by default
  --store NAME     this store alone; all three in turn by default
  --faults A,B     these faults alone, several times per run; by default each fault in runs of its own, in turn with
                   runs of many faults that overlap. With `hang` or `group-signal` among them, the members are programs
                   of `oncegate run`, to which `crash`, `flush` and `flush-fresh` cannot happen
  --json           one line for each run on stdout, instead of the table
  --report FILE    puts the table between `<!-- torture -->` and `<!-- end of torture -->` in FILE";

/// How many steps a run of overlapping faults has.
const STEPS: usize = 8;
/// How often a run of a single fault injects it.
const REPEATS: usize = 4;

/// How many runs of a single fault come before the next one of many.
const ALONE_BETWEEN_MANY: usize = 2;

/// What a run is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunKind {
    /// One fault, again and again.
    Alone(Fault),
    /// Many faults that overlap, or the chosen ones.
    Many,
    /// Many faults that overlap, with programs of `oncegate run` as members.
    ManyOfPrograms,
}

impl fmt::Display for RunKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Alone(fault) => write!(f, "{fault}"),
            Self::Many => f.write_str("overlapping"),
            Self::ManyOfPrograms => f.write_str("overlapping with `oncegate run`"),
        }
    }
}

struct Settings {
    minutes: u64,
    seed: u64,
    stores: Vec<StoreKind>,
    faults: Vec<Fault>,
    json: bool,
    report: Option<PathBuf>,
}

fn settings() -> Result<Settings, String> {
    let mut settings = Settings {
        minutes: 10,
        seed: fastrand::u64(..),
        stores: vec![StoreKind::Redis, StoreKind::Sqlite, StoreKind::Postgres],
        faults: Vec::new(),
        json: false,
        report: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--json" {
            settings.json = true;
            continue;
        }
        let value = arguments
            .next()
            .ok_or_else(|| format!("{name} needs a value\n\n{USAGE}"))?;
        let number = || {
            value
                .parse::<u64>()
                .map_err(|_| format!("{name} needs a number, not {value:?}"))
        };
        match name.as_str() {
            "--minutes" => settings.minutes = number()?,
            "--seed" => settings.seed = number()?,
            "--store" => {
                let kind = serde_json::from_value(serde_json::Value::String(value.clone()));
                settings.stores =
                    vec![kind.map_err(|_| format!("there is no store {value:?}\n\n{USAGE}"))?];
            }
            "--faults" => {
                settings.faults = value.split(',').map(str::parse).collect::<Result<_, _>>()?;
            }
            "--report" => settings.report = Some(value.into()),
            _ => return Err(format!("unknown argument {name}\n\n{USAGE}")),
        }
    }
    Ok(settings)
}

/// What each run is, one after the other: its row in the table, and its plan.
struct Plans {
    settings: Settings,
    /// The worker, and the program `oncegate`.
    programs: (PathBuf, PathBuf),
    rng: Rng,
    /// The kinds of runs, in turn.
    kinds: Vec<(StoreKind, RunKind)>,
    next: usize,
}

impl Plans {
    fn new(settings: Settings, programs: (PathBuf, PathBuf)) -> Self {
        let mut rng = Rng::with_seed(settings.seed);
        let of = |store: &StoreKind| {
            let store = *store;
            let of_programs = Fault::of_programs(store, true)
                .into_iter()
                .filter(|one| one.needs_programs());
            let faults = Fault::of(store, true).into_iter().chain(of_programs);
            faults.map(move |fault| (store, RunKind::Alone(fault)))
        };
        let mut alone: Vec<_> = settings.stores.iter().flat_map(of).collect();
        rng.shuffle(&mut alone);
        let many = |kind| settings.stores.iter().map(move |store| (*store, kind));
        let kinds = if settings.faults.is_empty() {
            // After every few runs of one fault comes one of many.
            let mut many_in_turn = many(RunKind::Many)
                .chain(many(RunKind::ManyOfPrograms))
                .cycle();
            let few = alone.chunks(ALONE_BETWEEN_MANY);
            few.flat_map(|few| few.iter().copied().chain(many_in_turn.next()))
                .collect()
        } else {
            many(RunKind::Many).collect()
        };
        Self {
            settings,
            programs,
            rng,
            kinds,
            next: 0,
        }
    }

    /// Whether neither faults nor stores were left out.
    fn is_about_everything(&self) -> bool {
        self.settings.faults.is_empty() && self.settings.stores.len() > 1
    }

    /// Returns whether runs of every kind, on every store, have been made.
    fn had_all_turns(&self) -> bool {
        self.is_about_everything() && self.next >= self.kinds.len()
    }

    /// The kinds of runs that have not had their turn, in words.
    fn without_a_turn(&self) -> String {
        let name = |(store, kind): &(StoreKind, RunKind)| {
            format!("{kind} on {}", format!("{store:?}").to_lowercase())
        };
        let done = self.kinds.get(..self.next).unwrap_or(&self.kinds);
        let left: BTreeSet<String> = self
            .kinds
            .iter()
            .filter(|kind| !done.contains(kind))
            .map(name)
            .collect();
        if left.is_empty() {
            return String::new();
        }
        format!(
            " Without a run of their own: {}.",
            left.into_iter().collect::<Vec<_>>().join(", ")
        )
    }

    fn next(&mut self) -> (String, Plan) {
        let (store, kind) = self
            .kinds
            .get(self.next % self.kinds.len())
            .copied()
            .expect("there are kinds of runs");
        self.next += 1;
        let seed = self.rng.u64(..);
        let (worker, oncegate) = self.programs.clone();
        let chosen = &self.settings.faults;
        let has_programs = match kind {
            RunKind::Alone(fault) => fault.needs_programs(),
            RunKind::Many => chosen.iter().any(|fault| fault.needs_programs()),
            RunKind::ManyOfPrograms => true,
        };
        let possible = if has_programs {
            Fault::of_programs(store, true)
        } else {
            Fault::of(store, true)
        };
        let (name, plan) = match kind {
            RunKind::Alone(fault) => (
                kind.to_string(),
                Plan::each_once(seed, store, vec![fault; REPEATS], worker),
            ),
            RunKind::Many | RunKind::ManyOfPrograms if chosen.is_empty() => (
                kind.to_string(),
                Plan::random(seed, store, &possible, STEPS, worker),
            ),
            RunKind::Many | RunKind::ManyOfPrograms => {
                let faults: Vec<Fault> = chosen
                    .iter()
                    .copied()
                    .filter(|one| possible.contains(one))
                    .collect();
                let name = faults
                    .iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join(", ");
                (
                    name,
                    Plan::each_once(seed, store, faults.repeat(REPEATS), worker),
                )
            }
        };
        (
            name,
            if has_programs {
                plan.of_programs(oncegate)
            } else {
                plan
            },
        )
    }
}

fn tell(json: bool, name: &str, report: &Report) {
    if json {
        println!(
            "{}",
            serde_json::to_string(report).expect("a report is plain data")
        );
    }
    let Report {
        seed,
        store,
        messages,
        extra_effects,
        violations,
        seconds,
        surprises,
        ..
    } = report;
    eprintln!(
        "{seconds:>4} s  {store:?}, {name}: {messages} messages, {extra_effects} second effects, {} violations, \
         {} surprises (seed {seed})",
        violations.len(),
        surprises.len()
    );
    for one in violations.iter().chain(surprises) {
        eprintln!("        {}", one.lines().next().unwrap_or_default());
    }
}

/// Puts the table where the marks are.
fn write_report(path: &PathBuf, text: &str) -> Result<(), String> {
    const MARKS: [&str; 2] = ["<!-- torture -->", "<!-- end of torture -->"];
    let wrong = |what: String| format!("{}: {what}", path.display());
    let page = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let parts = page.split_once(MARKS[0]).zip(page.split_once(MARKS[1]));
    let ((before, _), (_, after)) = parts.ok_or_else(|| wrong(format!("it has no {MARKS:?}")))?;
    let page = format!("{before}{}\n{text}{}{after}", MARKS[0], MARKS[1]);
    std::fs::write(path, page).map_err(|error| wrong(error.to_string()))
}

#[tokio::main]
async fn main() -> ExitCode {
    let settings = match settings() {
        Ok(settings) => settings,
        Err(what) => {
            eprintln!("{what}");
            return ExitCode::from(2);
        }
    };
    let json = settings.json;
    let minutes = settings.minutes;
    let seed = settings.seed;
    let report_to = settings.report.clone();
    let here = std::env::current_exe().expect("a program knows where it is");
    let programs = (
        here.with_file_name("fire_worker"),
        here.with_file_name("oncegate"),
    );
    let mut plans = Plans::new(settings, programs);
    eprintln!("seed {seed}");
    let mut broker = KafkaBroker::start_for_long().await;
    let begun = Instant::now();
    let mut summary = Summary::default();
    let mut runs = 0;
    let planned = Duration::from_secs(minutes * 60);
    loop {
        let took = begun.elapsed();
        // A chance decides what a run reaches, so what is missing may come with another one.
        let lacks = plans.had_all_turns() && !summary.unreached().is_empty();
        if took >= planned && !(lacks && took < planned * 3 / 2) {
            break;
        }
        let (name, plan) = plans.next();
        let report = run(&plan, Some(&mut broker)).await;
        tell(json, &name, &report);
        summary.add(&name, &report);
        runs += 1;
    }
    let took = begun.elapsed().as_secs().div_ceil(60);
    let text = format!(
        "\n{runs} runs in {took} minutes: `scripts/torture --minutes {minutes} --seed {seed}`.{}\n\n{}\n{}\n",
        plans.without_a_turn(),
        summary.table(),
        summary.reached_table()
    );
    if !json {
        println!("{text}");
    }
    if let Some(path) = report_to
        && let Err(what) = write_report(&path, &text)
    {
        eprintln!("{what}");
        return ExitCode::FAILURE;
    }
    // Once every kind of run has had its turn, what was not reached was not tested.
    let proves_nothing = plans.had_all_turns() && !summary.unreached().is_empty();
    if summary.violations.is_empty() && !proves_nothing {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
