//! Rules: which requests a layer holds, where their keys are, and what is kept of their responses.
//!
//! A layer without rules holds every POST and PATCH. With rules it holds what they name, and
//! nothing else: all other requests pass as they are.
//!
//! # Not obvious
//!
//! - A path is compared by its decoded parts, without empty ones: services treat `/a//b/` and
//!   `/%61/b` as `/a/b`, and a request that reaches the service must not pass the rule.
//! - A key from the body or the path belongs to its rule: order 7 of `/payments` is not order 7 of
//!   `/refunds`. A key from a header belongs to all rules, so that one that is used for another
//!   operation is found.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::header::HeaderName;
use ::http::request::Parts;
use ::http::{Method, StatusCode, Uri};
use axum::extract::OriginalUri;
use bytes::Bytes;
use oncegate_core::key::{CompiledKey, Key, KeyError, KeyInput, Scope};
use percent_encoding::percent_decode_str;

use super::key::MAX_KEY_BYTES;
use super::problem::Problem;

/// Begins keys that do not come from a header: no header can have it.
const OF_RULE: char = '\u{1}';

/// The scope of the digests that are keys of the body. It is in no record.
const BODY_SCOPE: &str = "body";

/// The rules of a layer, in the order in which they are tried.
#[derive(Clone, Debug)]
pub struct Rules(Arc<[Arc<Rule>]>);

impl Rules {
    /// The rules of a layer. Of several that fit a request, the first counts.
    ///
    /// # Errors
    /// When there are none: the layer would hold nothing.
    pub fn new(rules: impl IntoIterator<Item = Rule>) -> Result<Self, RuleError> {
        let rules: Arc<[Arc<Rule>]> = rules.into_iter().map(Arc::new).collect();
        if rules.is_empty() {
            return Err(RuleError(
                "there are no rules, so nothing would be protected: name at least one method and path"
                    .to_owned(),
            ));
        }
        Ok(Self(rules))
    }

    /// Returns each rule that can never count, because an earlier one takes all its requests, in
    /// words.
    pub fn shadowed(&self) -> Vec<String> {
        let all = self.0.iter().enumerate();
        all.filter_map(|(place, rule)| {
            let earlier = self.0.iter().take(place).find(|earlier| earlier.covers(rule))?;
            Some(format!(
                "the rule for {rule} never counts, because the one for {earlier} stands before it and takes the same requests; \
                 put it before that one, or remove it"
            ))
        })
        .collect()
    }

    /// The longest time for which one of the rules keeps a record.
    pub fn longest_retention(&self) -> Option<Duration> {
        self.0.iter().filter_map(|rule| rule.retention).max()
    }

    /// Returns the rule that a request belongs to.
    pub(super) fn find(&self, request: &Parts) -> Option<Arc<Rule>> {
        if !self.0.iter().any(|rule| rule.takes(&request.method)) {
            return None;
        }
        let readings = readings_of(sent_uri(request).path());
        let mut rules = self.0.iter();
        let found = rules.find(|rule| {
            let fits = readings.iter().any(|parts| rule.path.fits(parts));
            fits && rule.takes(&request.method)
        });
        found.cloned()
    }
}

/// The requests of a method and a path, and how they are held.
#[derive(Clone)]
pub struct Rule {
    method: Method,
    path: RulePath,
    pub(super) required: bool,
    key: RuleKey,
    pub(super) retention: Option<Duration>,
    keep: Option<Vec<StatusRange>>,
    pub(super) ignored: Vec<RequestPart>,
}

/// The place of the key in a rule's requests.
#[derive(Clone, Debug)]
enum RuleKey {
    /// In the first of the layer's headers that is there.
    OfLayer,
    Header(HeaderName),
    Body(Arc<CompiledKey>),
    Parameters(Vec<String>),
}

/// A part of a request that a repetition may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestPart {
    /// The name of the host.
    Host,
    /// The query of the address.
    Query,
    /// The body.
    Body,
}

