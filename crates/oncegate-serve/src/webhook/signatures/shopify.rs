//! Shopify: `X-Shopify-Hmac-Sha256`, base64, over the body alone.

use ring::hmac::HMAC_SHA256;

use super::{Delivery, Genuine, NO_MATCH, Refusal, Secret, base64, is_equal, mac};

/// The headers of a delivery: of subscriptions to webhooks, and of those to events.
struct Names {
    signature: &'static str,
    /// Headers that Shopify always sends, and its library requires.
    required: [&'static str; 4],
    event: &'static str,
    topic: &'static str,
    shop: &'static str,
}

const WEBHOOKS: Names = Names {
    signature: "x-shopify-hmac-sha256",
    required: [
        "x-shopify-topic",
        "x-shopify-shop-domain",
        "x-shopify-api-version",
        "x-shopify-webhook-id",
    ],
    event: "x-shopify-event-id",
    topic: "x-shopify-topic",
    shop: "x-shopify-shop-domain",
};

const EVENTS: Names = Names {
    signature: "shopify-hmac-sha256",
    required: [
        "shopify-topic",
        "shopify-shop-domain",
        "shopify-api-version",
        "shopify-webhook-id",
    ],
    event: "shopify-event-id",
    topic: "shopify-topic",
    shop: "shopify-shop-domain",
};

pub(super) fn verify(secrets: &[Secret], delivery: &Delivery<'_>) -> Result<Genuine, Refusal> {
    let names = if delivery
        .header(EVENTS.signature)?
        .is_some_and(|it| !it.is_empty())
    {
        EVENTS
    } else {
        WEBHOOKS
    };
    let given = delivery.required(names.signature)?;
    if delivery.text()?.is_empty() {
        return Err(Refusal::NotGenuine("the body is empty"));
    }
    let is_genuine = secrets.iter().any(|secret| {
        let tag = mac(HMAC_SHA256, secret.text().as_bytes(), &[delivery.body]);
        is_equal(base64(tag.as_ref()).as_bytes(), given.as_bytes())
    });
    if !is_genuine {
        return Err(NO_MATCH);
    }
    for name in names.required {
        delivery.required(name)?;
    }
    let id = delivery
        .id_header(names.event)?
        .ok_or_else(|| Refusal::NoId(format!("the header `{}` is missing", names.event)))?;
    // One change in a shop may be an event of several topics, each with work of its own.
    Ok(Genuine::Event(vec![
        delivery.required(names.shop)?.to_owned(),
        delivery.required(names.topic)?.to_owned(),
        id.to_owned(),
    ]))
}
