//! Slack's Events API: `X-Slack-Signature: v0=…` over `v0:timestamp:body`.

use std::time::Duration;

use ring::hmac::HMAC_SHA256;
use serde::Deserialize;

use super::{
    Delivery, Genuine, NO_MATCH, Refusal, Secret, check_age, hex, is_equal, mac, timestamp,
};

pub(super) fn verify(
    secrets: &[Secret],
    delivery: &Delivery<'_>,
    tolerance: Duration,
) -> Result<Genuine, Refusal> {
    let sent = delivery.required("x-slack-request-timestamp")?;
    let given = delivery.required("x-slack-signature")?;
    delivery.text()?;
    check_age(delivery, timestamp(sent)?, tolerance)?;
    let head = format!("v0:{sent}:");
    let is_genuine = secrets.iter().any(|secret| {
        let key = secret.text().as_bytes();
        let tag = mac(HMAC_SHA256, key, &[head.as_bytes(), delivery.body]);
        let expected = format!("v0={}", hex(tag.as_ref()));
        is_equal(expected.as_bytes(), given.as_bytes())
    });
    if !is_genuine {
        return Err(NO_MATCH);
    }
    content(delivery.body)
}

/// The members that count. A name that occurs twice is an error.
#[derive(Deserialize)]
struct Envelope {
    #[serde(default)]
    r#type: String,
    #[serde(default)]
    challenge: String,
    #[serde(default)]
    event_id: String,
}

fn content(body: &[u8]) -> Result<Genuine, Refusal> {
    match serde_json::from_slice::<Envelope>(body) {
        Ok(envelope) if envelope.r#type == "url_verification" && envelope.event_id.is_empty() => {
            Ok(Genuine::Challenge(envelope.challenge))
        }
        Ok(envelope) if !envelope.event_id.trim().is_empty() => {
            Ok(Genuine::Event(vec![envelope.event_id]))
        }
        _ => Err(Refusal::NoId(
            "the body is no JSON with an `event_id`; commands and interactions of Slack have none"
                .to_owned(),
        )),
    }
}
