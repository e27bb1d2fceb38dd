//! Stripe: `Stripe-Signature: t=1733027000,v1=…,v1=…`.

use ring::hmac::HMAC_SHA256;
use serde::Deserialize;

use super::{
    Delivery, Genuine, MAX_SIGNATURES, NO_MATCH, Refusal, Secret, check_age, hex, is_equal, mac,
    timestamp,
};
use crate::webhook::settings::{StripeId, StripeSettings};

pub(super) fn verify(
    secrets: &[Secret],
    delivery: &Delivery<'_>,
    settings: &StripeSettings,
) -> Result<Genuine, Refusal> {
    let header = delivery.required("stripe-signature")?;
    delivery.text()?;
    let malformed = Refusal::NotGenuine("`Stripe-Signature` is malformed");
    let mut sent = None;
    let mut signatures = Vec::new();
    for item in header.split(',') {
        let mut parts = item.split('=');
        match (parts.next(), parts.next()) {
            (Some("t"), Some(value)) => sent = sent.or(Some(value)),
            (Some("v1"), Some(value)) => signatures.push(value),
            (Some("t" | "v1"), None) => return Err(malformed),
            // Other schemes, such as the `v0` of test events, prove nothing.
            _ => {}
        }
    }
    let sent = sent.ok_or(malformed)?;
    let sent_unix_s = timestamp(sent)?;
    let head = format!("{sent}.");
    let is_genuine = secrets.iter().any(|secret| {
        let key = secret.text().as_bytes();
        let expected = hex(mac(HMAC_SHA256, key, &[head.as_bytes(), delivery.body]).as_ref());
        signatures
            .iter()
            .take(MAX_SIGNATURES)
            .any(|given| is_equal(expected.as_bytes(), given.as_bytes()))
    });
    if !is_genuine {
        return Err(NO_MATCH);
    }
    check_age(delivery, sent_unix_s, settings.tolerance)?;
    id(delivery.body, settings.id)
}

/// The members that an id is made of. A name that occurs twice is an error.
#[derive(Deserialize)]
struct Event {
    #[serde(default)]
    id: String,
    #[serde(default)]
    r#type: String,
    #[serde(default)]
    data: Data,
}

#[derive(Default, Deserialize)]
struct Data {
    #[serde(default)]
    object: Object,
}

#[derive(Default, Deserialize)]
struct Object {
    #[serde(default)]
    id: String,
}

fn id(body: &[u8], wanted: StripeId) -> Result<Genuine, Refusal> {
    #[derive(Deserialize)]
    struct Id {
        id: String,
    }
    let id = match wanted {
        StripeId::Event => match serde_json::from_slice(body) {
            Ok(Id { id }) if !id.trim().is_empty() => Some(vec![id]),
            _ => None,
        },
        StripeId::ObjectAndType => match serde_json::from_slice::<Event>(body) {
            // Some objects have no id, such as the balance. Their event has.
            Ok(event) if event.data.object.id.is_empty() && !event.id.is_empty() => {
                Some(vec![event.id])
            }
            Ok(event) if !event.data.object.id.is_empty() && !event.r#type.is_empty() => {
                Some(vec![event.data.object.id, event.r#type])
            }
            _ => None,
        },
    };
    id.map(Genuine::Event)
        .ok_or_else(|| Refusal::NoId("the body is no JSON with the id of an event".to_owned()))
}
