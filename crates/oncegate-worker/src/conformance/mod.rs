//! One worker that is called by itself, over any protocol, to test whether it keeps the protocol.
//!
//! `dialogue` exchanges lines with a worker on standard streams, and checks how its process ends.

mod dialogue;

use std::time::Duration;

use oncegate_runtime::Lease;
use tokio::time::{Instant, sleep, timeout};

pub use self::dialogue::Dialogue;
use crate::command::Commands;
use crate::error::WorkerError;
use crate::http::Caller;
use crate::protocol::call::{AttemptInfo, Call};
use crate::protocol::reply::Reply;
use crate::report::WorkerReport;
use crate::worker::{WorkerKind, WorkerLimits};

/// The time between two checks whether a worker is ready.
const READY_INTERVAL: Duration = Duration::from_millis(100);
/// The time after which a message is cancelled.
const CANCEL_AFTER: Duration = Duration::from_millis(20);

/// A worker that is tested: it gets one message at a time, without a consumer.
#[derive(Debug)]
pub struct Subject {
    tested: Tested,
    /// The longest time that the worker may take for an answer.
    patience: Duration,
}

/// The tested worker by the way it is called.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one")]
enum Tested {
    Http(Caller),
    Exec(Dialogue),
    Command(Commands),
}

/// The outcome of a cancellation.
#[derive(Debug)]
pub enum Interrupted {
    /// The worker was told, and has answered if it is one that must.
    Announced,
    /// The answer came first.
    Answered,
    /// The worker has not answered the message; the reason as text.
    Silent(String),
}

fn late(patience: Duration) -> Reply {
    Reply::unknown(format!("no answer within {patience:?} (--patience)"))
}

impl Subject {
    /// The worker of this kind, which may take `patience` for each answer. Of a worker on standard
    /// streams there is one.
    ///
    /// # Errors
    /// When the settings of a worker behind HTTP are wrong.
    pub fn new(
        kind: WorkerKind,
        limits: &WorkerLimits,
        patience: Duration,
    ) -> Result<Self, WorkerError> {
        let most = limits.result_max_bytes;
        let tested = match kind {
            WorkerKind::Http(settings) => Tested::Http(Caller::new(
                &settings,
                limits.lease,
                most,
                &WorkerReport::default(),
            )?),
            WorkerKind::Exec { program, .. } => Tested::Exec(Dialogue::new(
                limits.runnable(program),
                limits.lease,
                patience,
            )),
            WorkerKind::Command(program) => Tested::Command(Commands::new(
                limits.runnable(program),
                most,
                WorkerReport::default(),
            )),
        };
        Ok(Self { tested, patience })
    }

    /// Waits until the worker is ready; a worker on standard streams is started if it is not
    /// running.
    ///
    /// # Errors
    /// As text: why it is not ready within the patience.
    pub async fn ready(&mut self) -> Result<(), String> {
        let caller = match &mut self.tested {
            Tested::Command(_) => return Ok(()),
            Tested::Exec(dialogue) => return dialogue.ready().await,
            Tested::Http(caller) => caller,
        };
        let give_up_at = Instant::now() + self.patience;
        loop {
            match caller.is_ready().await {
                Ok(()) => return Ok(()),
                Err(why) if Instant::now() >= give_up_at => {
                    return Err(format!("it is not ready: {why}"));
                }
                Err(_) => sleep(READY_INTERVAL).await,
            }
        }
    }

    /// Sends the worker the message, and waits for its answer.
    pub async fn tell(&mut self, lease: &Lease) -> Reply {
        let message = lease.message();
        let attempt = AttemptInfo::of(lease.attempt());
        let call = Call::default();
        let answered = match &mut self.tested {
            Tested::Http(caller) => {
                timeout(self.patience, caller.call(message, &attempt, &call)).await
            }
            Tested::Command(commands) => {
                timeout(self.patience, commands.run(message, &attempt, &call)).await
            }
            Tested::Exec(dialogue) => return dialogue.tell(lease).await,
        };
        answered.unwrap_or_else(|_| late(self.patience))
    }

    /// Returns whether a worker of this kind is notified when a message is cancelled.
    pub fn is_told_to_stop(&self) -> bool {
        !matches!(self.tested, Tested::Command(_))
    }

    /// The exchange with a worker on standard streams; `None` for one of another kind.
    pub fn dialogue(&mut self) -> Option<&mut Dialogue> {
        match &mut self.tested {
            Tested::Exec(dialogue) => Some(dialogue),
            Tested::Http(_) | Tested::Command(_) => None,
        }
    }

    /// Sends the worker the message, and then cancels it.
    pub async fn interrupt(&mut self, lease: &Lease) -> Interrupted {
        match &mut self.tested {
            Tested::Http(caller) => {
                let message = lease.message();
                let attempt = AttemptInfo::of(lease.attempt());
                let call = Call::default();
                match timeout(CANCEL_AFTER, caller.call(message, &attempt, &call)).await {
                    Ok(_) => Interrupted::Answered,
                    Err(_) => Interrupted::Announced,
                }
            }
            Tested::Exec(dialogue) => match dialogue.cancel(lease).await {
                Ok(()) => Interrupted::Announced,
                Err(why) => Interrupted::Silent(why),
            },
            Tested::Command(_) => Interrupted::Answered,
        }
    }
}
