//! The server of oncegate: the same records behind every HTTP door, in any language.
//!
//! | folder | what it has |
//! |---|---|
//! | `api` | claims over HTTP, for functions in any language |
//! | `proxy` | a proxy for `Idempotency-Key` in front of a service |
//! | `webhook` | events of providers: signature, key, claim, handler |
//!
//! A [`Door`] answers the requests of one listener.

use futures_util::future::BoxFuture;
use http::{Request, Response};

pub use oncegate_http::Body;

pub mod api;
pub mod proxy;
pub mod webhook;

/// Answers the requests of one listener, and knows no socket.
pub trait Door: Send + Sync + 'static {
    /// Answers one request. What happens to it does not depend on the returned future: a client
    /// that disconnects drops it.
    fn answer(&self, request: Request<Body>) -> BoxFuture<'static, Response<Body>>;
}
