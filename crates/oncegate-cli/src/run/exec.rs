//! Workers on standard streams: programs that read messages as JSON lines, and answer in any order.
//!
//! Each worker has a task, which owns its process and its streams. Messages wait in one queue, from which a worker takes
//! when it has room. A worker that ends, or says what is no protocol, is started again after a while; what it had is
//! unknown, because nobody can tell how far it came.

use std::collections::HashMap;
use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use oncegate::Message;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::lines::{
    Answer, LINE_MAX_BYTES, Line, Ready, ReadyType, Said, Told, parse, read_lines, write_lines,
};
use super::worker::{Begun, Reply};
use crate::config::values::Program;

/// The longest line of a worker's standard error that is logged as one, in bytes.
const LOG_LINE_MAX_BYTES: u64 = 8 * 1024;
/// The most messages that a worker may ask to have at a time.
const MAX_IN_FLIGHT_MOST: usize = 10_000;
/// How many lines may wait in either direction: messages and their cancellations.
const LINES_WAITING: usize = 2 * MAX_IN_FLIGHT_MOST;
/// How long a worker may take to say that it is ready.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// How long a worker whose input was closed may take to end, and how long after a SIGTERM.
pub(super) const END_GRACE: Duration = Duration::from_secs(10);
pub(super) const TERM_GRACE: Duration = Duration::from_secs(5);
/// The waits before a worker that ended is started again: they double, and begin anew once one has run for a while.
const RESTART_FIRST: Duration = Duration::from_millis(100);
const RESTART_MOST: Duration = Duration::from_secs(10);
const RESTART_FORGET: Duration = Duration::from_secs(30);

/// A message on its way to a worker.
struct Job {
    message: Message,
    begun: Begun,
    reply: oneshot::Sender<Reply>,
    /// Fires when nobody waits for the reply any more.
    gone: CancellationToken,
}

/// Workers that share one queue.
pub(crate) struct Crew {
    jobs: mpsc::Sender<Job>,
    workers: u32,
    /// How many messages one worker wants at a time, once the first has said so.
    wanted: watch::Receiver<Option<usize>>,
}

/// Keeps the workers running until it is told to end them.
#[derive(Debug)]
pub(crate) struct Foreman {
    tasks: JoinSet<()>,
    stop: CancellationToken,
}

impl Crew {
    /// Starts so many of the program.
    pub(crate) fn start(program: &Program, workers: u32, lease: Duration) -> (Self, Foreman) {
        let (jobs, queue) = mpsc::channel(1);
        let queue = Arc::new(Mutex::new(queue));
        let (wants, wanted) = watch::channel(None);
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for number in 1..=workers {
            let slot = Slot {
                number,
                program: program.clone(),
                lease,
                queue: Arc::clone(&queue),
                wants: wants.clone(),
                stop: stop.clone(),
            };
            tasks.spawn(slot.keep());
        }
        (Self { jobs, workers, wanted }, Foreman { tasks, stop })
    }

    /// Gives the message to the next worker that has room, and waits for its answer.
    pub(super) async fn hand_out(&self, message: &Message, begun: &Begun) -> Reply {
        let (reply, answer) = oneshot::channel();
        let gone = CancellationToken::new();
        let _gone = gone.clone().drop_guard();
        let job = Job { message: message.clone(), begun: begun.clone(), reply, gone };
        if self.jobs.send(job).await.is_err() {
            return Reply::retry("the workers have been stopped");
        }
        answer.await.unwrap_or_else(|_| Reply::unknown("the worker ended before it answered"))
    }

    /// Waits for the first worker that is ready. How many messages all of them take at a time.
    pub(crate) async fn ready(&self) -> u32 {
        let mut wanted = self.wanted.clone();
        let wanted = wanted.wait_for(Option::is_some).await.map(|wanted| wanted.unwrap_or(1));
        match wanted {
            Ok(wanted) => self.workers.saturating_mul(u32::try_from(wanted).unwrap_or(u32::MAX)),
            // The workers' tasks have ended without one that was ready: they have been told to stop.
            Err(_) => std::future::pending().await,
        }
    }
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("workers", &self.workers).finish_non_exhaustive()
    }
}

