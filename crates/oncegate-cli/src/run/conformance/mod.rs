//! `oncegate worker-test`: tests whether a worker keeps the protocol.
//!
//! `messages` makes the messages of the test.

mod messages;

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use oncegate::core::key::Scope;
use oncegate::{GateSettings, Lease};
use oncegate_worker::{Interrupted, Reply, Subject, WorkerError, WorkerLimits};
use serde::Serialize;

use super::workers;
use crate::args::{AnswerArgs, read_file, within};
use crate::config::shape;
use crate::config::values::{ProgramSetting, Secret};
use crate::configured::{ConfigArgs, choose, missing, route_of};
use crate::exit::{Exit, Problem};
use crate::output::{self, plain};
use crate::parse::duration;
use messages::{LEASE, Messages};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.worker-test/1";

/// The route of the messages where no configuration gives one.
const ROUTE: &str = "worker-test";
/// The content type where no configuration gives one.
const JSON: &str = "application/json";

/// Test whether a worker meets the requirements of docs/RUN.md, without a broker
///
/// The worker is called as `oncegate run` would call it, with the given payload. The payload must
/// be one that the worker can handle: the work is done, twice. No topic is consumed and no store is
/// used. Exit code 1: a check has failed.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("worker"))]
pub(crate) struct WorkerTestArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// The consumer of the configuration whose worker is tested [default: its only one]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    /// A worker behind HTTP: http://127.0.0.1:8080/handle, https://worker/handle or
    /// unix:/path/of/socket
    #[arg(long, value_name = "URL", group = "worker")]
    handler: Option<String>,

    /// A worker on standard streams
    #[arg(long, value_name = "COMMAND", group = "worker")]
    handler_exec: Option<String>,

    /// A program that is started for each message
    #[arg(long, value_name = "COMMAND", group = "worker")]
    handler_command: Option<String>,

    /// A URL that is requested until it answers with 2xx, before the first message
    #[arg(long, value_name = "URL")]
    ready_url: Option<String>,

    /// The content type of the payload [default: application/json, or that of --config]
    #[arg(long, value_name = "TYPE")]
    content_type: Option<String>,

    /// A file with the token that --handler requires
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,

    /// The authority that has signed the worker's certificate, a file in PEM [default: those of the
    /// machine]
    #[arg(long, value_name = "FILE")]
    handler_tls_root: Option<PathBuf>,

    /// The certificate that the worker requires of its clients, a file in PEM
    #[arg(long, value_name = "FILE", requires = "handler_tls_key")]
    handler_tls_certificate: Option<PathBuf>,

    /// The key of that certificate, a file in PEM
    #[arg(long, value_name = "FILE", requires = "handler_tls_certificate")]
    handler_tls_key: Option<PathBuf>,

    /// Allow --handler to be another machine over unencrypted http
    #[arg(long)]
    allow_remote: bool,

    /// How long the worker may take for each answer
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10s")]
    patience: Duration,

    #[command(flatten)]
    answer: AnswerArgs,

    /// The file with a payload that the worker can handle [default: standard input]
    #[arg(value_name = "PAYLOAD")]
    payload: Option<PathBuf>,
}

/// A requirement of a worker.
#[derive(Debug, Serialize)]
struct Check {
    /// The name of the check: one word.
    name: &'static str,
    ok: bool,
    /// The requirement, or what happened instead.
    found: String,
    /// The change to make; absent when the check passed.
    #[serde(skip_serializing_if = "str::is_empty")]
    fix: &'static str,
}

/// The answer of `--json`.
#[derive(Debug, Serialize)]
struct WorkerTestDocument {
    schema: &'static str,
    ok: bool,
    checks: Vec<Check>,
}

/// The worker that is tested.
struct Tested {
    handler: shape::Handler,
    /// The route of its messages.
    route: String,
    /// The variables of this process that the worker does not get.
    hidden: Vec<String>,
}

pub(crate) async fn run(args: &WorkerTestArgs) -> Result<Exit, Problem> {
    let tested = args.tested()?;
    let payload = Bytes::from(read_file(args.payload.clone()).await?);
    let examined = examine(&tested, args.patience, payload);
    let checks = within(args.answer.timeout, Box::pin(examined)).await?;
    let ok = checks.iter().all(|check| check.ok);
    if args.answer.json {
        output::answer_json(&WorkerTestDocument {
            schema: SCHEMA,
            ok,
            checks,
        })?;
    } else {
        output::answer(&text(&checks))?;
    }
    Ok(if ok { Exit::Yes } else { Exit::No })
}

