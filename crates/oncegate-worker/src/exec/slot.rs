//! A worker on standard streams: keeps its process running, and exchanges lines with it.

use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::ahead::Lines;
use super::job::{Job, Returned, Taken};
use super::session::{REMINDER, Session};
use super::violations::Violations;
use crate::process::{self, Leftovers, Process, Runnable, Streams, log};
use crate::protocol::lines::write_lines;
use crate::protocol::said::Ready;
use crate::protocol::values::{Written, read_chunks};
use crate::report::{Capacity, Ended, WorkerReport};

/// The exit codes of shells, and of ours, for a program that cannot be started.
const CANNOT_START: [i32; 2] = [126, 127];
/// The largest `max_in_flight` that a worker may request.
const MAX_IN_FLIGHT_MOST: usize = 10_000;
/// The most lines that may wait for a worker: messages and their cancellations.
const LINES_WAITING: usize = 2 * MAX_IN_FLIGHT_MOST;
/// The most parts of a worker's output that may wait, of up to 64 KiB each.
const CHUNKS_WAITING: usize = 16;
/// The longest time that a worker may take to report that it is ready.
const READY_LIMIT: Duration = Duration::from_secs(60);
/// The time limit for a worker to end after its input was closed, and again after a SIGTERM.
pub(crate) const END_GRACE: Duration = Duration::from_secs(10);
pub(crate) const TERM_GRACE: Duration = Duration::from_secs(5);
/// The time limit for a worker that has closed its standard output to end by itself.
const EXIT_GRACE: Duration = Duration::from_secs(1);
/// The longest time that a worker may be silent about a cancelled message before it is killed and
/// replaced: four fifths of the lease, and at most this. The message's handler is dropped a little
/// later, and its lease expires only then.
const CANCEL_GRACE: Duration = Duration::from_secs(4);
/// The waits before a worker that ended is restarted. They double, and start again at the first one
/// after a worker has run for `RESTART_FORGET`.
const RESTART_FIRST: Duration = Duration::from_millis(100);
const RESTART_MOST: Duration = Duration::from_secs(10);
const RESTART_FORGET: Duration = Duration::from_secs(30);

/// A worker, whose process may be replaced.
pub(super) struct Slot {
    pub(super) number: u32,
    pub(super) program: Runnable,
    pub(super) lease: Duration,
    pub(super) in_batches: bool,
    pub(super) queue: Arc<Mutex<mpsc::Receiver<Job>>>,
    pub(super) returned: Arc<Returned>,
    /// Cancelled when no more messages are to begin.
    pub(super) rest: CancellationToken,
    pub(super) wants: watch::Sender<Option<Capacity>>,
    pub(super) report: WorkerReport,
    pub(super) stop: CancellationToken,
    pub(super) forced: Arc<AtomicBool>,
    /// The time limit for a worker to end after its input was closed, if not `END_GRACE`.
    pub(super) end_grace: Arc<OnceLock<Duration>>,
    pub(super) violations: Arc<Violations>,
}

impl Slot {
    /// Keeps a process running until the stop.
    pub(super) async fn keep(self) {
        let mut wait = RESTART_FIRST;
        while !self.stop.is_cancelled() {
            let started = Instant::now();
            let ended = match self.spawn().await {
                Ok((process, streams)) => {
                    self.report.started();
                    self.attend(process, streams).await
                }
                Err(error) => Ended {
                    why: format!("it cannot be started: {error}"),
                    ..Ended::default()
                },
            };
            if self.stop.is_cancelled() {
                return;
            }
            self.report.ended(&ended);
            let why = ended.why;
            if started.elapsed() > RESTART_FORGET {
                wait = RESTART_FIRST;
            }
            warn!(
                worker = self.number,
                why,
                ?wait,
                "the worker has ended; restarting it"
            );
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
            self.report.restarts();
            wait = (wait * 2).min(RESTART_MOST);
        }
    }

    async fn spawn(&self) -> std::io::Result<(Process, Streams)> {
        let mut command = process::command(&self.program);
        command.env("ONCEGATE_WORKER", self.number.to_string());
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Process::start(command, Leftovers::Killed).await
    }

