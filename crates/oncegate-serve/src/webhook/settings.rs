//! The settings of a webhook, and their check.

use std::path::PathBuf;
use std::time::Duration;

use oncegate_core::key::{CompiledKey, Key, KeySpecError, Scope};
#[cfg(feature = "config")]
use oncegate_core::settings::Time;
#[cfg(feature = "config")]
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
#[cfg(feature = "config")]
use serde::{Deserialize, Serialize};

pub(super) const HOUR: Duration = Duration::from_secs(3_600);
pub(super) const DAY: Duration = Duration::from_secs(86_400);

/// The tolerance that the libraries of Standard Webhooks, Stripe and Slack have.
const DEFAULT_TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// The provider of a webhook: what is signed, how, and what the id of an event is.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Preset {
    /// Standard Webhooks, and Svix: `id.timestamp.body`, by a shared secret (`whsec_…`) or a
    /// public key (`whpk_…`). The id is `webhook-id` or `svix-id`.
    Standard(TimedSettings),
    /// Stripe: `timestamp.body`. The id is that of the event.
    Stripe(StripeSettings),
    /// GitHub: the body. The id is `X-GitHub-Delivery`.
    Github(PlainSettings),
    /// Shopify: the body. The id is the shop, the topic and `X-Shopify-Event-Id`.
    Shopify(PlainSettings),
    /// Slack's Events API: `v0:timestamp:body`. The id is `event_id`; `url_verification` is
    /// answered.
    Slack(TimedSettings),
    /// Twilio: the public address and the parameters. The id is `I-Twilio-Idempotency-Token`, or
    /// `MessageSid` and its status.
    Twilio(TwilioSettings),
    /// An HMAC of the body in a header, with an id of your choice.
    Hmac(HmacSettings),
    /// No signature: anyone who reaches the address can send events.
    None(UnsignedSettings),
}

/// Secrets, and nothing else.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct PlainSettings {
    /// The files with the secrets. Each that is valid at the moment has its own.
    #[cfg_attr(
        feature = "config",
        serde(default),
        schemars(extend("title" = "list of tables"))
    )]
    pub secrets: Vec<SecretFile>,
}

/// Secrets, and how old a request may be.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct TimedSettings {
    /// The files with the secrets. Each that is valid at the moment has its own.
    #[cfg_attr(
        feature = "config",
        serde(default),
        schemars(extend("title" = "list of tables"))
    )]
    pub secrets: Vec<SecretFile>,
    /// The most that the signed time may be away from now, before or after it: 5m by default, up
    /// to 1d.
    #[cfg_attr(feature = "config", serde(with = "Time", default = "tolerance"))]
    pub tolerance: Duration,
}

/// The settings of Stripe's events.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct StripeSettings {
    /// The files with the signing secrets of the endpoint (`whsec_…`).
    #[cfg_attr(
        feature = "config",
        serde(default),
        schemars(extend("title" = "list of tables"))
    )]
    pub secrets: Vec<SecretFile>,
    /// The most that the signed time may be away from now, before or after it: 5m by default, up
    /// to 1d.
    #[cfg_attr(feature = "config", serde(with = "Time", default = "tolerance"))]
    pub tolerance: Duration,
    /// The id of an event: `event` by default.
    #[cfg_attr(feature = "config", serde(default))]
    pub id: StripeId,
}

/// The id of an event of Stripe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum StripeId {
    /// The `id` of the event: equal for each delivery of it. The default.
    #[default]
    Event,
    /// The `id` of `data.object`, and the `type` of the event.
    ///
    /// Right only for types that an object has once in its life, such as
    /// `checkout.session.completed`: two events of one change are then one. An object that is
    /// updated twice has two events of one type, and the second would be taken for a duplicate.
    ObjectAndType,
}

/// The settings of Twilio's requests.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct TwilioSettings {
    /// The files with the auth tokens of the account.
    #[cfg_attr(
        feature = "config",
        serde(default),
        schemars(extend("title" = "list of tables"))
    )]
    pub secrets: Vec<SecretFile>,
    /// The address that Twilio sends to, as it was entered there, without its query. It is signed:
    /// `https://example.com/hooks/twilio`.
    #[cfg_attr(feature = "config", serde(default))]
    pub url: String,
}

/// The settings of a signature by HMAC.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct HmacSettings {
    /// The files with the secrets. Each that is valid at the moment has its own.
    #[cfg_attr(
        feature = "config",
        serde(default),
        schemars(extend("title" = "list of tables"))
    )]
    pub secrets: Vec<SecretFile>,
    /// The header with the signature.
    #[cfg_attr(feature = "config", serde(default))]
    pub header: String,
    /// The hash: `sha256` by default.
    #[cfg_attr(feature = "config", serde(default))]
    pub hash: HmacHash,
    /// The encoding of the signature: `hex` by default.
    #[cfg_attr(feature = "config", serde(default))]
    pub encoding: HmacEncoding,
    /// The text before the signature, such as `sha256=`. None by default.
    #[cfg_attr(feature = "config", serde(default))]
    pub prefix: String,
    /// The time that is signed with the body. Without it, the body alone is signed, and a recorded
    /// request can be sent again at any time.
    #[cfg_attr(feature = "config", serde(default))]
    pub timestamp: Option<SignedTimestamp>,
    /// The id of an event, as the `key` of a consumer: `{ header = "x-event-id" }`, or
    /// `{ json = ["id"] }`.
    pub id: EventId,
}

