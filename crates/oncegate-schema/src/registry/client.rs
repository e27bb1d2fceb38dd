//! Asks a registry over HTTP.

use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, LengthLimitError, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use oncegate_tls::{Authorities, Pem, TlsClient, Unusable};
use rustls::ClientConfig;
use serde::Deserialize;

use crate::SchemaError;

/// The longest wait for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest answer, in bytes: schemas are a few KiB.
const MAX_ANSWER_BYTES: usize = 4 * 1024 * 1024;
/// The codes of Confluent's API for a subject, a version and a schema that do not exist. Any other
/// "not found" may be a wrong address.
const NOT_FOUND: RangeInclusive<u32> = 40_401..=40_403;

const CONTENT_TYPE: HeaderValue =
    HeaderValue::from_static("application/vnd.schemaregistry.v1+json, application/json");

/// A schema as the registry has it.
#[derive(Debug, Deserialize)]
pub(super) struct Registered {
    pub(super) schema: String,
    /// The type of the schema; `AVRO` when absent.
    #[serde(rename = "schemaType")]
    pub(super) kind: Option<String>,
    #[serde(default)]
    pub(super) references: Option<Vec<Reference>>,
}

/// A schema that another one uses.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(super) struct Reference {
    pub(super) name: String,
    pub(super) subject: String,
    pub(super) version: i64,
}

#[derive(Deserialize)]
struct Refusal {
    error_code: u32,
}

/// The reason why a registry has given no schema.
#[derive(Debug)]
pub(super) enum Failure {
    /// The registry is away, or does not take the login.
    Away(String),
    /// The registry has refused this question.
    Refused(String),
    /// The registry has failed with this question, or this login may not ask it.
    Failed(String),
    /// The answer can never be used.
    Unfit(String),
}

impl Failure {
    pub(super) fn into_text(self) -> String {
        match self {
            Self::Away(why) | Self::Refused(why) | Self::Failed(why) | Self::Unfit(why) => why,
        }
    }
}

/// A server of a registry, and the login of this program.
struct Server {
    /// Without a slash at the end, and without a login.
    url: String,
    authorization: Option<HeaderValue>,
}

/// A registry.
pub(super) struct RegistryClient {
    http: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    /// The servers, in the order in which they are tried.
    servers: Vec<Server>,
}

impl RegistryClient {
    pub(super) fn new(
        urls: &[String],
        authorization: Option<HeaderValue>,
        tls_root: Option<&Path>,
    ) -> Result<Self, SchemaError> {
        let shown = without_login(&urls.join(","));
        let servers = urls
            .iter()
            .map(|url| Server::new(url, authorization.as_ref(), &shown))
            .collect::<Result<Vec<_>, _>>()?;
        let is_encrypted = urls.iter().any(|url| url.starts_with("https:"));
        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_connect_timeout(Some(ANSWER_TIMEOUT / 2));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(is_encrypted, tls_root)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = Client::builder(TokioExecutor::new())
            .pool_idle_timeout(Duration::from_secs(10))
            .build(connector);
        Ok(Self { http, servers })
    }

    /// The URLs of the servers, without logins.
    pub(super) fn urls(&self) -> String {
        let urls: Vec<&str> = self
            .servers
            .iter()
            .map(|server| server.url.as_str())
            .collect();
        urls.join(",")
    }

    /// The schema at this path; `None` when the registry says that there is none.
    ///
    /// # Errors
    /// When the registry is away, refuses, or is none.
    pub(super) async fn schema(&self, path: &str) -> Result<Option<Registered>, Failure> {
        let (status, body) = self.get(path).await?;
        if status == StatusCode::OK {
            let found = serde_json::from_slice(&body);
            return found.map(Some).map_err(|error| {
                Failure::Refused(format!("its answer to {path} is no schema: {error}"))
            });
        }
        let refusal: Option<Refusal> = serde_json::from_slice(&body).ok();
        let why = refusal_text(path, status);
        match status {
            StatusCode::NOT_FOUND
                if refusal.is_some_and(|refusal| NOT_FOUND.contains(&refusal.error_code)) =>
            {
                Ok(None)
            }
            StatusCode::FORBIDDEN => Err(Failure::Failed(why)),
            StatusCode::UNAUTHORIZED
            | StatusCode::PROXY_AUTHENTICATION_REQUIRED
            | StatusCode::REQUEST_TIMEOUT
            | StatusCode::TOO_EARLY
            | StatusCode::TOO_MANY_REQUESTS => Err(Failure::Away(why)),
            _ => Err(Failure::Refused(why)),
        }
    }

    /// Asks for something that every registry has.
    pub(super) async fn check(&self) -> Result<(), String> {
        match self.get("/schemas/types").await {
            // Another server than a registry may answer everything with a page.
            Ok((StatusCode::OK, body)) if serde_json::from_slice::<Vec<String>>(&body).is_err() => {
                Err("its answer to /schemas/types is none of Confluent's API".to_owned())
            }
            Ok((StatusCode::OK, _)) => Ok(()),
            Ok((status, _)) => Err(refusal_text("/schemas/types", status)),
            Err(failure) => Err(failure.into_text()),
        }
    }

