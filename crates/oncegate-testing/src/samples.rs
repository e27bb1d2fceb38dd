//! The business events of a trial: their duplicates, and which effect belongs to which event.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use fastrand::Rng;
use serde_json::Value;
use serde_json::value::RawValue;

/// The most samples of a trial.
pub const MAX_SAMPLES: usize = 1_000;
/// The beginning of the texts of poison.
const POISON: &str = "poison-";
/// A shorter text is found in an effect only as a whole value, not as a part of one.
const SHORTEST_PART_CHARS: usize = 4;

/// The reason why samples cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadSamples {
    /// There is none.
    #[error("there are no samples; give at least one message, and better five")]
    None,
    /// There are too many.
    #[error("there are {count} samples; give at most {MAX_SAMPLES}")]
    TooMany {
        /// The number of samples.
        count: usize,
    },
    /// A sample is not a JSON object.
    #[error("sample {number} is not a JSON object: {reason}")]
    NotAnObject {
        /// The number of the sample, from 1.
        number: usize,
        /// The fault, without the content of the sample.
        reason: String,
    },
    /// Two are equal apart from their volatile fields.
    #[error(
        "samples {first} and {second} are equal apart from volatile fields; each must be another business event"
    )]
    Equal {
        /// The number of the first, from 1.
        first: usize,
        /// The number of the second.
        second: usize,
    },
    /// No sample has a field that is named as volatile.
    #[error("no sample has the volatile field {path:?}; correct its path, or remove it")]
    NoSuchField {
        /// The path.
        path: String,
    },
}

/// The business events of a trial. Their numbers begin with 1.
#[derive(Debug)]
pub(crate) struct Samples {
    payloads: Vec<Bytes>,
    /// The scalar values of each sample that are not volatile.
    values: Vec<BTreeSet<String>>,
    /// In how many samples a value occurs.
    frequency: BTreeMap<String, usize>,
    volatile: BTreeSet<String>,
}

