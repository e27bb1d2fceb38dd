//! Settings as public data: what is wrong with them, and the forms that their values have in files.
//!
//! A setting is a field of a structure beside what it sets. Its documentation is that of the field;
//! with the feature `config`, the structure can be read from a file, and has a JSON schema.

#[cfg(feature = "config")]
mod forms;
mod tls_files;

#[cfg(feature = "config")]
pub use forms::{OptionalTime, Size, Time};
pub use tls_files::TlsFiles;

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

    /// Returns the finding that one of two settings is given without the other. Each comes with
    /// whether it is given.
    pub fn of_pair(pair: [(&'static str, bool); 2]) -> Option<Self> {
        let [(first, has_first), (second, has_second)] = pair;
        let alone = match (has_first, has_second) {
            (true, false) => first,
            (false, true) => second,
            _ => return None,
        };
        let what = format!("`{first}` and `{second}` belong together: give both");
        Some(Self::new(alone, what))
    }
}
