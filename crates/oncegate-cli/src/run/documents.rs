//! The documents of messages, for workers that get JSON in the place of the payload.

use std::sync::Arc;

use bytes::Bytes;
use oncegate::core::key::{CompiledKey, Scope};
use oncegate::{Failure, Header, Message};

use super::build;
use crate::config::format::Deliver;
use crate::config::shape;

/// The headers that say what the payload is.
const REPLACED: [&str; 2] = ["content-type", "content-encoding"];

/// Makes the messages that workers get.
#[derive(Clone, Debug)]
pub(crate) struct Documents(Arc<CompiledKey>);

impl Documents {
    /// The documents of a consumer; `None` if its workers get the payloads as they came.
    ///
    /// # Errors
    /// When the key or its format cannot be used; the text names the setting.
    pub(crate) fn of(name: &str, consumer: &shape::Consumer) -> Result<Option<Self>, String> {
        let deliver = consumer.format.as_ref().and_then(|format| format.deliver);
        if deliver != Some(Deliver::Json) {
            return Ok(None);
        }
        let Some(key) = build::key(consumer)? else { return Ok(None) };
        let scope = Scope::new(name).map_err(|error| error.to_string())?;
        let key = key.compile(&scope).map_err(|error| format!("`key`: {error}"))?;
        Ok(Some(Self(Arc::new(key))))
    }

    /// The message with its document as its payload. A tombstone stays one.
    ///
    /// # Errors
    /// [`Failure::not_run`] while a registry does not answer, [`Failure::permanent`] when there is no document.
    pub(crate) async fn of_message(&self, message: &Message) -> Result<Message, Failure> {
        if message.is_tombstone() {
            return Ok(message.clone());
        }
        let prepared = self.0.prepare_document(message).await;
        prepared.map_err(|error| Failure::not_run(error.to_string()))?;
        let document = self.0.document(message);
        let document =
            document.map_err(|error| Failure::permanent(format!("it has no document: {error}")))?;
        // These describe the payload that came.
        let describes =
            |header: &&Header| !REPLACED.iter().any(|replaced| header.name.eq_ignore_ascii_case(replaced));
        let mut headers: Vec<Header> = message.headers().iter().filter(describes).cloned().collect();
        headers.push(Header {
            name: "content-type".into(),
            value: Some(Bytes::from_static(b"application/json")),
        });
        Ok(message.clone().with_payload(Bytes::copy_from_slice(&document)).with_headers(headers))
    }
}
