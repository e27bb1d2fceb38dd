//! The data of a status page, for people.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use axum::http::StatusCode;
use bytesize::ByteSize;
use oncegate::health::{PartitionStatus, Phase, ScopeStatus, Status, WorkerStatus};
use serde::Deserialize;
use serde_json::Value;

use crate::exit::{Exit, Problem};
use crate::output::{self, Table, counted, grouped, plain, span};

/// The path of the data.
pub(super) const PATH: &str = "/status.json";

/// The format of the data, which is the `--json` document as well.
const SCHEMA: &str = "oncegate.status/1";

/// The data of a status page.
#[derive(Debug, Deserialize)]
struct Page {
    version: String,
    at_unix_ms: u64,
    consumers: Vec<Shown>,
    /// By metric, then by label.
    counts: BTreeMap<String, BTreeMap<String, u64>>,
    /// The newest first.
    dead_letters: Vec<Letter>,
}

/// A consumer.
#[derive(Debug, Deserialize)]
struct Shown {
    live: bool,
    ready: bool,
    reasons: Vec<Wrong>,
    /// Sentences about everything that waits; an older process has none.
    #[serde(default)]
    waits: Vec<String>,
    status: Status,
}

/// Something that is wrong.
#[derive(Debug, Deserialize)]
struct Wrong {
    words: String,
}

/// A dead letter.
#[derive(Debug, Deserialize)]
struct Letter {
    at_unix_ms: u64,
    scope: String,
    origin: String,
    cause: String,
    reason: String,
}

/// Prints the data of the page.
pub(super) fn tell(
    url: &str,
    (status, body): &(StatusCode, String),
    json: bool,
) -> Result<Exit, Problem> {
    if !status.is_success() {
        let text = format!("{url} answers {status}: {}", plain(body.trim()));
        return Err(Problem::new(Exit::Unreachable, text));
    }
    let document: Value = serde_json::from_str(body).map_err(|error| foreign(url, &error))?;
    if document.get("schema").and_then(Value::as_str) != Some(SCHEMA) {
        return Err(foreign(url, &format!("its `schema` is not {SCHEMA}")));
    }
    let page = Page::deserialize(&document).map_err(|error| foreign(url, &error))?;
    if json {
        output::answer_json(&document)?;
    } else {
        output::answer(&page.text())?;
    }
    let ready = page.consumers.iter().all(|shown| shown.ready);
    Ok(if ready { Exit::Yes } else { Exit::No })
}

fn foreign(url: &str, why: &dyn std::fmt::Display) -> Problem {
    Problem::new(
        Exit::BadData,
        format!("{url} is no status page that this release reads: {why}"),
    )
}

impl Page {
    fn text(&self) -> String {
        let mut text = format!(
            "oncegate {} at {}\n",
            plain(&self.version),
            time(self.at_unix_ms)
        );
        for shown in &self.consumers {
            text.push_str(&format!("\n{}", shown.text()));
        }
        text.push_str(&format!("\nsince the start\n{}", self.totals().render()));
        if !self.dead_letters.is_empty() {
            text.push_str("\nthe last dead letters\n");
        }
        for letter in &self.dead_letters {
            text.push_str(&letter.line());
        }
        text
    }

    /// Returns the counts of all consumers together.
    fn totals(&self) -> Table {
        let mut table = Table::default();
        table.number("acknowledged", self.count("acks"));
        let succeeded = self
            .labels("handler_runs")
            .filter(|(label, _)| *label == "succeeded");
        table.number(
            "handlers succeeded",
            succeeded.map(|(_, count)| count).sum(),
        );
        table.number("retries", self.count("retries"));
        table.number("extra runs", self.count("extra_runs"));
        for (cause, runs) in self.labels("extra_runs") {
            table.number(&format!("  {}", words(cause)), *runs);
        }
        table.noted(
            "completions refused",
            self.count("complete_lost"),
            "of owners that were replaced",
        );
        table.number("store errors", self.count("store_errors"));
        table.number("losses of records", self.count("store_losses"));
        table.number("dead letters", self.count("dead_letters"));
        table
    }

    fn labels(&self, metric: &str) -> impl Iterator<Item = (&String, &u64)> {
        self.counts.get(metric).into_iter().flatten()
    }

    fn count(&self, metric: &str) -> u64 {
        self.labels(metric).map(|(_, count)| count).sum()
    }
}

