//! Keys that are made by a user's function.

use std::fmt;
use std::sync::Arc;

use super::encode;
use super::error::KeyError;
use super::input::KeySource;

type Function = dyn Fn(&dyn KeySource, &mut KeyParts<'_>) -> Result<(), &'static str> + Send + Sync;

/// A key function with its name and version. Two of them are equal when name and version are equal.
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
        function: impl Fn(&dyn KeySource, &mut KeyParts<'_>) -> Result<(), &'static str>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            name,
            version,
            function: Arc::new(function),
        }
    }

    /// Appends the name, the version, the number of parts and the parts.
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
        let mut parts = KeyParts {
            left: limit,
            out,
            count: 0,
            blank: true,
            oversized: None,
        };
        (self.function)(input, &mut parts).map_err(|reason| KeyError::Custom {
            name: self.name.clone(),
            reason,
        })?;
        let KeyParts {
            count,
            blank,
            oversized,
            ..
        } = parts;
        if let Some(bytes) = oversized {
            return Err(KeyError::TooLarge {
                what: "custom key".to_owned(),
                bytes,
                limit,
            });
        }
        if blank {
            return Err(KeyError::Blank {
                path: format!("custom key {}", self.name),
            });
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

/// Collects the parts that the function of [`Key::custom`](super::Key::custom) pushes.
pub struct KeyParts<'a> {
    out: &'a mut Vec<u8>,
    count: usize,
    left: usize,
    blank: bool,
    oversized: Option<usize>,
}

impl KeyParts<'_> {
    /// Adds a part. Boundaries count: `"ab"`, `"c"` and `"a"`, `"bc"` give two keys. If there is no
    /// part, or all parts are blank, the message gets [`KeyError::Blank`].
    pub fn push(&mut self, part: impl AsRef<[u8]>) -> &mut Self {
        let part = part.as_ref();
        // The length prefixes count too, so that the number of empty parts is limited as well.
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
        f.debug_struct("KeyParts")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}
