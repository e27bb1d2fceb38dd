//! Writes JSON text within a limit.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use oncegate_core::key::KeyError;

/// The text that is written, and its limit.
pub(crate) struct Json<'o> {
    out: &'o mut Vec<u8>,
    limit: usize,
}

impl<'o> Json<'o> {
    pub(crate) fn new(out: &'o mut Vec<u8>, limit: usize) -> Self {
        Self { out, limit }
    }

    /// Refuses a document that has grown over the limit. Called after each value, so the text never
    /// grows much further.
    fn checked(&self) -> Result<(), KeyError> {
        if self.out.len() > self.limit {
            let what = "document".to_owned();
            return Err(KeyError::TooLarge {
                what,
                bytes: self.out.len(),
                limit: self.limit,
            });
        }
        Ok(())
    }

    pub(crate) fn raw(&mut self, text: &str) -> Result<(), KeyError> {
        self.out.extend_from_slice(text.as_bytes());
        self.checked()
    }

    /// Writes bytes as they are. The scanner of the document refuses those that are no UTF-8.
    pub(crate) fn raw_bytes(&mut self, bytes: &[u8]) -> Result<(), KeyError> {
        self.out.extend_from_slice(bytes);
        self.checked()
    }

    pub(crate) fn open(&mut self, bracket: u8) {
        self.out.push(bracket);
    }

    pub(crate) fn close(&mut self, bracket: u8) -> Result<(), KeyError> {
        self.out.push(bracket);
        self.checked()
    }

    /// Writes a comma unless an object or array was just opened.
    pub(crate) fn separate(&mut self) {
        if !matches!(self.out.last(), Some(b'{' | b'[')) {
            self.out.push(b',');
        }
    }

    /// Writes the name of a member, with the comma before and the colon after it.
    pub(crate) fn name(&mut self, name: &[u8]) -> Result<(), KeyError> {
        self.separate();
        self.text(name)?;
        self.out.push(b':');
        Ok(())
    }

    /// Writes a string. Bytes that are no UTF-8 stay, and the scanner of the document refuses them.
    pub(crate) fn text(&mut self, text: &[u8]) -> Result<(), KeyError> {
        self.out.push(b'"');
        let mut rest = text;
        while let Some(at) = rest
            .iter()
            .position(|byte| matches!(byte, b'"' | b'\\' | 0..=0x1F))
        {
            let (plain, special) = rest.split_at(at);
            self.out.extend_from_slice(plain);
            let Some((byte, after)) = special.split_first() else {
                break;
            };
            self.escape(*byte);
            self.checked()?;
            rest = after;
        }
        self.out.extend_from_slice(rest);
        self.out.push(b'"');
        self.checked()
    }

    fn escape(&mut self, byte: u8) {
        const HEX: &[u8; 16] = b"0123456789abcdef";
        match byte {
            b'"' | b'\\' => self.out.extend_from_slice(&[b'\\', byte]),
            _ => {
                let digit = HEX.get(usize::from(byte & 0xF)).copied().unwrap_or(b'0');
                self.out
                    .extend_from_slice(&[b'\\', b'u', b'0', b'0', b'0' + (byte >> 4), digit]);
            }
        }
    }

    /// Writes bytes as base64 in a string.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Result<(), KeyError> {
        let text = STANDARD.encode(bytes);
        self.out.push(b'"');
        self.out.extend_from_slice(text.as_bytes());
        self.out.push(b'"');
        self.checked()
    }

    pub(crate) fn bool(&mut self, value: bool) -> Result<(), KeyError> {
        self.raw(if value { "true" } else { "false" })
    }

    pub(crate) fn integer(&mut self, number: i128) -> Result<(), KeyError> {
        self.raw(&number.to_string())
    }

    /// Writes the shortest number that is this `f32`. JSON has no infinity and no NaN: they are
    /// strings, as in Protobuf's JSON.
    pub(crate) fn float(&mut self, number: f32) -> Result<(), KeyError> {
        match special(f64::from(number)) {
            Some(word) => self.raw(word),
            None => self.raw(&format!("{number:e}")),
        }
    }

    /// Writes the shortest number that is this `f64`.
    pub(crate) fn double(&mut self, number: f64) -> Result<(), KeyError> {
        match special(number) {
            Some(word) => self.raw(word),
            None => self.raw(&format!("{number:e}")),
        }
    }
}

fn special(number: f64) -> Option<&'static str> {
    if number.is_nan() {
        return Some("\"NaN\"");
    }
    if number.is_infinite() {
        return Some(if number > 0.0 {
            "\"Infinity\""
        } else {
            "\"-Infinity\""
        });
    }
    None
}