impl Samples {
    pub(crate) fn new(
        payloads: Vec<Bytes>,
        volatile: BTreeSet<String>,
    ) -> Result<Self, BadSamples> {
        match payloads.len() {
            0 => return Err(BadSamples::None),
            count if count > MAX_SAMPLES => return Err(BadSamples::TooMany { count }),
            _ => {}
        }
        let mut found = BTreeSet::new();
        let mut values = Vec::new();
        let mut contents: BTreeMap<BTreeSet<(String, String)>, usize> = BTreeMap::new();
        for (number, payload) in (1..).zip(&payloads) {
            let document =
                object(payload).map_err(|reason| BadSamples::NotAnObject { number, reason })?;
            let mut leaves = BTreeSet::new();
            leaves_of(&document, "", &volatile, &mut found, &mut leaves);
            values.push(leaves.iter().map(|(_, value)| value.clone()).collect());
            if let Some(first) = contents.insert(leaves, number) {
                return Err(BadSamples::Equal {
                    first,
                    second: number,
                });
            }
        }
        if let Some(path) = volatile.iter().find(|path| !found.contains(*path)) {
            return Err(BadSamples::NoSuchField { path: path.clone() });
        }
        let mut frequency = BTreeMap::new();
        for value in values.iter().flatten() {
            *frequency.entry(String::clone(value)).or_default() += 1;
        }
        Ok(Self {
            payloads,
            values,
            frequency,
            volatile,
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.payloads.len()
    }

    /// The sample as it was given.
    pub(crate) fn original(&self, number: usize) -> Bytes {
        number
            .checked_sub(1)
            .and_then(|place| self.payloads.get(place))
            .cloned()
            .unwrap_or_default()
    }

    /// The same event as another producer, or the same one later, would spell it.
    pub(crate) fn duplicate(&self, number: usize, rng: &mut Rng) -> Bytes {
        let original = self.original(number);
        let text = String::from_utf8_lossy(&original);
        Bytes::from(respelt(text.trim(), "", &self.volatile, false, rng))
    }

    /// JSON of the sample's shape, with values that no handler expects.
    pub(crate) fn poison(&self, number: usize, rng: &mut Rng) -> Bytes {
        let mut document = serde_json::from_slice(&self.original(number)).unwrap_or(Value::Null);
        spoil(&mut document, rng);
        Bytes::from(document.to_string())
    }

    /// The samples that the body of an effect fits best: those that share the most distinguishing
    /// values with it.
    pub(crate) fn owners(&self, body: &Value) -> Vec<usize> {
        let values = values_of(body);
        let mut best: (f64, Vec<usize>) = (0.0, Vec::new());
        for (number, of_sample) in (1..).zip(&self.values) {
            let score: f64 = of_sample
                .iter()
                .filter(|value| occurs(value, &values))
                .map(|value| self.weight(value))
                .sum();
            if score > best.0 {
                best = (score, vec![number]);
            } else if score > 0.0 && score == best.0 {
                best.1.push(number);
            }
        }
        best.1
    }

    /// The values of a payload that no sample has.
    pub(crate) fn foreign_values(&self, payload: &[u8]) -> BTreeSet<String> {
        let document = serde_json::from_slice(payload).unwrap_or_default();
        values_of(&document)
            .into_iter()
            .filter(|value| !self.frequency.contains_key(value))
            .collect()
    }

    /// A value of few samples says more than one of many.
    fn weight(&self, value: &str) -> f64 {
        let samples = self.frequency.get(value).copied().unwrap_or(1).max(1);
        // At most the number of samples, so the conversion is exact.
        1.0 / f64::from(u32::try_from(samples).unwrap_or(u32::MAX))
    }
}

/// The scalar values of a document.
fn values_of(document: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut leaves = BTreeSet::new();
    leaves_of(document, "", &BTreeSet::new(), &mut found, &mut leaves);
    leaves.into_iter().map(|(_, value)| value).collect()
}

/// Returns whether the body of an effect has one of these values.
pub(crate) fn has_any(body: &Value, values: &BTreeSet<String>) -> bool {
    let of_body = values_of(body);
    values.iter().any(|value| occurs(value, &of_body))
}

fn occurs(value: &str, among: &BTreeSet<String>) -> bool {
    among.contains(value)
        || among
            .iter()
            .any(|text| value.chars().count() >= SHORTEST_PART_CHARS && text.contains(value))
}

/// Collects the scalar values with their paths, without volatile ones; `found` gets the volatile
/// paths that exist.
fn leaves_of(
    value: &Value,
    path: &str,
    volatile: &BTreeSet<String>,
    found: &mut BTreeSet<String>,
    leaves: &mut BTreeSet<(String, String)>,
) {
    if volatile.contains(path) {
        found.insert(path.to_owned());
        return;
    }
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                leaves_of(member, &below(path, name), volatile, found, leaves);
            }
        }
        Value::Array(items) => {
            for (place, item) in items.iter().enumerate() {
                leaves_of(
                    item,
                    &below(path, &place.to_string()),
                    volatile,
                    found,
                    leaves,
                );
            }
        }
        Value::Null => {}
        Value::Bool(value) => drop(leaves.insert((path.to_owned(), value.to_string()))),
        Value::Number(number) => {
            leaves.insert((path.to_owned(), plain_number(&number.to_string())));
        }
        Value::String(text) => drop(leaves.insert((path.to_owned(), text.clone()))),
    }
}

