//! A proxy for `Idempotency-Key` in front of a service in any language.
//!
//! Requests that a rule names are held by an [`IdempotencyLayer`]: their keys, callers, kept
//! responses and problems are those of `oncegate::http`. All others stream through, in both
//! directions. `docs/SERVE.md` of the repository is the manual.
//!
//! # upstream-unreachable
//! 502 with `Retry-After`. The service could not be reached, and has read nothing of the request.
//! # upstream-broken
//! 502 with `Retry-After`. The connection to the service broke after something of the request was
//! sent: whether it was handled is unknown.
//! # upstream-too-slow
//! 504 with `Retry-After`. The service has not begun to answer in time: whether the request was
//! handled is unknown.
//! # request-broken
//! 400. The request's own body ended too early, or paused for too long.
//! # no-door
//! 404. No door of the address takes the path.
//! # no-tunnel
//! 405. CONNECT is not allowed.
//!
//! | layer | files |
//! |---|---|
//! | what is sent to the service | `upstream` |
//! | its parts | `headers`, `flowing`, `tunnel` |

mod flowing;
mod headers;
mod tunnel;
mod upstream;

use std::fmt;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use oncegate_http::{Idempotency, IdempotencyLayer};
use oncegate_runtime::GateError;
use tower_layer::Layer as _;
use tower_service::Service as _;

pub use upstream::{Upstream, UpstreamSettings};

use crate::{Body, Door};

/// A door in front of a service: requests with keys are handled once.
pub struct Proxy {
    layer: IdempotencyLayer,
    held: Idempotency<Upstream>,
    upstream: Upstream,
}

impl Proxy {
    /// A proxy whose layer, with its rules, says what is held.
    pub fn new(layer: IdempotencyLayer, upstream: Upstream) -> Self {
        Self {
            held: layer.layer(upstream.clone()),
            layer,
            upstream,
        }
    }

    /// Opens the gate of the layer, before the first request.
    ///
    /// # Errors
    /// The text names what to change.
    pub async fn open(&self) -> Result<(), GateError> {
        self.layer.open().await.map(drop)
    }

    /// Takes no new requests with keys, waits for those that run, and drops the ones that still run
    /// after `deadline`: their leases expire. Closes tunnels. Returns how many requests were
    /// dropped.
    pub async fn drain(&self, deadline: Duration) -> usize {
        self.upstream.close_tunnels();
        self.layer.drain(deadline).await
    }
}

impl Door for Proxy {
    fn answer(&self, request: Request<Body>) -> BoxFuture<'static, Response<Body>> {
        self.held
            .clone()
            .call(request)
            .map(|Ok(response)| response)
            .boxed()
    }
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy")
            .field("layer", &self.layer)
            .field("upstream", &self.upstream)
            .finish()
    }
}
