//! Signatures of providers: whether a request is genuine, and the id of its event.
//!
//! [`verify`] is pure. It reads no clock and no file, and compares in constant time. Each provider
//! has a file; the rules in it are those of the provider's own libraries, which the tests ask: what
//! a library refuses is refused here. Where they are lenient beyond what their provider sends, this
//! is stricter: a header that counts occurs once, and a timestamp is digits alone.
//!
//! # Not obvious
//!
//! - Of GitHub and Shopify the body alone is signed, of Twilio not the token that names the event.
//!   A request that was recorded on its way can be sent again under another id. TLS prevents it.
//! - Twilio joins names and values without separators, so one signature fits several ways to cut
//!   them. This, too, needs a recorded request.
//! - The last character of a base64 text has bits that no byte has. Decoders differ in whether they
//!   look at them; only the decoded bytes are compared where the provider's library decodes.

use std::fmt;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::HeaderMap;
use ring::hmac;
use subtle::ConstantTimeEq as _;

use super::settings::Preset;

mod generic;
mod github;
mod shopify;
mod slack;
mod standard;
mod stripe;
mod twilio;

pub(super) use standard::check_secret as check_standard_secret;

/// The most signatures of one header that are compared. Providers send one for each secret that is
/// valid during a rotation.
const MAX_SIGNATURES: usize = 16;

/// The longest header that can be an id, in bytes.
const MAX_ID_BYTES: usize = 4 * 1024;

/// A secret that a provider signs with, or its public key. It is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Takes the text that the provider shows, such as `whsec_…`.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A request as it arrived.
#[derive(Clone, Copy)]
pub struct Delivery<'a> {
    /// All headers.
    pub headers: &'a HeaderMap,
    /// The body, byte for byte.
    pub body: &'a [u8],
    /// The address that the provider has sent it to, with its query. Twilio signs it.
    pub url: &'a str,
    /// The current time in milliseconds since 1970.
    pub now_unix_ms: u64,
}

impl fmt::Debug for Delivery<'_> {
    /// Shows its size, never its content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Delivery")
            .field("body_bytes", &self.body.len())
            .field("now_unix_ms", &self.now_unix_ms)
            .finish_non_exhaustive()
    }
}

/// The content of a genuine request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Genuine {
    /// An event, by the parts of its id. A provider repeats them with every delivery of the event.
    Event(Vec<String>),
    /// A question of the provider whether the address is right, with the text to answer with.
    Challenge(String),
}

/// The reason that a request is refused. It contains nothing of the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The request is not from the provider, or too old or too new to tell.
    #[error("{0}")]
    NotGenuine(&'static str),
    /// The request is genuine and has no id, so it cannot be told from its repetition.
    #[error("{0}")]
    NoId(String),
}

/// Returns what a request contains, if one of the secrets has signed it.
///
/// # Errors
/// [`Refusal::NotGenuine`] when no secret has, or when the signed time is further from now than the
/// tolerance in either direction; [`Refusal::NoId`] when it is genuine but names no event.
pub fn verify(
    preset: &Preset,
    secrets: &[Secret],
    delivery: &Delivery<'_>,
) -> Result<Genuine, Refusal> {
    match preset {
        Preset::Standard(timed) => standard::verify(secrets, delivery, timed.tolerance),
        Preset::Stripe(stripe) => stripe::verify(secrets, delivery, stripe),
        Preset::Github(_) => github::verify(secrets, delivery),
        Preset::Shopify(_) => shopify::verify(secrets, delivery),
        Preset::Slack(timed) => slack::verify(secrets, delivery, timed.tolerance),
        Preset::Twilio(_) => twilio::verify(secrets, delivery),
        Preset::Hmac(hmac) => generic::verify(secrets, delivery, hmac),
        Preset::None(unsigned) => generic::id(delivery, &unsigned.id),
    }
}

