//! Makes a worker crash or stop at a step of a message.
//!
//! `ONCEGATE_FIRE=effect-after:3:abort` ends the process.
//! `ONCEGATE_FIRE=effect-after:3:stop:/tmp/go` stops it; it goes on once it is continued and the
//! file exists. `hold` instead of `stop` holds only the thread until the file exists. Several are
//! separated by semicolons.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use oncegate_testing::promise::{Point, PointHook};

/// Names the point, how often it is passed until it works, and what happens there: `abort`, `stop`
/// or `hold`.
pub(super) const VARIABLE: &str = "ONCEGATE_FIRE";

#[derive(Debug)]
struct Trap {
    point: String,
    passes_left: AtomicU32,
    fate: Fate,
}

/// What happens to a process at a point.
#[derive(Debug)]
enum Fate {
    Dies,
    /// All of it, until it is continued and the file is there.
    Stops(PathBuf),
    /// The thread that passes, until the file is there.
    IsHeld(PathBuf),
}

impl Trap {
    fn of(text: &str) -> Self {
        let mut parts = text.split(':');
        let mut part = || {
            parts
                .next()
                .expect("a trap is POINT:PASSES:FATE, and perhaps a file")
        };
        let point = part().to_owned();
        let passes = part();
        let fate = part();
        let fate = match fate {
            "stop" => Fate::Stops(part().into()),
            "hold" => Fate::IsHeld(part().into()),
            _ => Fate::Dies,
        };
        let passes_left = AtomicU32::new(passes.parse().expect("a number of passes"));
        Self {
            point,
            passes_left,
            fate,
        }
    }
}

/// How often it is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// The traps of this process.
#[derive(Debug)]
pub(super) struct Traps(Vec<Trap>);

impl Traps {
    /// Those of the environment.
    pub(super) fn of_environment() -> Self {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        Self(
            text.split(';')
                .filter(|trap| !trap.is_empty())
                .map(Trap::of)
                .collect(),
        )
    }

    fn at(&self, point: Point) -> Option<&Trap> {
        self.0.iter().find(|trap| trap.point == point.as_str())
    }
}

impl PointHook for Traps {
    fn is_set(&self, point: Point) -> bool {
        self.at(point)
            .is_some_and(|trap| trap.passes_left.load(SeqCst) > 0)
    }

    fn pass(&self, point: Point) {
        let Some(trap) = self.at(point) else { return };
        let left = trap
            .passes_left
            .fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        if left != Ok(1) {
            return;
        }
        let go = match &trap.fate {
            Fate::Dies => std::process::abort(),
            Fate::IsHeld(go) => go,
            Fate::Stops(go) => {
                let id = std::process::id().to_string();
                let stopped = Command::new("sh")
                    .args(["-c", r#"kill -s STOP "$1""#, "kill", &id])
                    .status();
                stopped.expect("a process may stop itself");
                go
            }
        };
        // A signal takes its time, and this thread must not go a step further meanwhile.
        while !go.exists() {
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}
