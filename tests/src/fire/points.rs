//! The steps of a message at which a worker can be told to die, `ONCEGATE_FIRE=effect-after:3:abort`, or to stop and go on
//! once it is continued and a file is there: `ONCEGATE_FIRE=effect-after:3:stop:/tmp/go`.

use std::path::PathBuf;
use std::process::Command;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// Names the point, how often it is passed until it works, and what happens there: `abort` or `stop`.
pub(super) const VARIABLE: &str = "ONCEGATE_FIRE";

/// A step of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// The claim has not been sent.
    ClaimBefore,
    /// The claim was granted, and nobody has been told.
    ClaimAfter,
    /// The handler runs, and its effect has not happened.
    EffectBefore,
    /// The effect has happened.
    EffectAfter,
    /// The completion has not been sent.
    CompleteBefore,
    /// The completion is on its way, and its answer is not.
    CompleteSent,
    /// The completion was answered, and nobody has been told.
    CompleteAfter,
    /// The message is about to be acknowledged.
    AckBefore,
    /// The message was acknowledged, and its offset is not committed yet.
    AckAfter,
}

/// Every point, in the order in which a message passes them.
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
        }
    }
}

struct Trap {
    point: String,
    passes_left: AtomicU32,
    /// Where the file will be, if it is to stop.
    go: Option<PathBuf>,
}

/// How often it is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

static TRAP: LazyLock<Option<Trap>> = LazyLock::new(|| {
    let text = std::env::var(VARIABLE).ok()?;
    let mut parts = text.split(':');
    let (point, passes, action) = (parts.next()?, parts.next()?, parts.next()?);
    let passes_left = AtomicU32::new(passes.parse().expect("a number of passes"));
    let go = (action == "stop").then(|| parts.next().map(PathBuf::from).expect("a file to wait for"));
    Some(Trap { point: point.to_owned(), passes_left, go })
});

/// Whether this process is to meet its fate at this point some time.
pub(super) fn is_set(point: Point) -> bool {
    TRAP.as_ref().is_some_and(|trap| trap.point == point.name() && trap.passes_left.load(SeqCst) > 0)
}

/// The process is at this point.
pub(super) fn pass(point: Point) {
    let Some(trap) = TRAP.as_ref().filter(|trap| trap.point == point.name()) else { return };
    let left = trap.passes_left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
    if left != Ok(1) {
        return;
    }
    let Some(go) = &trap.go else { std::process::abort() };
    let id = std::process::id().to_string();
    let stopped = Command::new("sh").args(["-c", r#"kill -s STOP "$1""#, "kill", &id]).status();
    stopped.expect("a process may stop itself");
    // A signal takes its time, and this thread must not go a step further meanwhile.
    while !go.exists() {
        std::thread::sleep(LOOK_INTERVAL);
    }
}
