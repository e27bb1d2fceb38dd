//! A worker on standard streams for `oncegate run --handler-exec`: pays orders into the ledger, and
//! writes down what it does. It hangs when the stage has planned that for some message.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead as _, Write as _};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use oncegate::core::key::{CompiledKey, Scope};
use oncegate::{BoxError, Key, Message, Origin};
use oncegate_testing::promise::{History, Occurrence, SUCCEEDED};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::faults::Fault;
use super::settings::WorkerSettings;
use super::work::{FAILS_FOR, Fate, LEASE, Order};
use crate::ledger::Ledger;

/// The lease of programs: `--lease`. It is longer than that of recorded members, because no record
/// tells that a busy machine has kept a program from extending it, which would explain a second
/// effect.
pub(super) const PROGRAM_LEASE: Duration = LEASE.saturating_mul(3);
/// How long a message may take: `--timeout`. The longest one that does not hang takes a third of
/// it.
pub(super) const TIME_LIMIT: Duration = PROGRAM_LEASE.saturating_mul(2);
/// How long after the time limit a late answer comes: within the four fifths of a lease after which
/// a silent process is killed.
const LATE_BY: Duration = Duration::from_millis(300);
/// The outcomes of runs that hang, and of one that ends its process, in a history.
pub(super) const HUNG: &str = "hung";
pub(super) const LATE: &str = "late";
pub(super) const ENDED_ITS_PROCESS: &str = "ended its process";

/// How a worker hangs with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Silence {
    /// It waits for ever.
    Waits,
    /// Its process is stopped (SIGSTOP), and is not continued.
    Stops,
    /// It answers after the time limit, when the message was cancelled.
    AnswersLate,
}

/// What is to happen to the next message that would be paid at once: the content of a file that one
/// worker takes away.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct PlannedHang {
    pub(super) silence: Silence,
    /// Whether the order is paid before, or after if ever.
    pub(super) is_paid: bool,
}

/// Where planned hangs are, one file each.
pub(super) fn hangs_of(settings: &WorkerSettings) -> PathBuf {
    settings.history.with_file_name("hangs")
}

/// Where each worker notes which member has started it.
pub(super) fn crew_of(settings: &WorkerSettings) -> PathBuf {
    settings.history.with_file_name("crew")
}

/// A line of the protocol, as far as this worker reads it.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum FromOncegate {
    Message(GivenMessage),
    /// One message at a time: it is answered before this is read.
    Cancel {},
}

#[derive(Deserialize)]
struct GivenMessage {
    id: String,
    attempt: u32,
    origin: GivenOrigin,
    payload: String,
}

#[derive(Deserialize)]
struct GivenOrigin {
    kafka: KafkaPlace,
}

#[derive(Deserialize)]
struct KafkaPlace {
    topic: String,
    partition: i32,
    offset: i64,
}

/// One run of a message.
struct Run<'a> {
    cashier: &'a Cashier,
    id: &'a str,
    key: String,
    origin: String,
    attempt: u32,
    /// Whether it was noted how it ends.
    is_noted: bool,
}

struct Cashier {
    key: CompiledKey,
    ledger: Ledger,
    history: History,
    hangs: PathBuf,
}

/// A worker, until its input ends.
///
/// # Errors
/// When a file cannot be opened, or a line is none of the protocol.
pub fn serve(settings: &WorkerSettings) -> Result<(), BoxError> {
    let cashier = Cashier {
        key: Key::json(["order"]).compile(&Scope::new(&settings.scope)?)?,
        ledger: Ledger::open(&settings.ledger),
        history: History::open(&settings.history)?,
        hangs: hangs_of(settings),
    };
    join(&crew_of(settings))?;
    let mut out = io::stdout().lock();
    let mut answer = |line: Value| {
        writeln!(out, "{line}")?;
        out.flush()
    };
    answer(json!({ "type": "ready", "v": 1 }))?;
    for line in io::stdin().lock().lines() {
        if let FromOncegate::Message(given) = serde_json::from_str(&line?)? {
            answer(cashier.answer(&given)?)?;
        }
    }
    Ok(())
}

/// Notes which process has started this one, in one write.
fn join(crew: &Path) -> io::Result<()> {
    let line = format!("{} {}\n", std::process::id(), parent_id());
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(crew)?
        .write_all(line.as_bytes())
}

