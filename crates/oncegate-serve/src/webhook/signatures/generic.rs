//! A signature and an id as the settings describe them.

use base64::Engine as _;
use oncegate_core::key::KeyInput;
use ring::hmac;

use super::{
    BASE64_UNPADDED, Delivery, Genuine, NO_MATCH, Refusal, Secret, check_age, is_equal, mac,
    timestamp,
};
use crate::webhook::settings::{EventId, HmacEncoding, HmacHash, HmacSettings};

/// The route of ids in their digests. The door's name is in the key of the record.
const ROUTE: &str = "webhook";

pub(super) fn verify(
    secrets: &[Secret],
    delivery: &Delivery<'_>,
    settings: &HmacSettings,
) -> Result<Genuine, Refusal> {
    let given = one_of(delivery, &settings.header)?;
    let given = given
        .strip_prefix(settings.prefix.as_str())
        .ok_or(Refusal::NotGenuine("the signature lacks its prefix"))?;
    let given = match settings.encoding {
        HmacEncoding::Hex => from_hex(given),
        HmacEncoding::Base64 => BASE64_UNPADDED.decode(given).ok(),
    }
    .ok_or(Refusal::NotGenuine("the signature is not encoded as set"))?;
    let mut head = String::new();
    if let Some(signed) = &settings.timestamp {
        let sent = one_of(delivery, &signed.header)?;
        check_age(delivery, timestamp(sent)?, signed.tolerance)?;
        head = format!("{sent}{}", signed.separator);
    }
    let algorithm = match settings.hash {
        HmacHash::Sha1 => hmac::HMAC_SHA1_FOR_LEGACY_USE_ONLY,
        HmacHash::Sha256 => hmac::HMAC_SHA256,
        HmacHash::Sha384 => hmac::HMAC_SHA384,
        HmacHash::Sha512 => hmac::HMAC_SHA512,
    };
    let is_genuine = secrets.iter().any(|secret| {
        let key = secret.text().as_bytes();
        let tag = mac(algorithm, key, &[head.as_bytes(), delivery.body]);
        is_equal(tag.as_ref(), &given)
    });
    if !is_genuine {
        return Err(NO_MATCH);
    }
    id(delivery, &settings.id)
}

/// The value of a header that the settings name.
fn one_of<'a>(delivery: &Delivery<'a>, name: &str) -> Result<&'a str, Refusal> {
    let mut lines = delivery.headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(value), None) => value
            .to_str()
            .map_err(|_| Refusal::NotGenuine("a header that counts is not ASCII")),
        (None, _) => Err(Refusal::NotGenuine("a header of the signature is missing")),
        (Some(_), Some(_)) => Err(Refusal::NotGenuine(
            "a header that counts occurs more than once",
        )),
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u8> = text
        .chars()
        .map(|digit| digit.to_digit(16).and_then(|it| u8::try_from(it).ok()))
        .collect::<Option<_>>()?;
    let (pairs, odd) = digits.as_chunks::<2>();
    odd.is_empty()
        .then(|| pairs.iter().map(|[high, low]| high << 4 | low).collect())
}

/// The id by the specification of the settings.
pub(super) fn id(delivery: &Delivery<'_>, wanted: &EventId) -> Result<Genuine, Refusal> {
    let key = wanted
        .compile()
        .map_err(|error| Refusal::NoId(error.to_string()))?;
    let headers: Vec<(&str, &[u8])> = delivery
        .headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_bytes()))
        .collect();
    let message = KeyInput::payload(delivery.body).with_headers(&headers);
    match key.derive(ROUTE, &message) {
        Ok(key) => Ok(Genuine::Event(vec![key.digest().to_string()])),
        Err(error) => Err(Refusal::NoId(error.to_string())),
    }
}
