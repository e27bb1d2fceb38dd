//! Steps of a message at which a worker can be made to crash or stop.
//!
//! `ONCEGATE_FIRE=effect-after:3:abort` ends the process. `ONCEGATE_FIRE=effect-after:3:stop:/tmp/go` stops it; it goes
//! on once it is continued and the file exists. `hold` instead of `stop` holds only the thread until the file exists.
//! Several are separated by semicolons.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// Names the point, how often it is passed until it works, and what happens there: `abort`, `stop` or `hold`.
pub(super) const VARIABLE: &str = "ONCEGATE_FIRE";

/// A step of a message, or of its partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The claim has not been sent.
    ClaimBefore,
    /// The claim was granted, and the worker does not have the reply.
    ClaimAfter,
    /// The handler runs, and its effect has not happened.
    EffectBefore,
    /// The effect has happened.
    EffectAfter,
    /// The completion has not been sent.
    CompleteBefore,
    /// The completion is in flight, and not answered.
    CompleteSent,
    /// The completion was answered, and the worker does not have the reply.
    CompleteAfter,
    /// The message is about to be acknowledged.
    AckBefore,
    /// The message was acknowledged, and its offset is not committed yet.
    AckAfter,
    /// The poll thread has released partitions, and the group does not know it yet.
    Revoke,
}

/// Every point of a message, in the order in which it passes them.
pub const POINTS: [Point; 9] = [
    Point::ClaimBefore,
    Point::ClaimAfter,
    Point::EffectBefore,
    Point::EffectAfter,
    Point::CompleteBefore,
    Point::CompleteSent,
    Point::CompleteAfter,
    Point::AckBefore,
    Point::AckAfter,
];

impl Point {
    /// Its name in the environment.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClaimBefore => "claim-before",
            Self::ClaimAfter => "claim-after",
            Self::EffectBefore => "effect-before",
            Self::EffectAfter => "effect-after",
            Self::CompleteBefore => "complete-before",
            Self::CompleteSent => "complete-sent",
            Self::CompleteAfter => "complete-after",
            Self::AckBefore => "ack-before",
            Self::AckAfter => "ack-after",
            Self::Revoke => "revoke",
        }
    }
}

struct Trap {
    point: String,
    passes_left: AtomicU32,
    fate: Fate,
}

/// What happens to a process at a point.
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
        let mut part = || parts.next().expect("a trap is POINT:PASSES:FATE, and perhaps a file");
        let (point, passes, fate) = (part().to_owned(), part(), part());
        let fate = match fate {
            "stop" => Fate::Stops(part().into()),
            "hold" => Fate::IsHeld(part().into()),
            _ => Fate::Dies,
        };
        let passes_left = AtomicU32::new(passes.parse().expect("a number of passes"));
        Self { point, passes_left, fate }
    }
}

/// How often it is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

static TRAPS: LazyLock<Vec<Trap>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    text.split(';').filter(|trap| !trap.is_empty()).map(Trap::of).collect()
});

fn trap(point: Point) -> Option<&'static Trap> {
    TRAPS.iter().find(|trap| trap.point == point.name())
}

/// Whether a trap of this point is still ahead in this process.
pub(super) fn is_set(point: Point) -> bool {
    trap(point).is_some_and(|trap| trap.passes_left.load(SeqCst) > 0)
}

/// The process is at this point.
pub(super) fn pass(point: Point) {
    let Some(trap) = trap(point) else { return };
    let left = trap.passes_left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
    if left != Ok(1) {
        return;
    }
    let go = match &trap.fate {
        Fate::Dies => std::process::abort(),
        Fate::IsHeld(go) => go,
        Fate::Stops(go) => {
            let id = std::process::id().to_string();
            let stopped = Command::new("sh").args(["-c", r#"kill -s STOP "$1""#, "kill", &id]).status();
            stopped.expect("a process may stop itself");
            go
        }
    };
    // A signal takes its time, and this thread must not go a step further meanwhile.
    while !go.exists() {
        std::thread::sleep(LOOK_INTERVAL);
    }
}