/// Parses a JSON object. The error says why it is none, without its content.
fn object(payload: &[u8]) -> Result<Value, String> {
    let document: Value = serde_json::from_slice(payload)
        .map_err(|error| format!("{:?} error at column {}", error.classify(), error.column()))?;
    if document.is_object() {
        Ok(document)
    } else {
        Err("it is another JSON value".to_owned())
    }
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// The number without trailing zeros: 10.50 as 10.5, 10.0 as 10.
fn plain_number(text: &str) -> String {
    if text.contains('.') && !text.contains(['e', 'E']) {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text.to_owned()
    }
}

/// Writes a JSON value in another order of members, with trailing zeros, and with other values in
/// volatile places.
///
/// Integers keep their spelling: a handler with a type for integers may refuse 7.0, and would be
/// right.
fn respelt(
    raw: &str,
    path: &str,
    volatile: &BTreeSet<String>,
    changes: bool,
    rng: &mut Rng,
) -> String {
    let changes = changes || volatile.contains(path);
    match raw.as_bytes().first() {
        Some(b'{') => {
            let members: BTreeMap<String, &RawValue> =
                serde_json::from_str(raw).unwrap_or_default();
            let mut members: Vec<String> = members
                .into_iter()
                .map(|(name, value)| {
                    let value = respelt(value.get(), &below(path, &name), volatile, changes, rng);
                    format!("{}:{value}", Value::String(name))
                })
                .collect();
            rng.shuffle(&mut members);
            format!("{{{}}}", members.join(","))
        }
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(raw).unwrap_or_default();
            let items: Vec<String> = (0..)
                .zip(items)
                .map(|(place, item): (usize, _)| {
                    respelt(
                        item.get(),
                        &below(path, &place.to_string()),
                        volatile,
                        changes,
                        rng,
                    )
                })
                .collect();
            format!("[{}]", items.join(","))
        }
        Some(b'"') if changes => {
            let text: String = serde_json::from_str(raw).unwrap_or_default();
            Value::String(changed(&text, rng)).to_string()
        }
        Some(b'0'..=b'9' | b'-') if changes => changed(raw, rng),
        Some(b'0'..=b'9' | b'-')
            if raw.contains('.') && !raw.contains(['e', 'E']) && rng.bool() =>
        {
            format!("{raw}0")
        }
        _ => raw.to_owned(),
    }
}

/// Another text of the same form: digits become other digits, letters other letters.
fn changed(text: &str, rng: &mut Rng) -> String {
    let is_date = text.get(..11).is_some_and(|date| {
        date.bytes().enumerate().all(|(place, byte)| match place {
            4 | 7 => byte == b'-',
            10 => matches!(byte, b'T' | b't' | b' '),
            _ => byte.is_ascii_digit(),
        })
    });
    let mut first_digit = true;
    let (time, offset) = match text.find(['+']).filter(|_| is_date) {
        Some(at) => text.split_at(at),
        None => (text, ""),
    };
    let other: String = time
        .chars()
        .enumerate()
        .map(|(place, c)| match c {
            // The date stays, and hour, minute and second stay below 20, 60 and 60.
            _ if is_date && place < 11 => c,
            '0'..='9' if is_date && place == 11 => char::from(b'0' + rng.u8(0..2)),
            '0'..='9' if is_date && matches!(place, 14 | 17) => char::from(b'0' + rng.u8(0..6)),
            // The offset from UTC stays.
            _ if is_date && place > 18 && !c.is_ascii_digit() => c,
            '0'..='9' => {
                let least = u8::from(std::mem::take(&mut first_digit));
                char::from(b'0' + rng.u8(least..10))
            }
            'a'..='f' => char::from(b'a' + rng.u8(0..6)),
            'A'..='F' => char::from(b'A' + rng.u8(0..6)),
            'g'..='z' => char::from(b'g' + rng.u8(0..20)),
            'G'..='Z' => char::from(b'G' + rng.u8(0..20)),
            other => other,
        })
        .collect();
    format!("{other}{offset}")
}

