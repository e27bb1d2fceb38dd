//! Writers of dead letters, messages of an outbox, and copies.

pub(crate) mod dead_letters;
mod partitioner;
pub(crate) mod publisher;
pub(crate) mod writer;
