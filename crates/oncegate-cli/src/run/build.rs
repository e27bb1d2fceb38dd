//! Builds the gates that a configuration describes.

use oncegate::core::store::Store;
use oncegate::journal::FileJournal;
use oncegate::results::ObjectResults;
use oncegate::{Documents, Gate, Key};

use crate::config::format::Deliver;
use crate::config::shape;
use crate::config::values::{FingerprintSetting, KeySetting};

/// The key of a consumer with its format; `None` without a key.
///
/// # Errors
/// When a file or secret of the format cannot be read.
pub(crate) fn key(consumer: &shape::Consumer) -> Result<Option<Key>, String> {
    let Some(KeySetting(key)) = consumer.key.clone() else {
        return Ok(None);
    };
    let key = match &consumer.route {
        Some(route) => route.apply(key),
        None => key,
    };
    match &consumer.format {
        Some(format) => format
            .apply(key)
            .map(Some)
            .map_err(|why| format!("`format`: {why}")),
        None => Ok(Some(key)),
    }
}

/// Makes the documents of a consumer; `None` if its workers get the payloads as they came.
///
/// # Errors
/// When the key or its format cannot be used; the text names the setting.
pub(crate) fn documents(consumer: &shape::Consumer) -> Result<Option<Documents>, String> {
    let deliver = consumer.format.as_ref().and_then(|format| format.deliver);
    if deliver != Some(Deliver::Json) {
        return Ok(None);
    }
    let Some(key) = key(consumer)? else {
        return Ok(None);
    };
    Documents::new(&key)
        .map(Some)
        .map_err(|error| format!("`key`: {error}"))
}

/// The gate of a consumer; `None` without a key. Settings that are not given have the library's
/// defaults.
///
/// # Errors
/// When a file or secret of the format cannot be read.
pub(crate) fn gate(
    name: &str,
    consumer: &shape::Consumer,
    store: impl Store + 'static,
) -> Result<Option<Gate>, String> {
    let key = key(consumer)?;
    Ok(key.map(|key| with_gate_settings(Gate::new(name, key, store), consumer)))
}

/// Applies every setting of a consumer that concerns its gate, without files of its own.
pub(crate) fn with_gate_settings(gate: Gate, consumer: &shape::Consumer) -> Gate {
    let gate = gate.settings(consumer.gate);
    match &consumer.fingerprint {
        Some(FingerprintSetting(fingerprint)) => gate.fingerprint(fingerprint.clone()),
        None => gate,
    }
}

/// The gate with its result store and its journal.
///
/// # Errors
/// When the folder or file cannot be created or opened.
pub(crate) fn with_files(mut gate: Gate, consumer: &shape::Consumer) -> Result<Gate, String> {
    if let Some(folder) = &consumer.large_results {
        let results =
            ObjectResults::folder(folder).map_err(|error| format!("`large_results`: {error}"))?;
        gate = gate.large_results(results);
    }
    if let Some(path) = &consumer.journal {
        let journal = FileJournal::open(path);
        gate = gate
            .journal(journal.map_err(|error| format!("`journal`: {}: {error}", path.display()))?);
    }
    Ok(gate)
}
