//! Errors of a message's key and of a key specification.
//!
//! The texts name the path or setting to change. They never contain payload data: paths come from
//! the specification, positions are byte offsets, and everything else is constant.

use super::normaliser::Normaliser;

/// The reason why no key (or fingerprint) could be made from a message.
///
/// Every variant but [`NotPrepared`](Self::NotPrepared) is permanent for the message: it becomes a
/// dead letter. It is neither processed without a gate nor given a constant key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The payload has no value at a path of the key.
    #[error(
        "key field `{path}` is missing in the payload; correct the path in the key, or the producer"
    )]
    MissingField {
        /// The path as the specification has it.
        path: String,
    },
    /// The value at a path of the key is `null`.
    #[error(
        "key field `{path}` is null in the payload; choose a field that is always set, or correct the producer"
    )]
    NullField {
        /// The path as the specification has it.
        path: String,
    },
    /// A value of the key cannot distinguish messages: it is empty or white space, or an array or
    /// object without a number, boolean or non-blank string.
    ///
    /// For a header, the message key and other sources without a path, `path` names the source.
    #[error(
        "`{path}` is empty or blank and cannot identify a message; choose another field, or correct the producer"
    )]
    Blank {
        /// The path as the specification has it, or `payload`, `header x`, `message key`, `message
        /// id`.
        path: String,
    },
    /// A normaliser cannot be applied to the message's value.
    #[error(
        "key field `{path}`: normaliser `{normaliser}` needs {needs}; correct the producer, or the key's `as`"
    )]
    NormaliserFailed {
        /// The path as the specification has it.
        path: String,
        /// The normaliser that could not be applied.
        normaliser: Normaliser,
        /// The kind of value that the normaliser needs.
        needs: &'static str,
    },
    /// The payload is not one well-formed JSON document (RFC 8259).
    #[error(
        "payload is not valid JSON at byte {offset}: {what}; for other formats use a header, the message key or a custom key"
    )]
    MalformedJson {
        /// The position of the error, in bytes from the start of the payload.
        offset: usize,
        /// The fault at this position.
        what: &'static str,
    },
    /// An object of the payload repeats a name. Names are compared after their escapes are
    /// resolved.
    #[error(
        "payload has a JSON object that repeats a name at byte {offset}, nesting level {depth}; which value counts is undefined, so the producer must be corrected"
    )]
    DuplicateJsonKey {
        /// The position of the repeated name, in bytes from the start of the payload.
        offset: usize,
        /// The nesting level at this position; 1 is the outermost.
        depth: usize,
    },
    /// The payload nests arrays and objects deeper than [`MAX_DEPTH`](super::MAX_DEPTH).
    #[error(
        "payload nests deeper than {limit} levels at byte {offset}; flatten it, or use a header or the message key"
    )]
    TooDeep {
        /// The position at which the first level over the limit opens, in bytes from the start of
        /// the payload.
        offset: usize,
        /// The limit, in levels.
        limit: usize,
    },
    /// A source of the key is larger than its limit.
    #[error(
        "{what} has {bytes} bytes, over the limit of {limit}; raise `max_payload_bytes` of the key, or make it smaller"
    )]
    TooLarge {
        /// The part that is too large: `payload`, `header x`, `message key`, `message id`, `route`,
        /// `custom key`.
        what: String,
        /// The size in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The payload is not UTF-8.
    #[error("payload is not UTF-8 at byte {offset}; JSON must be UTF-8")]
    NotUtf8 {
        /// The first byte that is not UTF-8.
        offset: usize,
    },
    /// The payload is text in UTF-16 or UTF-32.
    #[error("payload is UTF-16 or UTF-32, and JSON must be UTF-8; correct the producer's encoding")]
    Utf16,
    /// A value that a decoder of a path needs cannot be decoded.
    #[error(
        "key field `{path}`: {decoder} cannot be decoded: {what}; correct the path in the key, or the producer"
    )]
    DecodeFailed {
        /// The path as the specification has it.
        path: String,
        /// `json`, `base64` or `gzip`.
        decoder: &'static str,
        /// The fault. Constant text, so it contains no payload data.
        what: &'static str,
    },
    /// The payload is not what the format says.
    #[error(
        "payload is not valid {format} at byte {offset}: {what}; correct the producer, or the consumer's `format`"
    )]
    MalformedPayload {
        /// `avro` or `protobuf`, or the framing of one.
        format: &'static str,
        /// The position of the error, in bytes from the start of the payload.
        offset: usize,
        /// The fault. Constant text, so it contains no payload data.
        what: &'static str,
    },
    /// The payload carries its document in a form that no format is set for.
    #[error("payload has another form than JSON: {what}")]
    Framed {
        /// The fault, and the setting to change.
        what: &'static str,
    },
    /// The payload could not be decompressed or decoded.
    #[error(
        "payload cannot be decoded as {encoding}: {what}; correct the producer, or the `encoding` of the consumer's `format`"
    )]
    BadEncoding {
        /// `gzip`, `zstd` or `base64`, or the name of the header that names another.
        encoding: &'static str,
        /// The fault. Constant text, so it contains no payload data.
        what: &'static str,
    },
    /// The schema that the payload names does not exist.
    #[error(
        "the schema registry has no schema {schema}, which the payload names; correct the producer, or the registry's address"
    )]
    UnknownSchema {
        /// The schema's id.
        schema: String,
    },
    /// The schema of the payload cannot be used.
    #[error("schema {schema} cannot be used: {why}")]
    UnusableSchema {
        /// The schema's id.
        schema: String,
        /// The fault in the schema. A schema contains no payload data.
        why: String,
    },
    /// The format still lacks what it needs, such as a schema. The message is not at fault: prepare
    /// it, and derive the key again.
    #[error("the schema of the payload has not been fetched yet")]
    NotPrepared,
    /// No case of the key takes the message.
    #[error("no case of the key takes the message; add a case, or one without `when` at the end")]
    NoCase,
    /// A number that belongs to the key has an exponent of more than 18 digits.
    #[error(
        "payload has a number at byte {offset} whose exponent has more than 18 digits; correct the producer"
    )]
    ExponentTooLarge {
        /// The start of the number, in bytes from the start of the payload.
        offset: usize,
    },
    /// The message has no payload (a Kafka tombstone), and the key is made from the payload.
    #[error(
        "message has no payload (a tombstone), and the key needs one; use the message key or a header"
    )]
    NoPayload,
    /// The message lacks the header that the key names.
    #[error("header `{name}` is missing; correct the name in the key, or the producer")]
    MissingHeader {
        /// The name as the specification has it.
        name: String,
    },
    /// The message has the header that the key names more than once.
    #[error(
        "header `{name}` is there more than once; which one counts is undefined, so the producer must be corrected"
    )]
    RepeatedHeader {
        /// The name as the specification has it.
        name: String,
    },
    /// The message has no broker key.
    #[error("message has no message key; choose other fields for the key, or correct the producer")]
    MissingMessageKey,
    /// The message has no id.
    #[error("message has no message id; choose other fields for the key")]
    MissingMessageId,
    /// The message does not have the form that its source is configured for, so none of its content
    /// can be relied on.
    #[error("the message is not what its source expects: {what}")]
    BadInput {
        /// The expected value. Constant text, so it contains no payload data.
        what: &'static str,
    },
    /// A custom key function returned an error.
    #[error("custom key `{name}`: {reason}")]
    Custom {
        /// The name given to [`Key::custom`](super::Key::custom).
        name: String,
        /// The error that the function returned. Constant text, so it contains no payload data.
        reason: &'static str,
    },
}

