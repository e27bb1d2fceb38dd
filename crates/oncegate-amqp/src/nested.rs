//! Arrays, tables and decimals in headers: JSON for handlers and keys, and their AMQP types for
//! dead letters.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lapin::types::{AMQPValue, DecimalValue};
use serde_json::{Map, Value};

/// The beginning of the kind of such a value; the value with its types follows.
const KIND: &str = "json:";
/// Stands before bytes that are no text.
const BASE64: &str = "base64:";

/// Returns the kind of a value, from which it is written again as it was.
pub(crate) fn kind(value: &AMQPValue) -> String {
    let typed = serde_json::to_vec(value).unwrap_or_default();
    format!("{KIND}{}", STANDARD.encode(typed))
}

pub(crate) fn is_kind(kind: &str) -> bool {
    kind.starts_with(KIND)
}

/// Returns the value of this kind, if its JSON still is `json`.
pub(crate) fn value(kind: &str, json: &[u8]) -> Option<AMQPValue> {
    let typed = STANDARD.decode(kind.strip_prefix(KIND)?).ok()?;
    let value: AMQPValue = serde_json::from_slice(&typed).ok()?;
    (self::json(&value).to_string().as_bytes() == json).then_some(value)
}

/// Returns the value as JSON. What JSON cannot say is text: bytes, in base64, and decimals.
pub(crate) fn json(value: &AMQPValue) -> Value {
    match value {
        AMQPValue::Boolean(value) => (*value).into(),
        AMQPValue::ShortShortInt(value) => (*value).into(),
        AMQPValue::ShortShortUInt(value) => (*value).into(),
        AMQPValue::ShortInt(value) => (*value).into(),
        AMQPValue::ShortUInt(value) => (*value).into(),
        AMQPValue::LongInt(value) => (*value).into(),
        AMQPValue::LongUInt(value) => (*value).into(),
        AMQPValue::LongLongInt(value) => (*value).into(),
        AMQPValue::Timestamp(value) => (*value).into(),
        AMQPValue::Float(value) => number(f64::from(*value)),
        AMQPValue::Double(value) => number(*value),
        AMQPValue::DecimalValue(value) => decimal(*value).into(),
        AMQPValue::ShortString(text) => text.as_str().into(),
        AMQPValue::LongString(text) => bytes(text.as_bytes()),
        AMQPValue::ByteArray(value) => {
            format!("{BASE64}{}", STANDARD.encode(value.as_slice())).into()
        }
        AMQPValue::FieldArray(values) => values.as_slice().iter().map(json).collect(),
        AMQPValue::FieldTable(table) => {
            let members = table
                .into_iter()
                .map(|(name, value)| (name.to_string(), json(value)));
            Value::Object(members.collect::<Map<_, _>>())
        }
        AMQPValue::Void => Value::Null,
    }
}

fn bytes(value: &[u8]) -> Value {
    match std::str::from_utf8(value) {
        Ok(text) => text.into(),
        Err(_) => format!("{BASE64}{}", STANDARD.encode(value)).into(),
    }
}

/// Returns a number, or as text what JSON has no number for.
fn number(value: f64) -> Value {
    serde_json::Number::from_f64(value).map_or_else(|| value.to_string().into(), Value::Number)
}

/// Returns a decimal as text, such as `-1.50`: RabbitMQ takes its value as signed.
fn decimal(value: DecimalValue) -> String {
    let digits = value.value.cast_signed();
    let sign = if digits < 0 { "-" } else { "" };
    let digits = digits.unsigned_abs().to_string();
    let scale = usize::from(value.scale);
    if scale == 0 {
        return format!("{sign}{digits}");
    }
    let padded = format!("{digits:0>width$}", width = scale + 1);
    let (whole, fraction) = padded.split_at(padded.len() - scale);
    format!("{sign}{whole}.{fraction}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::types::FieldTable;

    #[test]
    fn values_are_json_and_keep_their_types() {
        let mut table = FieldTable::default();
        table.insert(
            "tenant".into(),
            AMQPValue::FieldArray(vec![AMQPValue::LongString("acme".into())].into()),
        );
        table.insert("big".into(), AMQPValue::LongLongInt(9_007_199_254_740_993));
        table.insert("raw".into(), AMQPValue::LongString(vec![255].into()));
        table.insert("none".into(), AMQPValue::Void);
        let price = DecimalValue { scale: 2, value: 5 };
        table.insert("price".into(), AMQPValue::DecimalValue(price));
        let value = AMQPValue::FieldTable(table);
        let text = json(&value).to_string();
        let wanted = r#"{"big":9007199254740993,"none":null,"price":"0.05","raw":"base64:/w==","tenant":["acme"]}"#;
        assert_eq!(text, wanted);
        let kind = kind(&value);
        assert_eq!(super::value(&kind, text.as_bytes()), Some(value));
        assert_eq!(super::value(&kind, b"{}"), None, "it was edited");
    }
}
