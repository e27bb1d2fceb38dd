//! The connection of a client, as far as the client reports it.

use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// The state of a client's connections, from its statistics.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// The time at which the client first reported no connection, since it last had one.
    lost_at: Option<Instant>,
    /// The time for which the connection had been lost at the last report.
    lost_for: Option<Duration>,
    /// The time at which the probe got its first answer, since its last request without one.
    answered_at: Option<Instant>,
    /// `true` once the probe has had answers for so long that this client should have connected.
    others_connect: bool,
}

impl Connection {
    /// Records whether the client reports a connection.
    pub(crate) fn note(&self, is_connected: bool) {
        let mut state = self.state();
        if is_connected {
            *state = State::default();
        } else {
            let lost_at = *state.lost_at.get_or_insert_with(Instant::now);
            state.lost_for = Some(lost_at.elapsed());
        }
    }

    /// Forgets everything, because another client has replaced this one.
    pub(crate) fn begin_anew(&self) {
        *self.state() = State::default();
    }

    /// Returns how long the client has had no connection, by its last report; `None` when it has
    /// one, or has not reported.
    pub(crate) fn lost_for(&self) -> Option<Duration> {
        self.state().lost_for
    }

    /// Returns whether the probe has had answers for so long that this client should have
    /// connected.
    pub(crate) fn others_connect(&self) -> bool {
        self.state().others_connect
    }

    /// Records whether the probe got an answer. Once it has had answers for longer than `patience`,
    /// returns how long the client has had no connection.
    pub(crate) fn answered(&self, is_answered: bool, patience: Duration) -> Option<Duration> {
        let mut state = self.state();
        if !is_answered || state.lost_for.is_none() {
            state.answered_at = None;
            state.others_connect = false;
            return None;
        }
        state.others_connect =
            state.answered_at.get_or_insert_with(Instant::now).elapsed() >= patience;
        state.lost_for.filter(|_| state.others_connect)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_without_a_connection_for_as_long_as_it_says_so() {
        let connection = Connection::default();
        assert_eq!(connection.lost_for(), None, "nothing is known");
        connection.note(false);
        let first = connection.lost_for().expect("lost");
        assert!(
            connection.lost_for() == Some(first),
            "silence proves nothing"
        );
        connection.note(false);
        assert!(connection.lost_for() >= Some(first));
        let far = Duration::from_secs(3_600);
        assert!(
            connection.answered(true, far).is_none() && !connection.others_connect(),
            "it may connect yet"
        );
        assert!(connection.answered(true, Duration::ZERO).is_some() && connection.others_connect());
        assert!(
            connection.answered(false, Duration::ZERO).is_none() && !connection.others_connect()
        );
        connection.note(true);
        assert!(connection.lost_for().is_none());
        assert!(
            connection.answered(true, Duration::ZERO).is_none() && !connection.others_connect(),
            "it is back"
        );
        connection.note(false);
        connection.begin_anew();
        assert_eq!(connection.lost_for(), None, "another client");
    }
}
