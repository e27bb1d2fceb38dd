//! Tests one worker on standard streams, line by line.

use std::collections::VecDeque;
use std::fmt;
use std::process::Stdio;
use std::time::Duration;

use oncegate_runtime::Lease;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::exec::slot::{END_GRACE, TERM_GRACE};
use crate::process::{self, Leftovers, Process, Runnable, log};
use crate::protocol::call::AttemptInfo;
use crate::protocol::lines::{HandleLine, Outgoing, write_lines};
use crate::protocol::reply::Reply;
use crate::protocol::said::{Answer, Ready};
use crate::protocol::values::{Finder, Written, read_chunks};

/// The most lines that may wait in either direction.
const LINES_WAITING: usize = 64;

/// A worker that is started when it is not running.
pub struct Dialogue {
    program: Runnable,
    /// The lease that the worker is told.
    lease: Duration,
    patience: Duration,
    running: Option<Running>,
    next_id: u64,
}

/// A worker's process with its streams.
struct Running {
    process: Process,
    /// The sender to the worker, whose input ends when this is dropped.
    tell: mpsc::Sender<Outgoing>,
    said: mpsc::Receiver<Vec<u8>>,
    finder: Finder,
    /// The findings in its output that were not dealt with.
    written: VecDeque<Written>,
    _streams: JoinSet<()>,
}

impl fmt::Debug for Dialogue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialogue")
            .field("program", &self.program)
            .finish_non_exhaustive()
    }
}

impl Dialogue {
    pub(super) fn new(program: Runnable, lease: Duration, patience: Duration) -> Self {
        Self {
            program,
            lease,
            patience,
            running: None,
            next_id: 0,
        }
    }

    /// Starts the worker unless it is running, and waits until it reports that it is ready.
    pub(super) async fn ready(&mut self) -> Result<(), String> {
        if let Some(running) = &mut self.running
            && running.process.is_running()
        {
            return Ok(());
        }
        self.running = None;
        let mut running = Running::start(&self.program).await?;
        let first = timeout(self.patience, running.written()).await;
        match first {
            Err(_) => {
                return Err(format!(
                    "it has not reported that it is ready within {:?}",
                    self.patience
                ));
            }
            Ok(None) => return Err("it ended before it was ready".to_owned()),
            Ok(Some(Written::Ready(Ready { v: 1, .. }))) => {}
            Ok(Some(Written::Ready(Ready { v, .. }))) => {
                return Err(format!("it speaks version {v} of the protocol, not 1"));
            }
            Ok(Some(Written::Answer { .. })) => {
                return Err("its first line was an answer".to_owned());
            }
            Ok(Some(Written::Wrong { why, .. } | Written::Noise { why })) => return Err(why),
        }
        self.running = Some(running);
        Ok(())
    }

    pub(super) async fn tell(&mut self, lease: &Lease) -> Reply {
        let give_up_at = Instant::now() + self.patience;
        let Some(id) = self.give(lease).await else {
            return Reply::unknown("it does not run");
        };
        self.answer(&id, give_up_at).await
    }

    /// Sends the worker a message and cancels it at once.
    ///
    /// # Errors
    /// As text: the worker does not answer the message, so `oncegate run` would treat it as hung.
    pub(super) async fn cancel(&mut self, lease: &Lease) -> Result<(), String> {
        let give_up_at = Instant::now() + self.patience;
        let Some(id) = self.give(lease).await else {
            return Err("it does not run".to_owned());
        };
        let line = serde_json::json!({ "type": "cancel", "id": id })
            .to_string()
            .into_bytes();
        if let Some(running) = &self.running {
            drop(running.tell.send(Outgoing { line, call: None }).await);
        }
        match self.answer(&id, give_up_at).await {
            Reply::Unknown { reason } => Err(format!("a message that was cancelled: {reason}")),
            _ => Ok(()),
        }
    }

    async fn give(&mut self, lease: &Lease) -> Option<String> {
        self.next_id += 1;
        let id = self.next_id.to_string();
        let attempt = AttemptInfo::of(lease.attempt());
        let line =
            serde_json::to_vec(&HandleLine::of(lease.message(), &attempt, &id, self.lease)).ok()?;
        self.running
            .as_ref()?
            .tell
            .send(Outgoing { line, call: None })
            .await
            .ok()?;
        Some(id)
    }

