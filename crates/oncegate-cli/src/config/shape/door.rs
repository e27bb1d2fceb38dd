//! The doors of `oncegate serve`: what stands in front of services, and takes their requests.

use oncegate::GateSettings;
use oncegate::core::settings::TlsFiles;
use schemars::JsonSchema;
use serde::Deserialize;

use super::api::Api;
use super::webhook::Webhook;
use crate::config::values::{
    FingerprintSetting, Names, PrincipalSetting, RuleKeySetting, Size, Time,
};

/// One door: an address, and what is done with its requests. `webhook` or `api` says that it is one
/// of those; without them it is a proxy.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Door {
    /// The address that requests come to: `127.0.0.1:8080`, or `unix:/path/of/socket`. Doors may
    /// share an address if their `path` is another.
    #[schemars(extend("default" = Self::LISTEN))]
    pub(crate) listen: Option<String>,
    /// The path of the requests that this door takes, with all that is below it. Without it, a door
    /// takes what no other door at its address does.
    pub(crate) path: Option<String>,
    /// Claims of functions, instead of a service: `callers` and `keys`.
    #[schemars(extend("title" = "table"))]
    pub(crate) api: Option<Api>,
    /// The service: `http://127.0.0.1:3000`, `https://service`, or `unix:/path/of/socket`.
    pub(crate) upstream: Option<String>,
    /// Allow an `upstream` by `http` on another machine, which is not encrypted.
    #[schemars(extend("default" = false))]
    pub(crate) allow_remote: Option<bool>,
    /// Use only HTTP/2 with the service. Over TLS, HTTP/2 is used in any case with a service that
    /// supports it.
    #[schemars(extend("default" = false))]
    pub(crate) http2: Option<bool>,
    /// The time until the service's response begins. After that the outcome of a request
    /// with a key is unknown, and its lease expires.
    #[schemars(extend("default" = "1m"))]
    pub(crate) timeout: Option<Time>,
    /// The longest pause of a body that streams through. After that its connection is closed.
    #[schemars(extend("default" = "1m"))]
    pub(crate) idle_timeout: Option<Time>,
    /// The headers that may have the key. Two different keys in one request are refused.
    #[schemars(extend("default" = "Idempotency-Key"))]
    pub(crate) headers: Option<Names>,
    /// The caller of a request: `{ header = "x-user-id" }`, which your authentication in front of
    /// the door must set, or `"single-tenant"`. There is no default.
    pub(crate) principal: Option<PrincipalSetting>,
    /// The requests that are held: each rule has `method` and `path`, and may have `required`,
    /// `key`, `retention`, `keep` and `ignore`. All others stream through.
    #[schemars(extend("title" = "list of tables"))]
    pub(crate) rules: Option<Vec<DoorRule>>,
    /// Refuse keys without quotes.
    #[schemars(extend("default" = false))]
    pub(crate) strict: Option<bool>,
    /// The parts of a request that must be equal besides the key:
    /// `{ except = ["body.sent_at", "host"] }`. Without it, all of them.
    pub(crate) fingerprint: Option<FingerprintSetting>,
    /// The largest body of a request that is held, up to 64MiB.
    #[schemars(extend("default" = "1MiB"))]
    pub(crate) max_request: Option<Size>,
    /// The time for the body of a request that is held.
    #[schemars(extend("default" = "30s"))]
    pub(crate) request_timeout: Option<Time>,
    /// The most requests with a key that the service handles at once. Others get 503.
    #[schemars(extend("default" = 1024))]
    pub(crate) max_in_flight: Option<u32>,
    /// The bodies of requests with keys that are in memory at once. Others get 503.
    #[schemars(extend("default" = "256MiB"))]
    pub(crate) max_buffered: Option<Size>,
    /// The provider whose events this door takes: `{ stripe = { secrets = [{ file = "…" }] } }`.
    pub(crate) webhook: Option<Webhook>,
    /// The most attempts of a key that fail or break off before it is given up, up to 254.
    #[schemars(extend("default" = 10))]
    pub(crate) max_attempts: Option<u32>,
    /// The time that a repetition waits for the first response before it gets 409.
    #[schemars(extend("default" = "0s"))]
    pub(crate) wait: Option<Time>,
    #[serde(default, rename = "*tls")]
    #[schemars(flatten)]
    pub(crate) tls: TlsFiles,
    #[serde(default, rename = "*gate")]
    #[schemars(flatten)]
    pub(crate) gate: GateSettings,
}

impl Door {
    /// The default address: only this machine can reach it.
    pub(crate) const LISTEN: &str = "127.0.0.1:8080";

    /// The address of the door.
    pub(crate) fn address(&self) -> &str {
        self.listen.as_deref().unwrap_or(Self::LISTEN)
    }
}

/// The requests that a door holds, and how.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DoorRule {
    /// The method: `POST`, for example.
    pub(crate) method: Option<String>,
    /// The path, with `{names}` for parts that may be anything: `/accounts/{id}/payments`.
    pub(crate) path: Option<String>,
    /// Refuse a request without a key. Otherwise it passes.
    #[schemars(extend("default" = true))]
    pub(crate) required: Option<bool>,
    /// The place of the key: `{ header = "X-Request-Id" }`, fields of the body as
    /// `{ json = ["order_id"] }`, or `{ parameters = ["id"] }` of the path. Without it, in one of
    /// the door's `headers`.
    pub(crate) key: Option<RuleKeySetting>,
    /// The time for which a completed request is known. Without it, that of the door.
    pub(crate) retention: Option<Time>,
    /// The statuses that are kept for repetitions: `["2xx", "404"]`. Without it, those that
    /// docs/HTTP.md lists.
    pub(crate) keep: Option<Names>,
    /// Parts of the request that a repetition may change: `host`, `query` or `body`.
    pub(crate) ignore: Option<Names>,
}

/// The listeners of `oncegate serve`, and how it stops.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Serve {
    /// The most connections of an address at once. Others wait until one ends.
    #[schemars(extend("default" = 10_000))]
    pub(crate) max_connections: Option<u32>,
    /// The largest head of a request, with its address and headers.
    #[schemars(extend("default" = "64KiB"))]
    pub(crate) max_head: Option<Size>,
    /// The time for the head of a request, and so for a pause between two requests.
    #[schemars(extend("default" = "30s"))]
    pub(crate) head_timeout: Option<Time>,
    /// The time that running requests may take to end after SIGTERM.
    #[schemars(extend("default" = "20s"))]
    pub(crate) drain_timeout: Option<Time>,
}
