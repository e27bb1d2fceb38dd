//! `oncegate init`: writes a configuration, a worker in the language asked for, and messages to try
//! them with.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;

use crate::exit::{Exit, Problem};
use crate::output;
use crate::sources::{InitFlags, SourceKind, Template, quoted};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.init/1";

const CONFIGURATION: &str = "oncegate.toml";
const MESSAGES: &str = "orders.jsonl";
const SAMPLES: &str = "samples.jsonl";

/// Write a commented configuration, a worker, and a few messages to try them with
///
/// The worker handles orders: change it, and `key`, to what your messages are. Files that exist are
/// never overwritten: then nothing is written, and the exit code is 1.
#[derive(Debug, clap::Args)]
pub(crate) struct InitArgs {
    /// The folder to write to; it is made if there is none
    #[arg(value_name = "FOLDER", default_value = ".")]
    folder: PathBuf,

    /// The language of the worker: python, node, go, rust or bash; one of any other language is
    /// called by HTTP, and written by hand (docs/RUN.md)
    #[arg(long, value_name = "LANGUAGE", value_parser = Language::named)]
    language: Language,

    /// Where messages come from
    #[arg(long, value_name = "SOURCE", default_value = "stdin")]
    source: SourceKind,

    /// The consumer's name, which is the scope of its keys
    #[arg(long, value_name = "NAME", default_value = "billing")]
    scope: oncegate::core::key::Scope,

    /// store.url [default: sqlite:oncegate.db, and redis://localhost:6379 for topics and queues]
    #[arg(long, value_name = "URL")]
    store: Option<String>,

    #[command(flatten)]
    flags: InitFlags,

    /// Only print what would be written
    #[arg(long)]
    dry_run: bool,

    /// Print one JSON document
    #[arg(long)]
    json: bool,
}

/// A language that workers are written in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Language {
    Python,
    Node,
    Go,
    Rust,
    Bash,
}

impl Language {
    /// # Errors
    /// When there is no worker in this language; the text says how it is called all the same.
    fn named(text: &str) -> Result<Self, String> {
        <Self as ValueEnum>::from_str(text, true).map_err(|_| {
            let names = Self::value_variants().iter();
            let names = names.filter_map(ValueEnum::to_possible_value);
            let names: Vec<String> = names.map(|name| name.get_name().to_owned()).collect();
            format!(
                "workers are written in {}. A program in another language is a worker, too: as a service, handler = {{ http = \
                 \"http://127.0.0.1:8080/handle\" }}, or a program that reads a line and answers with one, handler = {{ exec = \
                 [\"./worker\"] }}; docs/RUN.md describes both, and `oncegate worker-test` tests it",
                names.join(", ")
            )
        })
    }

    /// The files of the worker, each with its text.
    const fn worker(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Python => &[("worker.py", include_str!("../templates/worker.py"))],
            Self::Node => &[("worker.js", include_str!("../templates/worker.js"))],
            Self::Go => &[("worker.go", include_str!("../templates/worker.go"))],
            // As a file `Cargo.toml`, the template would keep its folder out of this crate's
            // package.
            Self::Rust => &[
                (
                    "Cargo.toml",
                    include_str!("../templates/worker-manifest.toml"),
                ),
                ("src/main.rs", include_str!("../templates/worker.rs")),
            ],
            Self::Bash => &[("worker.sh", include_str!("../templates/worker.sh"))],
        }
    }

    /// The setting `handler`, and what it does.
    const fn handler(self) -> (&'static str, &'static str) {
        const LINES: &str = "A program that oncegate starts and exchanges JSON lines with.";
        match self {
            Self::Python => (r#"{ exec = ["python3", "worker.py"], workers = 2 }"#, LINES),
            Self::Node => (r#"{ exec = ["node", "worker.js"] }"#, LINES),
            Self::Go => (r#"{ exec = ["./worker"], workers = 2 }"#, LINES),
            Self::Rust => (
                r#"{ exec = ["./target/release/worker"], workers = 2 }"#,
                LINES,
            ),
            Self::Bash => (
                r#"{ command = ["bash", "worker.sh"] }"#,
                "A program that oncegate starts for each message.",
            ),
        }
    }

    /// The command that builds the worker.
    const fn build(self) -> Option<&'static str> {
        match self {
            Self::Go => Some("go build -o worker worker.go"),
            Self::Rust => Some("cargo build --release"),
            Self::Python | Self::Node | Self::Bash => None,
        }
    }
}

/// The answer of `--json`.
#[derive(Serialize)]
struct InitDocument<'a> {
    schema: &'static str,
    folder: &'a Path,
    files: Vec<&'static str>,
    /// The commands to continue with, in the folder.
    next: &'a [String],
    /// `true` if the files were written.
    done: bool,
}