    /// Waits for the answer to this message; answers to others may come before it.
    async fn answer(&mut self, id: &str, give_up_at: Instant) -> Reply {
        let Some(running) = &mut self.running else {
            return Reply::unknown("it does not run");
        };
        loop {
            let written = match tokio::time::timeout_at(give_up_at, running.written()).await {
                Err(_) => {
                    return Reply::unknown(format!(
                        "no answer within {:?} (--patience)",
                        self.patience
                    ));
                }
                Ok(None) => {
                    self.running = None;
                    return Reply::unknown("its process ended");
                }
                Ok(Some(written)) => written,
            };
            match written {
                Written::Answer {
                    answer:
                        Answer {
                            flaw: Some(flaw), ..
                        },
                    line,
                } => {
                    self.running = None;
                    return Reply::unknown(format!(
                        "line {line} of its standard output is an answer with a wrong field: {flaw}"
                    ));
                }
                // `oncegate run` goes on after some of these; a worker should write none of them.
                Written::Wrong { why, .. } | Written::Noise { why } => {
                    self.running = None;
                    return Reply::unknown(why);
                }
                Written::Ready(_) => {
                    return Reply::unknown("it reported twice that it is ready");
                }
                Written::Answer { answer, .. } if answer.id == id => return answer.into(),
                Written::Answer { .. } => {}
            }
        }
    }

    /// Closes the worker's input: it must end with code 0. Returns how it ended.
    ///
    /// # Errors
    /// As text: it does not run, does not end in time, or ends with another code.
    pub async fn end_by_input(&mut self) -> Result<String, String> {
        self.ready().await?;
        let Some(Running {
            mut process,
            tell,
            said: _said,
            _streams,
            ..
        }) = self.running.take()
        else {
            return Err("it does not run".to_owned());
        };
        drop(tell);
        match timeout(END_GRACE, process.wait()).await {
            Err(_) => Err(format!(
                "it goes on for {END_GRACE:?} after the end of its standard input"
            )),
            Ok(Err(error)) => Err(format!("its exit status is unknown: {error}")),
            Ok(Ok(status)) if status.success() => Ok("it ends with its standard input".to_owned()),
            Ok(Ok(status)) => Err(format!("it ends with its standard input, but by {status}")),
        }
    }

    /// Sends the worker a SIGTERM: it must end. Returns how it ended.
    ///
    /// # Errors
    /// As text: it does not run, or does not end in time.
    pub async fn end_by_signal(&mut self) -> Result<String, String> {
        self.ready().await?;
        let Some(mut running) = self.running.take() else {
            return Err("it does not run".to_owned());
        };
        running.process.terminate();
        match timeout(TERM_GRACE, running.process.wait()).await {
            Ok(_) => Ok("it ends by SIGTERM".to_owned()),
            Err(_) => Err(format!("it goes on for {TERM_GRACE:?} after a SIGTERM")),
        }
    }
}

impl Running {
    async fn start(program: &Runnable) -> Result<Self, String> {
        let mut command = process::command(program);
        command.env("ONCEGATE_WORKER", "1");
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let started = Process::start(command, Leftovers::Killed).await;
        let (process, (stdin, stdout, stderr)) =
            started.map_err(|error| format!("it cannot be started: {error}"))?;
        let mut streams = JoinSet::new();
        let (chunks, said) = mpsc::channel(LINES_WAITING);
        streams.spawn(async move { read_chunks(stdout, chunks).await });
        let (tell, lines) = mpsc::channel(LINES_WAITING);
        streams.spawn(async move { write_lines(stdin, lines).await });
        streams.spawn(async move { drop(log(1, stderr).await) });
        Ok(Self {
            process,
            tell,
            said,
            finder: Finder::default(),
            written: VecDeque::new(),
            _streams: streams,
        })
    }

    /// Returns what the worker has written next; `None` at the end of its output.
    async fn written(&mut self) -> Option<Written> {
        loop {
            if let Some(written) = self.written.pop_front() {
                return Some(written);
            }
            // A worker that is tested has one message.
            let known = &|_: &str| true;
            match self.said.recv().await {
                Some(chunk) => self.written.extend(self.finder.take(&chunk, known)),
                None => {
                    self.written.extend(self.finder.end(known));
                    return self.written.pop_front();
                }
            }
        }
    }
}