/// The key of a request, as far as its head shows it.
pub(super) enum FoundKey {
    /// One of these headers may have it.
    InHeaders(Vec<HeaderName>),
    Known(String),
    InBody,
}

impl Rule {
    /// A rule for requests with this method, and this path. A part of the path in braces may be
    /// anything: `/accounts/{id}/payments`.
    ///
    /// # Errors
    /// When the method is safe, as GET is, or the path cannot be one.
    pub fn new(method: &str, path: &str) -> Result<Self, RuleError> {
        let parsed = Method::from_bytes(method.as_bytes())
            .map_err(|_| unusable((method, path), "its method is none; write it as POST"))?;
        if parsed.as_str() != parsed.as_str().to_ascii_uppercase() {
            return Err(unusable(
                (method, path),
                "methods are written in capitals, as POST",
            ));
        }
        if matches!(
            parsed,
            Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::CONNECT
        ) {
            return Err(unusable(
                (method, path),
                "this method changes nothing, so its requests pass without a key; remove the rule",
            ));
        }
        Ok(Self {
            method: parsed,
            path: RulePath::parse(path).map_err(|what| unusable((method, path), &what))?,
            required: true,
            key: RuleKey::OfLayer,
            retention: None,
            keep: None,
            ignored: Vec::new(),
        })
    }

    /// Lets requests without a key pass, unprotected. By default they need one.
    pub fn optional(mut self) -> Self {
        self.required = false;
        self
    }