fn spoil(value: &mut Value, rng: &mut Rng) {
    match value {
        Value::Object(members) => members.values_mut().for_each(|member| spoil(member, rng)),
        Value::Array(_) => *value = Value::Null,
        Value::String(text) => *text = format!("{POISON}{:08x}", rng.u32(..)),
        Value::Number(_) => *value = Value::from(-i64::from(rng.u32(1..))),
        // Another truth value might be that of another sample.
        Value::Bool(_) => *value = Value::from(format!("{POISON}{:08x}", rng.u32(..))),
        Value::Null => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn samples(payloads: &[&'static str], volatile: &[&str]) -> Result<Samples, BadSamples> {
        let payloads = payloads
            .iter()
            .map(|payload| Bytes::from_static(payload.as_bytes()))
            .collect();
        Samples::new(
            payloads,
            volatile.iter().map(|path| (*path).to_owned()).collect(),
        )
    }

    #[test]
    fn duplicates_differ_only_in_volatile_fields_order_and_zeros() {
        let text = r#"{"id":"A-17","amount":10.5,"n":7,"sent_at":"2026-11-23T10:11:12.5Z","trace":{"id":"8e03-ff"}}"#;
        let samples = samples(&[text], &["sent_at", "trace.id"]).unwrap();
        let mut spellings = BTreeSet::new();
        let seed = fastrand::u64(..);
        let mut rng = Rng::with_seed(seed);
        for _ in 0..50 {
            let duplicate = samples.duplicate(1, &mut rng);
            let value: Value = serde_json::from_slice(&duplicate).unwrap();
            assert_eq!(value["id"], "A-17", "seed {seed}");
            assert_eq!(
                (&value["amount"], &value["n"]),
                (&10.5.into(), &7.into()),
                "seed {seed}"
            );
            let sent_at = value["sent_at"].as_str().unwrap();
            assert!(
                sent_at.starts_with("2026-11-23T") && sent_at.ends_with('Z'),
                "seed {seed}: {sent_at}"
            );
            spellings.insert(duplicate);
        }
        assert!(
            spellings.len() > 40,
            "seed {seed}: {} spellings",
            spellings.len()
        );
    }

    #[test]
    fn an_effect_belongs_to_the_sample_whose_values_it_has() {
        let samples = samples(
            &[
                r#"{"order_id":"o-1000","amount":10.0,"currency":"EUR"}"#,
                r#"{"order_id":"o-1001","amount":10.0,"currency":"EUR"}"#,
                r#"{"order_id":"o-1001","amount":10.0,"currency":"USD"}"#,
            ],
            &[],
        )
        .unwrap();
        let owners = |body: &str| samples.owners(&serde_json::from_str(body).unwrap());
        assert_eq!(owners(r#"{"order":"o-1000","cents":1000}"#), [1]);
        assert_eq!(
            owners(r#"{"text":"charge o-1001 in USD","currency":"USD"}"#),
            [3]
        );
        assert_eq!(owners(r#"{"order":"o-1001"}"#), [2, 3], "both fit");
        assert!(owners(r#"{"hello":"world"}"#).is_empty());
    }

    #[test]
    fn samples_that_cannot_be_judged_are_refused() {
        let refused =
            |payloads: &[&'static str], volatile: &[&str]| samples(payloads, volatile).unwrap_err();
        assert_eq!(refused(&[], &[]), BadSamples::None);
        assert!(matches!(
            refused(&[r#"{"a":1}"#, "7"], &[]),
            BadSamples::NotAnObject { number: 2, .. }
        ));
        assert!(matches!(
            refused(&["{no"], &[]),
            BadSamples::NotAnObject { number: 1, .. }
        ));
        let equal = refused(&[r#"{"a":1,"t":1}"#, r#"{"t":2,"a":1}"#], &["t"]);
        assert_eq!(
            equal,
            BadSamples::Equal {
                first: 1,
                second: 2
            }
        );
        assert_eq!(
            refused(&[r#"{"a":1}"#], &["b"]),
            BadSamples::NoSuchField {
                path: "b".to_owned()
            }
        );
    }

    #[test]
    fn poison_has_the_shape_of_its_sample() {
        let samples = samples(
            &[r#"{"id":"o-1","items":[1],"amount":3,"express":true}"#],
            &[],
        )
        .unwrap();
        let poison: Value =
            serde_json::from_slice(&samples.poison(1, &mut Rng::with_seed(1))).unwrap();
        assert!(poison["id"].as_str().unwrap().starts_with("poison-"));
        let values = samples.foreign_values(poison.to_string().as_bytes());
        assert_eq!(values.len(), 3, "{values:?}");
        // A handler may always send a value that samples have, too.
        let effect = json!({"text": format!("charge {}", poison["id"]), "amount": 3});
        assert!(has_any(&effect, &values) && samples.owners(&effect) == [1]);
        assert!(!has_any(&json!({"id": "o-1", "amount": 3}), &values));
        assert!(poison["items"].is_null() && poison["amount"].as_i64().unwrap() < 0);
    }
}