    /// The first answer of any of the servers.
    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), Failure> {
        let mut failures: Vec<String> = Vec::new();
        let mut has_answered = false;
        for server in &self.servers {
            let url = &server.url;
            match self.get_from(server, path).await {
                Ok((status, body)) if !status.is_server_error() => return Ok((status, body)),
                Ok((status, _)) => {
                    has_answered = true;
                    failures.push(format!("{url} answers {path} with {status}"));
                }
                Err(Failure::Away(why)) => failures.push(format!("{url}: {why}")),
                Err(failure) => return Err(failure),
            }
        }
        let why = failures.join("; ");
        Err(if has_answered {
            Failure::Failed(why)
        } else {
            Failure::Away(why)
        })
    }

    async fn get_from(&self, server: &Server, path: &str) -> Result<(StatusCode, Bytes), Failure> {
        let mut request =
            Request::get(format!("{}{path}", server.url)).header(ACCEPT, CONTENT_TYPE);
        if let Some(authorization) = &server.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .body(Empty::new())
            .map_err(|error| Failure::Refused(error.to_string()))?;
        let answer = async {
            let answer = self
                .http
                .request(request)
                .await
                .map_err(|error| Failure::Away(causes(&error)))?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await;
            let body = body.map_err(|error| {
                if error.is::<LengthLimitError>() {
                    let limit = MAX_ANSWER_BYTES / (1024 * 1024);
                    Failure::Unfit(format!("the answer to {path} is over {limit} MiB"))
                } else {
                    Failure::Away(error.to_string())
                }
            })?;
            Ok((head.status, body.to_bytes()))
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(answer) => answer,
            Err(_) => {
                let limit = ANSWER_TIMEOUT.as_secs();
                Err(Failure::Away(format!("no answer within {limit} s")))
            }
        }
    }
}

impl Server {
    /// Reads a URL. `shown` is what errors show of it, and of those beside it.
    fn new(
        text: &str,
        authorization: Option<&HeaderValue>,
        shown: &str,
    ) -> Result<Self, SchemaError> {
        let (url, login) = split_login(text)
            .ok_or_else(|| refuse(format!("the login in the URL `{shown}` cannot be read")))?;
        let uri: Uri = url
            .parse()
            .map_err(|_| refuse(format!("the registry's URL `{shown}` cannot be read")))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            return Err(refuse(format!(
                "the registry's URL `{shown}` must begin with http:// or https:// and name a host"
            )));
        }
        let authorization = match (authorization, login) {
            (Some(_), Some(_)) => {
                return Err(refuse(format!(
                    "the registry's URL `{shown}` has a login, and there is another one; leave one out"
                )));
            }
            (authorization, None) => authorization.cloned(),
            (None, Some((user, password))) => Some(basic(&user, &password)?),
        };
        Ok(Self { url, authorization })
    }
}

/// A URL with `***` in the place of its login. Of several URLs, all up to the last login.
pub(super) fn without_login(url: &str) -> String {
    match url.rsplit_once('@') {
        Some((before, host)) => {
            let scheme = before.find("://").map_or(0, |at| at + 3);
            format!("{}***@{host}", before.get(..scheme).unwrap_or_default())
        }
        None => url.to_owned(),
    }
}

/// Takes the user name and the password out of a URL. `None` when they cannot be read.
fn split_login(url: &str) -> Option<(String, Option<(String, String)>)> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Some((url.to_owned(), None));
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let Some((login, host)) = authority.rsplit_once('@') else {
        // A login whose password has a slash that is not escaped.
        return (!path.contains('@')).then(|| (url.to_owned(), None));
    };
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let login = (unescaped(user)?, unescaped(password)?);
    Some((format!("{scheme}://{host}{path}"), Some(login)))
}

/// A text of which some characters are written as `%` and two digits.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        if *byte == b'%' {
            let (digits, after) = after.split_at_checked(2)?;
            let digits = std::str::from_utf8(digits).ok()?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            rest = after;
        } else {
            bytes.push(*byte);
        }
    }
    String::from_utf8(bytes).ok()
}

/// The text for an answer without a schema, with what to change.
fn refusal_text(path: &str, status: StatusCode) -> String {
    match status {
        StatusCode::NOT_FOUND => format!(
            "it has nothing at {path}: is this the address of Confluent's API, as in http://host/apis/ccompat/v7?"
        ),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            format!("it refuses the login ({status}): correct `user` and `password`, or `token`")
        }
        _ => format!("it answers {path} with {status}"),
    }
}

/// `Basic …` of a user name and a password.
pub(super) fn basic(user: &str, password: &str) -> Result<HeaderValue, SchemaError> {
    secret(&format!(
        "Basic {}",
        STANDARD.encode(format!("{user}:{password}"))
    ))
}

/// `Bearer …` of a token.
pub(super) fn bearer(token: &str) -> Result<HeaderValue, SchemaError> {
    secret(&format!("Bearer {token}"))
}

fn secret(text: &str) -> Result<HeaderValue, SchemaError> {
    let value = HeaderValue::from_str(text);
    let mut value = value.map_err(|_| {
        refuse("the registry's token has characters that a header cannot have".to_owned())
    })?;
    value.set_sensitive(true);
    Ok(value)
}

fn tls(is_encrypted: bool, root: Option<&Path>) -> Result<ClientConfig, SchemaError> {
    let authorities = match root {
        _ if !is_encrypted => Authorities::None,
        None => Authorities::Machine,
        Some(file) => Authorities::Pem(Pem::File(file.to_owned())),
    };
    let client = TlsClient {
        authorities,
        ..TlsClient::default()
    };
    client
        .config()
        .map_err(|Unusable { why, .. }| refuse(format!("the registry's `tls_root`: {why}")))
}

fn refuse(what: String) -> SchemaError {
    SchemaError { what }
}

/// An error with its causes, on one line.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        _ = write!(text, ": {inner}");
        cause = inner.source();
    }
    text
}
