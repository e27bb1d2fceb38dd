//! Login with tokens (SASL OAUTHBEARER): which properties say where they come from.
//!
//! | `sasl.oauthbearer.method` | a token is |
//! |---|---|
//! | `oidc` | what an OAuth 2.0 server grants to a client's id and secret |
//! | `aws_msk_iam` | a signed URL, made with the credentials that the AWS SDK finds |
//!
//! librdkafka has the first one only when it is built with curl. Its names for the properties are
//! kept; they are taken out of a client's configuration here. A client asks for a token when it is
//! made, for the next one after four fifths of a token's validity, and ten seconds after a failure.
//! Requests of administration ask for one with each connection.

#[cfg(feature = "oauth")]
mod client_credentials;
#[cfg(feature = "msk-iam")]
mod msk_iam;

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use rdkafka::client::OAuthToken;
use rdkafka::config::ClientConfig;

use super::properties::Property;
use oncegate_runtime::source::SourceError;

const METHOD: &str = "sasl.oauthbearer.method";
const ENDPOINT: &str = "sasl.oauthbearer.token.endpoint.url";
const CLIENT_ID: &str = "sasl.oauthbearer.client.id";
const CLIENT_SECRET: &str = "sasl.oauthbearer.client.secret";
const SCOPE: &str = "sasl.oauthbearer.scope";
/// The client library has no way to hand these to librdkafka, and librdkafka itself takes them only
/// when it is built with curl.
const EXTENSIONS: &str = "sasl.oauthbearer.extensions";
const REGION: &str = "sasl.oauthbearer.aws.region";

/// The file with the authorities of the token server.
const AUTHORITIES: &str = "https.ca.location";

/// The properties that begin like this are about tokens.
const PREFIX: &str = "sasl.oauthbearer.";

/// Time limit of one request for a token. The thread that polls a consumer waits for it.
#[cfg(any(feature = "oauth", feature = "msk-iam"))]
const TOKEN_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// The source of a client's tokens. A clone is another handle on the same source.
#[derive(Clone)]
pub(crate) struct Tokens(Arc<Method>);

/// A way to get tokens. Without a feature that has one, there is none.
enum Method {
    #[cfg(feature = "oauth")]
    ClientCredentials(client_credentials::ClientCredentials),
    #[cfg(feature = "msk-iam")]
    MskIam(msk_iam::MskIam),
}

/// The reason for which there is no token.
#[derive(Debug)]
pub(crate) struct TokenError {
    text: String,
    /// `true` if a later attempt may succeed without any change of the settings.
    is_away: bool,
}

impl TokenError {
    #[cfg(any(feature = "oauth", feature = "msk-iam"))]
    fn refused(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_away: false,
        }
    }

    #[cfg(any(feature = "oauth", feature = "msk-iam"))]
    fn away(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            is_away: true,
        }
    }

    /// The error of a source that cannot open without a token.
    pub(crate) fn of_source(&self) -> SourceError {
        let error = SourceError::new(self.text.clone());
        if self.is_away { error.away() } else { error }
    }
}

impl fmt::Display for TokenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for TokenError {}

/// Returns whether these properties log in with tokens.
pub(crate) fn are_used(properties: &[Property]) -> bool {
    let last = properties
        .iter()
        .rev()
        .find(|(name, _)| matches!(name.as_str(), "sasl.mechanism" | "sasl.mechanisms"));
    last.is_some_and(|(_, value)| value.eq_ignore_ascii_case("OAUTHBEARER"))
}

/// Checks the properties about tokens, as far as that needs no server.
///
/// # Errors
/// Names the property that is missing or wrong.
pub(crate) fn check(properties: &[Property]) -> Result<(), SourceError> {
    let known = [METHOD, ENDPOINT, CLIENT_ID, CLIENT_SECRET, SCOPE, REGION];
    let ours: Vec<&str> = properties
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| name.starts_with(PREFIX))
        .collect();
    if ours.contains(&EXTENSIONS) {
        return refuse(format!(
            "the property {EXTENSIONS} cannot be sent by this client: where brokers need extensions, as Confluent Cloud does \
             (logicalCluster, identityPoolId), log in with an API key: sasl.mechanism=PLAIN, sasl.username, sasl.password"
        ));
    }
    if let Some(name) = ours.iter().find(|name| !known.contains(name)) {
        return refuse(format!(
            "the property {name} is not supported; known are {}",
            known.join(", ")
        ));
    }
    if !are_used(properties) {
        return match ours.first() {
            Some(name) => refuse(format!(
                "the property {name} belongs to sasl.mechanism=OAUTHBEARER"
            )),
            None => Ok(()),
        };
    }
    match value(properties, METHOD) {
        Some("oidc") => {
            if !cfg!(feature = "oauth") {
                return refuse(format!(
                    "{METHOD} is oidc: this build needs the feature kafka-oauth for it"
                ));
            }
            match [ENDPOINT, CLIENT_ID, CLIENT_SECRET]
                .into_iter()
                .find(|name| value(properties, name).is_none())
            {
                Some(missing) => refuse(format!(
                    "the property {missing} is missing: {METHOD}=oidc needs it"
                )),
                None => check_endpoint(value(properties, ENDPOINT).unwrap_or_default()),
            }
        }
        Some("aws_msk_iam") if cfg!(feature = "msk-iam") => Ok(()),
        Some("aws_msk_iam") => refuse(format!(
            "{METHOD} is aws_msk_iam: this build needs the feature kafka-msk-iam for it"
        )),
        // What a file contains is not read for this.
        Some("") => Ok(()),
        _ => refuse(format!(
            "sasl.mechanism is OAUTHBEARER: set {METHOD} to oidc or aws_msk_iam"
        )),
    }
}

