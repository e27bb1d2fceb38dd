//! The forms of values, the same on the command line and in a configuration.

use std::time::{Duration, SystemTime};

use oncegate::FingerprintSpec;
use oncegate::core::settings::Time;

/// UTF-8's byte order mark, which .NET and PowerShell write before the first line.
pub(crate) const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// `name=value`, split at the first `=`.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("it must be name=value".to_owned()),
    }
}

/// The reason of a change, for the journal.
pub(crate) fn reason(text: &str) -> Result<String, String> {
    if text.trim().is_empty() {
        return Err("it must say why".to_owned());
    }
    Ok(text.to_owned())
}

/// `payload`, `payload-except:sent_at,trace.id`, `raw`, or the JSON form of a configuration file.
pub(crate) fn fingerprint(text: &str) -> Result<FingerprintSpec, String> {
    let text = text.trim();
    if let Some(paths) = text.strip_prefix("payload-except:") {
        return Ok(FingerprintSpec::payload().except(paths.split(',').map(str::trim)));
    }
    let json = if text.starts_with('{') {
        text.to_owned()
    } else {
        serde_json::json!(text).to_string()
    };
    serde_json::from_str(&json).map_err(|error| error.to_string())
}

/// A whole number above zero with its unit: `500ms`, `30s`, `5m`, `2h`, `7d`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    text.parse().map(|Time(time)| time)
}

/// A time, and how it was written.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    pub(crate) text: String,
    pub(crate) time: SystemTime,
}

impl std::str::FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let time = humantime::parse_rfc3339_weak(text)
            .ok()
            .or_else(|| SystemTime::now().checked_sub(duration(text).ok()?));
        let time =
            time.ok_or("it must be a time as 2026-11-21T10:00:00Z, in UTC, or a duration as 2h")?;
        Ok(Self {
            text: text.to_owned(),
            time,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_may_hold_equals_signs() {
        assert_eq!(
            pair("token=a=b"),
            Ok(("token".to_owned(), "a=b".to_owned()))
        );
        assert!(pair("token").is_err() && pair("=x").is_err());
    }

    #[test]
    fn fingerprints_are_spelt_as_keys_are() {
        assert_eq!(fingerprint("payload"), Ok(FingerprintSpec::payload()));
        assert_eq!(fingerprint("raw"), Ok(FingerprintSpec::raw()));
        let except = FingerprintSpec::payload().except(["sent_at", "trace.id"]);
        assert_eq!(
            fingerprint("payload-except:sent_at, trace.id"),
            Ok(except.clone())
        );
        assert_eq!(
            fingerprint(r#"{"except":["sent_at","trace.id"]}"#),
            Ok(except)
        );
        assert!(fingerprint("payloads").is_err());
    }
}