impl Delivery<'_> {
    /// The value of a header that counts; `None` when there is none.
    fn header(&self, name: &'static str) -> Result<Option<&str>, Refusal> {
        let mut lines = self.headers.get_all(name).iter();
        match (lines.next(), lines.next()) {
            (None, _) => Ok(None),
            (Some(value), None) => value
                .to_str()
                .map(Some)
                .map_err(|_| Refusal::NotGenuine("a header that counts is not ASCII")),
            // It is not defined which of them counts, and proxies differ.
            (Some(_), Some(_)) => Err(Refusal::NotGenuine(
                "a header that counts occurs more than once",
            )),
        }
    }

    /// The value of a header that a genuine request has.
    fn required(&self, name: &'static str) -> Result<&str, Refusal> {
        self.header(name)?
            .filter(|value| !value.is_empty())
            .ok_or(Refusal::NotGenuine("a header of the signature is missing"))
    }

    /// The value of a header that names the event. It is not signed, so that it is missing or twice
    /// there says nothing about who has sent it.
    fn id_header(&self, name: &'static str) -> Result<Option<&str>, Refusal> {
        match self.header(name) {
            Ok(value) => Ok(value.filter(|id| !id.trim().is_empty() && id.len() <= MAX_ID_BYTES)),
            Err(_) => Err(Refusal::NoId(format!(
                "the header `{name}` occurs more than once, or is not ASCII"
            ))),
        }
    }

    /// The body as the text that the providers' libraries take it for.
    fn text(&self) -> Result<&str, Refusal> {
        std::str::from_utf8(self.body)
            .map_err(|_| Refusal::NotGenuine("the body is not UTF-8, as this provider's are"))
    }
}

/// Seconds since 1970, as providers write them: digits without a leading zero.
fn timestamp(text: &str) -> Result<u64, Refusal> {
    const MAX_DIGITS: usize = 12;
    let is_plain = text.len() <= MAX_DIGITS
        && text.bytes().all(|byte| byte.is_ascii_digit())
        && (text == "0" || !text.starts_with('0'));
    text.parse()
        .ok()
        .filter(|_| is_plain)
        .ok_or(Refusal::NotGenuine(
            "the timestamp is not a number of seconds",
        ))
}

/// Refuses a time that is further away than the tolerance.
fn check_age(
    delivery: &Delivery<'_>,
    sent_unix_s: u64,
    tolerance: std::time::Duration,
) -> Result<(), Refusal> {
    let sent_unix_ms = sent_unix_s.saturating_mul(1_000);
    let tolerance_ms = u64::try_from(tolerance.as_millis()).unwrap_or(u64::MAX);
    if delivery.now_unix_ms > sent_unix_ms.saturating_add(tolerance_ms) {
        return Err(Refusal::NotGenuine(
            "the request was signed too long ago; is this machine's clock right?",
        ));
    }
    if sent_unix_ms > delivery.now_unix_ms.saturating_add(tolerance_ms) {
        return Err(Refusal::NotGenuine(
            "the request was signed in the future; is this machine's clock right?",
        ));
    }
    Ok(())
}

/// The error when no secret fits.
const NO_MATCH: Refusal = Refusal::NotGenuine("no secret fits the signature");

/// Computes the code of what the parts are together.
fn mac(algorithm: hmac::Algorithm, key: &[u8], parts: &[&[u8]]) -> hmac::Tag {
    let mut context = hmac::Context::with_key(&hmac::Key::new(algorithm, key));
    for part in parts {
        context.update(part);
    }
    context.sign()
}

/// Compares in a time that depends on the lengths alone.
fn is_equal(expected: &[u8], given: &[u8]) -> bool {
    expected.ct_eq(given).into()
}

/// Writes bytes as lower-case hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    use fmt::Write as _;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
            // Writing to a string cannot fail.
            _ = write!(text, "{byte:02x}");
            text
        })
}

/// Base64 as most decoders read it: the bits at the end that no byte has are ignored.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_allow_trailing_bits(true),
);

/// The same, with padding or without.
const BASE64_UNPADDED: GeneralPurpose = GeneralPurpose::new(
    &alphabet::STANDARD,
    GeneralPurposeConfig::new()
        .with_decode_allow_trailing_bits(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Writes bytes as base64 with padding.
fn base64(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}

#[cfg(test)]
mod tests;
