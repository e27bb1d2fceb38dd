//! Processes of workers: each has a process group of its own, and on Linux the kernel ends it when
//! oncegate ends.
//!
//! The process group keeps the signals of a terminal away from workers: Ctrl-C goes to the whole
//! foreground group, and would end a worker in the middle of a message.
//!
//! Linux sends a process its parent-death signal when the *thread* that started it ends. Threads of
//! a runtime end before their process does, so all workers are started by one thread that lives as
//! long as the process.
//!
//! A process that a worker leaves behind inherits its streams, so the end of a worker is never read
//! from its pipes. The system reports it while the worker is kept as a zombie: as long as it is
//! one, the number of its group belongs to it, and what is left of the group can be killed without
//! hitting another.

use std::io;
use std::os::fd::AsFd;
#[cfg(target_os = "linux")]
use std::path::Path;
use std::pin::Pin;
use std::process::ExitStatus;
use std::sync::Arc;
use std::task::{Context, Poll};

use oncegate_core::reason::one_line;
use rustix::io::ioctl_fionread;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader, ReadBuf, Take};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{self, SignalKind};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::AbortOnDropHandle;
use tracing::{debug, warn};

use crate::program::{Program, is_one_command};

/// The internal first argument that makes this program a worker instead of a command line.
#[cfg(target_os = "linux")]
const BECOME_WORKER: &str = "__worker";
/// The running program, also when its file was replaced by a newer one.
#[cfg(target_os = "linux")]
const THIS_PROGRAM: &str = "/proc/self/exe";
/// The exit code of shells for a program that cannot be started.
#[cfg(target_os = "linux")]
const CANNOT_START: u8 = 127;

/// The longest line of a worker's standard error that is logged as one, in bytes.
const LOG_LINE_MAX_BYTES: u64 = 8 * 1024;
/// The part of the last line that is told as the reason of an end, in characters.
const LAST_LINE_MOST: usize = 300;

/// A program, with the variables of this process that it does not get, and those that it gets
/// besides.
#[derive(Clone, Debug)]
pub(crate) struct Runnable {
    program: Program,
    hidden: Arc<[String]>,
    given: Arc<[(String, String)]>,
}

impl Runnable {
    /// `hidden` are variables with secrets of oncegate itself.
    pub(crate) fn new(program: Program, hidden: &[String], given: &[(String, String)]) -> Self {
        Self {
            program,
            hidden: hidden.into(),
            given: given.into(),
        }
    }
}

/// A command for the program. A text is the shell's, whole: its exit status is that of the text.
///
/// The process is the leader of a new process group, which signals are sent to: they reach what a
/// shell has started.
pub(crate) fn command(runnable: &Runnable) -> Command {
    let words: Vec<String> = match &runnable.program {
        Program::Shell(text) => {
            let text = if is_one_command(text) {
                format!("exec {text}")
            } else {
                text.clone()
            };
            vec!["sh".to_owned(), "-c".to_owned(), text]
        }
        Program::Words(words) => words.clone(),
    };
    let mut command = bound_command(&words);
    for variable in &*runnable.hidden {
        command.env_remove(variable);
    }
    command.envs(runnable.given.iter().map(|(name, value)| (name, value)));
    command.process_group(0).kill_on_drop(true);
    command
}

/// A command that runs these arguments in a process that ends with this one.
#[cfg(target_os = "linux")]
fn bound_command(words: &[String]) -> Command {
    if !Path::new(THIS_PROGRAM).exists() {
        // Without /proc, a worker detects the end of oncegate only by the end of its standard
        // input.
        return plain_command(words);
    }
    let mut command = Command::new(THIS_PROGRAM);
    command
        .args([BECOME_WORKER, &std::process::id().to_string()])
        .args(words);
    command
}

#[cfg(not(target_os = "linux"))]
fn bound_command(words: &[String]) -> Command {
    plain_command(words)
}