impl WorkerTestArgs {
    /// # Errors
    /// When neither flags nor a configuration name a worker, or a flag is not about this worker.
    fn tested(&self) -> Result<Tested, Problem> {
        let tested = match self.config.load(self.names_worker())? {
            None => {
                let json = shape::Handler {
                    content_type: Some(JSON.to_owned()),
                    ..shape::Handler::default()
                };
                Tested {
                    handler: self.over(json),
                    route: ROUTE.to_owned(),
                    hidden: Vec::new(),
                }
            }
            Some(loaded) => {
                let (_, settings) = choose(&loaded, self.scope.as_ref().map(Scope::as_str))?;
                // A worker for several topics tells them apart, or does not.
                let route = route_of(settings).ok().flatten();
                Tested {
                    handler: self.over(settings.handler.clone().unwrap_or_default()),
                    route: route.unwrap_or_else(|| ROUTE.to_owned()),
                    hidden: loaded.variables(),
                }
            }
        };
        let handler = &tested.handler;
        if handler.http.is_none() && handler.exec.is_none() && handler.command.is_none() {
            return Err(missing("--handler, --handler-exec or --handler-command"));
        }
        match self
            .of_http()
            .into_iter()
            .find(|(_, is_given)| *is_given && handler.http.is_none())
        {
            Some((flag, _)) => Err(Problem::new(
                Exit::Usage,
                format!("{flag} is about a worker behind HTTP (--handler)"),
            )),
            None => Ok(tested),
        }
    }

    fn names_worker(&self) -> bool {
        let workers = [&self.handler, &self.handler_exec, &self.handler_command];
        workers.iter().any(|worker| worker.is_some())
            || self.of_http().iter().any(|(_, is_given)| *is_given)
    }

    /// The flags about a worker behind HTTP, and which of them are given.
    fn of_http(&self) -> [(&'static str, bool); 6] {
        [
            ("--ready-url", self.ready_url.is_some()),
            ("--content-type", self.content_type.is_some()),
            ("--token-file", self.token_file.is_some()),
            ("--handler-tls-root", self.handler_tls_root.is_some()),
            (
                "--handler-tls-certificate",
                self.handler_tls_certificate.is_some(),
            ),
            ("--allow-remote", self.allow_remote),
        ]
    }

    /// The settings of the worker, with those of the flags over them.
    fn over(&self, mut handler: shape::Handler) -> shape::Handler {
        if [&self.handler, &self.handler_exec, &self.handler_command]
            .iter()
            .any(|worker| worker.is_some())
        {
            handler.http = self.handler.clone();
            handler.exec = self.handler_exec.clone().map(ProgramSetting::shell);
            handler.command = self.handler_command.clone().map(ProgramSetting::shell);
        }
        handler.ready_url = self.ready_url.clone().or(handler.ready_url);
        handler.content_type = self.content_type.clone().or(handler.content_type);
        handler.token = self.token_file.clone().map(Secret::File).or(handler.token);
        let files = &mut handler.tls;
        files.root = self.handler_tls_root.clone().or(files.root.take());
        if self.handler_tls_certificate.is_some() {
            files.certificate = self.handler_tls_certificate.clone();
            files.key = self.handler_tls_key.clone();
        }
        handler.allow_remote = Some(self.allow_remote || handler.allow_remote == Some(true));
        handler
    }
}

impl Tested {
    /// # Errors
    /// When a setting of the worker is wrong.
    fn subject(&self, patience: Duration) -> Result<Subject, Problem> {
        let limits = WorkerLimits {
            lease: LEASE,
            result_max_bytes: GateSettings::DEFAULT.max_large_result_bytes,
            in_batches: false,
            hidden: self.hidden.clone(),
            given: Vec::new(),
        };
        Subject::new(workers::kind(&self.handler), &limits, patience).map_err(|error| match error {
            WorkerError::ContentType(name) => Problem::configuration(format!(
                "--content-type is {name:?}, which is not a content type"
            )),
            error => error.into(),
        })
    }
}

/// The checks so far, and the state that they need.
struct Exam {
    subject: Subject,
    messages: Messages,
    checks: Vec<Check>,
}

async fn examine(
    tested: &Tested,
    patience: Duration,
    payload: Bytes,
) -> Result<Vec<Check>, Problem> {
    let subject = tested.subject(patience)?;
    let messages = Messages::new(payload, &tested.route);
    let mut exam = Exam {
        subject,
        messages,
        checks: Vec::new(),
    };
    if !exam.is_ready().await || !exam.does_the_work().await? {
        // Any further failure would only be a consequence.
        return Ok(exam.checks);
    }
    exam.survives_garbage().await?;
    if exam.subject.is_told_to_stop() {
        exam.survives_a_cancellation().await?;
    }
    if exam.subject.dialogue().is_some() {
        exam.ends_with_its_input().await;
        exam.ends_when_told_to().await;
    }
    Ok(exam.checks)
}

impl Exam {
    fn note(&mut self, name: &'static str, ok: Result<String, String>, fix: &'static str) -> bool {
        let is_ok = ok.is_ok();
        let (Ok(found) | Err(found)) = ok;
        self.checks.push(Check {
            name,
            ok: is_ok,
            found,
            fix: if is_ok { "" } else { fix },
        });
        is_ok
    }