    /// Takes the key from this header. By default, from those of the layer.
    ///
    /// # Errors
    /// When it cannot be the name of a header.
    pub fn key_in_header(mut self, name: &str) -> Result<Self, RuleError> {
        let parsed = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| RuleError(format!("the rule for {self}: `{name}` is no header")))?;
        self.key = RuleKey::Header(parsed);
        Ok(self)
    }

    /// Makes the key of the fields of a JSON body that `key` names. Other rules have other keys for
    /// the same fields.
    ///
    /// # Errors
    /// When the key cannot be used.
    pub fn key_in_body(mut self, key: &Key) -> Result<Self, RuleError> {
        let compiled = Scope::new(BODY_SCOPE).and_then(|scope| key.compile(&scope));
        let compiled =
            compiled.map_err(|error| RuleError(format!("the rule for {self}: {error}")))?;
        self.key = RuleKey::Body(Arc::new(compiled));
        Ok(self)
    }

    /// Makes the key of these parts of the path, which stand in braces there.
    ///
    /// # Errors
    /// When the path has no part of that name, or none is named.
    pub fn key_in_path<N: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = N>,
    ) -> Result<Self, RuleError> {
        let names: Vec<String> = names.into_iter().map(Into::into).collect();
        let stranger = names.iter().find(|name| !self.path.has(name));
        if let Some(stranger) = stranger {
            let what = format!("the rule for {self}: its path has no part {{{stranger}}}");
            return Err(RuleError(what));
        }
        if names.is_empty() {
            let what = format!("the rule for {self}: its key names no part of the path");
            return Err(RuleError(what));
        }
        self.key = RuleKey::Parameters(names);
        Ok(self)
    }

    /// Keeps completed requests for this long. By default, as long as the gate; more than that is
    /// refused when the layer opens.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }

    /// Keeps the responses with these statuses, such as `2xx` or `404`, and no others. A status
    /// that is not named is not kept, and the next request with the key runs. By default, the
    /// table of `docs/HTTP.md` counts.
    ///
    /// # Errors
    /// When one is no status.
    pub fn keep<'a>(
        mut self,
        statuses: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, RuleError> {
        let ranges: Option<Vec<StatusRange>> =
            statuses.into_iter().map(StatusRange::parse).collect();
        let ranges = ranges.filter(|ranges| !ranges.is_empty()).ok_or_else(|| {
            RuleError(format!(
                "the rule for {self}: `keep` names statuses, as 2xx or 404"
            ))
        })?;
        self.keep = Some(ranges);
        Ok(self)
    }

    /// Lets repetitions change this part of the request.
    pub fn ignore(mut self, part: RequestPart) -> Self {
        self.ignored.push(part);
        self
    }

    /// Returns whether responses with this status are kept; `None` if the rule says nothing.
    pub(super) fn keeps(&self, status: StatusCode) -> Option<bool> {
        let ranges = self.keep.as_ref()?;
        Some(ranges.iter().any(|range| range.has(status)))
    }

    /// Returns the key of a request, as far as its head shows it.
    pub(super) fn key_of_head(&self, request: &Parts, of_layer: &[HeaderName]) -> FoundKey {
        match &self.key {
            RuleKey::OfLayer => FoundKey::InHeaders(of_layer.to_vec()),
            RuleKey::Header(name) => FoundKey::InHeaders(vec![name.clone()]),
            RuleKey::Body(_) => FoundKey::InBody,
            RuleKey::Parameters(names) => {
                let readings = readings_of(sent_uri(request).path());
                let fitting = readings.iter().find(|parts| self.path.fits(parts));
                let parts = fitting.map(Vec::as_slice).unwrap_or_default();
                let values = names.iter().filter_map(|name| self.path.value(name, parts));
                // Each with its length, so that no two lists of values make one key.
                let joined: String = values
                    .map(|value| format!("{}:{value}", value.len()))
                    .collect();
                FoundKey::Known(self.own_key(&digest_if_long(joined)))
            }
        }
    }

    /// Returns the key in the body of a request; `None` if the key is elsewhere, `Ok(None)` if the
    /// body has none and needs none.
    pub(super) fn key_of_body(&self, body: &Bytes) -> Option<Result<Option<String>, Problem>> {
        let RuleKey::Body(key) = &self.key else {
            return None;
        };
        if body.is_empty() && !self.required {
            return Some(Ok(None));
        }
        let derived = key.derive("body", &KeyInput::payload(body));
        Some(match derived {
            Ok(key) => Ok(Some(self.own_key(&key.digest().to_string()))),
            Err(KeyError::MissingField { .. } | KeyError::NullField { .. }) if !self.required => {
                Ok(None)
            }
            Err(error) => Err(Problem::BodyKey(error.to_string())),
        })
    }

    fn own_key(&self, value: &str) -> String {
        format!("{OF_RULE}{self}{OF_RULE}{value}")
    }

    /// Returns whether this is the rule's method: some services take `post` for POST.
    fn takes(&self, method: &Method) -> bool {
        self.method.as_str().eq_ignore_ascii_case(method.as_str())
    }

    /// Returns whether this rule takes every request that `other` would.
    fn covers(&self, other: &Self) -> bool {
        self.method == other.method && self.path.covers(&other.path)
    }
}

impl fmt::Display for Rule {
    /// Shows the method and the path.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.method, self.path.text)
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rule({self})")
    }
}

/// The reason why rules cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError(String);

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RuleError {}

fn unusable((method, path): (&str, &str), what: &str) -> RuleError {
    RuleError(format!("the rule for {method} {path}: {what}"))
}