/// A time that is signed before the body.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct SignedTimestamp {
    /// The header with the time, in seconds since 1970.
    pub header: String,
    /// The text between the time and the body in what is signed: `.` by default.
    #[cfg_attr(feature = "config", serde(default = "separator"))]
    pub separator: String,
    /// The most that the signed time may be away from now, before or after it: 5m by default, up
    /// to 1d.
    #[cfg_attr(feature = "config", serde(with = "Time", default = "tolerance"))]
    pub tolerance: Duration,
}

/// The hash of an HMAC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum HmacHash {
    /// SHA-1, which old providers use. As an HMAC it is not broken.
    Sha1,
    /// SHA-256. The default.
    #[default]
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

/// The encoding of an HMAC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(rename_all = "lowercase")
)]
#[non_exhaustive]
pub enum HmacEncoding {
    /// Hexadecimal digits of either case. The default.
    #[default]
    Hex,
    /// Base64, with padding or without.
    Base64,
}

/// The settings of a webhook without a signature.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct UnsignedSettings {
    /// The id of an event, as the `key` of a consumer: `{ header = "x-event-id" }`, or
    /// `{ json = ["id"] }`.
    pub id: EventId,
}

/// A file with one secret, which is read for each request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(deny_unknown_fields)
)]
pub struct SecretFile {
    /// The path. The file has the secret as the provider shows it; a line break at its end does not
    /// count.
    pub file: PathBuf,
}

/// The specification of an id: that of a key, over the headers and the body of a request.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "config", derive(Deserialize, Serialize), serde(transparent))]
pub struct EventId(pub Key);

impl EventId {
    /// Compiles the specification. The scope is the same for all doors: that of the gate is the
    /// door's name.
    pub(super) fn compile(&self) -> Result<CompiledKey, KeySpecError> {
        self.0.compile(&Scope::new("webhook")?)
    }
}

#[cfg(feature = "config")]
impl JsonSchema for EventId {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "EventId".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "title": "key", "type": ["object", "string"] })
    }
}

#[cfg(feature = "config")]
fn tolerance() -> Duration {
    DEFAULT_TOLERANCE
}

#[cfg(feature = "config")]
fn separator() -> String {
    ".".to_owned()
}

impl PlainSettings {
    /// Settings with these secrets.
    pub fn new(secrets: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            secrets: files(secrets),
        }
    }
}

impl TimedSettings {
    /// Settings with these secrets, and a tolerance of 5 minutes.
    pub fn new(secrets: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            secrets: files(secrets),
            tolerance: DEFAULT_TOLERANCE,
        }
    }
}

impl StripeSettings {
    /// Settings with these secrets, a tolerance of 5 minutes, and the id of the event.
    pub fn new(secrets: impl IntoIterator<Item = PathBuf>) -> Self {
        Self {
            secrets: files(secrets),
            tolerance: DEFAULT_TOLERANCE,
            id: StripeId::Event,
        }
    }
}

impl HmacSettings {
    /// Settings for an HMAC-SHA256 of the body, in hexadecimal digits in `header`.
    pub fn new(
        secrets: impl IntoIterator<Item = PathBuf>,
        header: impl Into<String>,
        id: Key,
    ) -> Self {
        Self {
            secrets: files(secrets),
            header: header.into(),
            hash: HmacHash::Sha256,
            encoding: HmacEncoding::Hex,
            prefix: String::new(),
            timestamp: None,
            id: EventId(id),
        }
    }
}

impl SignedTimestamp {
    /// A time in `header`, with a dot behind it, and a tolerance of 5 minutes.
    pub fn new(header: impl Into<String>) -> Self {
        Self {
            header: header.into(),
            separator: ".".to_owned(),
            tolerance: DEFAULT_TOLERANCE,
        }
    }
}

fn files(paths: impl IntoIterator<Item = PathBuf>) -> Vec<SecretFile> {
    paths.into_iter().map(|file| SecretFile { file }).collect()
}

impl Preset {
    /// Returns the name of the preset, as in a file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Standard(_) => "standard",
            Self::Stripe(_) => "stripe",
            Self::Github(_) => "github",
            Self::Shopify(_) => "shopify",
            Self::Slack(_) => "slack",
            Self::Twilio(_) => "twilio",
            Self::Hmac(_) => "hmac",
            Self::None(_) => "none",
        }
    }

    /// Returns the files with the secrets.
    pub fn secret_files(&self) -> &[SecretFile] {
        match self {
            Self::Standard(timed) | Self::Slack(timed) => &timed.secrets,
            Self::Stripe(stripe) => &stripe.secrets,
            Self::Github(plain) | Self::Shopify(plain) => &plain.secrets,
            Self::Twilio(twilio) => &twilio.secrets,
            Self::Hmac(hmac) => &hmac.secrets,
            Self::None(_) => &[],
        }
    }

    /// Returns how long after an event its provider may still deliver it, as the provider's
    /// documentation says; `None` where there is no such word. `docs/WEBHOOKS.md` has the sources.
    pub fn delivers_for(&self) -> Option<Duration> {
        match self {
            // The schedule that the specification suggests ends after 75:35 hours.
            Self::Standard(_) => Some(76 * HOUR),
            Self::Stripe(_) => Some(3 * DAY),
            // Nothing is sent again by itself, and a delivery of the last three days by hand.
            Self::Github(_) => Some(3 * DAY),
            Self::Shopify(_) => Some(4 * HOUR),
            Self::Slack(_) | Self::Twilio(_) | Self::Hmac(_) | Self::None(_) => None,
        }
    }
}