pub(crate) fn run(args: &InitArgs) -> Result<Exit, Problem> {
    let configuration = args.configuration();
    let mut files = vec![(CONFIGURATION, configuration.as_str())];
    files.extend(args.language.worker());
    files.push((MESSAGES, include_str!("../templates/orders.jsonl")));
    files.push((SAMPLES, include_str!("../templates/samples.jsonl")));
    if let Some((name, _)) = files
        .iter()
        .find(|(name, _)| args.folder.join(name).exists())
    {
        let text = format!(
            "{} exists; nothing was written",
            args.folder.join(name).display()
        );
        return Err(Problem::new(Exit::No, text));
    }
    let next = args.next();
    if args.json {
        let files_named = files.iter().map(|(name, _)| *name).collect();
        if !args.dry_run {
            write(&args.folder, &files)?;
        }
        let folder = &*args.folder;
        let done = !args.dry_run;
        output::answer_json(&InitDocument {
            schema: SCHEMA,
            folder,
            files: files_named,
            next: &next,
            done,
        })?;
        return Ok(Exit::Yes);
    }
    if args.dry_run {
        let shown: Vec<String> = files
            .iter()
            .map(|(name, text)| format!("==> {} <==\n{text}", args.folder.join(name).display()))
            .collect();
        output::answer(&shown.join("\n"))?;
        return Ok(Exit::Yes);
    }
    write(&args.folder, &files)?;
    let change = (args.folder != Path::new(".")).then(|| format!("cd {}", args.folder.display()));
    let next: Vec<String> = change
        .into_iter()
        .chain(next)
        .map(|command| format!("  {command}"))
        .collect();
    let names = files
        .iter()
        .map(|(name, _)| *name)
        .collect::<Vec<_>>()
        .join(", ");
    output::answer(&format!("wrote {names}\n\nnext:\n{}", next.join("\n")))?;
    Ok(Exit::Yes)
}

/// Writes new files; one that has come into being meanwhile is not overwritten either.
fn write(folder: &Path, files: &[(&str, &str)]) -> Result<(), Problem> {
    for (name, text) in files {
        let path = folder.join(name);
        let parent = path.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent).map_err(|error| not_written(parent, &error))?;
        let file = OpenOptions::new().write(true).create_new(true).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| not_written(&path, &error))?;
    }
    Ok(())
}

fn not_written(path: &Path, error: &io::Error) -> Problem {
    Problem::configuration(format!("{} cannot be written: {error}", path.display()))
}

impl InitArgs {
    /// Returns what is written about the source.
    fn template(&self) -> Template {
        self.source.template(&self.flags, MESSAGES)
    }

    /// Returns the commands to continue with, in the folder: what tries the worker comes before
    /// what runs it.
    fn next(&self) -> Vec<String> {
        let mut next: Vec<String> = self
            .language
            .build()
            .map(str::to_owned)
            .into_iter()
            .collect();
        next.push(format!(
            "head -n 1 {SAMPLES} | oncegate worker-test --config {CONFIGURATION}"
        ));
        next.push(format!(
            "oncegate prove --config {CONFIGURATION} --samples {SAMPLES}"
        ));
        next.extend(self.template().next);
        next
    }

    fn configuration(&self) -> String {
        let Template {
            source,
            dead_letters,
            about: on_source,
            store,
            ..
        } = self.template();
        let store = self.store.as_deref().unwrap_or(store);
        let (handler, on_handler) = self.language.handler();
        let scope = self.scope.as_str();
        format!(
            r#"# Settings of oncegate. docs/CONFIGURATION.md lists all; `oncegate check --explain` shows their values.
version = 1

[store]
# Where oncegate records what is done. SQLite (sqlite:FILE) serves one machine; Redis and PostgreSQL serve many.
url = {store}

# The name of a consumer is the scope of its keys: keep it when the rest changes.
[consumer.{name}]
# {on_source}
source = {source}
# The fields that identify a message: messages that are equal here are one message, however they are written.
key = {{ json = ["order_id", "amount"] }}
# {on_handler}
handler = {handler}
# Where messages go that are given up, with their bytes and the reason.
dead_letters = {dead_letters}
# How often a message is tried before it is given up, and how long the result of a finished one is kept: longer than
# you ever want to replay.
max_attempts = 10
retention = "7d"
"#,
            store = quoted(store),
            // A dot would begin another table.
            name = if scope.contains('.') {
                quoted(scope)
            } else {
                scope.to_owned()
            },
        )
    }
}
