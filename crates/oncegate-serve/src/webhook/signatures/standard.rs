//! Standard Webhooks, and Svix, which has the same under other names.

use std::time::Duration;

use base64::Engine as _;
use ring::hmac::HMAC_SHA256;
use ring::signature::{ED25519, UnparsedPublicKey};

use super::{
    BASE64, BASE64_UNPADDED, Delivery, Genuine, MAX_SIGNATURES, NO_MATCH, Refusal, Secret,
    check_age, is_equal, mac, timestamp,
};

const SECRET_PREFIX: &str = "whsec_";
const PUBLIC_KEY_PREFIX: &str = "whpk_";

/// The most signatures by Ed25519 that are verified: each takes a hash of the whole body for each
/// public key, and who sends them is not known yet.
const MAX_VERIFIED: usize = 4;

/// The length of a public key of Ed25519.
const PUBLIC_KEY_BYTES: usize = 32;

/// The names of the three headers: id, timestamp, signatures.
const STANDARD: [&str; 3] = ["webhook-id", "webhook-timestamp", "webhook-signature"];
const SVIX: [&str; 3] = ["svix-id", "svix-timestamp", "svix-signature"];

/// A secret, decoded.
enum Key {
    Shared(Vec<u8>),
    Public(Vec<u8>),
}

pub(super) fn verify(
    secrets: &[Secret],
    delivery: &Delivery<'_>,
    tolerance: Duration,
) -> Result<Genuine, Refusal> {
    let [id, sent, signatures] = if delivery.headers.contains_key("webhook-id") {
        STANDARD
    } else {
        SVIX
    };
    let id = delivery.required(id)?;
    let sent = delivery.required(sent)?;
    let signatures = delivery.required(signatures)?;
    delivery.text()?;
    check_age(delivery, timestamp(sent)?, tolerance)?;

    let keys: Vec<Key> = secrets
        .iter()
        .filter_map(|secret| key(secret.text()).ok())
        .collect();
    let head = format!("{id}.{sent}.");
    let tags: Vec<_> = keys
        .iter()
        .filter_map(|key| match key {
            Key::Shared(key) => Some(mac(HMAC_SHA256, key, &[head.as_bytes(), delivery.body])),
            Key::Public(_) => None,
        })
        .collect();
    let mut verified = 0;
    for signature in signatures.split(' ').take(MAX_SIGNATURES) {
        // A list with something else in it is none of a provider.
        let malformed = Refusal::NotGenuine("the list of signatures is malformed");
        let Some((version, text)) = signature.split_once(',').filter(|(_, s)| !s.contains(','))
        else {
            return Err(malformed);
        };
        let fits = match version {
            "v1" => {
                let given = BASE64.decode(text).map_err(|_| malformed)?;
                tags.iter().any(|tag| is_equal(tag.as_ref(), &given))
            }
            "v1a" if verified < MAX_VERIFIED => {
                verified += 1;
                BASE64
                    .decode(text)
                    .is_ok_and(|given| is_signed(&keys, &head, delivery.body, &given))
            }
            _ => false,
        };
        if fits {
            return Ok(Genuine::Event(vec![id.to_owned()]));
        }
    }
    Err(NO_MATCH)
}

/// Returns whether one of the public keys fits.
fn is_signed(keys: &[Key], head: &str, body: &[u8], signature: &[u8]) -> bool {
    let mut public = keys
        .iter()
        .filter_map(|key| match key {
            Key::Public(key) => Some(UnparsedPublicKey::new(&ED25519, key)),
            Key::Shared(_) => None,
        })
        .peekable();
    if public.peek().is_none() {
        return false;
    }
    let signed = [head.as_bytes(), body].concat();
    public.any(|key| key.verify(&signed, signature).is_ok())
}

fn key(secret: &str) -> Result<Key, &'static str> {
    if let Some(text) = secret.strip_prefix(PUBLIC_KEY_PREFIX) {
        return match BASE64_UNPADDED.decode(text) {
            Ok(key) if key.len() == PUBLIC_KEY_BYTES => Ok(Key::Public(key)),
            _ => Err("what follows `whpk_` is not base64 of 32 bytes"),
        };
    }
    if secret.starts_with("whsk_") {
        return Err("`whsk_…` is the sender's private key; the receiver needs `whpk_…`");
    }
    let text = secret.strip_prefix(SECRET_PREFIX).unwrap_or(secret);
    match BASE64_UNPADDED.decode(text) {
        Ok(key) if key.is_empty() => Err("the secret is empty"),
        Ok(key) => Ok(Key::Shared(key)),
        Err(_) => Err("the secret is not `whsec_` and base64, nor `whpk_` and base64"),
    }
}

/// Returns what is wrong with a secret, without showing it.
pub(in crate::webhook) fn check_secret(secret: &Secret) -> Result<(), &'static str> {
    key(secret.text()).map(drop)
}
