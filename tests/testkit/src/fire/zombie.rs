//! A worker outside of a run that is stopped at a point, and goes on when it is too late.

use std::path::PathBuf;
use std::time::Duration;

use oncegate_testing::promise::Point;

use super::points::VARIABLE;
use super::settings::WorkerSettings;
use super::stage::STOP_LIMIT;
use crate::process::{self, Process};
use crate::until::until;

/// What is to happen to a [`Zombie`] at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trap {
    /// The process stops itself.
    Stop(Point),
    /// The thread that comes there is held, and no other.
    Hold(Point),
}

/// A worker of its own, outside of a run, that can be stopped at a point and goes on later.
#[derive(Debug)]
pub struct Zombie {
    process: Process,
    go: PathBuf,
}

impl Zombie {
    /// Starts the program; it is caught when it first passes these points.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(program: PathBuf, settings: &WorkerSettings, traps: &[Trap]) -> Self {
        let mut command = process::bound_to_parent(program, "KILL");
        command.arg(settings.as_json());
        let go = settings.history.with_extension("go");
        let trap = |trap: &Trap| match trap {
            Trap::Stop(point) => format!("{}:1:stop:{}", point.as_str(), go.display()),
            Trap::Hold(point) => format!("{}:1:hold:{}", point.as_str(), go.display()),
        };
        command.env(
            VARIABLE,
            traps.iter().map(trap).collect::<Vec<String>>().join(";"),
        );
        Self {
            process: Process::spawn("a worker", command),
            go,
        }
    }

    /// Its process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until it has stopped itself.
    ///
    /// # Panics
    /// When it has not within `limit`.
    pub async fn until_stopped(&self, limit: Duration) {
        until("a worker to stop itself", limit, async || {
            if self.is_stopped() {
                Ok(())
            } else {
                Err("it runs".to_owned())
            }
        })
        .await;
    }

    /// Whether it has stopped itself.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        process::is_stopped(self.id())
    }

    /// Continues the stopped process; threads that reached a trap are still held there.
    ///
    /// # Panics
    /// When it has ended.
    pub fn wake(&mut self) {
        self.process.signal("CONT");
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// When it has ended.
    pub fn go_on(&mut self) {
        std::fs::write(&self.go, "").expect("a file can be made");
        self.wake();
    }

    /// Kills it with SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Asks it to stop, and waits until it has ended well.
    ///
    /// # Panics
    /// When it does not within a minute, or reports that something went wrong.
    pub async fn stop(&mut self) {
        self.process.signal("TERM");
        let status = self.process.end_within(STOP_LIMIT).await;
        assert!(
            status.success(),
            "a worker that was asked to stop ended with {status}"
        );
    }
}