/// The path of a rule, as parts between its slashes.
#[derive(Clone, Debug)]
struct RulePath {
    text: String,
    parts: Vec<PathPart>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum PathPart {
    Literal(String),
    Parameter(String),
}

impl RulePath {
    fn parse(text: &str) -> Result<Self, String> {
        if !text.starts_with('/') || text.contains(['?', '#']) {
            return Err("its path begins with a slash, and has no query".to_owned());
        }
        let mut parts = Vec::new();
        for part in text.split('/').filter(|part| !part.is_empty()) {
            let parameter = part
                .strip_prefix('{')
                .and_then(|rest| rest.strip_suffix('}'));
            let part = match parameter {
                Some(name) if name.is_empty() || name.contains(['{', '}', '*']) => {
                    return Err(format!("`{part}` is no name for a part of the path"));
                }
                Some(name) => PathPart::Parameter(name.to_owned()),
                None if part.contains(['{', '}']) => {
                    return Err(format!(
                        "`{part}`: a name in braces stands for a whole part between two slashes"
                    ));
                }
                None => PathPart::Literal(decoded(part)),
            };
            if matches!(part, PathPart::Parameter(_)) && parts.contains(&part) {
                return Err("two parts of its path have one name".to_owned());
            }
            parts.push(part);
        }
        Ok(Self {
            text: text.to_owned(),
            parts,
        })
    }

    fn fits(&self, path: &[String]) -> bool {
        self.parts.len() == path.len()
            && self.parts.iter().zip(path).all(|(part, given)| match part {
                PathPart::Literal(text) => text.eq_ignore_ascii_case(given),
                PathPart::Parameter(_) => true,
            })
    }

    fn has(&self, name: &str) -> bool {
        self.parts.contains(&PathPart::Parameter(name.to_owned()))
    }

    fn value<'a>(&self, name: &str, path: &'a [String]) -> Option<&'a str> {
        let wanted = PathPart::Parameter(name.to_owned());
        let place = self.parts.iter().position(|part| *part == wanted)?;
        path.get(place).map(String::as_str)
    }

    fn covers(&self, other: &Self) -> bool {
        self.parts.len() == other.parts.len()
            && self
                .parts
                .iter()
                .zip(&other.parts)
                .all(|(own, other)| match (own, other) {
                    (PathPart::Parameter(_), _) => true,
                    (PathPart::Literal(own), PathPart::Literal(other)) => {
                        own.eq_ignore_ascii_case(other)
                    }
                    (PathPart::Literal(_), PathPart::Parameter(_)) => false,
                })
    }
}

/// The URI that the client sent. A nested router of axum strips its prefix from that of the
/// request.
pub(super) fn sent_uri(request: &Parts) -> &Uri {
    request
        .extensions
        .get::<OriginalUri>()
        .map_or(&request.uri, |OriginalUri(uri)| uri)
}

/// The ways in which services read a path: each part by itself, or all decoded before it is cut
/// and without the parameters of its parts.
fn readings_of(path: &str) -> [Vec<String>; 2] {
    let whole = decoded(path);
    let loose = whole
        .split(['/', '\\'])
        .map(|part| part.split(';').next().unwrap_or_default().to_owned());
    [resolved(path.split('/').map(decoded)), resolved(loose)]
}

/// Leaves empty parts out, and resolves `.` and `..`.
fn resolved(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut parts = Vec::new();
    for part in all {
        match part.as_str() {
            "" | "." => {}
            ".." => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts
}

fn decoded(part: &str) -> String {
    percent_decode_str(part).decode_utf8_lossy().into_owned()
}

/// Keeps a key within the limit of keys.
fn digest_if_long(text: String) -> String {
    if text.len() <= MAX_KEY_BYTES {
        text
    } else {
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }
}

/// One status, or a hundred of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatusRange {
    One(u16),
    Hundred(u16),
}

impl StatusRange {
    fn parse(text: &str) -> Option<Self> {
        match text.strip_suffix("xx") {
            Some(hundred) => {
                let hundred: u16 = hundred.parse().ok()?;
                (2..=5).contains(&hundred).then_some(Self::Hundred(hundred))
            }
            None => {
                let one: u16 = text.parse().ok()?;
                (200..=599).contains(&one).then_some(Self::One(one))
            }
        }
    }

    fn has(self, status: StatusCode) -> bool {
        match self {
            Self::One(one) => status.as_u16() == one,
            Self::Hundred(hundred) => status.as_u16() / 100 == hundred,
        }
    }
}

#[cfg(test)]
mod tests;
