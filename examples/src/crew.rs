//! Worker processes: this very program, started again with other arguments.

use std::io::{self, BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use oncegate::BoxError;
use tokio::io::AsyncReadExt as _;

use crate::hang::Hang;

/// The time without progress after which something is wrong.
const STUCK_AFTER: Duration = Duration::from_secs(60);

/// The number of worker processes in the programs about payments.
const WORKERS: usize = 3;

/// The line that a worker prints when it is ready.
const READY: &str = "ready";

/// Interval at which the workers' progress is read.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// The progress of the workers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// The number of charges that were asked for.
    pub charges: u64,
    /// The number of duplicates that were answered.
    pub answers: u64,
}

/// Running workers; they are killed when this value is dropped.
#[derive(Debug)]
pub struct Crew {
    workers: Vec<Child>,
}

impl Crew {
    /// Starts the workers of a program about payments: three, as `worker` with these arguments.
    ///
    /// # Errors
    /// When one does not start.
    pub fn start_workers<'a>(
        arguments: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, BoxError> {
        let arguments = ["worker"].into_iter().chain(arguments).map(str::to_owned);
        Self::start(WORKERS, &arguments.collect::<Vec<String>>())
    }

    /// Starts so many workers, and waits until each [says that it is ready](until_told_to_stop);
    /// `arguments` is what each is given.
    ///
    /// # Errors
    /// When one does not start, or ends before it is ready.
    pub fn start(workers: usize, arguments: &[String]) -> Result<Self, BoxError> {
        let workers = (0..workers)
            .map(|_| {
                let mut worker = Command::new(std::env::current_exe()?);
                worker
                    .args(arguments)
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
            })
            .collect::<Result<Vec<Child>, io::Error>>()?;
        let mut crew = Self { workers };
        for worker in &mut crew.workers {
            let mut said = String::new();
            let output = worker.stdout.take().ok_or("a worker has no output")?;
            BufReader::new(output).read_line(&mut said)?;
            if said.trim_end() != READY {
                return Err("a worker has ended before it was ready".into());
            }
        }
        Ok(crew)
    }

    /// Waits until `enough`, showing progress; gives up when nothing moves. A question that fails
    /// is asked again.
    ///
    /// # Errors
    /// When nothing moves, or a worker ends by itself.
    pub fn wait_for(
        &mut self,
        bar: &ProgressBar,
        progress: impl Fn() -> Result<Progress, BoxError>,
        enough: impl Fn(&Progress) -> Result<bool, BoxError>,
    ) -> Result<Progress, BoxError> {
        let mut last = (progress()?, Instant::now());
        loop {
            let progress = progress()?;
            bar.set_position(progress.charges.max(progress.answers));
            let answer = enough(&progress);
            if matches!(answer, Ok(true)) {
                return Ok(progress);
            }
            if progress != last.0 {
                last = (progress, Instant::now());
            } else if last.1.elapsed() > STUCK_AFTER {
                return Err(stuck(progress, answer.err()).into());
            }
            for worker in &mut self.workers {
                if let Some(status) = worker.try_wait()? {
                    return Err(format!("a worker has ended by itself: {status}").into());
                }
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until a worker has stopped in the middle of a payment, and kills it with SIGKILL.
    /// Returns its process id.
    ///
    /// # Errors
    /// When nothing moves, or a worker ends by itself.
    pub fn kill_in(
        &mut self,
        hang: &Hang,
        bar: &ProgressBar,
        progress: impl Fn() -> Result<Progress, BoxError>,
    ) -> Result<u32, BoxError> {
        self.wait_for(bar, progress, |_| Ok(hang.who().is_some()))?;
        let place = self
            .workers
            .iter()
            .position(|worker| Some(worker.id()) == hang.who());
        let place = place.ok_or("it is no worker that has stopped")?;
        // It stays among the workers until it is dead, so that it is waited for whatever happens.
        let worker = self.workers.get_mut(place).ok_or("no worker is left")?;
        worker.kill()?;
        worker.wait()?;
        Ok(self.workers.swap_remove(place).id())
    }

    /// Waits until everything is done, showing progress, and stops the workers.
    ///
    /// # Errors
    /// When nothing moves, or a worker ends by itself or not well.
    pub fn finish(
        &mut self,
        bar: &ProgressBar,
        progress: impl Fn() -> Result<Progress, BoxError>,
        is_done: impl Fn() -> Result<bool, BoxError>,
    ) -> Result<(), BoxError> {
        self.wait_for(bar, progress, |_| is_done())?;
        self.stop()
    }

    /// Closing a worker's standard input asks it to stop; it finishes what it has started, commits
    /// and leaves.
    ///
    /// # Errors
    /// When one does not end well.
    pub fn stop(&mut self) -> Result<(), BoxError> {
        self.workers
            .iter_mut()
            .for_each(|worker| drop(worker.stdin.take()));
        for worker in &mut self.workers {
            let status = worker.wait()?;
            if !status.success() {
                return Err(format!("a worker did not stop cleanly: {status}").into());
            }
        }
        self.workers.clear();
        Ok(())
    }
}

fn stuck(progress: Progress, failed: Option<BoxError>) -> String {
    let Progress { charges, answers } = progress;
    let failed = failed.map(|error| format!("; whether that is all cannot be asked: {error}"));
    format!(
        "nothing has moved for {STUCK_AFTER:?}, after {charges} charges and {answers} answers{}",
        failed.unwrap_or_default()
    )
}

impl Drop for Crew {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            _ = worker.kill();
            _ = worker.wait();
        }
    }
}

/// In a worker: tells the main process that it is ready. What it returns resolves when the main
/// process closes the worker's standard input to stop it, or ends.
pub fn until_told_to_stop() -> impl Future<Output = ()> + Send {
    println!("{READY}");
    async {
        _ = tokio::io::stdin().read_to_end(&mut Vec::new()).await;
    }
}

/// In a worker: logs to standard error. Quiet unless something is wrong; `PAYMENTS_LOG=info` shows
/// more.
pub fn start_logging() {
    let level = std::env::var("PAYMENTS_LOG")
        .ok()
        .and_then(|level| level.parse().ok());
    let level = level.unwrap_or(tracing_subscriber::filter::LevelFilter::ERROR);
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .init();
}