fn refuse(text: String) -> Result<(), SourceError> {
    Err(SourceError::new(text))
}

/// Returns the last value of the property.
fn value<'a>(properties: &'a [Property], name: &str) -> Option<&'a str> {
    properties
        .iter()
        .rev()
        .find(|(given, _)| given == name)
        .map(|(_, value)| value.as_str())
}

/// Takes the properties about tokens out of a client's configuration.
pub(crate) fn remove(config: &mut ClientConfig) {
    let ours: Vec<String> = config
        .config_map()
        .keys()
        .filter(|name| name.starts_with(PREFIX) || **name == AUTHORITIES)
        .map(|name| (*name).to_owned())
        .collect();
    for name in &ours {
        config.remove(name);
    }
}

/// Checks that the client's secret does not travel to another machine in plain text. A URL from a
/// file is checked when it is used.
fn check_endpoint(url: &str) -> Result<(), SourceError> {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    let host = rest.split(['/', '?', '#', '\\']).next().unwrap_or_default();
    if host.contains('@') {
        // The host is what follows it, and what precedes it would be a part of errors.
        return Err(SourceError::new(format!(
            "the property {ENDPOINT} contains a user or a password: set {CLIENT_ID} and {CLIENT_SECRET} instead"
        )));
    }
    let host = host
        .rsplit_once(':')
        .map_or(host, |(host, _)| host)
        .trim_matches(['[', ']']);
    match scheme {
        "https" => Ok(()),
        "http" if is_this_machine(host) => Ok(()),
        "" if url.is_empty() => Ok(()),
        _ => Err(SourceError::new(format!(
            "the property {ENDPOINT} must begin with https://, because the client's secret is sent there"
        ))),
    }
}

