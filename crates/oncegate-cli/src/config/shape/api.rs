//! The door that takes claims of functions.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use crate::config::values::{KeySetting, Names, Secret, Size};

/// The claims of functions over HTTP: who may send them, and for which keys.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Api {
    /// The programs that may claim, each by a name of its own with `token` and `scopes`:
    /// `{ cron = { token = { file = "cron.token" }, scopes = ["nightly"] } }`.
    #[schemars(extend("title" = "table of callers"))]
    pub(crate) callers: BTreeMap<String, ApiCaller>,
    /// The key specifications of scopes, by their names: `{ orders = "order_id" }`. The key of a
    /// request is then the document that the specification reads. In other scopes, all of it is the
    /// key.
    #[serde(default)]
    #[schemars(extend("title" = "table of keys"))]
    pub(crate) keys: BTreeMap<String, KeySetting>,
}

/// A program that may claim.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApiCaller {
    /// The bearer token. A file may have several, one a line, and is read again while the server
    /// runs.
    pub(crate) token: Secret,
    /// The scopes that it may use.
    pub(crate) scopes: Names,
    /// The most claims that it holds at once.
    #[schemars(extend("default" = 1000))]
    pub(crate) max_claims: Option<u32>,
    /// The most requests of it that wait for a result at once. A further one is answered at once.
    #[schemars(extend("default" = 100))]
    pub(crate) max_waiting: Option<u32>,
    /// The most bytes of its requests in memory at once.
    #[schemars(extend("default" = "16MiB"))]
    pub(crate) max_buffered: Option<Size>,
}
