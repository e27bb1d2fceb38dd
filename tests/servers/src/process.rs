//! Child processes that never outlive the test process, however it ends.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// How often a readiness probe asks again.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

/// How much of a log a failure shows.
const LOG_TAIL_LINES: usize = 40;

/// A child that is killed by its id when this value is dropped, and by the kernel when the test
/// process dies without dropping anything.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: Option<PathBuf>,
}

/// A command for [`Process::spawn`] that runs `program` and has the kernel send it `signal`
/// (`KILL`, `TERM`) when its parent dies.
///
/// `setpriv` of util-linux asks the kernel for this and then becomes the program, so the child's id
/// is the program's. A `pre_exec` here would need `unsafe`.
#[must_use]
pub fn bound_to_parent(program: impl AsRef<OsStr>, signal: &str) -> Command {
    bound_to_parent_as(None, program, signal)
}

/// Like [`bound_to_parent`], as another account, which only root can do.
pub fn bound_to_parent_as(
    account: Option<&Account>,
    program: impl AsRef<OsStr>,
    signal: &str,
) -> Command {
    let core = *CORE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut command = match core {
        None => Command::new("setpriv"),
        Some(core) => {
            let mut command = Command::new("taskset");
            command.args(["--cpu-list", &core.to_string(), "setpriv"]);
            command
        }
    };
    if let Some(Account { user, group }) = account {
        command.args([
            format!("--reuid={user}"),
            format!("--regid={group}"),
            "--clear-groups".to_owned(),
        ]);
    }
    command
        .args(["--pdeathsig", signal, "--"])
        .arg(program.as_ref());
    command
}

/// The core that servers run on from now on; `None` leaves them where the system puts them.
pub fn run_servers_on(core: Option<usize>) {
    *CORE.lock().unwrap_or_else(PoisonError::into_inner) = core;
}

static CORE: Mutex<Option<usize>> = Mutex::new(None);

/// An account of the machine, by its numbers.
#[derive(Debug)]
pub struct Account {
    user: u32,
    group: u32,
}

impl Account {
    /// The account of this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        let accounts = fs::read_to_string("/etc/passwd").ok()?;
        let line = accounts
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}:")))?;
        let mut fields = line.split(':').skip(1);
        Some(Self {
            user: fields.next()?.parse().ok()?,
            group: fields.next()?.parse().ok()?,
        })
    }

    /// Gives it a folder.
    pub fn own(&self, folder: &Path) {
        let given = std::os::unix::fs::chown(folder, Some(self.user), Some(self.group));
        given.unwrap_or_else(|error| panic!("cannot give {} away: {error}", folder.display()));
    }
}

/// Whether the tests run as root.
pub fn runs_as_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// The ids of a process's children.
pub fn children(id: u32) -> Vec<u32> {
    let path = format!("/proc/{id}/task/{id}/children");
    let listed =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
    listed
        .split_whitespace()
        .filter_map(|id| id.parse().ok())
        .collect()
}

/// The processor time that a process has used so far, in steps of 10 ms; with `ended`, that of its
/// ended children too.
pub fn cpu_time(id: u32, ended: bool) -> Duration {
    // `man 5 proc`: behind the name in brackets, user and system time are the 12th and 13th field,
    // those of the children that were waited for the next two, in hundredths of a second on every
    // Linux.
    const TICK: Duration = Duration::from_millis(10);
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
    let ticks = fields
        .skip(11)
        .take(if ended { 4 } else { 2 })
        .filter_map(|field| field.parse::<u32>().ok());
    TICK * ticks.sum::<u32>()
}

/// Whether the process was stopped by a signal.
#[must_use]
pub fn is_stopped(id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| rest.starts_with('T'))
}

