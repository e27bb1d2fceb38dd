//! `oncegate worker-test`: does a worker keep the protocol?
//!
//! `subject` is the worker as the test sees it, over HTTP, on standard streams or as a command; `dialogue` speaks with one
//! on standard streams, and sees how its process ends.

mod dialogue;
mod subject;

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use oncegate::{Entry, Gate, Key, Lease, MemoryStore, Message, Origin};
use serde::Serialize;

use super::worker::Reply;
use crate::args::{AnswerArgs, duration, read_file, within};
use crate::config::shape;
use crate::config::values::{Program, Secret};
use crate::exit::{Exit, Problem};
use crate::output::{self, plain};
use subject::{Interrupted, Subject};

/// Names the form of the document that `--json` prints.
const SCHEMA: &str = "oncegate.worker-test/1";

/// What no worker can read: neither JSON nor UTF-8.
const GARBAGE: &[u8] = b"\xff\x00{worker-test";
/// How long a claim lasts here: how long the second attempt of a message has to wait.
const LEASE: Duration = Duration::from_millis(200);

/// Test a worker before it meets a broker: does it keep what docs/RUN.md asks of it?
///
/// It is called as `oncegate run` would call it, with the payload given, which must be one that it can do: the work is
/// done, twice. Nothing is consumed, and no store is asked. Exit code 1: a check has failed.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("worker").required(true))]
pub(crate) struct Args {
    /// A worker behind HTTP: http://127.0.0.1:8080/handle, https://worker/handle or unix:/path/of/socket
    #[arg(long, value_name = "URL", group = "worker")]
    handler: Option<String>,

    /// A worker on standard streams
    #[arg(long, value_name = "COMMAND", group = "worker")]
    handler_exec: Option<String>,

    /// A program that is started for each message
    #[arg(long, value_name = "COMMAND", group = "worker")]
    handler_command: Option<String>,

    /// Asked until it answers with 2xx, before the first message
    #[arg(long, value_name = "URL", requires = "handler")]
    ready_url: Option<String>,

    /// The content type of the payload
    #[arg(long, value_name = "TYPE", default_value = "application/json", requires = "handler")]
    content_type: String,

    /// A file with the token that --handler wants
    #[arg(long, value_name = "FILE", requires = "handler")]
    token_file: Option<PathBuf>,

    /// The authority that has signed the worker's certificate, a file in PEM [default: those of the machine]
    #[arg(long, value_name = "FILE", requires = "handler")]
    handler_tls_root: Option<PathBuf>,

    /// Allow --handler to be another machine although nobody encrypts it
    #[arg(long, requires = "handler")]
    allow_remote: bool,

    /// How long the worker may take for each answer
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10s")]
    patience: Duration,

    #[command(flatten)]
    answer: AnswerArgs,

    /// The file that holds a payload which the worker can do [default: standard input]
    #[arg(value_name = "PAYLOAD")]
    payload: Option<PathBuf>,
}

/// One thing that a worker must do.
#[derive(Debug, Serialize)]
struct Check {
    /// One word.
    name: &'static str,
    ok: bool,
    /// What it is about, or what was seen instead.
    found: String,
    /// What to change; nothing when it is well.
    #[serde(skip_serializing_if = "str::is_empty")]
    fix: &'static str,
}

/// The answer of `--json`.
#[derive(Debug, Serialize)]
struct Document {
    schema: &'static str,
    ok: bool,
    checks: Vec<Check>,
}

pub(crate) async fn run(args: &Args) -> Result<Exit, Problem> {
    let payload = Bytes::from(read_file(args.payload.clone()).await?);
    let checks = within(args.answer.timeout, Box::pin(examine(args, payload))).await?;
    let ok = checks.iter().all(|check| check.ok);
    if args.answer.json {
        output::answer_json(&Document { schema: SCHEMA, ok, checks })?;
    } else {
        output::answer(&text(&checks))?;
    }
    Ok(if ok { Exit::Yes } else { Exit::No })
}