    /// Runs one process until it ends, and returns how it ended.
    async fn attend(&self, mut process: Process, (stdin, stdout, stderr): Streams) -> Ended {
        let mut side = JoinSet::new();
        let number = self.number;
        let last_line = AbortOnDropHandle::new(tokio::spawn(log(number, stderr)));
        // Input and output lines have tasks of their own. If one task wrote before it read, it
        // would deadlock with a worker that writes before it reads.
        let (chunks, said) = mpsc::channel(CHUNKS_WAITING);
        side.spawn(async move { read_chunks(stdout, chunks).await });
        let (tell, lines) = mpsc::channel(LINES_WAITING);
        side.spawn(async move { write_lines(stdin, lines).await });
        let grace = CANCEL_GRACE.min(self.lease * 4 / 5);
        let mut session = Session::new(number, self.lease, grace, tell, said);
        let mut was_ready = false;
        let End { why, hangs } = self.converse(&mut session, &mut was_ready).await;
        // A program closes its output a moment before it has ended.
        let by_itself = if session.said.is_closed() {
            timeout(EXIT_GRACE, process.ended()).await.is_ok()
        } else {
            !process.is_running()
        };
        session.close_input();
        self.shut(&mut process, hangs).await;
        let status = process.wait().await.ok();
        // Its last line is the reason of its end, most of the time.
        let last_line = timeout(TERM_GRACE, last_line)
            .await
            .ok()
            .and_then(Result::ok)
            .unwrap_or_default();
        let why = match status.filter(|_| by_itself) {
            Some(status) if last_line.is_empty() => format!("{why} ({status})"),
            Some(status) => format!("{why} ({status}): {last_line}"),
            None => why,
        };
        self.take_last_words(&mut session).await;
        let unanswered = session.close();
        if !self.stop.is_cancelled() {
            for why in unanswered.mistakes() {
                self.violations.note(why);
            }
        }
        // Not earlier: the next attempts must not run at the same time as these.
        let not_begun = unanswered.give_up(number, &why);
        if !not_begun.is_empty() {
            let messages = not_begun.len();
            info!(
                worker = number,
                messages, "messages that the worker has not begun go to the next one"
            );
        }
        for job in not_begun {
            self.hand_on(job);
        }
        drop(
            timeout(TERM_GRACE, async {
                while side.join_next().await.is_some() {}
            })
            .await,
        );
        let cannot_start = status.and_then(|status| status.code());
        let cannot_start =
            by_itself && cannot_start.is_some_and(|code| CANNOT_START.contains(&code));
        Ended {
            why,
            was_ready,
            cannot_start: cannot_start && !was_ready,
        }
    }

    /// Ends the process, whose input is closed.
    async fn shut(&self, process: &mut Process, hangs: bool) {
        if hangs {
            return process.kill().await;
        }
        if !self.stop.is_cancelled() {
            end(process, Duration::ZERO).await;
            return;
        }
        let grace = self.end_grace.get().copied().unwrap_or(END_GRACE);
        if !end(process, grace).await {
            self.forced.store(true, Ordering::Relaxed);
        }
    }

    /// Takes what a process has written until its end: what it has answered counts, and shows what
    /// it has begun.
    async fn take_last_words(&self, session: &mut Session) {
        loop {
            match timeout(TERM_GRACE, session.said.recv()).await {
                Ok(chunk) => {
                    let goes_on = session.read(chunk);
                    if self.take_written(session).is_err() {
                        return session.doubt();
                    }
                    if !goes_on {
                        return;
                    }
                }
                Err(_) => return session.doubt(),
            }
        }
    }

    /// Gives messages that a process has not begun to the next one that is free.
    fn hand_on(&self, job: Job) {
        if self.stop.is_cancelled() || self.rest.is_cancelled() {
            job.not_run("the consumer stops");
        } else {
            self.returned.push(job);
        }
    }

    async fn converse(&self, session: &mut Session, was_ready: &mut bool) -> End {
        let lines = match self.until_ready(session).await {
            Ok(Ready {
                v: 1,
                batches: false,
                ..
            }) if self.in_batches => {
                return "it takes no batches, and `batch` is set; its first line must have \"batches\":true"
                    .to_owned()
                    .into();
            }
            Ok(Ready {
                v: 1,
                max_in_flight,
                ahead,
                ..
            }) => Lines::new(
                max_in_flight.clamp(1, MAX_IN_FLIGHT_MOST),
                // A batch is as many messages as are claimed together.
                if self.in_batches { 0 } else { ahead },
            ),
            Ok(Ready { v, .. }) => {
                return format!("it speaks version {v} of the protocol, not 1").into();
            }
            Err(why) => return why.into(),
        };
        info!(
            worker = self.number,
            max_in_flight = lines.at_a_time(),
            "the worker is ready"
        );
        *was_ready = true;
        self.report.ready();
        let room = lines.room();
        self.wants
            .send_if_modified(|wanted| wanted.replace(room).is_none());
        session.begin(lines);
        self.exchange(session).await
    }

