//! The servers that a consumer needs before it starts: its store, its topics or queues.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::BoxError;
use oncegate::core::store::Store;
use oncegate::dead_letters::DeadLetters;
use oncegate::kafka::describe_topics;
use oncegate::source::{SourceError, Terms};
use tracing::{debug, warn};

use crate::exit::{Problem, dead_letters_not_opened, not_opened};
use crate::sources::ConfiguredSource;
use crate::sources::kafka::{ENTITY_KEYS, Topics, VERSIONED_KEYS};

/// The servers of a consumer.
pub(super) struct Servers {
    pub(super) source: Box<dyn ConfiguredSource>,
    pub(super) dead_letters: Option<Arc<dyn DeadLetters>>,
    pub(super) store: Arc<dyn Store>,
    /// The topics of a consumer whose key is the broker's key of a message.
    pub(super) by_message_key: Option<Topics>,
}

impl Servers {
    /// Checks what the start would refuse, so that it is reported even if the worker never becomes
    /// ready.
    ///
    /// # Errors
    /// When a topic or queue does not exist or cannot be used, or the store must not be used with
    /// its settings. A server that is away is an error once the check has taken longer than
    /// `patience`; until then the start waits for it.
    pub(super) async fn check(&self, name: &str, patience: Duration) -> Result<(), Problem> {
        let begun = Instant::now();
        match self.store.check().await {
            Err(error) if error.is_away() => warn!(consumer = name, %error, "the store is away"),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        match self.source.examine(&Terms::default()).await {
            Err(error) if error.is_away() && begun.elapsed() < patience => {
                warn!(consumer = name, %error, "the server of the source is away");
            }
            Err(error) => return Err(not_opened(&error)),
            Ok(_) => {}
        }
        if let Some(topics) = &self.by_message_key {
            warn_of_entities(name, topics).await;
        }
        let Some(dead_letters) = &self.dead_letters else {
            return Ok(());
        };
        match dead_letters.open().await {
            Err(error) if is_away(&error) && begun.elapsed() < patience => {
                warn!(consumer = name, %error, "the server of the dead letters is away");
            }
            Err(error) => return Err(dead_letters_not_opened(&error)),
            Ok(()) => {}
        }
        Ok(())
    }
}

/// Warns of compacted topics. A user who may not see their settings is not told: nothing else
/// depends on that right.
async fn warn_of_entities(name: &str, topics: &Topics) {
    let Topics {
        brokers,
        properties,
        consumed,
        ..
    } = topics;
    match describe_topics(brokers, consumed, properties).await {
        Ok(facts) => {
            for topic in facts.into_iter().filter(|topic| topic.compacted) {
                warn!(
                    consumer = name,
                    topic = topic.name,
                    "{ENTITY_KEYS}: {VERSIONED_KEYS}"
                );
            }
        }
        Err(error) => debug!(consumer = name, %error, "the topics could not be described"),
    }
}

fn is_away(error: &BoxError) -> bool {
    error
        .downcast_ref::<SourceError>()
        .is_some_and(SourceError::is_away)
}
