//! Workers on standard streams: programs that read messages as JSON lines, and answer in any order.
//!
//! Each worker has a task, which owns its process and its streams. Messages wait in one queue, from which a worker takes
//! when it has room: a message takes up its place until it is answered, also when nobody waits for the answer any more. A
//! worker that ends, says what is no protocol, or stays silent about a message that was cancelled, is started again; what
//! it had is unknown, because nobody can tell how far it came. What it was not given has not happened.

use std::fmt;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use oncegate::Message;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::lines::{Line, Ready, ReadyType, Said, parse, read_lines, write_lines};
use super::process::{self, Process, Streams};
use super::session::{REMINDER, Session};
use super::worker::{AttemptInfo, Call, Reply};
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
/// How long a worker may be silent about a message that was cancelled, before it is killed and replaced: four fifths of the
/// lease, and this at the most. The message's handler is dropped a little later, and its lease lapses only then.
const CANCEL_GRACE: Duration = Duration::from_secs(4);
/// The waits before a worker that ended is started again: they double, and begin anew once one has run for a while.
const RESTART_FIRST: Duration = Duration::from_millis(100);
const RESTART_MOST: Duration = Duration::from_secs(10);
const RESTART_FORGET: Duration = Duration::from_secs(30);

/// A message on its way to a worker.
pub(super) struct Job {
    pub(super) message: Message,
    pub(super) attempt: AttemptInfo,
    pub(super) call: Call,
    pub(super) reply: oneshot::Sender<Reply>,
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
    ///
    /// A call that is withdrawn after it has begun resolves when the worker has answered, or was replaced.
    pub(super) async fn hand_out(&self, message: &Message, attempt: &AttemptInfo, call: &Call) -> Reply {
        let (reply, answer) = oneshot::channel();
        let job = Job { message: message.clone(), attempt: attempt.clone(), call: call.clone(), reply };
        if self.jobs.send(job).await.is_err() {
            return Reply::not_run("the workers have been stopped");
        }
        answer.await.unwrap_or_else(|_| match call.has_begun() {
            true => Reply::unknown("the worker ended before it answered"),
            false => Reply::not_run("the worker ended before it was given the message"),
        })
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
            let why = match self.spawn().await {
                Ok((process, streams)) => self.attend(process, streams).await,
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

    async fn spawn(&self) -> std::io::Result<(Process, Streams)> {
        let mut command = process::command(&self.program);
        command.env("ONCEGATE_WORKER", self.number.to_string());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Process::start(command).await
    }

    /// Works with one process until it ends, and says why it did.
    async fn attend(&self, mut process: Process, (stdin, stdout, stderr): Streams) -> String {
        let mut side = JoinSet::new();
        let number = self.number;
        side.spawn(async move { log(number, stderr).await });
        // Lines in and out have tasks of their own: a worker that writes before it reads must not be waited for by
        // somebody who writes before he reads.
        let (lines, said) = mpsc::channel(LINES_WAITING);
        side.spawn(async move { read_lines(stdout, lines).await });
        let (tell, lines) = mpsc::channel(LINES_WAITING);
        side.spawn(async move { write_lines(stdin, lines).await });
        let grace = CANCEL_GRACE.min(self.lease * 4 / 5);
        let mut session = Session::new(number, self.lease, grace, tell, said);
        let End { why, hangs } = self.converse(&mut session).await;
        let unanswered = session.close();
        match (hangs, self.stop.is_cancelled()) {
            (true, _) => process.kill().await,
            (false, true) => end(&mut process, END_GRACE).await,
            (false, false) => end(&mut process, Duration::ZERO).await,
        }
        // Not before: their next attempts must not run beside these.
        unanswered.give_up(number, &why);
        // What it has said last, about the reason of its end perhaps, is still read.
        drop(timeout(TERM_GRACE, async { while side.join_next().await.is_some() {} }).await);
        why
    }

    async fn converse(&self, session: &mut Session) -> End {
        let most = match self.first_line(session).await {
            Ok(Said::Ready(Ready { r#type: ReadyType::Ready, v: 1, max_in_flight })) => {
                max_in_flight.clamp(1, MAX_IN_FLIGHT_MOST)
            }
            Ok(Said::Ready(Ready { v, .. })) => {
                return format!("it speaks version {v} of the protocol, not 1").into();
            }
            Ok(Said::Answer(_)) => {
                return "its first line was an answer, not {\"type\":\"ready\",\"v\":1}".to_owned().into();
            }
            Err(why) => return why.into(),
        };
        info!(worker = self.number, max_in_flight = most, "the worker is ready");
        self.wants.send_if_modified(|wanted| wanted.replace(most).is_none());
        self.exchange(session, most).await
    }

    /// Waits for the line that says that the worker is ready.
    async fn first_line(&self, session: &mut Session) -> Result<Said, String> {
        let started = Instant::now();
        let mut wait_until = started + REMINDER;
        loop {
            let line = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(STOPPED.to_owned()),
                line = timeout_at(wait_until, session.said.recv()) => line,
            };
            match line {
                Ok(Some(line)) => return parse(&line),
                Ok(None) => return Err("it ended before it was ready".to_owned()),
                Err(_) if started.elapsed() < READY_LIMIT => {
                    wait_until = started + READY_LIMIT;
                    warn!(
                        worker = self.number,
                        "the worker has not said that it is ready for {REMINDER:?}; its first line must be {{\"type\":\"ready\",\"v\":1}}, and standard output must be flushed behind it"
                    );
                }
                Err(_) => return Err(format!("it has not said that it is ready within {READY_LIMIT:?}")),
            }
        }
    }

    async fn exchange(&self, session: &mut Session, most: usize) -> End {
        loop {
            let has_room = session.in_flight() < most;
            let next = async { self.queue.lock().await.recv().await };
            let look_at = session.look_at();
            let look = async {
                match look_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let gone_on = tokio::select! {
                biased;
                line = session.said.recv() => answered(session, line),
                () = self.stop.cancelled() => Err(STOPPED.to_owned()),
                Some(withdrawn) = session.withdrawn.join_next() => withdrawn.map_or(Ok(()), |id| session.cancel(id)),
                () = look => match session.look() {
                    Ok(()) => Ok(()),
                    Err(why) => return End { why, hangs: true },
                },
                job = next, if has_room => match job {
                    Some(job) => session.give(job),
                    None => Err("it has nothing more to do".to_owned()),
                },
            };
            if let Err(why) = gone_on {
                return why.into();
            }
        }
    }
}

/// Why a process is ended that is being stopped.
const STOPPED: &str = "it was told to stop";

/// Why the talk with a process is over.
struct End {
    why: String,
    /// It answers nothing, so it need not be asked to end.
    hangs: bool,
}

impl From<String> for End {
    fn from(why: String) -> Self {
        Self { why, hangs: false }
    }
}

/// Takes the next line of a worker that is ready.
fn answered(session: &mut Session, line: Option<Line>) -> Result<(), String> {
    let Some(line) = line else { return Err("it ended".to_owned()) };
    match parse(&line)? {
        Said::Ready(_) => {
            Err(format!("line {} of its standard output says again that it is ready", line.number))
        }
        Said::Answer(answer) => {
            session.answer(answer, line.number);
            Ok(())
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
async fn end(process: &mut Process, grace: Duration) {
    if timeout(grace, process.wait()).await.is_ok() {
        return;
    }
    process.terminate();
    if timeout(TERM_GRACE, process.wait()).await.is_err() {
        process.kill().await;
    }
}
