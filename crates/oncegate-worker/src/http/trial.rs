//! Finds out whether an HTTP worker keeps its connections.
//!
//! Some servers close each connection behind its answer and do not say so. A request that is sent
//! meanwhile is lost with its connection, and nothing tells a client whether it was read: its
//! outcome is unknown. So a connection is not used again before one has stayed open behind its
//! answer. Until then, each request has a connection of its own.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::tracked::Life;

/// The time for which a connection must stay open behind its answer.
const STAYS_OPEN: Duration = Duration::from_millis(250);

/// The delay before another trial of a worker that closes its connections, because it may have been
/// restarting, or that has not answered the trial.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// The part of a request in the trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// The request has a connection of its own.
    Single,
    /// The request's connection is the one that is watched.
    Trial,
    /// The request may use a connection again.
    Keeping,
}

/// The known facts about a worker's connections.
#[derive(Debug)]
pub(super) struct Trial(Mutex<TrialState>);

#[derive(Debug)]
enum TrialState {
    /// The next request is the trial.
    Untried,
    /// The trial was sent then, and is not answered.
    Asked(Instant),
    /// The trial was answered then, on this connection.
    Answered(Arc<Life>, Instant),
    /// The worker closes its connections, as was found then.
    Closes(Instant),
    Keeps,
}

impl Trial {
    /// Connections of HTTP/2 are shared, and say which requests they have not taken.
    pub(super) fn new(http2: bool) -> Self {
        Self(Mutex::new(if http2 {
            TrialState::Keeps
        } else {
            TrialState::Untried
        }))
    }

    /// The part of the next request.
    pub(super) fn part(&self) -> Part {
        let mut state = self.0.lock();
        match &*state {
            TrialState::Answered(life, _) if life.has_ended() => {
                *state = TrialState::Closes(Instant::now());
            }
            TrialState::Answered(_, at) if at.elapsed() >= STAYS_OPEN => *state = TrialState::Keeps,
            TrialState::Closes(at) | TrialState::Asked(at) if at.elapsed() >= TRY_AGAIN_AFTER => {
                *state = TrialState::Untried;
            }
            _ => {}
        }
        match &*state {
            TrialState::Untried => {
                *state = TrialState::Asked(Instant::now());
                Part::Trial
            }
            TrialState::Keeps => Part::Keeping,
            TrialState::Asked(_) | TrialState::Answered(..) | TrialState::Closes(_) => Part::Single,
        }
    }

    /// Notes the answer to the trial and its connection; without one, the next request is the
    /// trial.
    pub(super) fn answered(&self, life: Option<Arc<Life>>) {
        let mut state = self.0.lock();
        *state = life.map_or(TrialState::Untried, |life| {
            TrialState::Answered(life, Instant::now())
        });
    }
}
