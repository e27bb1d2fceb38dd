//! The worker under test, over any protocol.

use std::sync::Arc;
use std::time::Duration;

use hyper::header::HeaderValue;
use oncegate::{GateSettings, Lease};
use tokio::time::{Instant, sleep, timeout};

use super::super::CONTENT_TYPE;
use super::super::command::Commands;
use super::super::http::{Caller, Token};
use super::super::process::Runnable;
use super::super::report::WorkerReport;
use super::super::request::RequestParts;
use super::super::worker::{AttemptInfo, Call, Reply};
use super::dialogue::Dialogue;
use super::messages::LEASE;
use crate::config::shape;

/// The time between two checks whether a worker is ready.
const READY_INTERVAL: Duration = Duration::from_millis(100);
/// The time after which a message is cancelled.
const CANCEL_AFTER: Duration = Duration::from_millis(20);

#[expect(clippy::large_enum_variant, reason = "there is one")]
pub(super) enum Subject {
    Http(Caller, Duration),
    Exec(Dialogue),
    Command(Commands, Duration),
}

/// The outcome of a cancellation.
pub(super) enum Interrupted {
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
    /// The worker with these settings, which does not get the variables that are hidden from it.
    ///
    /// # Errors
    /// As text: what is wrong with the settings.
    pub(super) fn of(
        handler: &shape::Handler,
        hidden: &[String],
        patience: Duration,
    ) -> Result<Self, String> {
        const MOST: usize = GateSettings::DEFAULT.max_large_result_bytes;
        if let Some(program) = &handler.exec {
            return Ok(Self::Exec(Dialogue::new(
                Runnable::new(program.clone(), hidden, &[]),
                patience,
            )));
        }
        if let Some(program) = &handler.command {
            let program = Runnable::new(program.clone(), hidden, &[]);
            return Ok(Self::Command(
                Commands::new(program, MOST, WorkerReport::default()),
                patience,
            ));
        }
        let content_type = handler.content_type.as_deref().unwrap_or(CONTENT_TYPE);
        let told = RequestParts {
            content_type: HeaderValue::try_from(content_type).map_err(|_| {
                format!("--content-type is {content_type:?}, which is not a content type")
            })?,
            token: handler
                .token
                .as_ref()
                .map(Token::of)
                .transpose()?
                .map(Arc::new),
            lease_ms: LEASE.as_millis(),
            cloudevents: handler.cloudevents.unwrap_or(false),
        };
        Ok(Self::Http(Caller::of(handler, told, MOST)?, patience))
    }

    /// Waits until the worker is ready; a worker on standard streams is started if it is not
    /// running.
    pub(super) async fn ready(&mut self) -> Result<(), String> {
        match self {
            Self::Command(..) => Ok(()),
            Self::Exec(dialogue) => dialogue.ready().await,
            Self::Http(caller, patience) => {
                let give_up_at = Instant::now() + *patience;
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
        }
    }

    /// Sends the worker the message, and waits for its answer.
    pub(super) async fn tell(&mut self, lease: &Lease) -> Reply {
        let message = lease.message();
        let attempt = AttemptInfo::of(lease.attempt());
        let call = Call::default();
        match self {
            Self::Http(caller, patience) => {
                let answered = timeout(*patience, caller.call(message, &attempt, &call)).await;
                answered.unwrap_or_else(|_| late(*patience))
            }
            Self::Command(commands, patience) => {
                let answered = timeout(*patience, commands.run(message, &attempt, &call)).await;
                answered.unwrap_or_else(|_| late(*patience))
            }
            Self::Exec(dialogue) => dialogue.tell(lease).await,
        }
    }

    /// Returns whether a worker of this kind is notified when a message is cancelled.
    pub(super) fn is_told_to_stop(&self) -> bool {
        !matches!(self, Self::Command(..))
    }

    /// Sends the worker the message, and then cancels it.
    pub(super) async fn interrupt(&mut self, lease: &Lease) -> Interrupted {
        let message = lease.message();
        let attempt = AttemptInfo::of(lease.attempt());
        match self {
            Self::Http(caller, _) => {
                let call = Call::default();
                match timeout(CANCEL_AFTER, caller.call(message, &attempt, &call)).await {
                    Ok(_) => Interrupted::Answered,
                    Err(_) => Interrupted::Announced,
                }
            }
            Self::Exec(dialogue) => match dialogue.cancel(lease).await {
                Ok(()) => Interrupted::Announced,
                Err(why) => Interrupted::Silent(why),
            },
            Self::Command(..) => Interrupted::Answered,
        }
    }
}