fn plain_command(words: &[String]) -> Command {
    let (program, arguments) = words
        .split_first()
        .map_or(("", words), |(first, rest)| (first.as_str(), rest));
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

/// Becomes a worker if the arguments of this process ask for it, and then does not return unless
/// that fails.
///
/// `None`: this is an ordinary command line. A program that starts workers must call this at the
/// beginning of its `main`, before any thread is started: it starts each of them by way of itself.
#[cfg(target_os = "linux")]
pub fn become_worker() -> Option<std::process::ExitCode> {
    use std::os::unix::process::CommandExt as _;

    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != BECOME_WORKER {
        return None;
    }
    let parent = arguments.next();
    let program = arguments.next().unwrap_or_default();
    let bound = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if let Err(error) = bound {
        eprintln!("oncegate: the worker cannot be bound to its parent process: {error}");
    }
    // A parent that ended before the line above sends no signal.
    let has_parent = rustix::process::getppid()
        .is_some_and(|now| parent.is_some_and(|then| then == *now.as_raw_nonzero().to_string()));
    if !has_parent {
        return Some(CANNOT_START.into());
    }
    let error = std::process::Command::new(&program).args(arguments).exec();
    eprintln!(
        "oncegate: the worker {} cannot be started: {error}",
        program.to_string_lossy()
    );
    Some(CANNOT_START.into())
}

/// Does nothing outside Linux: a worker detects the end of oncegate by the end of its standard
/// input.
#[cfg(not(target_os = "linux"))]
pub fn become_worker() -> Option<std::process::ExitCode> {
    None
}

/// The treatment of the processes that a process leaves behind in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leftovers {
    /// Kills them.
    Killed,
    /// Leaves them alone after exit code 0, and kills them after every other end.
    KilledUnlessDone,
}

/// A running worker. Dropping it kills its whole process group.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    leader: Pid,
    leftovers: Leftovers,
    /// Cancelled when the leader has ended. It stays a zombie until it is waited for.
    ended: CancellationToken,
    _watch: AbortOnDropHandle<()>,
}

/// The streams of a process: standard input, output and error.
pub(crate) type Streams = (ChildStdin, Output<ChildStdout>, Output<ChildStderr>);

impl Process {
    /// Starts the command, and returns the process with its streams, which the command must have
    /// piped.
    ///
    /// # Errors
    /// When it cannot be started.
    pub(crate) async fn start(
        command: Command,
        leftovers: Leftovers,
    ) -> io::Result<(Self, Streams)> {
        // Before the start, so that no end is missed.
        let children = unix::signal(SignalKind::child())?;
        let mut child = launcher::launch(command).await?;
        let leader = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .and_then(Pid::from_raw);
        let leader = leader.ok_or_else(|| io::Error::other("it has no process number"))?;
        let ended = CancellationToken::new();
        let watch = tokio::spawn(until_ended(leader, children, ended.clone()));
        let streams = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let _watch = AbortOnDropHandle::new(watch);
        let process = Self {
            child,
            leader,
            leftovers,
            ended,
            _watch,
        };
        match streams {
            (Some(stdin), Some(stdout), Some(stderr)) => {
                let outputs = (
                    Output::of(stdout, &process.ended),
                    Output::of(stderr, &process.ended),
                );
                Ok((process, (stdin, outputs.0, outputs.1)))
            }
            _ => Err(io::Error::other("it has no standard streams")),
        }
    }

    /// Resolves when the process has ended, also while others hold its streams.
    pub(crate) fn ended(&self) -> WaitForCancellationFutureOwned {
        self.ended.clone().cancelled_owned()
    }

