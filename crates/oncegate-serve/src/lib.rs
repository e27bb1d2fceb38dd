//! The server of oncegate: the same records behind every HTTP door, in any language.
//!
//! | folder | what it has |
//! |---|---|
//! | `proxy` | a proxy for `Idempotency-Key` in front of a service |
//! | `webhook` | events of providers: signature, key, claim, handler |
//! | `api` | claims over HTTP, for functions in any language |
//! | `listener` | addresses, connections and their limits, how a server stops |
//! | `answers` | responses that no door gives |
//!
//! A [`Door`] answers the requests of one address or path; a [`Listener`] has the sockets.

use futures_util::future::BoxFuture;
use http::{Request, Response};

pub use oncegate_http::Body;

mod answers;
mod listener;

pub mod api;
pub mod proxy;
pub mod webhook;

pub use listener::{Address, Doors, Limits, Listener, Peer};

/// Answers the requests of one listener, and knows no socket.
pub trait Door: Send + Sync + 'static {
    /// Answers one request. What happens to it does not depend on the returned future: a client
    /// that disconnects drops it.
    fn answer(&self, request: Request<Body>) -> BoxFuture<'static, Response<Body>>;
}
