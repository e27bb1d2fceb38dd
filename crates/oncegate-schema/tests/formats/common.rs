//! Helpers that the tests of formats share.

use std::sync::Arc;

use oncegate_core::key::{CompiledKey, Field, Key, KeyError, KeyInput, Scope, StoreKey};
use oncegate_schema::SchemaFormat;

pub(crate) fn compiled(key: &Key) -> CompiledKey {
    key.compile(&Scope::new("billing").unwrap()).unwrap()
}

/// A format, to derive keys with.
pub(crate) struct Under(Arc<SchemaFormat>);

impl Under {
    pub(crate) fn new(format: SchemaFormat) -> Self {
        Self(Arc::new(format))
    }

    pub(crate) fn avro(schema: &str) -> Self {
        Self::new(SchemaFormat::avro(schema).unwrap())
    }

    pub(crate) fn protobuf(source: &str, message: &str) -> Self {
        Self::new(SchemaFormat::protobuf(source, Some(message)).unwrap())
    }

    pub(crate) fn key(&self, key: &Key, payload: &[u8]) -> Result<StoreKey, KeyError> {
        let key = key.clone().format(Arc::clone(&self.0) as Arc<_>);
        compiled(&key).derive("orders", &KeyInput::payload(payload))
    }

    pub(crate) fn document(&self, payload: &[u8]) -> Result<String, KeyError> {
        let key = compiled(&Key::payload().format(Arc::clone(&self.0) as Arc<_>));
        let input = KeyInput::payload(payload);
        let document = key.document(&input)?;
        Ok(String::from_utf8_lossy(&document).into_owned())
    }

    /// Checks that a payload has the key of a JSON document, by these paths and as a whole.
    pub(crate) fn is_twin(&self, payload: &[u8], twin: &str, paths: &[&str]) {
        self.is_twin_by(payload, twin, paths.iter().map(|path| Field::path(*path)));
    }

    /// The same, where the paths find defaults, which they must ask for.
    pub(crate) fn is_twin_with_defaults(&self, payload: &[u8], twin: &str, paths: &[&str]) {
        let paths = paths.iter().map(|path| Field::path(*path).or_default());
        self.is_twin_by(payload, twin, paths);
    }

    fn is_twin_by(&self, payload: &[u8], twin: &str, fields: impl Iterator<Item = Field>) {
        let json = |key: &Key| {
            compiled(key)
                .derive("orders", &KeyInput::payload(twin))
                .unwrap()
        };
        for field in fields {
            let key = Key::json([field]);
            assert_eq!(self.key(&key, payload), Ok(json(&key)), "{key} of {twin}");
        }
        let whole = Key::payload();
        assert_eq!(
            self.key(&whole, payload),
            Ok(json(&whole)),
            "{twin}\n{:?}",
            self.document(payload)
        );
    }
}

/// Bytes out of their hexadecimal digits.
pub(crate) fn hex(digits: &str) -> Vec<u8> {
    let digits: Vec<u8> = digits
        .bytes()
        .filter(|digit| !digit.is_ascii_whitespace())
        .collect();
    let pairs = digits
        .chunks(2)
        .map(|pair| std::str::from_utf8(pair).unwrap());
    pairs
        .map(|pair| u8::from_str_radix(pair, 16).unwrap())
        .collect()
}