impl Shown {
    fn text(&self) -> String {
        let status = &self.status;
        let mut table = Table::default();
        table.text("consumer", &status.name);
        let phase = match status.phase {
            Phase::Starting => "starting",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
            Phase::Stopped => "stopped",
            _ => "in an unknown phase",
        };
        let judgement = self.judgement();
        table.text(
            "state",
            format!("{judgement}, {phase} for {}", span(status.up)),
        );
        for Wrong { words } in &self.reasons {
            table.text("  because", words);
        }
        for wait in &self.waits {
            table.text("  waits", wait);
        }
        table.optional("ended", status.error.as_ref());
        work(&mut table, status);
        if let Some(worker) = &status.worker {
            processes(&mut table, worker);
        }
        for scope in &status.scopes {
            store(&mut table, scope);
        }
        for partition in &status.source.partitions {
            let name = format!("{}/{}", partition.topic, partition.partition);
            table.text(&name, place(partition));
        }
        table.render()
    }

    fn judgement(&self) -> &'static str {
        match (self.live, self.ready, self.reasons.is_empty()) {
            (false, ..) => "stalled",
            (true, false, _) => "not ready",
            (true, true, false) => "degraded",
            (true, true, true) => "healthy",
        }
    }
}

/// Adds what the consumer does and what waits.
fn work(table: &mut Table, status: &Status) {
    let permits = status.permits;
    let slow = status.handler_p99.map_or_else(String::new, |time| {
        format!("; 99 of 100 take no longer than {}", span(time))
    });
    let running = permits.total.saturating_sub(permits.free);
    table.text(
        "handlers",
        format!("{running} of {} run{slow}", permits.total),
    );
    let messages = status.messages;
    table.text(
        "in flight",
        format!(
            "{}, {}; {} wait, {} are parked, {} held back",
            counted(messages.in_flight as u64, "message"),
            ByteSize::b(messages.bytes as u64),
            grouped((messages.ready + messages.behind) as u64),
            grouped(messages.parked as u64),
            grouped(messages.held_back as u64),
        ),
    );
    table.text(
        "a second",
        format!(
            "{:.1} delivered, {:.1} acknowledged",
            status.rates.delivered_per_second, status.rates.ended_per_second
        ),
    );
    if !status.paused.is_empty() {
        let causes = status.paused.iter().map(|cause| words(cause.as_str()));
        table.text("paused", causes.collect::<Vec<_>>().join(", "));
    }
}

/// Adds the processes of a worker.
fn processes(table: &mut Table, worker: &WorkerStatus) {
    let WorkerStatus {
        processes,
        ready,
        restarts,
        ..
    } = worker;
    if worker.not_ready.is_none() && processes + worker.ends_in_a_row == 0 && *restarts == 0 {
        return;
    }
    table.text(
        "worker",
        format!(
            "{ready} of {} ready; {restarts} started again",
            counted(u64::from(*processes), "process")
        ),
    );
    table.optional("  the last ended", worker.last_end.as_ref());
}

/// Adds a store, and the promise in force.
fn store(table: &mut Table, scope: &ScopeStatus) {
    let state = if scope.is_store_up() {
        "answers".to_owned()
    } else {
        let outages = scope.outages.iter().map(|outage| {
            if outage.halted {
                return "halted, for it has lost records".to_owned();
            }
            let open = if outage.open {
                ", messages run without it"
            } else {
                ""
            };
            format!("away for {}{open}", span(outage.lasts))
        });
        outages.collect::<Vec<_>>().join("; ")
    };
    table.text("store", format!("{}: {state}", scope.store));
    table.text("  promise", format!("{}: {}", scope.promise, scope.holds));
    for warning in &scope.warnings {
        table.text("  warning", warning);
    }
}

/// Returns how far a partition or queue is.
fn place(partition: &PartitionStatus) -> String {
    let mut facts = Vec::new();
    if let Some(lag) = partition.lag {
        facts.push(format!("lag {}", grouped(lag)));
    }
    if let Some(withheld) = partition.withheld.filter(|withheld| *withheld > 0) {
        facts.push(format!("{} behind an open transaction", grouped(withheld)));
    }
    if let Some(committed) = partition.committed {
        facts.push(format!("committed {committed}"));
    }
    facts.push(format!("{} in flight", grouped(partition.in_flight as u64)));
    if let Some(age) = partition.oldest_unfinished {
        facts.push(format!("the oldest for {}", span(age)));
    }
    if let Some(first) = &partition.first {
        facts.push(format!("{} {}", first.origin, first.stage));
    }
    if let Some(cause) = partition.paused {
        facts.push(format!("paused: {}", words(cause.as_str())));
    }
    facts.join(", ")
}

impl Letter {
    fn line(&self) -> String {
        format!(
            "  {}  {}  {}  {}: {}\n",
            time(self.at_unix_ms),
            plain(&self.scope),
            plain(&self.origin),
            plain(&words(&self.cause)),
            plain(&self.reason)
        )
    }
}

fn time(unix_ms: u64) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(unix_ms));
    output::time(time.unwrap_or(SystemTime::UNIX_EPOCH))
}

/// A name in metrics as words.
fn words(name: &str) -> String {
    name.replace('_', " ")
}
