//! The version of the key format, and the limits of keys and their specifications.

use super::error::KeySpecError;

/// The version of the key format. Another version derives other keys from the same messages.
pub const KEY_FORMAT: u8 = 1;

/// The maximum nesting of arrays and objects in a payload, in levels. This limit is a part of the
/// key format.
pub const MAX_DEPTH: usize = 64;

/// The default maximum payload size, in bytes (4 MiB): four times the default limit of Kafka and
/// SQS. Change it with [`Key::max_payload_bytes`](super::Key::max_payload_bytes).
pub const DEFAULT_MAX_PAYLOAD_BYTES: usize = 4 * 1024 * 1024;

/// The highest value for [`Key::max_payload_bytes`](super::Key::max_payload_bytes), in bytes
/// (1 GiB).
pub const MAX_PAYLOAD_BYTES_LIMIT: usize = 1024 * 1024 * 1024;

/// The maximum number of paths in one specification.
pub const MAX_PATHS: usize = 256;

/// The maximum length of a path, in bytes.
pub const MAX_PATH_BYTES: usize = 1024;

/// The maximum length of the name of a header, a custom key or a route, in bytes.
pub const MAX_NAME_BYTES: usize = 1024;

pub(super) fn checked_name(what: &'static str, name: &str) -> Result<String, KeySpecError> {
    if name.trim().is_empty() || name.len() > MAX_NAME_BYTES {
        return Err(KeySpecError::BadName {
            what,
            limit: MAX_NAME_BYTES,
        });
    }
    Ok(name.to_owned())
}
