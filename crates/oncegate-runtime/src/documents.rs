//! Gives handlers the documents of messages whose payloads are not JSON.

use std::sync::Arc;

use bytes::Bytes;
use oncegate_core::key::{CompiledKey, Key, KeySpecError, Scope};

use crate::failure::Failure;
use crate::message::{Header, Message};

/// The headers that describe the payload.
const REPLACED: [&str; 2] = ["content-type", "content-encoding"];

/// Makes documents: the JSON of payloads in the [format](Key::format) of a key, such as Avro.
///
/// Handlers get payloads as they came. One that wants JSON begins with this:
///
/// ```
/// use oncegate::{Attempt, Documents, Failure, Handler, Message};
///
/// struct Billing {
///     documents: Documents, // Documents::new(&key)?, with the key of the gate
/// }
///
/// impl Handler for Billing {
///     type Output = ();
///
///     async fn handle(&self, message: &Message, _: &Attempt) -> Result<(), Failure> {
///         let payment: serde_json::Value = self.documents.of(message).await?.json()?;
/// #       drop(payment);
///         Ok(())
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct Documents(Arc<CompiledKey>);

impl Documents {
    /// Makes documents of payloads in the format of this key. They share its schemas.
    ///
    /// # Errors
    /// When the key cannot be used; its gate returns the same error.
    pub fn new(key: &Key) -> Result<Self, KeySpecError> {
        // The scope is no part of a document.
        let scope = Scope::new("documents").expect("it is a valid name");
        Ok(Self(Arc::new(key.compile(&scope)?)))
    }

    /// Returns the message with its document in the place of its payload, and says so in its header
    /// `content-type`. A tombstone stays one.
    ///
    /// # Errors
    /// [`Failure::not_run`] while a registry does not answer, [`Failure::permanent`] when there is
    /// no document.
    pub async fn of(&self, message: &Message) -> Result<Message, Failure> {
        if message.is_tombstone() {
            return Ok(message.clone());
        }
        let prepared = self.0.prepare_document(message).await;
        prepared.map_err(|error| Failure::not_run(error.to_string()))?;
        let document = self.0.document(message);
        let document =
            document.map_err(|error| Failure::permanent(format!("it has no document: {error}")))?;
        let kept = message
            .headers()
            .iter()
            .filter(|header| !describes_payload(&header.name))
            .cloned();
        let content_type = Header {
            name: "content-type".into(),
            value: Some(Bytes::from_static(b"application/json")),
        };
        let headers = kept.chain([content_type]).collect();
        Ok(message
            .clone()
            .with_payload(Bytes::copy_from_slice(&document))
            .with_headers(headers))
    }
}

fn describes_payload(name: &str) -> bool {
    REPLACED
        .iter()
        .any(|replaced| name.eq_ignore_ascii_case(replaced))
}
