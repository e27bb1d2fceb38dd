//! The base of every client of librdkafka: settings, logins, errors and log lines; the clients that
//! ask and that produce.

pub(crate) mod convert;
mod delivery;
pub(crate) mod headers;
pub(crate) mod inquiry;
pub(crate) mod java_names;
pub(crate) mod log;
pub(crate) mod login;
pub(crate) mod notices;
pub(crate) mod producer;
pub(crate) mod properties;
pub(crate) mod remedies;
pub(crate) mod rotation;
pub(crate) mod settings;
pub(crate) mod source_settings;
pub(crate) mod statistics;
pub(crate) mod tokens;
pub(crate) mod trouble;
