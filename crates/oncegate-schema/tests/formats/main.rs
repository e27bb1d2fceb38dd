//! Keys by the formats: that a payload has the key of the JSON document with the same values, and
//! what is refused.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod avro;
mod common;
mod constant;
mod encodings;
mod hostile;
mod inside;
mod protobuf;
mod reader;
