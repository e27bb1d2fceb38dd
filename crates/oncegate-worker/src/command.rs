//! Runs a process for each message: the payload on its standard input, metadata in its environment.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::process::Stdio;

use oncegate_runtime::{Header, Message};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use crate::process::{self, Leftovers, Process, Runnable, log};
use crate::protocol::call::{AttemptInfo, Call};
use crate::protocol::reply::{Reply, WorkerResult};
use crate::protocol::{attributes, origin};
use crate::report::WorkerReport;

/// Exit codes of BSD's `sysexits`.
const EX_DATAERR: i32 = 65;
const EX_TEMPFAIL: i32 = 75;

/// Starts a program for each message.
#[derive(Debug)]
pub(crate) struct Commands {
    program: Runnable,
    result_max_bytes: usize,
    report: WorkerReport,
}

impl Commands {
    pub(crate) fn new(program: Runnable, result_max_bytes: usize, report: WorkerReport) -> Self {
        Self {
            program,
            result_max_bytes,
            report,
        }
    }

    /// Runs the program to its end. Dropping the future kills it.
    pub(crate) async fn run(&self, message: &Message, attempt: &AttemptInfo, call: &Call) -> Reply {
        let mut command = process::command(&self.program);
        describe(&mut command, message, attempt);
        if !call.begin() {
            return Reply::not_run("the run was cancelled before the command was started");
        }
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let (mut process, (mut stdin, stdout, stderr)) =
            match Process::start(command, Leftovers::KilledUnlessDone).await {
                Ok(started) => started,
                // It would not fit in the next attempt either.
                Err(error) if error.kind() == ErrorKind::ArgumentListTooLong => {
                    let reason =
                        "the message's headers are larger than an environment may be".to_owned();
                    return Reply::DeadLetter { reason };
                }
                Err(error) => {
                    return Reply::not_run(format!("the command cannot be started: {error}"));
                }
            };
        let payload = message.payload_bytes().unwrap_or_default();
        let ended = process.ended();
        // A program does not have to read its input, and what it leaves behind may hold it.
        let feed = async move {
            tokio::select! {
                _ = stdin.write_all(&payload) => {}
                () = ended => {}
            }
        };
        let mut result = Vec::new();
        let most = self.result_max_bytes;
        let read = async {
            let mut stdout = stdout;
            let mut kept = (&mut stdout).take(most as u64 + 1);
            let read = kept.read_to_end(&mut result).await;
            // A full pipe must not block the program.
            drop(tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await);
            read
        };
        let ((), read, last_line, status) =
            tokio::join!(feed, read, log(0, stderr), process.wait());
        let status = match status {
            Ok(status) => status,
            Err(error) => {
                return Reply::unknown(format!("the command's exit status is unknown: {error}"));
            }
        };
        if status.code().is_some() {
            self.report.answered();
        }
        match (status.code(), read) {
            (Some(0), Err(error)) => {
                Reply::unknown(format!("the command's result cannot be read: {error}"))
            }
            (Some(0), Ok(_)) if result.len() > most => {
                Reply::Complete(WorkerResult::TooLarge { most })
            }
            (Some(0), Ok(_)) => Reply::Complete(WorkerResult::of_bytes(None, result.into())),
            (Some(EX_DATAERR), _) => Reply::DeadLetter {
                reason: reason(&result, &last_line, EX_DATAERR),
            },
            (Some(EX_TEMPFAIL), _) => Reply::retry(reason(&result, &last_line, EX_TEMPFAIL)),
            (Some(code), _) => Reply::retry(reason(&[], &last_line, code)),
            (None, _) => {
                let why = with_detail(format!("the command was ended ({status})"), &last_line);
                self.report.ended_without_outcome(&why);
                Reply::unknown(why)
            }
        }
    }
}

/// The exit code with the command's output, or else with the last line of its standard error.
fn reason(result: &[u8], last_line: &str, code: i32) -> String {
    let said = String::from_utf8_lossy(result);
    let detail = if said.trim().is_empty() {
        last_line
    } else {
        said.trim()
    };
    with_detail(format!("the command ended with code {code}"), detail)
}

fn with_detail(what: String, detail: &str) -> String {
    if detail.is_empty() {
        what
    } else {
        format!("{what}: {detail}")
    }
}

/// The environment variable of a header.
fn variable(header: &str) -> String {
    let name = header.chars().map(|c| {
        if c.is_ascii_alphanumeric() || c == '_' {
            c.to_ascii_uppercase()
        } else {
            '_'
        }
    });
    "ONCEGATE_HEADER_".chars().chain(name).collect()
}

fn without_nul(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace('\0', "")
}

fn describe(command: &mut Command, message: &Message, attempt: &AttemptInfo) {
    command
        .env("ONCEGATE_IDEMPOTENCY_KEY", &attempt.idempotency_key)
        .env("ONCEGATE_ATTEMPT", attempt.number.to_string())
        .env(
            "ONCEGATE_RECOVERED",
            if attempt.recovered { "1" } else { "0" },
        )
        .env("ONCEGATE_ORIGIN", origin::as_json(message).to_string())
        .env("ONCEGATE_ROUTE", message.route())
        // Standard input ends early if this process is killed while it writes.
        .env(
            "ONCEGATE_PAYLOAD_BYTES",
            message.payload().len().to_string(),
        );
    if let Some(fencing_token) = attempt.fencing_token {
        command.env("ONCEGATE_FENCING_TOKEN", fencing_token.to_string());
    }
    if message.is_tombstone() {
        command.env("ONCEGATE_TOMBSTONE", "1");
    }
    let mut room = attributes::Room::default();
    if let Some(key) = message.key()
        && room.takes("ONCEGATE_MESSAGE_KEY", key)
    {
        command.env("ONCEGATE_MESSAGE_KEY", without_nul(key));
    }
    // Several headers may have one variable, as `x-a` and `x_a` do. It has the last one, as a
    // header that is repeated.
    let valued = || {
        message
            .headers()
            .iter()
            .filter_map(|header| Some((header, header.value.as_ref()?)))
    };
    let last: HashMap<String, &Header> = valued()
        .map(|(header, _)| (variable(&header.name), header))
        .collect();
    for (header, value) in valued() {
        let variable = variable(&header.name);
        if last
            .get(&variable)
            .is_some_and(|last| !std::ptr::eq(*last, header))
        {
            room.leave_out();
        } else if room.takes(&header.name, value) {
            command.env(variable, without_nul(value));
        }
    }
    if room.tell(message) > 0 {
        command.env("ONCEGATE_HEADERS_LEFT_OUT", room.left_out().to_string());
    }
}
