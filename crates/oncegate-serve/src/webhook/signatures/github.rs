//! GitHub: `X-Hub-Signature-256: sha256=…`, over the body alone.

use ring::hmac::HMAC_SHA256;

use super::{Delivery, Genuine, NO_MATCH, Refusal, Secret, hex, is_equal, mac};

const ID: &str = "x-github-delivery";

pub(super) fn verify(secrets: &[Secret], delivery: &Delivery<'_>) -> Result<Genuine, Refusal> {
    let given = delivery.required("x-hub-signature-256")?;
    if delivery.text()?.is_empty() {
        return Err(Refusal::NotGenuine("the body is empty"));
    }
    let is_genuine = secrets.iter().any(|secret| {
        let tag = mac(HMAC_SHA256, secret.text().as_bytes(), &[delivery.body]);
        let expected = format!("sha256={}", hex(tag.as_ref()));
        is_equal(expected.as_bytes(), given.as_bytes())
    });
    if !is_genuine {
        return Err(NO_MATCH);
    }
    match delivery.id_header(ID)? {
        Some(id) => Ok(Genuine::Event(vec![id.to_owned()])),
        None => Err(Refusal::NoId(format!("the header `{ID}` is missing"))),
    }
}
