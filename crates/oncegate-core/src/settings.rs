//! Settings as public data: what is wrong with them, and the forms that their values have in files.
//!
//! A setting is a field of a structure beside what it sets. Its documentation is that of the field;
//! with the feature `config`, the structure can be read from a file, and has a JSON schema.

#[cfg(feature = "config")]
mod forms;

#[cfg(feature = "config")]
pub use forms::{OptionalTime, Size, Time};

/// A setting that makes no sense, or does not suit others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The name of the setting, as in a file; `breaker.keys` for one of a table.
    pub setting: &'static str,
    /// The reason, and what to change.
    pub what: String,
}

impl Finding {
    /// A finding about one setting.
    pub fn new(setting: &'static str, what: impl Into<String>) -> Self {
        let what = what.into();
        Self { setting, what }
    }
}