impl Args {
    fn handler(&self) -> shape::Handler {
        let program = |text: &String| Program::Shell(text.clone());
        shape::Handler {
            http: self.handler.clone(),
            exec: self.handler_exec.as_ref().map(program),
            command: self.handler_command.as_ref().map(program),
            ready_url: self.ready_url.clone(),
            content_type: Some(self.content_type.clone()),
            token: self.token_file.clone().map(Secret::File),
            tls_root: self.handler_tls_root.clone(),
            allow_remote: Some(self.allow_remote),
            ..shape::Handler::default()
        }
    }
}

/// The checks so far, and what they need.
struct Exam {
    subject: Subject,
    messages: Messages,
    checks: Vec<Check>,
}

async fn examine(args: &Args, payload: Bytes) -> Result<Vec<Check>, Problem> {
    let refuse = |why: String| Problem::new(Exit::Configuration, why);
    let subject = Subject::of(&args.handler(), args.patience).map_err(refuse)?;
    let mut exam = Exam { subject, messages: Messages::new(payload)?, checks: Vec::new() };
    if !exam.is_ready().await || !exam.does_the_work().await? {
        // Whatever else could be said would follow from that.
        return Ok(exam.checks);
    }
    exam.survives_garbage().await?;
    if exam.subject.is_told_to_stop() {
        exam.survives_a_cancellation().await?;
    }
    if matches!(exam.subject, Subject::Exec(_)) {
        exam.ends_with_its_input().await;
        exam.ends_when_told_to().await;
    }
    Ok(exam.checks)
}

impl Exam {
    fn note(&mut self, name: &'static str, ok: Result<String, String>, fix: &'static str) -> bool {
        let is_ok = ok.is_ok();
        let (Ok(found) | Err(found)) = ok;
        self.checks.push(Check { name, ok: is_ok, found, fix: if is_ok { "" } else { fix } });
        is_ok
    }

    async fn is_ready(&mut self) -> bool {
        let ready = self.subject.ready().await.map(|()| "it is ready".to_owned());
        let fix = match &self.subject {
            Subject::Exec(_) => {
                "its first line must be {\"type\":\"ready\",\"v\":1}; print nothing else to standard output, and flush it"
            }
            _ => "start it, and check its address; with --ready-url, that must answer with 2xx",
        };
        self.note("ready", ready, fix)
    }

    /// The same message twice, as after a crash: the second time it is said to be recovered.
    async fn does_the_work(&mut self) -> Result<bool, Problem> {
        let mut lease = self.messages.good().await?;
        let first = self.tell(&lease).await;
        let done = self.note(
            "completes",
            completed(&first),
            "answer the payload with 2xx, \"outcome\":\"complete\" or exit code 0; give one that it can do as PAYLOAD",
        );
        if !done {
            return Ok(false);
        }
        let message = lease.message().clone();
        drop(lease);
        lease = self.messages.again(&message).await?;
        let second = self.tell(&lease).await;
        self.note(
            "repeats",
            completed(&second).map(|_| "the same message again, as recovered, is completed again".to_owned()),
            "a message that comes again under its idempotency key must get the same outcome: it is done already",
        );
        Ok(true)
    }

    async fn tell(&mut self, lease: &Lease) -> Reply {
        self.subject.tell(lease).await
    }

    async fn survives_garbage(&mut self) -> Result<(), Problem> {
        let lease = self.messages.garbage().await?;
        let reply = self.tell(&lease).await;
        let fix = "catch what cannot be read, and give it up: 400 or 422, \"outcome\":\"dead-letter\", exit code 65";
        let answered = match &reply {
            Reply::Unknown { reason } | Reply::NotRun { reason } => {
                Err(format!("a payload that it cannot read: {}", short(reason)))
            }
            _ => Ok(format!("a payload that it cannot read: {}", outcome(&reply))),
        };
        self.note("garbage", answered, fix);
        self.goes_on("after-garbage", "it goes on after that", fix).await
    }

    async fn survives_a_cancellation(&mut self) -> Result<(), Problem> {
        let lease = self.messages.good().await?;
        let interrupted = self.subject.interrupt(&lease).await;
        let fix = "a message that nobody waits for any more must end nothing but itself";
        match interrupted {
            Interrupted::Told => {
                self.goes_on("cancelled", "it goes on after a message that was cancelled", fix).await
            }
            Interrupted::Silent(why) => {
                let fix = "answer a message that was cancelled, too, with any outcome: its place is taken until then, and a worker that stays silent is killed";
                self.note("cancelled", Err(why), fix);
                Ok(())
            }
            Interrupted::Answered => {
                self.goes_on("cancelled", "it was done before it could be cancelled, and goes on", fix).await
            }
        }
    }

