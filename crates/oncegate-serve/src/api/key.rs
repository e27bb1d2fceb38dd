//! Turns the key of a request into the message that a gate makes a store key of.

use std::sync::Arc;

use bytes::Bytes;
use oncegate_core::key::{
    CompiledFingerprint, Fingerprint, FingerprintSpec, Key, KeyInput, KeySpecError,
};
use oncegate_core::record::Token;
use oncegate_core::store::Store;
use oncegate_runtime::gate::Gate;
use oncegate_runtime::message::{Message, Origin};
use serde_json::value::RawValue;

use super::problem::ApiProblem;

/// The route of keys without the name of a function, which cannot have this character.
const NO_FUNCTION: &str = "*";
const MAX_FUNCTION_BYTES: usize = 128;

/// A gate for functions whose claims come over HTTP: the whole key of a request is the key.
///
/// A gate with another key specification, such as `Key::json(["order_id"])`, reads the key of a
/// request as its document.
pub fn function_gate(scope: impl Into<String>, store: impl Store + 'static) -> Gate {
    Gate::new(scope, Key::payload(), store)
}

/// The specification of what arguments are equal. It never changes, so that records of all releases
/// can be compared.
pub(super) fn arguments_fingerprint() -> Result<CompiledFingerprint, KeySpecError> {
    FingerprintSpec::payload().compile(&Key::payload())
}

/// Returns the message of a key.
pub(super) fn message(
    function: Option<&str>,
    key: Option<&RawValue>,
) -> Result<Message, ApiProblem> {
    let function = function.unwrap_or(NO_FUNCTION);
    if function != NO_FUNCTION && !is_name(function) {
        let what = format!(
            "the name of the function must have 1 to {MAX_FUNCTION_BYTES} characters of A-Z a-z 0-9 . _ : -"
        );
        return Err(ApiProblem::RequestInvalid { what });
    }
    let Some(key) = key else {
        return Err(ApiProblem::KeyMissing);
    };
    check_substance(key)?;
    let payload = Bytes::copy_from_slice(key.get().as_bytes());
    let route: Arc<str> = function.into();
    let origin = Origin::Other("a claim over HTTP".into());
    Ok(Message::new(route, origin, Some(payload)))
}

fn is_name(name: &str) -> bool {
    (1..=MAX_FUNCTION_BYTES).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
}

/// Refuses a key that most likely comes of a variable that was not set: all such work would share
/// one record, and all but the first would be lost. Deeper values may be null: they are arguments.
fn check_substance(key: &RawValue) -> Result<(), ApiProblem> {
    let text = key.get();
    match text.as_bytes().first() {
        Some(b'"') if is_empty(key) => return Err(ApiProblem::KeyMissing),
        Some(b'n') => return Err(ApiProblem::KeyMissing),
        Some(b't' | b'f') => {
            let what = "the key is true or false, so there would be two keys in all";
            return Err(invalid(what.to_owned()));
        }
        Some(b'[') => {
            let members: Vec<&RawValue> =
                serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
            if members.is_empty() {
                return Err(ApiProblem::KeyMissing);
            }
            if let Some(at) = members.iter().position(|member| is_empty(member)) {
                return Err(invalid(format!("member {at} of the key is null or empty")));
            }
        }
        Some(b'{') => {
            let members: std::collections::BTreeMap<String, &RawValue> =
                serde_json::from_str(text).map_err(|error| invalid(error.to_string()))?;
            if members.is_empty() {
                return Err(ApiProblem::KeyMissing);
            }
            if let Some((name, _)) = members.iter().find(|(_, member)| is_empty(member)) {
                let what = format!("the member {name:?} of the key is null or empty");
                return Err(invalid(what));
            }
        }
        _ => {}
    }
    Ok(())
}

fn invalid(what: String) -> ApiProblem {
    ApiProblem::KeyInvalid { what }
}

/// Returns whether a value is null or a blank string.
fn is_empty(value: &RawValue) -> bool {
    let text = value.get();
    text == "null" || serde_json::from_str::<String>(text).is_ok_and(|text| text.trim().is_empty())
}

/// Returns the fingerprint of the arguments.
pub(super) fn fingerprint(
    specification: &CompiledFingerprint,
    arguments: &RawValue,
) -> Result<Fingerprint, ApiProblem> {
    specification
        .derive(&KeyInput::payload(arguments.get().as_bytes()))
        .map_err(|error| ApiProblem::RequestInvalid {
            what: format!("the arguments: {error}"),
        })
}

/// Returns the owner token of a claim with this nonce, a UUID or 32 hexadecimal digits.
pub(super) fn token(caller: &str, nonce: &str) -> Result<Token, ApiProblem> {
    let digits: Vec<u8> = nonce.bytes().filter(|b| *b != b'-').collect();
    let is_uuid =
        nonce.len() <= 36 && digits.len() == 32 && digits.iter().all(u8::is_ascii_hexdigit);
    if !is_uuid || digits.iter().all(|digit| Some(digit) == digits.first()) {
        let what = "\"nonce\" must be a random UUID, made for this claim";
        return Err(ApiProblem::RequestInvalid {
            what: what.to_owned(),
        });
    }
    let mut hasher = blake3::Hasher::new_derive_key("oncegate 2026-12-01 claim nonce v1");
    hasher.update(&(caller.len() as u64).to_be_bytes());
    hasher.update(caller.as_bytes());
    hasher.update(&digits.to_ascii_lowercase());
    let mut token = [0; 16];
    hasher.finalize_xof().fill(&mut token);
    Ok(Token::from(token))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use super::*;

    fn refused(key: &str) -> bool {
        let raw: &RawValue = serde_json::from_str(key).unwrap();
        message(None, Some(raw)).is_err()
    }

    #[test]
    fn a_key_of_a_variable_without_a_value_is_refused() {
        for key in [
            "null",
            "\"\"",
            "\" \\t\"",
            "{}",
            "[]",
            "true",
            "{\"job\":null}",
            "{\"job\":\"nightly\",\"at\":\"\"}",
            "[\"a\",null]",
        ] {
            assert!(refused(key), "{key}");
        }
        for key in [
            "\"a\"",
            "0",
            "{\"tool\":\"mail\",\"arguments\":{\"cc\":null}}",
            "[1]",
        ] {
            assert!(!refused(key), "{key}");
        }
        assert!(message(None, None).is_err());
        assert!(message(Some(""), None).is_err());
        let key: &RawValue = serde_json::from_str("1").unwrap();
        assert!(message(Some("a b"), Some(key)).is_err());
    }

    #[test]
    fn a_nonce_is_a_random_uuid_and_belongs_to_its_caller() {
        let nonce = "8e03978e-40d5-43e8-bc93-6894a57f9324";
        let one = token("cron", nonce).unwrap();
        assert_eq!(one, token("cron", &nonce.to_uppercase()).unwrap());
        assert_eq!(one, token("cron", &nonce.replace('-', "")).unwrap());
        assert_ne!(one, token("agent", nonce).unwrap());
        for wrong in [
            "",
            "1",
            &"0".repeat(32),
            &"a".repeat(33),
            "8e03978e-40d5-43e8-bc93-6894a57f932g",
        ] {
            assert!(token("cron", wrong).is_err(), "{wrong}");
        }
    }
}
