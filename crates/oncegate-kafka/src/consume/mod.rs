//! The source that a consumer receives from, and its retry topics.

pub(crate) mod ack_handle;
pub(crate) mod retries;
pub(crate) mod retry_headers;
pub(crate) mod retry_tier;
pub(crate) mod running;
pub(crate) mod source;
pub(crate) mod status;
