//! Twilio: `X-Twilio-Signature` over the address and the sorted parameters.

use std::collections::{BTreeMap, BTreeSet};

use http::header::CONTENT_TYPE;
use percent_encoding::percent_decode;
use ring::digest::{SHA256, digest};
use ring::hmac::{Algorithm, HMAC_SHA1_FOR_LEGACY_USE_ONLY, HMAC_SHA256};

use super::{Delivery, Genuine, NO_MATCH, Refusal, Secret, base64, hex, is_equal, mac};

/// The parameters of a form, each with its different values.
type Parameters = BTreeMap<String, BTreeSet<String>>;

pub(super) fn verify(secrets: &[Secret], delivery: &Delivery<'_>) -> Result<Genuine, Refusal> {
    let given = delivery.required("x-twilio-signature")?;
    let algorithm = algorithm(delivery)?;
    let address = SignedAddress::parse(delivery.url).ok_or(Refusal::NotGenuine(
        "the address that the request was sent to is not `https://host/path`",
    ))?;
    let parameters = parameters(delivery, address.query)?;
    let signed: String = parameters
        .iter()
        .flat_map(|(name, values)| values.iter().map(move |value| (name, value)))
        .flat_map(|(name, value)| [name.as_str(), value.as_str()])
        .collect();
    // Twilio signs the port or leaves it out, so its libraries try both.
    let addresses = [address.without_port(), address.with_port()];
    let is_genuine = secrets.iter().any(|secret| {
        let key = secret.text().as_bytes();
        addresses.iter().any(|address| {
            let tag = mac(algorithm, key, &[address.as_bytes(), signed.as_bytes()]);
            is_equal(base64(tag.as_ref()).as_bytes(), given.as_bytes())
        })
    });
    if !is_genuine {
        return Err(NO_MATCH);
    }
    id(delivery, &parameters)
}

/// The hash that the request says it is signed with.
fn algorithm(delivery: &Delivery<'_>) -> Result<Algorithm, Refusal> {
    let settings = delivery
        .header("x-twilio-webhooks-signature-settings")?
        .unwrap_or_default();
    let named = settings.split(',').find_map(|part| {
        let (name, value) = part.split_once('=')?;
        (name.trim() == "algorithm" && !value.trim().is_empty()).then(|| value.trim())
    });
    match named.map(str::to_ascii_uppercase).as_deref() {
        None | Some("HMAC_SHA1") => Ok(HMAC_SHA1_FOR_LEGACY_USE_ONLY),
        Some("HMAC_SHA256") => Ok(HMAC_SHA256),
        Some(_) => Err(Refusal::NotGenuine(
            "the request is signed with a hash that is not known here",
        )),
    }
}

/// The parameters that are signed with the address. The signature of any other body is that of the
/// address, whose query has the body's hash.
fn parameters(delivery: &Delivery<'_>, query: &str) -> Result<Parameters, Refusal> {
    if is_form(delivery) {
        let mut parameters = Parameters::new();
        for (name, value) in pairs(delivery.body) {
            let (Some(name), Some(value)) = (name, value) else {
                return Err(Refusal::NotGenuine("the form is not UTF-8"));
            };
            parameters.entry(name).or_default().insert(value);
        }
        return Ok(parameters);
    }
    let hash = pairs(query.as_bytes()).find_map(|pair| match pair {
        (Some(name), Some(value)) if name == "bodySHA256" && !value.is_empty() => Some(value),
        _ => None,
    });
    let is_covered = match hash {
        Some(hash) => {
            let expected = hex(digest(&SHA256, delivery.body).as_ref());
            is_equal(expected.as_bytes(), hash.as_bytes())
        }
        None => delivery.body.is_empty(),
    };
    if is_covered {
        Ok(Parameters::new())
    } else {
        Err(Refusal::NotGenuine(
            "the body is neither a form, nor has the query its `bodySHA256`",
        ))
    }
}

fn is_form(delivery: &Delivery<'_>) -> bool {
    delivery
        .headers
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|essence| {
            essence
                .trim()
                .eq_ignore_ascii_case("application/x-www-form-urlencoded")
        })
}

/// The names and values of a form; `None` for what is not UTF-8.
fn pairs(form: &[u8]) -> impl Iterator<Item = (Option<String>, Option<String>)> {
    form.split(|byte| *byte == b'&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let mut halves = pair.splitn(2, |byte| *byte == b'=');
            let name = halves.next().unwrap_or_default();
            (decoded(name), decoded(halves.next().unwrap_or_default()))
        })
}

fn decoded(text: &[u8]) -> Option<String> {
    let spaced: Vec<u8> = text
        .iter()
        .map(|byte| if *byte == b'+' { b' ' } else { *byte })
        .collect();
    String::from_utf8(percent_decode(&spaced).collect()).ok()
}

fn id(delivery: &Delivery<'_>, parameters: &Parameters) -> Result<Genuine, Refusal> {
    if let Some(token) = delivery.id_header("i-twilio-idempotency-token")? {
        return Ok(Genuine::Event(vec!["token".to_owned(), token.to_owned()]));
    }
    let message = only(parameters, ["MessageSid", "SmsSid"]);
    let status = only(parameters, ["MessageStatus", "SmsStatus"]);
    match (message, status) {
        (Some(message), Some(status)) => {
            Ok(Genuine::Event(vec!["message".to_owned(), message, status]))
        }
        _ => Err(Refusal::NoId(
            "the request has neither `I-Twilio-Idempotency-Token`, nor `MessageSid` and `MessageStatus`"
                .to_owned(),
        )),
    }
}

/// The value of the first of these parameters. One with two values names no event.
fn only(parameters: &Parameters, names: [&str; 2]) -> Option<String> {
    let values = names.iter().find_map(|name| parameters.get(*name))?;
    values
        .first()
        .filter(|value| values.len() == 1 && !value.trim().is_empty())
        .cloned()
}

/// The parts of an address, each as it stands there, except for the case of the scheme.
struct SignedAddress<'a> {
    scheme: String,
    /// `user:password@`, or nothing.
    user: &'a str,
    host: &'a str,
    port: Option<&'a str>,
    /// The path and what follows it.
    path: &'a str,
    query: &'a str,
}

impl<'a> SignedAddress<'a> {
    fn parse(url: &'a str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let at = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at_checked(at)?;
        let host_at = authority.rfind('@').map_or(0, |at| at + 1);
        let (user, host) = authority.split_at_checked(host_at)?;
        // The colons of an address of IPv6 stand in brackets.
        let (host, port) = match host.rsplit_once(':') {
            Some((name, port)) if !port.contains(']') => (name, Some(port)),
            _ => (host, None),
        };
        let path = path.strip_suffix('?').unwrap_or(path);
        let query = path.split_once('?').map_or("", |(_, query)| query);
        let port = port.filter(|port| !port.is_empty());
        (!host.is_empty() && port.is_none_or(is_port)).then(|| Self {
            scheme: scheme.to_ascii_lowercase(),
            user,
            host,
            port,
            path,
            query,
        })
    }

    fn without_port(&self) -> String {
        let Self {
            scheme,
            user,
            host,
            path,
            ..
        } = self;
        format!("{scheme}://{user}{host}{path}")
    }

    fn with_port(&self) -> String {
        let Self {
            scheme,
            user,
            host,
            path,
            ..
        } = self;
        let standard = if scheme == "https" { "443" } else { "80" };
        let port = self.port.unwrap_or(standard);
        format!("{scheme}://{user}{host}:{port}{path}")
    }
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok()
}