    /// Waits until the process has ended, and deals with what it leaves behind.
    ///
    /// # Errors
    /// When the system does not report how it ended.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        self.ended.cancelled().await;
        let spares_leftovers = self.leftovers == Leftovers::KilledUnlessDone
            && matches!(look(self.leader), Ok(Some(status)) if status.exit_status() == Some(0));
        if !spares_leftovers {
            self.signal(Signal::KILL);
        }
        self.child.wait().await
    }

    /// Returns whether the process is still running.
    pub(crate) fn is_running(&self) -> bool {
        self.child.id().is_some() && matches!(look(self.leader), Ok(None))
    }

    /// Sends SIGTERM to the process group.
    pub(crate) fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Kills the process group (SIGKILL), and waits until its leader has ended.
    pub(crate) async fn kill(&mut self) {
        self.signal(Signal::KILL);
        drop(self.wait().await);
    }

    /// Sends a signal to the group, unless its leader was waited for: by then the system may have
    /// reused the number.
    fn signal(&self, signal: Signal) {
        if self.child.id().is_some()
            && let Err(error) = kill_process_group(self.leader, signal)
        {
            debug!(group = ?self.leader, ?signal, %error, "a worker's process group cannot be signalled");
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Asks how the process has ended, without taking it from the system; `None` while it runs.
fn look(leader: Pid) -> rustix::io::Result<Option<rustix::process::WaitIdStatus>> {
    waitid(
        WaitId::Pid(leader),
        WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG,
    )
}

/// Cancels `ended` when the process has ended.
async fn until_ended(leader: Pid, mut children: unix::Signal, ended: CancellationToken) {
    while matches!(look(leader), Ok(None)) {
        children.recv().await;
    }
    ended.cancel();
}

/// An output of a process. It ends with the process: what was written until then is read, and
/// nothing that another process writes later, which may hold the pipe for any time.
pub(crate) struct Output<T> {
    pipe: Take<T>,
    /// `None` once the process has ended.
    ended: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

impl<T: AsyncRead> Output<T> {
    fn of(pipe: T, ended: &CancellationToken) -> Self {
        Self {
            pipe: pipe.take(u64::MAX),
            ended: Some(Box::pin(ended.clone().cancelled_owned())),
        }
    }
}

impl<T: AsyncRead + AsFd + Unpin> AsyncRead for Output<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(ended) = &mut this.ended
            && ended.as_mut().poll(cx).is_ready()
        {
            this.ended = None;
            this.pipe.set_limit(ioctl_fionread(this.pipe.get_ref())?);
        }
        Pin::new(&mut this.pipe).poll_read(cx, buf)
    }
}

/// Writes a worker's standard error to the log. Returns the beginning of its last line that is not
/// empty.
pub(crate) async fn log(worker: u32, stderr: impl AsyncRead + Unpin) -> String {
    let mut stderr = BufReader::new(stderr);
    let mut last = String::new();
    loop {
        let mut line = Vec::new();
        let read = (&mut stderr)
            .take(LOG_LINE_MAX_BYTES)
            .read_until(b'\n', &mut line)
            .await;
        if !matches!(read, Ok(1..)) {
            return last;
        }
        let line = String::from_utf8_lossy(&line);
        warn!(target: "oncegate::worker", worker, "{}", line.trim_end());
        if !line.trim().is_empty() {
            last = one_line(line.trim()).chars().take(LAST_LINE_MOST).collect();
        }
    }
}

/// The thread that starts the workers.
#[cfg(target_os = "linux")]
mod launcher {
    use std::io;
    use std::sync::{OnceLock, mpsc};

    use tokio::process::{Child, Command};
    use tokio::runtime::Handle;
    use tokio::sync::oneshot;

    /// A process to start, and the channel that returns it.
    struct Launch {
        command: Command,
        runtime: Handle,
        reply: oneshot::Sender<io::Result<Child>>,
    }

    /// Starts a process on the thread that lives as long as this program.
    pub(crate) async fn launch(command: Command) -> io::Result<Child> {
        static LAUNCHER: OnceLock<mpsc::Sender<Launch>> = OnceLock::new();
        let launcher = match LAUNCHER.get() {
            Some(launcher) => launcher,
            None => {
                let started = start()?;
                LAUNCHER.get_or_init(|| started)
            }
        };
        let (reply, answer) = oneshot::channel();
        let launch = Launch {
            command,
            runtime: Handle::current(),
            reply,
        };
        launcher.send(launch).map_err(|_| launcher_gone())?;
        answer.await.unwrap_or_else(|_| Err(launcher_gone()))
    }

    fn launcher_gone() -> io::Error {
        io::Error::other("the thread that starts workers has ended")
    }

    /// The thread ends when its sender is dropped: with the process, because the sender is a
    /// static.
    fn start() -> io::Result<mpsc::Sender<Launch>> {
        let (sender, launches) = mpsc::channel();
        std::thread::Builder::new()
            .name("oncegate-spawn".to_owned())
            .spawn(move || {
                for Launch {
                    mut command,
                    runtime,
                    reply,
                } in launches
                {
                    let _inside = runtime.enter();
                    // The caller has stopped waiting: the process is dropped, which kills it.
                    drop(reply.send(command.spawn()));
                }
            })?;
        Ok(sender)
    }
}

#[cfg(not(target_os = "linux"))]
mod launcher {
    use std::io;

    use tokio::process::{Child, Command};

    /// Starts a process.
    pub(crate) async fn launch(mut command: Command) -> io::Result<Child> {
        command.spawn()
    }
}
