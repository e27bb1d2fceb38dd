//! The settings of a store in DynamoDB, and its address.

use std::time::Duration;

use oncegate_core::settings::Finding;
#[cfg(feature = "config")]
use oncegate_core::settings::Time;
use oncegate_core::store::StoreError;

/// The settings of a [`DynamoDbStore`](crate::DynamoDbStore), besides its URL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(serde::Deserialize, serde::Serialize, schemars::JsonSchema),
    serde(default, deny_unknown_fields)
)]
pub struct DynamoDbSettings {
    /// The time that the server may take to answer. Keep it well below the lease.
    ///
    /// Within it, DynamoDB is asked again after an error that passes, such as throttling. After it
    /// the outcome counts as unknown, if a write may have been executed.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub response_timeout: Duration,
    /// The time limit of one attempt to connect.
    #[cfg_attr(feature = "config", serde(with = "Time"))]
    pub connect_timeout: Duration,
    /// The region of a global table whose replicas are eventually consistent in which alone
    /// consumers write. Without it such a table is refused.
    ///
    /// A condition is evaluated on the replica that gets it, so two regions that write would both
    /// be granted one key. The store refuses to work in any other region than this one.
    pub home_region: Option<String>,
}

impl DynamoDbSettings {
    /// The defaults.
    pub const DEFAULT: Self = Self {
        response_timeout: Duration::from_secs(4),
        connect_timeout: Duration::from_secs(2),
        home_region: None,
    };

    /// Returns what is wrong with these settings.
    pub fn check(&self) -> Vec<Finding> {
        let times = [
            ("response_timeout", self.response_timeout),
            ("connect_timeout", self.connect_timeout),
        ];
        let too_short = times
            .into_iter()
            .filter(|(_, time)| time.is_zero())
            .map(|(setting, _)| Finding::new(setting, "it must be above zero"));
        let empty = self.home_region.as_deref() == Some("");
        let empty = empty.then(|| Finding::new("home_region", "it is empty; name a region"));
        too_short.chain(empty).collect()
    }
}

impl Default for DynamoDbSettings {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The address of a table: `dynamodb://TABLE?region=REGION&endpoint=URL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) table: String,
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
}

const SCHEME: &str = "dynamodb://";

/// The form of a URL, for errors about another one.
const FORM: &str = "dynamodb://TABLE?region=REGION&endpoint=URL, both parameters optional";

impl Address {
    /// Parses a URL.
    ///
    /// # Errors
    /// With what is wrong, and the form that is expected.
    pub(crate) fn parse(url: &str) -> Result<Self, StoreError> {
        Self::of(url).map_err(|why| StoreError::refused(format_args!("{why}; write {FORM}")))
    }

    fn of(url: &str) -> Result<Self, String> {
        let rest = url
            .strip_prefix(SCHEME)
            .ok_or_else(|| format!("the URL does not begin with {SCHEME}"))?;
        if rest.contains('@') {
            return Err(
                "the URL contains a login; credentials come from the AWS SDK's default chain"
                    .to_owned(),
            );
        }
        let (table, parameters) = rest.split_once('?').unwrap_or((rest, ""));
        // The rules of DynamoDB.
        let is_name = (3..=255).contains(&table.len())
            && table
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
        if !is_name {
            return Err(format!(
                "`{table}` is no name of a table: 3 to 255 of A-Z a-z 0-9 _ - ."
            ));
        }
        let mut address = Self {
            table: table.to_owned(),
            region: None,
            endpoint: None,
        };
        for parameter in parameters.split('&').filter(|one| !one.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let place = match name {
                "region" => &mut address.region,
                "endpoint" => &mut address.endpoint,
                _ => return Err(format!("the URL has no parameter `{name}`")),
            };
            if value.is_empty() || place.is_some() {
                return Err(format!("the parameter `{name}` is empty, or given twice"));
            }
            *place = Some(value.to_owned());
        }
        match &address.endpoint {
            Some(url) if !url.starts_with("http://") && !url.starts_with("https://") => {
                Err("the parameter `endpoint` does not begin with http:// or https://".to_owned())
            }
            _ => Ok(address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_table_and_how_it_is_reached() {
        let plain = Address::parse("dynamodb://oncegate").unwrap();
        assert_eq!((plain.region, plain.endpoint), (None, None));
        let local = "dynamodb://my.table_1-x?region=eu-west-1&endpoint=http://127.0.0.1:8000";
        let local = Address::parse(local).unwrap();
        assert_eq!(local.table, "my.table_1-x");
        assert_eq!(local.region.as_deref(), Some("eu-west-1"));
        assert_eq!(local.endpoint.as_deref(), Some("http://127.0.0.1:8000"));
    }

    #[test]
    fn what_is_wrong_is_said_with_the_form() {
        for (url, says) in [
            ("redis://oncegate", "begin with"),
            ("dynamodb://", "no name of a table"),
            ("dynamodb://a/b/c", "no name of a table"),
            ("dynamodb://key:secret@table", "contains a login"),
            (
                "dynamodb://table?endpoint=http://me:secret@host",
                "contains a login",
            ),
            ("dynamodb://table?zone=1", "`zone`"),
            ("dynamodb://table?region=", "`region`"),
            ("dynamodb://table?region=a&region=b", "`region`"),
            ("dynamodb://table?endpoint=localhost", "`endpoint`"),
        ] {
            let error = Address::parse(url).unwrap_err().to_string();
            assert!(
                error.contains(says) && error.contains(FORM),
                "{url}: {error}"
            );
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_told() {
        assert_eq!(DynamoDbSettings::DEFAULT.check(), []);
        let wrong = DynamoDbSettings {
            response_timeout: Duration::ZERO,
            home_region: Some(String::new()),
            ..DynamoDbSettings::DEFAULT
        };
        let wrong = wrong.check();
        let settings: Vec<&str> = wrong.iter().map(|finding| finding.setting).collect();
        assert_eq!(settings, ["response_timeout", "home_region"]);
    }
}