    async fn is_ready(&mut self) -> bool {
        let ready = self
            .subject
            .ready()
            .await
            .map(|()| "it is ready".to_owned());
        let fix = if self.subject.dialogue().is_some() {
            "its first line must be {\"type\":\"ready\",\"v\":1}; print nothing else to standard output, and flush it"
        } else {
            "start it, and check its address; with --ready-url, that must answer with 2xx"
        };
        self.note("ready", ready, fix)
    }

    /// Sends the same message twice, as after a crash: the second time it is marked as recovered.
    async fn does_the_work(&mut self) -> Result<bool, Problem> {
        let mut lease = self.messages.good().await?;
        let first = self.tell(&lease).await;
        let done = self.note(
            "completes",
            completed(&first),
            "answer the payload with 2xx, \"outcome\":\"complete\" or exit code 0; give a payload that it can handle as PAYLOAD",
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
            "a message that comes again with the same idempotency key must get the same outcome: its work is done already",
        );
        Ok(true)
    }

    async fn tell(&mut self, lease: &Lease) -> Reply {
        self.subject.tell(lease).await
    }

    async fn survives_garbage(&mut self) -> Result<(), Problem> {
        let lease = self.messages.garbage().await?;
        let reply = self.tell(&lease).await;
        let fix = "catch a payload that cannot be read, and give the message up: 400 or 422, \"outcome\":\"dead-letter\", exit code 65";
        let answered = match &reply {
            Reply::Unknown { reason } | Reply::NotRun { reason } => {
                Err(format!("a payload that it cannot read: {}", short(reason)))
            }
            _ => Ok(format!(
                "a payload that it cannot read: {}",
                outcome(&reply)
            )),
        };
        self.note("garbage", answered, fix);
        self.goes_on("after-garbage", "it continues after that", fix)
            .await
    }

    async fn survives_a_cancellation(&mut self) -> Result<(), Problem> {
        let lease = self.messages.good().await?;
        let interrupted = self.subject.interrupt(&lease).await;
        let fix = "a cancelled message must end nothing but its own work";
        match interrupted {
            Interrupted::Announced => {
                self.goes_on(
                    "cancelled",
                    "it continues after a message that was cancelled",
                    fix,
                )
                .await
            }
            Interrupted::Silent(why) => {
                let fix = "answer a cancelled message, too, with any outcome: it counts as in flight until then, and a worker that stays silent is killed";
                self.note("cancelled", Err(why), fix);
                Ok(())
            }
            Interrupted::Answered => {
                self.goes_on(
                    "cancelled",
                    "it finished before it could be cancelled, and continues",
                    fix,
                )
                .await
            }
        }
    }

    /// Checks that the worker still handles the payload.
    async fn goes_on(
        &mut self,
        name: &'static str,
        what: &str,
        fix: &'static str,
    ) -> Result<(), Problem> {
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
        let Some(worker) = self.subject.dialogue() else {
            return;
        };
        let ended = worker.end_by_input().await;
        let fix =
            "end with exit code 0 when standard input ends: that is how oncegate stops a worker";
        self.note("end-of-input", ended, fix);
    }

    async fn ends_when_told_to(&mut self) {
        let Some(worker) = self.subject.dialogue() else {
            return;
        };
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

/// The outcome as text.
fn outcome(reply: &Reply) -> String {
    match reply {
        Reply::Complete(_) => "complete".to_owned(),
        Reply::Retry { reason, .. } => format!("retry ({})", short(reason)),
        Reply::Later { reason, .. } => format!("later ({})", short(reason)),
        Reply::DeadLetter { reason } => format!("dead letter ({})", short(reason)),
        Reply::Unknown { reason } => format!("unknown ({})", short(reason)),
        Reply::NotRun { reason } => format!("not begun ({})", short(reason)),
        Reply::TooLong { reason } => format!("too long ({})", short(reason)),
    }
}

fn short(reason: &str) -> String {
    const SHOWN_MOST: usize = 200;
    reason.chars().take(SHOWN_MOST).collect()
}

fn text(checks: &[Check]) -> String {
    let width = checks
        .iter()
        .map(|check| check.name.len())
        .max()
        .unwrap_or(0);
    let mut text = String::new();
    for Check {
        name,
        ok,
        found,
        fix,
    } in checks
    {
        let verdict = if *ok { "ok    " } else { "FAILED" };
        text.push_str(&format!("{verdict}  {name:width$}  {}\n", plain(found)));
        if !fix.is_empty() {
            text.push_str(&format!("        fix: {fix}\n"));
        }
    }
    text
}