/// Whether the process runs. One that its parent has not waited for is still listed, as a zombie.
#[must_use]
pub fn is_running(id: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// Kills processes that are not children of this one, and waits until they are gone.
pub fn kill_and_wait(ids: &[u32], limit: Duration) {
    for id in ids {
        // It may have ended by itself when its parent did.
        drop(
            Command::new("sh")
                .args(["-c", r#"kill -s KILL "$1""#, "kill", &id.to_string()])
                .output(),
        );
    }
    let deadline = Instant::now() + limit;
    while ids.iter().copied().any(is_running) {
        assert!(
            Instant::now() < deadline,
            "processes {ids:?} were killed, and still run after {limit:?}"
        );
        std::thread::sleep(PROBE_INTERVAL);
    }
}

impl Process {
    /// Starts a command made by [`bound_to_parent`]. `name` is what failures call it.
    ///
    /// # Panics
    /// When the command cannot be started.
    #[must_use]
    pub fn spawn(name: &str, command: Command) -> Self {
        let child = spawn_by_keeper(command).unwrap_or_else(|error| {
            panic!("cannot start {name}: {error}; is `setpriv` (package util-linux) installed?")
        });
        Self {
            name: name.to_owned(),
            child,
            log: None,
        }
    }

    /// Like [`Process::spawn`], without an input, and with all output appended to the file `log`.
    ///
    /// # Panics
    /// When the command cannot be started or the log cannot be opened.
    #[must_use]
    pub fn spawn_logged(name: &str, mut command: Command, log: &Path) -> Self {
        let file = OpenOptions::new().create(true).append(true).open(log);
        let out = file.unwrap_or_else(|error| panic!("cannot open {}: {error}", log.display()));
        let err = out.try_clone().expect("a file handle can be cloned");
        command.stdin(Stdio::null()).stdout(out).stderr(err);
        let mut process = Self::spawn(name, command);
        process.log = Some(log.to_owned());
        process
    }

    /// The process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its standard input, output and error, where the command made pipes of them.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The exit status when the process has ended, `None` while it runs. Never waits.
    ///
    /// # Panics
    /// When the kernel does not know the child, which would be a bug of this module.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("only this value waits for it")
    }

    /// Waits until the process ends by itself, however long that takes, and returns its status.
    pub async fn end(&mut self) -> ExitStatus {
        loop {
            if let Some(status) = self.try_wait() {
                return status;
            }
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }

    /// Like [`Process::end`], within a limit.
    ///
    /// # Panics
    /// When it still runs after `limit`; the text shows the end of its log.
    pub async fn end_within(&mut self, limit: Duration) -> ExitStatus {
        let ended = tokio::time::timeout(limit, self.end()).await;
        ended.unwrap_or_else(|_| {
            panic!(
                "{} still runs after {limit:?}{}",
                self.name,
                self.log_tail()
            )
        })
    }

    /// Kills it with SIGKILL and waits until it is gone. Does nothing when it has ended already.
    pub fn kill(&mut self) {
        // Both calls fail only for a child that has been waited for, and then there is nothing to
        // do.
        drop(self.child.kill());
        drop(self.child.wait());
    }

    /// Asks it to end by a signal, even if it was stopped, and waits until it has ended; one that
    /// still runs after `limit` is killed.
    pub fn end_by(&mut self, signal: &str, limit: Duration) {
        if self.try_wait().is_some() {
            return;
        }
        let script = r#"kill -s "$1" "$2"; kill -s CONT "$2""#;
        let mut command = Command::new("sh");
        command.args(["-c", script, "kill", signal, &self.id().to_string()]);
        // If it cannot be sent, the process is killed below.
        drop(command.output());
        let deadline = Instant::now() + limit;
        while self.try_wait().is_none() && Instant::now() < deadline {
            std::thread::sleep(PROBE_INTERVAL);
        }
        self.kill();
    }

    /// Sends a signal by name (`STOP`, `CONT`, `TERM`). Returns once it is sent, not once it has
    /// worked.
    ///
    /// # Panics
    /// When the process has ended: its id may belong to another process by now.
    pub fn signal(&mut self, signal: &str) {
        self.send(signal, &self.id().to_string());
    }

    /// Sends a signal to the process group that the process leads, as a terminal does at Ctrl-C.
    ///
    /// # Panics
    /// As [`Process::signal`].
    pub fn signal_group(&mut self, signal: &str) {
        self.send(signal, &format!("-{}", self.id()));
    }

    fn send(&mut self, signal: &str, target: &str) {
        assert!(self.try_wait().is_none(), "{} has ended", self.name);
        // The shell's own `kill` is everywhere; the program of that name is a package of its own.
        let status = Command::new("sh")
            .args(["-c", r#"kill -s "$1" -- "$2""#, "kill", signal, target])
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "cannot send {signal} to {}",
            self.name
        );
    }

    /// Calls `probe` until it returns `Ok`: the process has answered, and is the one that was
    /// started.
    ///
    /// # Panics
    /// When the process ends, or `limit` passes; the text has the last answer of the probe, `hint`
    /// and the end of the log.
    pub async fn ready<F, Probe>(&mut self, limit: Duration, hint: &str, mut probe: F)
    where
        F: FnMut() -> Probe + Send,
        Probe: Future<Output = Result<(), String>> + Send,
    {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.try_wait() {
                panic!(
                    "{} ended before it was ready ({status}). {hint}{}",
                    self.name,
                    self.log_tail()
                );
            }
            let Err(answer) = probe().await else { return };
            assert!(
                Instant::now() < deadline,
                "{} was not ready within {limit:?}: {answer}. {hint}{}",
                self.name,
                self.log_tail()
            );
            tokio::time::sleep(PROBE_INTERVAL).await;
        }
    }

    /// The end of its log, for the text of a panic.
    pub fn log_tail(&self) -> String {
        let Some(log) = &self.log else {
            return String::new();
        };
        let text = fs::read(log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let above = text.lines().count().saturating_sub(LOG_TAIL_LINES);
        let tail: Vec<&str> = text.lines().skip(above).collect();
        format!("\n--- the end of its log ---\n{}", tail.join("\n"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts the command on a thread that runs as long as the process.
///
/// The kernel's "parent" is the *thread* that started the child. Every test has a thread of its
/// own, so a server that all tests share would otherwise die with the test that happened to start
/// it.
fn spawn_by_keeper(command: Command) -> io::Result<Child> {
    type Job = (Command, mpsc::Sender<io::Result<Child>>);
    static KEEPER: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
        let (jobs, inbox) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("process-lease_renewer".to_owned())
            .spawn(move || {
                for (mut command, reply) in inbox {
                    // An asker that is gone drops the child's handle; the kernel ends it with us.
                    drop(reply.send(command.spawn()));
                }
            })
            .expect("a thread can be started");
        jobs
    });
    let (reply, answer) = mpsc::channel();
    KEEPER
        .send((command, reply))
        .expect("the lease_renewer never ends");
    answer.recv().expect("the lease_renewer answers every job")
}
