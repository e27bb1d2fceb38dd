//! The documents that workers get in the place of payloads.

use oncegate::Documents;

use super::build;
use crate::config::format::Deliver;
use crate::config::shape;

/// Makes the documents of a consumer; `None` if its workers get the payloads as they came.
///
/// # Errors
/// When the key or its format cannot be used; the text names the setting.
pub(crate) fn documents(consumer: &shape::Consumer) -> Result<Option<Documents>, String> {
    let deliver = consumer.format.as_ref().and_then(|format| format.deliver);
    if deliver != Some(Deliver::Json) {
        return Ok(None);
    }
    let Some(key) = build::key(consumer)? else { return Ok(None) };
    Documents::new(&key).map(Some).map_err(|error| format!("`key`: {error}"))
}