impl KeyError {
    /// A short constant name of the error kind, for metric labels, dead-letter headers and test
    /// vectors.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::MissingField { .. } => "missing_field",
            Self::NullField { .. } => "null_field",
            Self::Blank { .. } => "blank",
            Self::NormaliserFailed { .. } => "normaliser_failed",
            Self::MalformedJson { .. } => "malformed_json",
            Self::DuplicateJsonKey { .. } => "duplicate_json_key",
            Self::TooDeep { .. } => "too_deep",
            Self::TooLarge { .. } => "too_large",
            Self::NotUtf8 { .. } | Self::Utf16 => "not_utf8",
            Self::DecodeFailed { .. } => "decode_failed",
            Self::MalformedPayload { .. } => "malformed_payload",
            Self::Framed { .. } => "framed",
            Self::BadEncoding { .. } => "bad_encoding",
            Self::UnknownSchema { .. } => "unknown_schema",
            Self::UnusableSchema { .. } => "unusable_schema",
            Self::NotPrepared => "not_prepared",
            Self::NoCase => "no_case",
            Self::ExponentTooLarge { .. } => "exponent_too_large",
            Self::NoPayload => "no_payload",
            Self::MissingHeader { .. } => "missing_header",
            Self::RepeatedHeader { .. } => "repeated_header",
            Self::MissingMessageKey => "missing_message_key",
            Self::MissingMessageId => "missing_message_id",
            Self::BadInput { .. } => "bad_input",
            Self::Custom { .. } => "custom",
        }
    }
}