pub(super) fn is_this_machine(host: &str) -> bool {
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

impl Tokens {
    /// Takes the properties about tokens out of a client's configuration. `None` when it logs in
    /// otherwise.
    ///
    /// # Errors
    /// As [`check`].
    pub(crate) fn take(config: &mut ClientConfig) -> Result<Option<Self>, SourceError> {
        // Its map hides the values that are secret; `get` does not.
        let names: Vec<String> = config
            .config_map()
            .keys()
            .map(|name| (*name).to_owned())
            .collect();
        let properties: Vec<Property> = names
            .into_iter()
            .map(|name| {
                let value = config.get(&name).unwrap_or_default().to_owned();
                (name, value)
            })
            .collect();
        check(&properties)?;
        remove(config);
        if !are_used(&properties) {
            return Ok(None);
        }
        match value(&properties, METHOD) {
            #[cfg(feature = "oauth")]
            Some("oidc") => client_credentials::ClientCredentials::of(|name| {
                value(&properties, name).map(str::to_owned)
            })
            .map(Method::ClientCredentials)
            .map(Some),
            #[cfg(feature = "msk-iam")]
            Some("aws_msk_iam") => {
                let region = value(&properties, REGION).map(str::to_owned);
                Ok(Some(Method::MskIam(msk_iam::MskIam::new(region))))
            }
            _ => Ok(None),
        }
        .map(|method| method.map(|method| Self(Arc::new(method))))
    }

    /// Gets a token within [`TOKEN_TIMEOUT`].
    #[cfg(any(feature = "oauth", feature = "msk-iam"))]
    pub(crate) async fn fetch(&self) -> Result<OAuthToken, TokenError> {
        let fetching = async {
            match &*self.0 {
                #[cfg(feature = "oauth")]
                Method::ClientCredentials(client) => client.token().await,
                #[cfg(feature = "msk-iam")]
                Method::MskIam(signer) => signer.token().await,
            }
        };
        tokio::time::timeout(TOKEN_TIMEOUT, fetching)
            .await
            .unwrap_or_else(|_| {
                Err(TokenError::away(format!(
                    "no token within {TOKEN_TIMEOUT:?}: {}",
                    self.0.server()
                )))
            })
    }

    /// Gets a token; blocks for at most [`TOKEN_TIMEOUT`].
    pub(crate) fn next(&self) -> Result<OAuthToken, TokenError> {
        #[cfg(any(feature = "oauth", feature = "msk-iam"))]
        {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            let runtime =
                runtime.map_err(|error| TokenError::away(format!("no token: {error}")))?;
            let fetched = runtime.block_on(self.fetch());
            // Does not wait for a name that is still being resolved.
            runtime.shutdown_background();
            fetched
        }
        #[cfg(not(any(feature = "oauth", feature = "msk-iam")))]
        match *self.0 {}
    }
}

#[cfg(any(feature = "oauth", feature = "msk-iam"))]
impl Method {
    /// The text about a server that does not answer.
    fn server(&self) -> String {
        match self {
            #[cfg(feature = "oauth")]
            Self::ClientCredentials(client) => client.server(),
            #[cfg(feature = "msk-iam")]
            Self::MskIam(_) => "the AWS SDK finds no credentials".to_owned(),
        }
    }
}

/// The answer to librdkafka's request for a token.
pub(crate) fn generate(tokens: Option<&Tokens>) -> Result<OAuthToken, Box<dyn Error>> {
    let tokens = tokens.ok_or("the client was made without tokens")?;
    tokens.next().map_err(|error| {
        tracing::warn!(%error, "no token for the login to Kafka; the former one is used while it is valid");
        error.into()
    })
}

impl fmt::Debug for Tokens {
    /// Shows no secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokens").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(given: &[(&str, &str)]) -> Vec<Property> {
        let mechanism = ("sasl.mechanism", "OAUTHBEARER");
        let all = std::iter::once(&mechanism).chain(given);
        all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn refusal(given: &[(&str, &str)]) -> String {
        check(&properties(given))
            .expect_err("it is wrong")
            .to_string()
    }

    #[test]
    fn each_wrong_property_is_named() {
        assert!(refusal(&[]).contains(METHOD));
        assert!(refusal(&[(METHOD, "default")]).contains("aws_msk_iam"));
        assert!(
            refusal(&[(METHOD, "oidc"), ("sasl.oauthbearer.extensions", "a=b")]).contains("PLAIN")
        );
        if cfg!(feature = "oauth") {
            let all = [
                (METHOD, "oidc"),
                (ENDPOINT, "https://id.example.org/token"),
                (CLIENT_ID, "a"),
                (CLIENT_SECRET, "b"),
            ];
            assert!(check(&properties(&all)).is_ok());
            for missing in 1..all.len() {
                let some: Vec<_> = all
                    .iter()
                    .enumerate()
                    .filter(|(n, _)| *n != missing)
                    .map(|(_, one)| *one)
                    .collect();
                assert!(refusal(&some).contains(all[missing].0), "{missing}");
            }
            for (url, is_right) in [
                ("http://127.0.0.1:8080/token", true),
                ("http://[::1]:8080/token", true),
                ("http://id.example.org/token", false),
                ("ftp://id.example.org", false),
                ("http://localhost:80@id.example.org/token", false),
                ("https://billing:hush@id.example.org/token", false),
                ("http://localhost#@id.example.org/token", true),
            ] {
                let given = [all[0], (ENDPOINT, url), all[2], all[3]];
                let checked = check(&properties(&given));
                assert_eq!(checked.is_ok(), is_right, "{url}");
                assert!(
                    !checked.is_err_and(|error| error.to_string().contains("hush")),
                    "{url}"
                );
            }
        } else {
            assert!(refusal(&[(METHOD, "oidc")]).contains("kafka-oauth"));
        }
        let plain = vec![
            ("sasl.mechanism".to_owned(), "PLAIN".to_owned()),
            (METHOD.to_owned(), "oidc".to_owned()),
        ];
        assert!(
            check(&plain)
                .unwrap_err()
                .to_string()
                .contains("OAUTHBEARER")
        );
    }

    #[test]
    fn the_client_library_sees_none_of_them() {
        if !cfg!(feature = "oauth") {
            return;
        }
        let mut config = ClientConfig::new();
        config
            .set("sasl.mechanism", "OAUTHBEARER")
            .set(METHOD, "oidc")
            .set(CLIENT_ID, "billing");
        config
            .set(CLIENT_SECRET, "hush")
            .set(ENDPOINT, "https://id.example.org/token")
            .set(SCOPE, "kafka");
        let tokens = Tokens::take(&mut config).unwrap();
        assert!(!format!("{tokens:?}").contains("hush") && tokens.is_some());
        assert_eq!(
            config.config_map().keys().copied().collect::<Vec<_>>(),
            ["sasl.mechanism"]
        );
    }
}
