//! The door that is a proxy: settings of a file as those of the library.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::http::HeaderName;
use futures_util::future::BoxFuture;
use oncegate::core::key::Scope;
use oncegate::core::store::Store;
use oncegate::http::{
    IdempotencyLayer, Principal, RequestPart, Rule, RuleError, Rules, request_gate,
};
use oncegate::observe::Observer;
use oncegate::{GateError, GateSettings, MemoryStore};
use oncegate_serve::Address;
use oncegate_serve::proxy::{Proxy, Upstream, UpstreamSettings};

use super::kind::{DoorKind, DoorParts, Flaw, ServedDoor};
use crate::config::Severity;
use crate::config::shape::{Door, DoorRule};
use crate::config::values::{
    FingerprintSetting, KeySetting, Names, PrincipalSetting, RuleKeySetting, Secret, Size, Time,
};
use crate::exit::Problem;

/// The largest response that is kept, in bytes.
const RESPONSE_MAX_BYTES: usize = 8 * 1024 * 1024;

/// A proxy in front of a service.
pub(crate) struct ProxyKind;

#[async_trait]
impl DoorKind for ProxyKind {
    fn named(&self, _: &Door) -> Option<(&'static str, bool)> {
        None
    }

    fn check(&self, name: &str, door: &Door) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        match &door.upstream {
            None => flaws.push(Flaw::error(
                "upstream",
                "it is missing: the service, as \"http://127.0.0.1:3000\"",
            )),
            Some(_) => {
                if let Err(why) = upstream(door) {
                    flaws.push(Flaw::error("upstream", why));
                }
            }
        }
        if let Err(why) = principal(door) {
            flaws.push(Flaw::error("principal", why));
        }
        let is_local = Address::parse(door.address()).is_ok_and(|address| address.is_local());
        if door.principal == Some(PrincipalSetting::SingleTenant) && !is_local {
            let what = format!(
                "every client that reaches {} gets the response of each key that it knows or guesses; \
                 name the header that your authentication sets, as {{ header = \"x-user-id\" }}",
                door.address()
            );
            flaws.push(Flaw::warning("principal", what));
        }
        if let Err(why) = key_headers(door) {
            flaws.push(Flaw::error("headers", why));
        }
        match rules(door) {
            Err(why) => flaws.push(Flaw::error("rules", why)),
            Ok(rules) => {
                let shadowed = rules.shadowed().into_iter();
                flaws.extend(shadowed.map(|why| Flaw::error("rules", why)));
            }
        }
        let of_rules = door.rules.iter().flatten();
        for Time(retention) in of_rules.filter_map(|rule| rule.retention) {
            let gate = GateSettings {
                retention,
                ..door.gate
            };
            let wrong = gate.check().into_iter();
            let wrong = wrong.filter(|finding| finding.setting == "retention");
            flaws.extend(wrong.map(|finding| Flaw::error("rules", finding.what)));
        }
        if door.gate.max_result_bytes > RESPONSE_MAX_BYTES {
            flaws.push(Flaw::error("max_result", "a response is kept up to 8MiB"));
        }
        if let Some(finding) = door.tls.check() {
            flaws.push(Flaw::error(finding.setting, finding.what));
        }
        // What is wrong with single settings is reported already.
        if flaws.iter().all(|flaw| flaw.severity == Severity::Warning)
            && Scope::new(name).is_ok()
            && door.gate.check().is_empty()
            && let Err(why) = checked(name, door)
        {
            flaws.push(Flaw::error("", why));
        }
        flaws
    }

    fn secrets<'a>(&self, _: &'a Door) -> Vec<(String, &'a Secret)> {
        Vec::new()
    }

    async fn build(
        &self,
        name: &str,
        door: &Door,
        parts: &DoorParts<'_>,
    ) -> Result<Arc<dyn ServedDoor>, Problem> {
        let store = Arc::clone(&parts.store);
        let observer = Arc::clone(&parts.observer);
        let proxy = upstream(door).and_then(|upstream| {
            let layer = layer(name, door, store, Some(observer))?;
            Ok(Proxy::new(layer, upstream))
        });
        match proxy {
            Ok(proxy) => Ok(Arc::new(proxy)),
            Err(why) => Err(Problem::configuration(why)),
        }
    }
}

impl ServedDoor for Proxy {
    fn open(&self) -> BoxFuture<'_, Result<(), GateError>> {
        Box::pin(Self::open(self))
    }

    fn drain(&self, deadline: Duration) -> BoxFuture<'_, usize> {
        Box::pin(Self::drain(self, deadline))
    }
}

/// Lets the library check the settings of a door together.
fn checked(name: &str, door: &Door) -> Result<(), String> {
    let layer = layer(name, door, MemoryStore::new(), None)?;
    layer.check().map_err(|error| error.to_string())
}

/// The service of a door.
fn upstream(door: &Door) -> Result<Upstream, String> {
    let url = door.upstream.clone().unwrap_or_default();
    let default = UpstreamSettings::at(url);
    let caller_header = match &door.principal {
        Some(PrincipalSetting::Header(name)) => header(name).ok(),
        _ => None,
    };
    Upstream::new(&UpstreamSettings {
        caller_header,
        allow_remote: door.allow_remote.unwrap_or(default.allow_remote),
        http2: door.http2.unwrap_or(default.http2),
        tls: door.tls.clone(),
        timeout: door.timeout.map_or(default.timeout, |Time(time)| time),
        idle_timeout: door
            .idle_timeout
            .map_or(default.idle_timeout, |Time(time)| time),
        ..default
    })
}

