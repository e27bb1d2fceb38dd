//! Tokens of an OAuth 2.0 server for a client's id and secret: RFC 6749, section 4.4.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use hyper::http::uri::Scheme;
use hyper::{Request, StatusCode, Uri};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use oncegate_tls::{Authorities, Pem, TlsClient, Unusable};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rdkafka::client::OAuthToken;
use rustls::ClientConfig;
use serde::Deserialize;

use super::{AUTHORITIES, CLIENT_ID, CLIENT_SECRET, ENDPOINT, SCOPE, TokenError, check_endpoint};
use oncegate_runtime::source::SourceError;

/// The most bytes of an answer.
const ANSWER_MAX_BYTES: usize = 64 * 1024;

/// The most characters of the server's word for an error that are repeated.
const ERROR_MAX_CHARS: usize = 64;

/// The time by which this machine's clock may be ahead of the token server's: a token that ended
/// before is of no use.
const CLOCKS_MAY_DIFFER: Duration = Duration::from_secs(300);

/// The characters that stay as they are in a form.
const FORM: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// A client of a token server.
pub(super) struct ClientCredentials {
    endpoint: Uri,
    id: String,
    secret: String,
    scope: Option<String>,
    authorities: Option<PathBuf>,
}

/// A granted token.
#[derive(Deserialize)]
struct Granted {
    access_token: String,
    expires_in: Option<f64>,
}

/// A refusal.
#[derive(Deserialize)]
struct Refused {
    error: String,
}

/// The claims of a token that is a JWT.
#[derive(Default, Deserialize)]
struct Claims {
    sub: Option<String>,
    exp: Option<f64>,
}

impl ClientCredentials {
    pub(super) fn of(get: impl Fn(&str) -> Option<String>) -> Result<Self, SourceError> {
        let text = |name: &str| get(name).unwrap_or_default();
        check_endpoint(&text(ENDPOINT))?;
        let endpoint: Uri = text(ENDPOINT)
            .parse()
            .map_err(|_| SourceError::new(format!("the property {ENDPOINT} is not a URL")))?;
        let authorities = get(AUTHORITIES).map(PathBuf::from);
        Ok(Self {
            endpoint,
            id: text(CLIENT_ID),
            secret: text(CLIENT_SECRET),
            scope: get(SCOPE),
            authorities,
        })
    }

    /// The text about a server that does not answer.
    pub(super) fn server(&self) -> String {
        format!(
            "the token server at {} does not answer ({ENDPOINT})",
            self.host()
        )
    }

    fn host(&self) -> &str {
        self.endpoint
            .authority()
            .map(|authority| authority.as_str())
            .unwrap_or_default()
    }

    /// Asks for a token.
    pub(super) async fn token(&self) -> Result<OAuthToken, TokenError> {
        let (status, body) = self.ask().await?;
        let host = self.host();
        match status.as_u16() {
            200 => self.granted(&body),
            400 | 401 | 403 => {
                let refused: Option<Refused> = serde_json::from_slice(&body).ok();
                let word: String = refused.map_or(status.to_string(), |refused| {
                    refused
                        .error
                        .chars()
                        .filter(char::is_ascii_graphic)
                        .take(ERROR_MAX_CHARS)
                        .collect()
                });
                Err(TokenError::refused(format!(
                    "the token server at {host} refuses this client ({CLIENT_ID}, {CLIENT_SECRET}, {SCOPE}): {word}"
                )))
            }
            429 | 500.. => Err(TokenError::away(format!(
                "{}: it answers {status}",
                self.server()
            ))),
            _ => Err(TokenError::refused(format!(
                "the token server at {host} answers {status}: check the property {ENDPOINT}"
            ))),
        }
    }

