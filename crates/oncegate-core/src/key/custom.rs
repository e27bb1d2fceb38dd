//! Keys made by a function of the user's.

use std::fmt;
use std::sync::Arc;

use super::encode;
use super::error::KeyError;
use super::input::KeySource;

type Function = dyn Fn(&dyn KeySource, &mut KeyParts<'_>) -> Result<(), &'static str> + Send + Sync;

/// The function, and what stands for it where a function cannot: two are equal when name and version are.
#[derive(Clone)]
pub(super) struct CustomKey {
    pub(super) name: String,
    pub(super) version: u32,
    function: Arc<Function>,
}

impl CustomKey {
    pub(super) fn new(
        name: String,
        version: u32,
        function: impl Fn(&dyn KeySource, &mut KeyParts<'_>) -> Result<(), &'static str> + Send + Sync + 'static,
    ) -> Self {
        Self { name, version, function: Arc::new(function) }
    }

    /// Appends name, version, and the counted parts.
    pub(super) fn write(
        &self,
        input: &dyn KeySource,
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<(), KeyError> {
        encode::put_bytes(self.name.as_bytes(), out);
        out.extend_from_slice(&self.version.to_be_bytes());
        let count_at = out.len();
        encode::put_len(0, out);
        let mut parts = KeyParts { left: limit, out, count: 0, blank: true, oversized: None };
        (self.function)(input, &mut parts)
            .map_err(|reason| KeyError::Custom { name: self.name.clone(), reason })?;
        let KeyParts { count, blank, oversized, .. } = parts;
        if let Some(bytes) = oversized {
            return Err(KeyError::TooLarge { what: "custom key".to_owned(), bytes, limit });
        }
        if blank {
            return Err(KeyError::Blank { path: format!("custom key {}", self.name) });
        }
        encode::patch_len(count, count_at, out);
        Ok(())
    }
}

impl PartialEq for CustomKey {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name && self.version == other.version
    }
}

impl fmt::Debug for CustomKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomKey")
            .field("name", &self.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// Takes what identifies a message from the function of [`Key::custom`](super::Key::custom).
pub struct KeyParts<'a> {
    out: &'a mut Vec<u8>,
    count: usize,
    left: usize,
    blank: bool,
    oversized: Option<usize>,
}

impl KeyParts<'_> {
    /// Adds a part. Boundaries count: `"ab"`, `"c"` and `"a"`, `"bc"` are two keys. If all parts are
    /// blank, or there is none, the message gets [`KeyError::Blank`].
    pub fn push(&mut self, part: impl AsRef<[u8]>) -> &mut Self {
        let part = part.as_ref();
        // Lengths count as well, so that not even empty parts can pile up without end.
        let bytes = part.len().saturating_add(4);
        if bytes > self.left {
            self.oversized = Some(bytes);
            self.left = 0;
            return self;
        }
        self.left -= bytes;
        self.count += 1;
        self.blank &= part.trim_ascii().is_empty();
        encode::put_bytes(part, self.out);
        self
    }
}

impl fmt::Debug for KeyParts<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyParts").field("count", &self.count).finish_non_exhaustive()
    }
}