fn principal(door: &Door) -> Result<Principal, String> {
    match &door.principal {
        None => Err(
            "it is missing: { header = \"x-user-id\" }, which your authentication sets, or \"single-tenant\" \
             if all requests come from one caller"
                .to_owned(),
        ),
        Some(PrincipalSetting::SingleTenant) => Ok(Principal::single_tenant()),
        Some(PrincipalSetting::Header(name)) => {
            let name = header(name)?;
            Ok(Principal::from_fn(move |request| {
                let mut lines = request.headers.get_all(&name).iter();
                match (lines.next(), lines.next()) {
                    (Some(value), None) => value.to_str().ok().map(str::to_owned),
                    // Of two callers, none is sure.
                    _ => None,
                }
            }))
        }
    }
}

fn key_headers(door: &Door) -> Result<Option<Vec<HeaderName>>, String> {
    let Some(Names(names)) = &door.headers else {
        return Ok(None);
    };
    let names = names.iter().map(|name| header(name));
    names.collect::<Result<_, _>>().map(Some)
}

fn header(name: &str) -> Result<HeaderName, String> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| format!("`{name}` is no header"))
}

/// The rules of a door.
fn rules(door: &Door) -> Result<Rules, String> {
    let Some(given) = &door.rules else {
        return Err(
            "they are missing: the requests to hold, as [{ method = \"POST\", path = \"/payments\" }]"
                .to_owned(),
        );
    };
    let own = door.gate.retention;
    let rules: Vec<Rule> = given
        .iter()
        .map(|given| rule(given, own))
        .collect::<Result<_, _>>()?;
    Rules::new(rules).map_err(|error| error.to_string())
}

fn words(error: RuleError) -> String {
    error.to_string()
}

/// A rule of a door that keeps its records for `retention` unless it says otherwise.
fn rule(given: &DoorRule, retention: Duration) -> Result<Rule, String> {
    let (Some(method), Some(path)) = (&given.method, &given.path) else {
        return Err("a rule has a `method` and a `path`".to_owned());
    };
    let mut rule = Rule::new(method, path).map_err(words)?;
    if given.required == Some(false) {
        rule = rule.optional();
    }
    rule = match &given.key {
        None => rule,
        Some(RuleKeySetting::Header(name)) => rule.key_in_header(name).map_err(words)?,
        Some(RuleKeySetting::Parameters(names)) => rule.key_in_path(names).map_err(words)?,
        Some(RuleKeySetting::Json(KeySetting(key))) => rule.key_in_body(key).map_err(words)?,
    };
    rule = rule.retention(given.retention.map_or(retention, |Time(time)| time));
    if let Some(Names(statuses)) = &given.keep {
        let statuses = statuses.iter().map(String::as_str);
        rule = rule.keep(statuses).map_err(words)?;
    }
    for part in given.ignore.iter().flat_map(|Names(parts)| parts) {
        let part = match part.as_str() {
            "host" => RequestPart::Host,
            "query" => RequestPart::Query,
            "body" => RequestPart::Body,
            other => {
                return Err(format!(
                    "the rule for {rule}: `ignore` names host, query or body, not `{other}`"
                ));
            }
        };
        rule = rule.ignore(part);
    }
    Ok(rule)
}

/// The layer of a door, over records in `store`.
fn layer(
    name: &str,
    door: &Door,
    store: impl Store + 'static,
    observer: Option<Arc<dyn Observer>>,
) -> Result<IdempotencyLayer, String> {
    let own = door.gate.retention;
    // A rule of its own retention may keep its records for longer than the others.
    let rules = rules(door)?;
    let longest = rules.longest_retention().unwrap_or(own).max(own);
    let mut gate = request_gate(name, store)
        .settings(door.gate)
        .retention(longest);
    if let Some(FingerprintSetting(fingerprint)) = &door.fingerprint {
        gate = gate.fingerprint(fingerprint.clone());
    }
    if let Some(observer) = observer {
        gate = gate.observer(observer);
    }
    let mut layer = IdempotencyLayer::new(gate, principal(door)?)
        .rules(rules)
        .max_response_bytes(door.gate.max_result_bytes);
    if let Some(headers) = key_headers(door)? {
        layer = layer.key_headers(headers);
    }
    if door.strict == Some(true) {
        layer = layer.strict();
    }
    if let Some(Size(bytes)) = door.max_request {
        layer = layer.max_request_bytes(bytes);
    }
    if let Some(Time(time)) = door.request_timeout {
        layer = layer.request_timeout(time);
    }
    if let Some(requests) = door.max_in_flight {
        layer = layer.max_in_flight(usize::try_from(requests).unwrap_or(usize::MAX));
    }
    if let Some(Size(bytes)) = door.max_buffered {
        layer = layer.max_buffered_bytes(bytes);
    }
    if let Some(attempts) = door.max_attempts {
        layer = layer.max_attempts(attempts);
    }
    if let Some(Time(time)) = door.wait {
        layer = layer.wait(time);
    }
    Ok(layer)
}
