//! Requests of administration: they create, remove and describe topics, and remove groups.
//!
//! | login | sent by |
//! |---|---|
//! | tokens (SASL OAUTHBEARER) | `token_admin`, a client of Kafka's protocol for these requests alone; `connection` has its frames, `messages` the versions, `login` and `tls` what their names say |
//! | every other one | `library_admin`, librdkafka |
//!
//! librdkafka asks for a token through the main queue of a client, which rdkafka's `AdminClient`
//! never polls. Without unsafe code, there is no other way to give it one: its requests would wait
//! until their time limit.

mod request;

pub(crate) mod facts;
pub(crate) mod new_topics;
pub(crate) mod removal;

mod library_admin;

#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod token_admin;

#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod address;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod connection;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod login;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod messages;
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
mod tls;

pub use self::request::TopicPlan;
pub(crate) use self::request::{
    Admin, CLEANUP, Described, MAX_MESSAGE_BYTES, MIN_INSYNC_REPLICAS, RETENTION, TopicSettings,
};

use self::library_admin::LibraryAdmin;
use crate::client::settings::{self, Property};
use crate::client::tokens::Tokens;
use oncegate_runtime::source::SourceError;

/// Returns the client that sends the requests to the cluster at `brokers`, with properties of
/// librdkafka. Nothing is sent yet.
///
/// # Errors
/// When a property is not valid, or decides about TLS in a way that requests with a token do not
/// have.
pub(crate) fn of(brokers: &str, properties: &[Property]) -> Result<Box<dyn Admin>, SourceError> {
    let mut config = settings::client(brokers, properties)?;
    match Tokens::take(&mut config)? {
        #[cfg(any(feature = "oauth", feature = "msk-iam"))]
        Some(tokens) if token_admin::is_for(&config) => Ok(Box::new(token_admin::TokenAdmin::new(
            brokers, &config, tokens,
        )?)),
        _ => Ok(Box::new(LibraryAdmin::new(brokers, &config)?)),
    }
}
