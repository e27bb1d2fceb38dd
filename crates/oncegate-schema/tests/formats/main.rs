//! Keys by the formats: that a payload has the key of the JSON document with the same values, and what is refused.

mod avro;
mod common;
mod encodings;
mod protobuf;
