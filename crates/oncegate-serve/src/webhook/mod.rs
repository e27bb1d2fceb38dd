//! Events of providers: signature, key, claim, handler.
//!
//! A [`Webhook`] takes the requests of one address. It verifies the signature over the raw body
//! before anything else, so a forged request leaves nothing in the store. The event's id is the
//! key, the scope of the gate is the door's name, and the rest is an
//! [`IdempotencyLayer`](oncegate_http::IdempotencyLayer) around the handler.
//!
//! ```
//! use std::convert::Infallible;
//!
//! use http::{Request, Response};
//! use oncegate_runtime::MemoryStore;
//! use oncegate_http::{Body, event_gate};
//! use oncegate_serve::webhook::{Preset, StripeSettings, Webhook};
//!
//! # async fn example() -> Result<(), oncegate_serve::webhook::WebhookError> {
//! let handler = tower::service_fn(async |request: Request<Body>| {
//!     Ok::<_, Infallible>(Response::new(Body::empty()))
//! });
//! let preset = Preset::Stripe(StripeSettings::new(["/run/secrets/stripe".into()]));
//! let webhook = Webhook::new(event_gate("stripe", MemoryStore::new()), preset, handler);
//! webhook.open().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What a provider sees
//!
//! | situation | answer |
//! |---|---|
//! | an event for the first time | what the handler answers, if it is 2xx |
//! | the handler fails | its 5xx, 410 or 429, else 502; the next delivery runs it again |
//! | the same event, after it | the stored 2xx, with `Idempotent-Replayed: true` |
//! | the same event, while it runs | 503 with `Retry-After: 1` |
//! | a signature that does not fit | 401 `signature-refused` |
//!
//! An answer that is not the handler's is `application/problem+json`. The `type` of a problem is
//! the address of its description below, or of one of `oncegate_http`.
//!
//! # method-not-allowed
//! 405. Events come by POST.
//! # signature-refused
//! 401. No secret fits the signature, or the request is too old or too new. Nothing was done.
//! # event-without-id
//! 422. The request is genuine, and has no id by which its repetition would be known. Nothing was
//!      done.
//! # secrets-missing
//! 503 with `Retry-After`. No secret could be read yet. Nothing was done.
//! # request-too-large
//! 413. The body is larger than [`max_request_bytes`](Webhook::max_request_bytes). Nothing was
//!      done.
//! # request-too-slow
//! 408. The body took longer than 30 s. Nothing was done.
//! # request-broken
//! 400. The body ended too early. Nothing was done.
//! # overloaded
//! 503 with `Retry-After`. The bodies of the current requests leave no memory for this one. Nothing
//! was done.
//! # outcome-undecided
//! 503. The event was given up, perhaps after an attempt whose outcome is unknown. An operator
//!      decides what becomes of it.
//!
//! # Not obvious
//!
//! - Two deliveries with one id are one event, whatever else differs: providers change parts of the
//!   body that count deliveries, such as Stripe's `pending_webhooks`. So there is no fingerprint.
//! - A handler's 4xx is not kept. A wrong path, a missing right or a bug that is repaired an hour
//!   later must not lose the events of that hour, and no person reads these answers.

mod at_path;
mod check;
mod door;
mod problem;
mod secrets;
mod settings;
pub mod signatures;

pub use at_path::AtPath;
pub use door::{Webhook, WebhookError};
pub use settings::{
    EventId, HmacEncoding, HmacHash, HmacSettings, PlainSettings, Preset, SecretFile,
    SignedTimestamp, StripeId, StripeSettings, TimedSettings, TwilioSettings, UnsignedSettings,
};
