//! What is written: dead letters, messages of an outbox, copies.

pub(crate) mod dead_letters;
pub(crate) mod publisher;
pub(crate) mod writer;