    /// Waits for the worker's report that it is ready.
    async fn until_ready(&self, session: &mut Session) -> Result<Ready, String> {
        let started = Instant::now();
        let mut wait_until = started + REMINDER;
        loop {
            while let Some(written) = session.written.pop_front() {
                match written {
                    Written::Ready(ready) => return Ok(ready),
                    Written::Noise { why } => session.ignore(&why),
                    Written::Wrong { why, .. } => return Err(why),
                    Written::Answer { .. } => {
                        return Err(
                            "its first line was an answer, not {\"type\":\"ready\",\"v\":1}"
                                .to_owned(),
                        );
                    }
                }
            }
            let chunk = tokio::select! {
                biased;
                () = self.stop.cancelled() => return Err(STOPPED.to_owned()),
                chunk = timeout_at(wait_until, session.said.recv()) => chunk,
            };
            match chunk {
                Ok(chunk) => {
                    if !session.read(chunk) && session.written.is_empty() {
                        return Err("it ended before it was ready".to_owned());
                    }
                }
                Err(_) if started.elapsed() < READY_LIMIT => {
                    wait_until = started + READY_LIMIT;
                    warn!(
                        worker = self.number,
                        "the worker has not reported that it is ready for {REMINDER:?}; its first line must be {{\"type\":\"ready\",\"v\":1}}, and standard output must be flushed after it"
                    );
                }
                Err(_) => {
                    return Err(format!(
                        "it has not reported that it is ready within {READY_LIMIT:?}"
                    ));
                }
            }
        }
    }

    async fn exchange(&self, session: &mut Session) -> End {
        // What has come with the report that it is ready.
        if let Err(why) = self.take_written(session) {
            return why.into();
        }
        loop {
            let has_room = session.has_room();
            let rests = session.rests();
            let next = self.next_job();
            let look_at = session.look_at();
            let look = async {
                match look_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let gone_on = tokio::select! {
                biased;
                chunk = session.said.recv() => {
                    let goes_on = session.read(chunk);
                    let taken = self.take_written(session);
                    if goes_on { taken } else { taken.and(Err("it ended".to_owned())) }
                }
                () = self.stop.cancelled() => Err(STOPPED.to_owned()),
                Some(withdrawn) = session.withdrawn.join_next() => match withdrawn {
                    Ok(ids) => ids.into_iter().try_for_each(|id| session.cancel(id)),
                    Err(_) => Ok(()),
                },
                () = self.rest.cancelled(), if !rests => {
                    session.rest();
                    session.recall()
                }
                () = look => match session.look() {
                    Ok(()) => self.judge_strays(session).and_then(|()| session.recall()),
                    Err(why) => return End { why, hangs: true },
                },
                job = next, if has_room => match job {
                    Some(job) => session.give(job),
                    // The consumer has ended, and the stop follows.
                    None => {
                        self.stop.cancelled().await;
                        Err(STOPPED.to_owned())
                    }
                },
            };
            if let Err(why) = gone_on {
                return why.into();
            }
        }
    }

    /// Waits for the next messages; for ever, once the consumer must stop because of its workers.
    async fn next_job(&self) -> Option<Job> {
        tokio::select! {
            biased;
            () = self.violations.too_many() => std::future::pending().await,
            job = self.returned.next() => Some(job),
            job = async { self.queue.lock().await.recv().await } => job,
        }
    }

    /// Takes what a worker that is ready has written.
    ///
    /// # Errors
    /// As text: the process must be replaced.
    fn take_written(&self, session: &mut Session) -> Result<(), String> {
        while let Some(written) = session.written.pop_front() {
            match written {
                Written::Answer { answer, line } => match session.answer(answer, line) {
                    Taken::Answer => {
                        self.violations.forget();
                        self.report.answered();
                    }
                    Taken::Back(job) => self.hand_on(job),
                    Taken::Nothing => {}
                },
                Written::Wrong { id, why } => session.stray(id, why),
                Written::Noise { why } => session.ignore(&why),
                Written::Ready(_) => return Err("it reports again that it is ready".to_owned()),
            }
        }
        Ok(())
    }

    /// Counts the wrong answers that no right one has followed.
    ///
    /// # Errors
    /// As text: the process must be replaced, because it is unknown which message was answered.
    fn judge_strays(&self, session: &mut Session) -> Result<(), String> {
        let mut result = Ok(());
        while let Some(stray) = session.overdue_stray() {
            self.violations.note(&stray.why);
            match stray.id {
                Some(id) => session.spoil(&id, &stray.why),
                None => result = Err(stray.why),
            }
        }
        result
    }
}

/// The reason when a process is stopped on purpose.
const STOPPED: &str = "it was stopped";

/// The end of the exchange with a process, and its reason.
struct End {
    why: String,
    /// The process answers nothing, so it is killed without a request to end.
    hangs: bool,
}

impl From<String> for End {
    fn from(why: String) -> Self {
        Self { why, hangs: false }
    }
}

/// Waits for a process whose input is closed; then sends SIGTERM, then SIGKILL. Returns whether it
/// ended by itself.
async fn end(process: &mut Process, grace: Duration) -> bool {
    if timeout(grace, process.wait()).await.is_ok() {
        return true;
    }
    process.terminate();
    if timeout(TERM_GRACE, process.wait()).await.is_err() {
        process.kill().await;
    }
    false
}