    async fn ask(&self) -> Result<(StatusCode, Bytes), TokenError> {
        let mut form = "grant_type=client_credentials".to_owned();
        if let Some(scope) = &self.scope {
            form = format!("{form}&scope={}", escaped(scope));
        }
        let login = STANDARD.encode(format!("{}:{}", escaped(&self.id), escaped(&self.secret)));
        let request = Request::post(self.endpoint.clone())
            .header(AUTHORIZATION, format!("Basic {login}"))
            .header(CONTENT_TYPE, "application/x-www-form-urlencoded")
            .header(ACCEPT, "application/json")
            .body(Full::new(Bytes::from(form)))
            .map_err(|error| {
                TokenError::refused(format!("the property {ENDPOINT} makes no request: {error}"))
            })?;
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(self.tls()?)
            .https_or_http()
            .enable_http1()
            .build();
        let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build(connector);
        let response = client
            .request(request)
            .await
            .map_err(|error| self.failed(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES)
            .collect()
            .await;
        Ok((
            status,
            body.map_err(|error| self.failed(&*error))?.to_bytes(),
        ))
    }

    /// The error of a request without an answer.
    fn failed(&self, error: &dyn std::error::Error) -> TokenError {
        let why = chain(error);
        if why.contains("invalid peer certificate") {
            return TokenError::refused(format!(
                "the certificate of the token server at {} is not accepted ({AUTHORITIES}): {why}",
                self.host()
            ));
        }
        TokenError::away(format!("{}: {why}", self.server()))
    }

    fn useless(&self, why: &str) -> TokenError {
        TokenError::refused(format!(
            "the token server at {} ({ENDPOINT}) {why}",
            self.host()
        ))
    }

    fn granted(&self, body: &[u8]) -> Result<OAuthToken, TokenError> {
        let granted: Granted =
            serde_json::from_slice(body).map_err(|_| self.useless("grants no access_token"))?;
        let claims = claims(&granted.access_token);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let ends = match (granted.expires_in, claims.exp) {
            (Some(seconds), _) => Duration::try_from_secs_f64(seconds)
                .ok()
                .and_then(|valid| now.checked_add(valid)),
            (None, Some(at)) => Duration::try_from_secs_f64(at).ok(),
            (None, None) => {
                return Err(self.useless("does not say how long its token is valid (expires_in)"));
            }
        };
        // The brokers go by what the token itself says. Some of them let such a token in, and close
        // the connection.
        let is_over = claims
            .exp
            .and_then(|exp| Duration::try_from_secs_f64(exp).ok())
            .is_some_and(|exp| exp.saturating_add(CLOCKS_MAY_DIFFER) < now);
        let ends = ends.filter(|ends| *ends > now && !is_over);
        let ends = ends.ok_or_else(|| self.useless("grants a token that has expired"))?;
        Ok(OAuthToken {
            token: granted.access_token,
            principal_name: claims
                .sub
                .filter(|sub| !sub.is_empty())
                .unwrap_or_else(|| self.id.clone()),
            lifetime_ms: i64::try_from(ends.as_millis()).unwrap_or(i64::MAX),
        })
    }

    fn tls(&self) -> Result<ClientConfig, TokenError> {
        let authorities = match &self.authorities {
            // Only a server on this machine may be without TLS.
            _ if self.endpoint.scheme() == Some(&Scheme::HTTP) => Authorities::None,
            None => Authorities::Machine,
            Some(file) => Authorities::Pem(Pem::File(file.clone())),
        };
        let client = TlsClient {
            authorities,
            ..TlsClient::default()
        };
        client
            .config()
            .map_err(|Unusable { why, .. }| TokenError::refused(format!("{AUTHORITIES}: {why}")))
    }
}

fn escaped(text: &str) -> String {
    utf8_percent_encode(text, FORM).to_string()
}

/// Returns the claims of a JWT; none of another kind of token. The brokers verify it, not this
/// client.
fn claims(token: &str) -> Claims {
    let payload = token
        .split('.')
        .nth(1)
        .and_then(|payload| URL_SAFE_NO_PAD.decode(payload).ok());
    payload
        .and_then(|payload| serde_json::from_slice(&payload).ok())
        .unwrap_or_default()
}

/// The text of an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> ClientCredentials {
        let get = |name: &str| match name {
            ENDPOINT => Some("https://id.example.org/token".to_owned()),
            CLIENT_ID => Some("billing".to_owned()),
            CLIENT_SECRET => Some("hush".to_owned()),
            _ => None,
        };
        ClientCredentials::of(get).unwrap()
    }

    fn jwt(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[test]
    fn a_token_is_valid_for_as_long_as_the_server_or_the_token_says() {
        let granted = |body: String| client().granted(body.as_bytes());
        let token = granted(format!(
            r#"{{"access_token":"{}","expires_in":60}}"#,
            jwt(r#"{"sub":"me"}"#)
        ))
        .unwrap();
        let now = i64::try_from(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_millis(),
        )
        .unwrap();
        assert!((now..=now + 60_000).contains(&token.lifetime_ms) && token.principal_name == "me");
        let token = granted(format!(
            r#"{{"access_token":"{}"}}"#,
            jwt(r#"{"exp":4102444800}"#)
        ))
        .unwrap();
        assert_eq!(
            (token.lifetime_ms, &*token.principal_name),
            (4_102_444_800_000, "billing")
        );
        for (body, why) in [
            (r#"{"token":"x"}"#.to_owned(), "access_token"),
            (r#"{"access_token":"opaque"}"#.to_owned(), "expires_in"),
            (
                format!(r#"{{"access_token":"{}"}}"#, jwt(r#"{"exp":1}"#)),
                "expired",
            ),
            (
                format!(
                    r#"{{"access_token":"{}","expires_in":60}}"#,
                    jwt(r#"{"exp":1}"#)
                ),
                "expired",
            ),
            (
                r#"{"access_token":"x","expires_in":-1}"#.to_owned(),
                "expired",
            ),
        ] {
            let error = granted(body).err().expect("it is refused").to_string();
            assert!(
                error.contains(why) && error.contains(ENDPOINT) && !error.contains("hush"),
                "{error}"
            );
        }
    }
}