impl Foreman {
    /// Closes the workers' input, and waits for their end; those that do not end are made to.
    pub(crate) async fn dismiss(mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

/// The place of one worker, whatever process stands in it.
struct Slot {
    number: u32,
    program: Program,
    lease: Duration,
    queue: Arc<Mutex<mpsc::Receiver<Job>>>,
    wants: watch::Sender<Option<usize>>,
    stop: CancellationToken,
}

impl Slot {
    async fn keep(self) {
        let mut wait = RESTART_FIRST;
        while !self.stop.is_cancelled() {
            let started = Instant::now();
            let why = match self.spawn() {
                Ok(child) => self.attend(child).await,
                Err(error) => format!("it cannot be started: {error}"),
            };
            if self.stop.is_cancelled() {
                return;
            }
            if started.elapsed() > RESTART_FORGET {
                wait = RESTART_FIRST;
            }
            warn!(worker = self.number, why, ?wait, "the worker has ended; it is started again");
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            wait = (wait * 2).min(RESTART_MOST);
        }
    }

    fn spawn(&self) -> std::io::Result<Child> {
        let mut command = command(&self.program);
        command.env("ONCEGATE_WORKER", self.number.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()
    }

    /// Works with one process until it ends, and says why it did.
    async fn attend(&self, mut child: Child) -> String {
        let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return "it has no standard streams".to_owned();
        };
        let mut side = JoinSet::new();
        let number = self.number;
        side.spawn(async move { log(number, stderr).await });
        // Lines in and out have tasks of their own: a worker that writes before it reads must not be waited for by
        // somebody who writes before he reads.
        let (lines, said) = mpsc::channel(LINES_WAITING);
        side.spawn(async move { read_lines(stdout, lines).await });
        let (tell, lines) = mpsc::channel(LINES_WAITING);
        side.spawn(async move { write_lines(stdin, lines).await });
        let mut session = Session { tell, said, in_flight: HashMap::new(), gone: JoinSet::new(), next_id: 0 };
        let why = self.converse(&mut session).await;
        // Their messages are unknown from here on: whoever waits is told by the drop.
        drop(session);
        let asked = if self.stop.is_cancelled() { END_GRACE } else { Duration::ZERO };
        end(child, asked).await;
        // What it has said last, about the reason of its end perhaps, is still read.
        drop(timeout(TERM_GRACE, async { while side.join_next().await.is_some() {} }).await);
        why
    }

    async fn converse(&self, session: &mut Session) -> String {
        let first = tokio::select! {
            biased;
            () = self.stop.cancelled() => return "it was told to stop".to_owned(),
            first = timeout(READY_LIMIT, session.said.recv()) => first,
        };
        let most = match first {
            Err(_) => return format!("it has not said that it is ready within {READY_LIMIT:?}"),
            Ok(None) => return "it ended before it was ready".to_owned(),
            Ok(Some(line)) => match parse(line) {
                Ok(Said::Ready(Ready { r#type: ReadyType::Ready, v: 1, max_in_flight })) => {
                    max_in_flight.clamp(1, MAX_IN_FLIGHT_MOST)
                }
                Ok(Said::Ready(Ready { v, .. })) => {
                    return format!("it speaks version {v} of the protocol, not 1");
                }
                Ok(Said::Answer(_)) => {
                    return "its first line was an answer, not {\"type\":\"ready\",\"v\":1}".to_owned();
                }
                Err(why) => return why,
            },
        };
        info!(worker = self.number, max_in_flight = most, "the worker is ready");
        self.wants.send_if_modified(|wanted| wanted.replace(most).is_none());
        self.exchange(session, most).await
    }

    async fn exchange(&self, session: &mut Session, most: usize) -> String {
        loop {
            let has_room = session.in_flight.len() < most;
            let next = async { self.queue.lock().await.recv().await };
            tokio::select! {
                biased;
                line = session.said.recv() => match line.map(parse) {
                    None => return "it ended".to_owned(),
                    Some(Err(why)) => return why,
                    Some(Ok(Said::Ready(_))) => return "it said twice that it is ready".to_owned(),
                    Some(Ok(Said::Answer(answer))) => session.answer(answer),
                },
                () = self.stop.cancelled() => return "it was told to stop".to_owned(),
                Some(gone) = session.gone.join_next(), if !session.gone.is_empty() => {
                    if let Ok(id) = gone
                        && session.in_flight.remove(&id).is_some()
                        && let Err(why) = session.cancel(&id)
                    {
                        return why;
                    }
                }
                job = next, if has_room => {
                    let Some(job) = job else { return "it has nothing more to do".to_owned() };
                    if let Err(why) = session.give(job, self.lease) {
                        return why;
                    }
                }
            }
        }
    }
}

/// One process, while it can be spoken to.
struct Session {
    tell: mpsc::Sender<Vec<u8>>,
    said: mpsc::Receiver<Line>,
    in_flight: HashMap<String, oneshot::Sender<Reply>>,
    /// Ends with the id of a message for which nobody waits any more.
    gone: JoinSet<String>,
    next_id: u64,
}

impl Session {
    fn give(&mut self, job: Job, lease: Duration) -> Result<(), String> {
        if job.gone.is_cancelled() {
            return Ok(());
        }
        self.next_id += 1;
        let id = self.next_id.to_string();
        let line = serde_json::to_vec(&Told::of(&job.message, &id, lease));
        let line = match line {
            Ok(line) if line.len() as u64 <= LINE_MAX_BYTES => line,
            Ok(line) => {
                let reason = format!("as a line it has {} bytes, more than {LINE_MAX_BYTES}", line.len());
                drop(job.reply.send(Reply::DeadLetter { reason }));
                return Ok(());
            }
            Err(error) => return Err(format!("a message makes no line: {error}")),
        };
        job.begun.now();
        self.in_flight.insert(id.clone(), job.reply);
        self.gone.spawn(async move {
            job.gone.cancelled().await;
            id
        });
        self.write(line)
    }

    fn cancel(&self, id: &str) -> Result<(), String> {
        self.write(serde_json::json!({ "type": "cancel", "id": id }).to_string().into_bytes())
    }

    fn write(&self, line: Vec<u8>) -> Result<(), String> {
        self.tell.try_send(line).map_err(|_| "it does not read its standard input".to_owned())
    }

    /// An answer to a message that was cancelled meanwhile is ignored.
    fn answer(&mut self, answer: Answer) {
        if let Some(waiting) = self.in_flight.remove(&answer.id) {
            drop(waiting.send(answer.into()));
        }
    }
}

/// Puts what a worker says on standard error into the log.
pub(super) async fn log(worker: u32, stderr: impl tokio::io::AsyncRead + Unpin) {
    let mut stderr = BufReader::new(stderr);
    loop {
        let mut line = Vec::new();
        let read = (&mut stderr).take(LOG_LINE_MAX_BYTES).read_until(b'\n', &mut line).await;
        if !matches!(read, Ok(1..)) {
            return;
        }
        let line = String::from_utf8_lossy(&line);
        warn!(target: "oncegate::worker", worker, "{}", line.trim_end());
    }
}

/// Waits for a process whose input is closed; then asks it to end, then ends it.
async fn end(mut child: Child, grace: Duration) {
    if timeout(grace, child.wait()).await.is_ok() {
        return;
    }
    terminate(&child).await;
    if timeout(TERM_GRACE, child.wait()).await.is_err() {
        drop(child.kill().await);
    }
}

/// Asks a process to end.
pub(super) async fn terminate(child: &Child) {
    let Some(id) = child.id() else { return };
    let mut kill = Command::new("sh");
    // The shell's own `kill` is everywhere, and signals need no unsafe code so.
    kill.args(["-c", "kill -s TERM \"$1\"", "kill", &id.to_string()]).stdin(Stdio::null());
    drop(kill.status().await);
}

/// A command for the program. What a shell is given becomes the program itself, so that signals reach it.
pub(super) fn command(program: &Program) -> Command {
    match program {
        Program::Shell(text) => {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exec {text}")]);
            command
        }
        Program::Words(words) => {
            let mut words = words.iter();
            let mut command = Command::new(words.next().map(String::as_str).unwrap_or_default());
            command.args(words);
            command
        }
    }
}
