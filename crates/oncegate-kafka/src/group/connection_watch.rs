//! Detects a client that has no connection although the brokers answer.
//!
//! librdkafka 2.12 has a state that it never leaves: a group member of the new protocol without a
//! single connection, whose commits wait for a coordinator that the client no longer looks for. It
//! raises no error. An unreachable cluster looks the same, so a second client, the probe, sends
//! requests. When the probe gets answers for longer than a client waits before it reconnects, the
//! client without a connection is replaced.

use std::error::Error;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rdkafka::client::{ClientContext, OAuthToken};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;

use super::member::Member;
use crate::client::login::login_refusal;
use crate::client::tokens::{self, Tokens};
use crate::client::trouble::Trouble;
use oncegate_runtime::health::CONNECTION_LIMIT;

/// The client id of the probe, the client that checks whether the brokers answer.
const PROBE_ID: &str = "oncegate-probe";

/// Time limit of the probe's request.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The time for which the probe is polled first if it needs a token: it asks for one there.
const TOKEN_POLL: Duration = Duration::from_millis(100);

/// Interval between two probes.
const PROBE_EVERY: Duration = Duration::from_secs(5);

/// The property for the longest wait of a client before it reconnects, and its default in
/// milliseconds.
const BACKOFF: (&str, u64) = ("reconnect.backoff.max.ms", 10_000);

/// The additional time for which the brokers must have answered, because connecting takes time.
const BACKOFF_MARGIN: Duration = Duration::from_secs(5);

/// Watches the connections of one client, on its poll thread.
pub(crate) struct Watch {
    config: ClientConfig,
    probe: Option<JoinHandle<bool>>,
    asked_at: Option<Instant>,
    patience: Duration,
}

impl Watch {
    /// Creates a watch for the client of `config`. The probe uses the same configuration.
    pub(crate) fn new(mut config: ClientConfig) -> Self {
        config
            .set("client.id", PROBE_ID)
            .set("statistics.interval.ms", "0");
        config.remove("group.instance.id");
        config.remove("debug");
        let (name, default_ms) = BACKOFF;
        let backoff_ms = config
            .get(name)
            .and_then(|set| set.parse().ok())
            .unwrap_or(default_ms);
        let patience = Duration::from_millis(backoff_ms).saturating_add(BACKOFF_MARGIN);
        Self {
            config,
            probe: None,
            asked_at: None,
            patience,
        }
    }

    /// Returns the reason if the client should be replaced; never waits.
    pub(crate) fn look(&mut self, member: &Member) -> Option<Trouble> {
        if let Some(probe) = self.probe.take_if(|probe| probe.is_finished()) {
            // A probe that has panicked has no answer.
            let is_answered = probe.join().unwrap_or(false);
            if let Some(lost_for) = member.connection.answered(is_answered, self.patience) {
                return Some(Trouble::disconnected(lost_for));
            }
        }
        let is_lost = member
            .connection
            .lost_for()
            .is_some_and(|lost_for| lost_for >= CONNECTION_LIMIT);
        let is_due = self
            .asked_at
            .is_none_or(|asked_at| asked_at.elapsed() >= PROBE_EVERY);
        if is_lost && is_due && self.probe.is_none() {
            self.asked_at = Some(Instant::now());
            let config = self.config.clone();
            let thread = std::thread::Builder::new().name("oncegate-probe".to_owned());
            match thread.spawn(move || answers(&config)) {
                Ok(probe) => self.probe = Some(probe),
                Err(error) => {
                    tracing::warn!(%error, "cannot start the thread that checks whether the brokers answer");
                }
            }
        }
        None
    }
}

impl Drop for Watch {
    /// Waits for the running probe, which has a time limit.
    fn drop(&mut self) {
        if let Some(probe) = self.probe.take()
            && probe.join().is_err()
        {
            tracing::error!("the client that checks whether the brokers answer has panicked");
        }
    }
}

/// Returns whether a new client gets an answer.
fn answers(config: &ClientConfig) -> bool {
    let mut config = config.clone();
    let tokens = match Tokens::take(&mut config) {
        Ok(tokens) => tokens,
        Err(error) => {
            tracing::warn!(%error, "cannot check whether the brokers answer another client");
            return false;
        }
    };
    let asks_for_token = tokens.is_some();
    let context = Quiet {
        tokens,
        refusal: Mutex::default(),
    };
    let probe: BaseConsumer<Quiet> = match config.create_with_context(context) {
        Ok(probe) => probe,
        Err(error) => {
            tracing::warn!(%error, "cannot check whether the brokers answer another client");
            return false;
        }
    };
    if asks_for_token {
        drop(probe.poll(TOKEN_POLL));
    }
    let answer = probe.fetch_metadata(None, PROBE_TIMEOUT);
    while probe.poll(Duration::ZERO).is_some() {}
    match (&answer, probe.context().refusal()) {
        (Ok(_), _) => {
            tracing::warn!(
                "the Kafka client has no connection, but the brokers answer another client"
            );
        }
        (Err(_), Some(refusal)) => {
            tracing::warn!(
                refusal,
                "the Kafka client has no connection, and the brokers refuse another client"
            );
        }
        (Err(error), None) => {
            tracing::warn!(%error, "the Kafka client has no connection, and no broker answers another client");
        }
    }
    answer.is_ok()
}

/// The probe's callbacks, which log at debug level only.
#[derive(Debug)]
struct Quiet {
    tokens: Option<Tokens>,
    /// The reason for which the brokers refuse the login.
    refusal: Mutex<Option<String>>,
}

impl Quiet {
    fn refusal(&self) -> Option<String> {
        self.refusal.lock().clone()
    }
}

impl ClientContext for Quiet {
    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, _config: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        tokens::generate(self.tokens.as_ref())
    }

    fn log(&self, _level: RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(target: "librdkafka", facility, "{line}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(refusal) = login_refusal(&error, reason, self.tokens.is_some()) {
            *self.refusal.lock() = Some(refusal);
        }
    }
}

impl ConsumerContext for Quiet {}
