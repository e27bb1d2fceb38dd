//! Findings about the settings of a webhook.

use std::time::Duration;

use http::HeaderName;
use oncegate_core::key::Key;
use oncegate_core::settings::Finding;

use super::settings::{DAY, EventId, HOUR, Preset};

const MINUTE: Duration = Duration::from_secs(60);
/// The longest tolerance that makes sense: recorded requests could be sent again for as long.
const MAX_TOLERANCE: Duration = DAY;
/// The most secrets that are valid at once.
const MAX_SECRETS: usize = 16;

impl Preset {
    /// Returns what is wrong with these settings for records that are kept for `retention`. None
    /// means that a webhook accepts them. Files are not read.
    pub fn check(&self, retention: Duration) -> Vec<Finding> {
        let mut findings = Vec::new();
        let is_signed = !matches!(self, Self::None(_));
        let secrets = self.secret_files().len();
        if is_signed && !(1..=MAX_SECRETS).contains(&secrets) {
            findings.push(Finding::new(
                "secrets",
                format!(
                    "`secrets` has {secrets} files; give 1 to {MAX_SECRETS}, such as [{{ file = \"/run/secrets/{}\" }}]",
                    self.name()
                ),
            ));
        }
        let tolerance = match self {
            Self::Standard(timed) | Self::Slack(timed) => Some(timed.tolerance),
            Self::Stripe(stripe) => Some(stripe.tolerance),
            Self::Hmac(hmac) => hmac.timestamp.as_ref().map(|signed| signed.tolerance),
            _ => None,
        };
        if let Some(tolerance) = tolerance
            && !(MINUTE..=MAX_TOLERANCE).contains(&tolerance)
        {
            findings.push(Finding::new(
                "tolerance",
                format!("`tolerance` is {tolerance:?}; it must be between a minute and a day"),
            ));
        }
        if let Some(longest) = self.delivers_for()
            && retention < longest
        {
            let hours = longest.as_secs() / HOUR.as_secs();
            findings.push(Finding::new(
                "retention",
                format!(
                    "`retention` is {retention:?}, and {} may deliver an event again for {hours} hours: it would run again. Set at least \"{hours}h\"",
                    self.name()
                ),
            ));
        }
        findings.extend(self.check_own());
        findings
    }

    /// Returns what is wrong with the settings that one preset has.
    fn check_own(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        match self {
            Self::Twilio(twilio) => findings.extend(check_url(&twilio.url)),
            Self::Hmac(hmac) => {
                findings.extend(check_header("header", &hmac.header));
                if let Some(signed) = &hmac.timestamp {
                    findings.extend(check_header("timestamp", &signed.header));
                }
                findings.extend(check_id(&hmac.id));
            }
            Self::None(unsigned) => findings.extend(check_id(&unsigned.id)),
            _ => {}
        }
        findings
    }
}

fn check_header(setting: &'static str, name: &str) -> Option<Finding> {
    HeaderName::try_from(name).err().map(|_| {
        Finding::new(
            setting,
            format!("{name:?} is no name of a header; give one such as \"x-signature\""),
        )
    })
}

fn check_url(url: &str) -> Option<Finding> {
    let rest = url
        .strip_prefix("https://")
        .or_else(|| url.strip_prefix("http://"));
    let is_address = rest
        .is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['/', '?', '#']))
        && !url.contains(['?', '#'])
        && url.bytes().all(|byte| byte.is_ascii_graphic());
    (!is_address).then(|| {
        Finding::new(
            "url",
            "`url` must be the address that was entered at Twilio, without a query: \"https://example.com/hooks/twilio\"",
        )
    })
}

fn check_id(id: &EventId) -> Option<Finding> {
    let wrong = match id.compile() {
        Err(error) => Some(error.to_string()),
        Ok(_) if id.0 == Key::message_key() || id.0 == Key::message_id() => Some(
            "a request has no message key or id; name a header or fields of the body".to_owned(),
        ),
        Ok(_) => None,
    };
    wrong.map(|what| Finding::new("id", what))
}
