//! Questions to the brokers about topics, rights and committed offsets.

pub(crate) mod annotations;
pub(crate) mod committed;
pub(crate) mod group_offsets;
pub(crate) mod history;
pub(crate) mod origin;
pub(crate) mod rights;
pub(crate) mod topics;