/// The reason why a key specification, a scope or a store key is refused. Reported at start-up,
/// before any message is received.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeySpecError {
    /// `Key::json` has no field.
    #[error("the key names no field; name at least one, as in `order_id`")]
    NoFields,
    /// A path is empty, or a part of it between two dots is empty or blank.
    #[error(
        "path `{path}` has an empty part; parts are separated by single dots, as in `customer.id`"
    )]
    BlankPath {
        /// The path as it was given.
        path: String,
    },
    /// A path has a backslash before a character that needs no escape.
    #[error("path `{path}`: a backslash may stand only before one of . \\ , : * $ [ /")]
    BadEscape {
        /// The path as it was given.
        path: String,
    },
    /// A path has the part `*`, which is reserved.
    #[error("path `{path}`: `*` alone is reserved; for a field of that name write `\\*`")]
    Wildcard {
        /// The path as it was given.
        path: String,
    },
    /// A path is over [`MAX_PATH_BYTES`](super::MAX_PATH_BYTES), or has more parts than a payload
    /// may have levels.
    #[error(
        "path `{path}` is too long or too deep: at most {max_bytes} bytes and {max_parts} parts"
    )]
    PathTooLong {
        /// The path, cut to its first 64 characters.
        path: String,
        /// The limit in bytes.
        max_bytes: usize,
        /// The limit in parts.
        max_parts: usize,
    },
    /// The same path occurs twice in the key, its tenant, or its exceptions.
    #[error("path `{path}` is given twice; remove one")]
    RepeatedPath {
        /// The path in its canonical spelling.
        path: String,
    },
    /// The specification has more than [`MAX_PATHS`](super::MAX_PATHS) paths.
    #[error("{count} paths are over the limit of {limit}; use `payload` with exceptions instead")]
    TooManyPaths {
        /// The number of sources that were given.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// A path names a decoder that there is not, or too many.
    #[error("path `{path}`: {problem}")]
    BadDecoder {
        /// The path as it was given.
        path: String,
        /// The fault.
        problem: &'static str,
    },
    /// The cases of a key cannot stand like this.
    #[error("the cases of the key: {problem}")]
    BadCases {
        /// The fault.
        problem: &'static str,
    },
    /// `.except(…)` was called on a key that is not made from the whole payload.
    #[error(
        "`except` goes only with `payload`; a key of named fields leaves everything else out anyway"
    )]
    ExceptWithoutPayload,
    /// The normalisers of a field cannot be combined.
    #[error("field `{path}`: normaliser `{normaliser}` {problem}")]
    Normalisers {
        /// The path as it was given.
        path: String,
        /// The normaliser that cannot be used here.
        normaliser: Normaliser,
        /// The fault.
        problem: &'static str,
    },
    /// There is no normaliser of this name.
    #[error(
        "`{name}` is no normaliser; there are trim, lowercase, nfc, decimal, epoch-seconds, -millis, -micros, -nanos, timestamp-days, -seconds, -millis, -micros, -nanos, unordered, and text"
    )]
    UnknownNormaliser {
        /// The name as it was given.
        name: String,
    },
    /// A header or custom key has no valid name.
    #[error("{what} needs a name of 1 to {limit} bytes that is not blank")]
    BadName {
        /// `header` or `custom key`.
        what: &'static str,
        /// The limit in bytes.
        limit: usize,
    },
    /// `max_payload_bytes` is 0 or over
    /// [`MAX_PAYLOAD_BYTES_LIMIT`](super::MAX_PAYLOAD_BYTES_LIMIT).
    #[error("`max_payload_bytes` is {bytes}; it must be between 1 and {limit}")]
    LimitOutOfRange {
        /// The value that was given, in bytes.
        bytes: usize,
        /// The largest value allowed, in bytes.
        limit: usize,
    },
    /// A specification from a file or the command line names no source or several.
    #[error(
        "a key must name exactly one of json, payload, header, message_key, message_id, parts, cases; this one names {count}"
    )]
    NotOneSource {
        /// The number of sources that it names.
        count: usize,
    },
    /// The text of a specification cannot be parsed.
    #[error("cannot read the key specification: {reason}")]
    Unreadable {
        /// The parser's error. A specification contains no payload data.
        reason: String,
    },
    /// A scope has a character or a length that is not allowed.
    #[error("scope {scope:?} is not allowed; use 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
    BadScope {
        /// The scope, cut to its first 64 characters.
        scope: String,
    },
    /// The text is not a store key or digest.
    #[error(
        "not a store key: expected `<scope>:<digest>` with a digest of 22 characters base64url"
    )]
    BadStoreKey,
}
