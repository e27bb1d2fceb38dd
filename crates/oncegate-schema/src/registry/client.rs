//! Asks a registry over HTTP.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HeaderValue};
use http::{Request, StatusCode, Uri};
use http_body_util::{BodyExt as _, Empty, Limited};
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
/// The code of Confluent's API for a schema that does not exist. Any other "not found" is a wrong
/// address.
const SCHEMA_NOT_FOUND: u32 = 40_403;

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

/// A registry, and the login of this program.
pub(super) struct RegistryClient {
    http: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    /// The URLs of the servers, without a slash at the end. They are tried in this order.
    urls: Vec<String>,
    authorization: Option<HeaderValue>,
}

impl RegistryClient {
    pub(super) fn new(
        urls: Vec<String>,
        authorization: Option<HeaderValue>,
        tls_root: Option<&Path>,
    ) -> Result<Self, SchemaError> {
        for url in &urls {
            let uri: Uri = url
                .parse()
                .map_err(|_| refuse(format!("the registry's URL `{url}` cannot be read")))?;
            if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
                return Err(refuse(format!(
                    "the registry's URL `{url}` must begin with http:// or https:// and name a host"
                )));
            }
        }
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
        Ok(Self {
            http,
            urls,
            authorization,
        })
    }

    /// The schema at this path; `None` when the registry says that there is none.
    ///
    /// # Errors
    /// As text: the registry is away, refuses, or is none.
    pub(super) async fn schema(&self, path: &str) -> Result<Option<Registered>, String> {
        let (status, body) = self.get(path).await?;
        if status == StatusCode::OK {
            let found = serde_json::from_slice(&body);
            return found
                .map(Some)
                .map_err(|error| format!("its answer to {path} is no schema: {error}"));
        }
        let refusal: Option<Refusal> = serde_json::from_slice(&body).ok();
        match refusal {
            Some(Refusal {
                error_code: SCHEMA_NOT_FOUND,
            }) if status == StatusCode::NOT_FOUND => Ok(None),
            _ => Err(refusal_text(path, status)),
        }
    }

    /// Asks for something that every registry has.
    pub(super) async fn check(&self) -> Result<(), String> {
        match self.get("/schemas/types").await? {
            (StatusCode::OK, _) => Ok(()),
            (status, _) => Err(refusal_text("/schemas/types", status)),
        }
    }

    /// The first answer of any of the servers.
    async fn get(&self, path: &str) -> Result<(StatusCode, Bytes), String> {
        let mut failures = String::new();
        for url in &self.urls {
            match self.get_from(url, path).await {
                Ok((status, body)) if !status.is_server_error() => return Ok((status, body)),
                Ok((status, _)) => _ = write!(failures, "{url} answers with {status}; "),
                Err(why) => _ = write!(failures, "{url}: {why}; "),
            }
        }
        Err(failures.trim_end_matches("; ").to_owned())
    }

    async fn get_from(&self, url: &str, path: &str) -> Result<(StatusCode, Bytes), String> {
        let mut request = Request::get(format!("{url}{path}")).header(ACCEPT, CONTENT_TYPE);
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .body(Empty::new())
            .map_err(|error| error.to_string())?;
        let answer = async {
            let answer = self
                .http
                .request(request)
                .await
                .map_err(|error| causes(&error))?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, MAX_ANSWER_BYTES)
                .collect()
                .await
                .map_err(|error| error.to_string())?;
            Ok((head.status, body.to_bytes()))
        };
        match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(format!("no answer within {} s", ANSWER_TIMEOUT.as_secs())),
        }
    }
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
