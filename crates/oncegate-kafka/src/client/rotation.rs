//! Detects that a client's password, key or certificate has changed, and tries the new one.
//!
//! librdkafka reads them once, when a client is made, and connects with them from then on. So a
//! client whose files have changed is replaced. The brokers may not accept the new ones yet,
//! because a password cannot be changed at the brokers and in the file at the same moment: another
//! client tries them first, and the old client goes on meanwhile.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::inquiry;
use super::properties::FileContents;
use super::settings::Settings;
use super::tokens;
use super::trouble::Trouble;
use oncegate_runtime::source::SourceError;

/// Interval at which the files are read.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Delay before changed files that the brokers refuse are tried again.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// Time limit for the brokers' answer to a client with the new files.
pub(crate) const TRIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Watches the files of one client, on its poll thread.
pub(crate) struct Rotation {
    settings: Settings,
    /// The contents of the files that the client was made of.
    current: FileContents,
    look_at: Instant,
    trial: Option<JoinHandle<Result<(), SourceError>>>,
}

impl Rotation {
    /// Creates a watch for a client that was made when the files contained `current`.
    pub(crate) fn new(settings: Settings, current: FileContents) -> Self {
        Self {
            settings,
            current,
            look_at: Instant::now() + LOOK_EVERY,
            trial: None,
        }
    }

    /// Returns whether a refused login may be accepted later, because the files may change, or the
    /// next token may come.
    pub(crate) fn may_come(&self) -> bool {
        self.settings.properties.has_files() || tokens::are_used(&self.settings.properties.unread())
    }

    /// Returns the reason if the client should be replaced; never waits for the brokers.
    pub(crate) fn look(&mut self) -> Option<Trouble> {
        if let Some(trial) = self.trial.take_if(|trial| trial.is_finished()) {
            let tried = trial.join().unwrap_or_else(|_| {
                Err(SourceError::new("the client that tried them has panicked"))
            });
            match tried {
                Ok(()) => return Some(Trouble::Outdated),
                Err(error) => {
                    self.look_at = Instant::now() + TRY_AGAIN;
                    tracing::warn!(
                        %error,
                        "the brokers do not accept the changed password or certificate yet; continuing with the former one"
                    );
                }
            }
        }
        let now = Instant::now();
        if self.trial.is_some() || now < self.look_at || !self.settings.properties.has_files() {
            return None;
        }
        self.look_at = now + LOOK_EVERY;
        if self.settings.properties.contents() != self.current {
            let settings = self.settings.clone();
            let thread = std::thread::Builder::new().name("oncegate-login".to_owned());
            match thread.spawn(move || try_out(&settings)) {
                Ok(trial) => self.trial = Some(trial),
                Err(error) => {
                    tracing::warn!(%error, "cannot start the thread that tries a changed password");
                }
            }
        }
        None
    }
}

impl Drop for Rotation {
    /// Waits for the running trial, which has a time limit.
    fn drop(&mut self) {
        if let Some(trial) = self.trial.take()
            && trial.join().is_err()
        {
            tracing::error!("the client that tried a changed password has panicked");
        }
    }
}

/// Checks that the brokers answer a client with what is in the files now.
fn try_out(settings: &Settings) -> Result<(), SourceError> {
    let (config, _) = settings.config()?;
    let topic = settings
        .topics
        .first()
        .map(String::as_str)
        .unwrap_or_default();
    answers(config, topic).map(drop)
}

/// Returns what the brokers answer about a topic to a client with these settings.
pub(crate) fn answers(
    config: rdkafka::ClientConfig,
    topic: &str,
) -> Result<rdkafka::metadata::Metadata, SourceError> {
    let client = inquiry::client(config)?;
    inquiry::metadata(&client, topic, TRIAL_TIMEOUT, |error| {
        SourceError::caused("no Kafka broker answers the changed login", error)
    })
}
