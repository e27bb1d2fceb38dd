//! Whether the client is connected to any broker, and what follows when it is not although the brokers answer.
//!
//! librdkafka 2.12 has a state that it never leaves: a member of a group of the new protocol without a single connection,
//! whose commits wait for a coordinator that nothing looks for any more. It raises no error. The same looks like a cluster
//! that is away, so another client asks: when it gets an answer, the one that has no connection is replaced.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};

use super::member::Member;
use super::trouble::Trouble;
use crate::health::CONNECTION_LIMIT;

/// How another client is named, which asks whether the brokers answer.
const PROBE_ID: &str = "oncegate-probe";

/// How long it waits for the answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two such questions.
const PROBE_EVERY: Duration = Duration::from_secs(10);

/// What is known of a client's connections, from its statistics.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// When the client was first heard to have no connection, since it last had one.
    lost_at: Option<Instant>,
    /// How long that was, when it was last heard.
    lost_for: Option<Duration>,
    /// Another client has had an answer meanwhile.
    others_connect: bool,
}

impl Connection {
    /// Takes note of what the client says of its connections.
    pub(crate) fn note(&self, is_connected: bool) {
        let mut state = self.state();
        if is_connected {
            *state = State::default();
        } else {
            let lost_at = *state.lost_at.get_or_insert_with(Instant::now);
            state.lost_for = Some(lost_at.elapsed());
        }
    }

    /// Another client is in the place of the one that was heard.
    pub(crate) fn begin_anew(&self) {
        *self.state() = State::default();
    }

    /// How long the client has had no connection, as it last said; `None` when it has one, or has said nothing.
    pub(crate) fn lost_for(&self) -> Option<Duration> {
        self.state().lost_for
    }

    /// Whether another client has had an answer since this one lost its last connection.
    pub(crate) fn others_connect(&self) -> bool {
        self.state().others_connect
    }

    /// Another client has had an answer; how long this one has been without, if it still is.
    fn answered(&self) -> Option<Duration> {
        let mut state = self.state();
        state.others_connect = state.lost_for.is_some();
        state.lost_for
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches one client, from its poll thread.
pub(crate) struct Watch {
    config: ClientConfig,
    probe: Option<JoinHandle<bool>>,
    asked_at: Option<Instant>,
}

impl Watch {
    /// The client was made with `config`, and so is the one that asks.
    pub(crate) fn new(mut config: ClientConfig) -> Self {
        config.set("client.id", PROBE_ID).set("statistics.interval.ms", "0");
        config.remove("group.instance.id");
        config.remove("debug");
        Self { config, probe: None, asked_at: None }
    }

    /// Looks whether the client should be replaced; never waits.
    pub(crate) fn look(&mut self, member: &Member) -> Option<Trouble> {
        if let Some(probe) = self.probe.take_if(|probe| probe.is_finished()) {
            // A probe that has panicked has no answer.
            let lost_for = probe.join().unwrap_or(false).then(|| member.connection.answered()).flatten();
            if let Some(lost_for) = lost_for.filter(|lost_for| *lost_for >= CONNECTION_LIMIT) {
                return Some(Trouble::disconnected(lost_for));
            }
        }
        let is_lost = member.connection.lost_for().is_some_and(|lost_for| lost_for >= CONNECTION_LIMIT);
        let is_due = self.asked_at.is_none_or(|asked_at| asked_at.elapsed() >= PROBE_EVERY);
        if is_lost && is_due && self.probe.is_none() {
            self.asked_at = Some(Instant::now());
            let config = self.config.clone();
            let thread = std::thread::Builder::new().name("oncegate-probe".to_owned());
            match thread.spawn(move || answers(&config)) {
                Ok(probe) => self.probe = Some(probe),
                Err(error) => tracing::warn!(%error, "no thread to ask whether the brokers answer"),
            }
        }
        None
    }
}

impl Drop for Watch {
    /// Waits for the question that is under way, which has a bound.
    fn drop(&mut self) {
        if let Some(probe) = self.probe.take()
            && probe.join().is_err()
        {
            tracing::error!("the client that asks whether the brokers answer has panicked");
        }
    }
}

/// Whether a new client gets an answer.
fn answers(config: &ClientConfig) -> bool {
    let probe: Result<BaseConsumer<Quiet>, _> = config.create_with_context(Quiet);
    let answer = probe.and_then(|probe| probe.fetch_metadata(None, PROBE_TIMEOUT).map(drop));
    match &answer {
        Ok(()) => tracing::warn!("the Kafka client has no connection, and another one has"),
        Err(error) => {
            tracing::warn!(%error, "the Kafka client has no connection, and no broker answers another one");
        }
    }
    answer.is_ok()
}

/// A client whose log is of no interest: its answer is.
#[derive(Debug)]
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _level: RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(target: "librdkafka", facility, "{line}");
    }

    fn error(&self, _error: rdkafka::error::KafkaError, _reason: &str) {}
}

impl ConsumerContext for Quiet {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_without_a_connection_for_as_long_as_it_says_so() {
        let connection = Connection::default();
        assert_eq!(connection.lost_for(), None, "nothing is known");
        connection.note(false);
        let first = connection.lost_for().expect("lost");
        assert!(connection.lost_for() == Some(first), "silence proves nothing");
        connection.note(false);
        assert!(connection.lost_for() >= Some(first));
        assert!(
            !connection.others_connect() && connection.answered().is_some() && connection.others_connect()
        );
        connection.note(true);
        assert!(connection.lost_for().is_none() && !connection.others_connect());
        assert!(connection.answered().is_none() && !connection.others_connect(), "it is back");
        connection.note(false);
        connection.begin_anew();
        assert_eq!(connection.lost_for(), None, "another client");
    }
}