impl Cashier {
    fn answer(&self, given: &GivenMessage) -> Result<Value, BoxError> {
        let order: Order = serde_json::from_str(&given.payload)?;
        let KafkaPlace {
            topic,
            partition,
            offset,
        } = &given.origin.kafka;
        let payload = given.payload.clone().into();
        let message = Message::new(topic.as_str(), Origin::Other("given".into()), Some(payload));
        let key = self
            .key
            .derive(message.route(), &message)?
            .as_str()
            .to_owned();
        let origin = format!("{topic}/{partition}@{offset}");
        self.history.note(Occurrence::Begun {
            key: key.clone(),
            origin: origin.clone(),
            attempt: given.attempt,
            fencing_token: None,
            content: order.amount.to_string(),
        });
        let mut run = Run {
            cashier: self,
            id: &given.id,
            key,
            origin,
            attempt: given.attempt,
            is_noted: false,
        };
        Ok(match (Fate::of(order.order), given.attempt) {
            (Fate::FailsOnce, 1) => run.failed("retry", "it fails once"),
            (Fate::PanicsOnce, 1) => {
                run.ends(ENDED_ITS_PROCESS);
                std::process::exit(1);
            }
            (Fate::GivesUp, _) => run.failed("dead-letter", "this cannot be paid"),
            (Fate::FailsAlways, number) if number > FAILS_FOR => {
                run.failed("dead-letter", "it fails always")
            }
            (Fate::FailsAlways, _) => run.failed("retry", "it fails always"),
            (Fate::BlocksItsThread | Fate::TakesLong, 1) => {
                // What takes time is never the proof that time has passed: it only makes room for a
                // fault.
                std::thread::sleep(LEASE * 2);
                run.pay(&order, None)
            }
            (Fate::Pays | Fate::PaysWithoutAWait | Fate::Computes, _) => {
                run.pay(&order, self.planned_hang())
            }
            _ => run.pay(&order, None),
        })
    }

    /// Takes a planned hang away, if there is one.
    fn planned_hang(&self) -> Option<PlannedHang> {
        // Before the first one is planned, there is no folder.
        fs::read_dir(&self.hangs)
            .into_iter()
            .flatten()
            .flatten()
            .find_map(|file| {
                let planned = serde_json::from_slice(&fs::read(file.path()).ok()?).ok()?;
                // One of several processes removes it.
                fs::remove_file(file.path()).ok().map(|()| planned)
            })
    }
}

impl Run<'_> {
    fn pay(&mut self, order: &Order, hang: Option<PlannedHang>) -> Value {
        let payment = format!("{}/{}", order.order, order.amount);
        if let Some(hang) = hang.filter(|hang| !hang.is_paid) {
            self.hang(hang.silence);
        }
        self.cashier.ledger.append(&payment);
        if let Some(hang) = hang.filter(|hang| hang.is_paid) {
            self.hang(hang.silence);
        }
        // As long as a handler of a consumer takes after its effect: room for a fault.
        std::thread::sleep(Duration::from_millis(2));
        self.ends(SUCCEEDED);
        json!({ "id": self.id, "outcome": "complete", "result": payment })
    }

    fn failed(&mut self, outcome: &str, reason: &str) -> Value {
        self.ends(if outcome == "retry" {
            "failed"
        } else {
            "gave_up"
        });
        json!({ "id": self.id, "outcome": outcome, "reason": reason })
    }

    /// Returns only if it is to answer late.
    fn hang(&mut self, silence: Silence) {
        let history = &self.cashier.history;
        history.note(Occurrence::FaultBegins {
            fault: Fault::Hang.name().to_owned(),
        });
        match silence {
            Silence::AnswersLate => {
                self.ends(LATE);
                std::thread::sleep(TIME_LIMIT + LATE_BY);
                return;
            }
            Silence::Waits => self.ends(HUNG),
            Silence::Stops => {
                self.ends(HUNG);
                let id = std::process::id().to_string();
                let stopped = Command::new("sh")
                    .args(["-c", r#"kill -s STOP "$1""#, "kill", &id])
                    .status();
                stopped.expect("a process may stop itself");
            }
        }
        loop {
            std::thread::park();
        }
    }

    /// Notes how it ends. Only the first time counts: a late one has hung, whatever it answers.
    fn ends(&mut self, outcome: &str) {
        if std::mem::replace(&mut self.is_noted, true) {
            return;
        }
        self.cashier.history.note(Occurrence::Ended {
            key: self.key.clone(),
            origin: self.origin.clone(),
            attempt: self.attempt,
            outcome: outcome.to_owned(),
        });
    }
}
