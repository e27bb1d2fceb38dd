//! The handler, which must run once for each payment, and the key, which makes two payments the
//! same: the code that you would write yourself.

#[path = "../payments/billing.rs"]
mod of_json;

use std::sync::Arc;

use oncegate::schema::{Registry, SchemaFormat};
use oncegate::{Attempt, BoxError, Documents, Failure, Handler, Key, Message};

pub(crate) use of_json::Billing;
use of_json::Receipt;

/// The newest schema. The names and defaults in it count for payloads that were written before.
pub(crate) const READER: &str = include_str!("payment.avsc");

/// The fields that make two payments the same, whatever schema they were written with: those of
/// JSON.
pub(crate) fn key(registry: &str) -> Result<Key, BoxError> {
    let format = SchemaFormat::registry(Registry::new(registry))?.reader(READER)?;
    Ok(of_json::key().format(Arc::new(format)))
}

/// The handler of JSON, with the documents of payments in Avro.
pub(crate) struct AvroBilling {
    pub(crate) documents: Documents,
    pub(crate) billing: Billing,
}

impl Handler for AvroBilling {
    type Output = Receipt;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<Receipt, Failure> {
        self.billing
            .handle(&self.documents.of(message).await?, attempt)
            .await
    }

    async fn duplicate(&self, message: &Message, receipt: Receipt) -> Result<(), Failure> {
        self.billing
            .duplicate(&self.documents.of(message).await?, receipt)
            .await
    }
}