    /// It must still do what it did.
    async fn goes_on(&mut self, name: &'static str, what: &str, fix: &'static str) -> Result<(), Problem> {
        if let Err(why) = self.subject.ready().await {
            self.note(name, Err(why), fix);
            return Ok(());
        }
        let lease = self.messages.good().await?;
        let reply = self.tell(&lease).await;
        self.note(name, completed(&reply).map(|_| what.to_owned()), fix);
        Ok(())
    }

    async fn ends_with_its_input(&mut self) {
        let Subject::Exec(worker) = &mut self.subject else { return };
        let ended = worker.end_by_input().await;
        let fix = "end with exit code 0 when standard input ends: that is how oncegate stops a worker";
        self.note("end-of-input", ended, fix);
    }

    async fn ends_when_told_to(&mut self) {
        let Subject::Exec(worker) = &mut self.subject else { return };
        let ended = worker.end_by_signal().await;
        let fix = "do not ignore SIGTERM: five seconds later comes SIGKILL";
        self.note("sigterm", ended, fix);
    }
}

fn completed(reply: &Reply) -> Result<String, String> {
    match reply {
        Reply::Complete(_) => Ok("the payload is completed".to_owned()),
        other => Err(format!("the payload: {}", outcome(other))),
    }
}

/// In words.
fn outcome(reply: &Reply) -> String {
    match reply {
        Reply::Complete(_) => "complete".to_owned(),
        Reply::Retry { reason, .. } => format!("retry ({})", short(reason)),
        Reply::DeadLetter { reason } => format!("dead letter ({})", short(reason)),
        Reply::Unknown { reason } => format!("unknown ({})", short(reason)),
        Reply::NotRun { reason } => format!("not begun ({})", short(reason)),
    }
}

fn short(reason: &str) -> String {
    const SHOWN_MOST: usize = 200;
    reason.chars().take(SHOWN_MOST).collect()
}

fn text(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Check { name, ok, found, fix } in checks {
        let verdict = if *ok { "ok    " } else { "FAILED" };
        text.push_str(&format!("{verdict}  {name:width$}  {}\n", plain(found)));
        if !fix.is_empty() {
            text.push_str(&format!("        fix: {fix}\n"));
        }
    }
    text
}

/// Makes messages with attempts as a gate gives them.
struct Messages {
    gate: Gate,
    payload: Bytes,
    made: u32,
    /// Another one at each test, so that a worker that remembers keys has never seen it.
    test: String,
}

impl Messages {
    fn new(payload: Bytes) -> Result<Self, Problem> {
        let gate = Gate::new("worker-test", Key::message_key(), MemoryStore::new()).lease(LEASE);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let test = format!("{}-{}", now.as_nanos(), std::process::id());
        Ok(Self { gate, payload, made: 0, test })
    }

    async fn good(&mut self) -> Result<Lease, Problem> {
        self.new_one(self.payload.clone()).await
    }

    async fn garbage(&mut self) -> Result<Lease, Problem> {
        self.new_one(Bytes::from_static(GARBAGE)).await
    }

    async fn new_one(&mut self, payload: Bytes) -> Result<Lease, Problem> {
        self.made += 1;
        let origin =
            Origin::Kafka { topic: "worker-test".into(), partition: 0, offset: i64::from(self.made) };
        let message = Message::new("worker-test", origin, Some(payload));
        self.again(&message.with_key(format!("{}-{}", self.test, self.made))).await
    }

    /// The next attempt of a message, as soon as the one before is over.
    async fn again(&self, message: &Message) -> Result<Lease, Problem> {
        loop {
            match self.gate.enter(message).await {
                Ok(Entry::Granted(lease)) => return Ok(lease),
                Ok(Entry::Busy { retry_in }) => tokio::time::sleep(retry_in).await,
                Ok(other) => return Err(Problem::new(Exit::Bug, format!("a test message is {other:?}"))),
                Err(error) => return Err(Problem::caused(Exit::Bug, &error)),
            }
        }
    }
}
