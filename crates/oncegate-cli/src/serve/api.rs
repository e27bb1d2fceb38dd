//! The door that takes claims of functions: settings of a file as those of the library.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use oncegate::core::key::{Key, Scope};
use oncegate::core::store::Store;
use oncegate::observe::Observer;
use oncegate::{Gate, GateError, MemoryStore};
use oncegate_serve::Address;
use oncegate_serve::api::{Api, ApiScope, Caller, function_gate};

use super::kind::{DoorKind, DoorParts, Flaw, ServedDoor};
use crate::config::shape::{self, ApiCaller, Door};
use crate::config::values::{KeySetting, Names, Secret, Size};
use crate::exit::Problem;

/// Claims of functions.
pub(crate) struct ApiKind;

#[async_trait]
impl DoorKind for ApiKind {
    fn named(&self, door: &Door) -> Option<(&'static str, bool)> {
        Some(("api", door.api.is_some()))
    }

    fn check(&self, _: &str, door: &Door) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        let api = settings(door);
        for (setting, is_set) in of_other_kinds(door) {
            if is_set {
                flaws.push(Flaw::error(
                    setting,
                    "a door with `api` has no such setting",
                ));
            }
        }
        let scopes = scopes(api);
        for scope in &scopes {
            if let Err(error) = Scope::new(scope) {
                flaws.push(Flaw::error("api.callers", error.to_string()));
            }
        }
        for (scope, KeySetting(key)) in &api.keys {
            let setting = format!("api.keys.{scope}");
            if let Err(error) = key.check() {
                flaws.push(Flaw::error(setting, error.to_string()));
            } else if !scopes.contains(scope.as_str()) {
                flaws.push(Flaw::error(setting, "no caller has this scope"));
            }
        }
        if !Address::parse(door.address()).is_ok_and(|address| address.is_local()) {
            let what = format!(
                "tokens and results come to {} unencrypted; listen on loopback or a Unix socket, behind what ends TLS",
                door.address()
            );
            flaws.push(Flaw::warning("listen", what));
        }
        if flaws.is_empty() && door.gate.check().is_empty() {
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
            if let Err(why) = api_of(door, &store, None, without_token) {
                flaws.push(Flaw::error("api", why));
            }
        }
        flaws
    }

    fn secrets<'a>(&self, door: &'a Door) -> Vec<(String, &'a Secret)> {
        settings(door)
            .callers
            .iter()
            .map(|(name, caller)| (format!("api.callers.{name}.token"), &caller.token))
            .collect()
    }

    async fn build(
        &self,
        name: &str,
        door: &Door,
        parts: &DoorParts<'_>,
    ) -> Result<Arc<dyn ServedDoor>, Problem> {
        let observer = Some(Arc::clone(&parts.observer));
        let api = api_of(door, &parts.store, observer, with_token)
            .map_err(|why| Problem::configuration(why).of(name))?;
        Ok(Arc::new(api))
    }
}

impl ServedDoor for Api {
    fn open(&self) -> BoxFuture<'_, Result<(), GateError>> {
        Box::pin(async { Self::open(self).await.map(drop) })
    }

    fn stopping(&self) {
        Self::stop_waiting(self);
    }

    fn drain(&self, deadline: Duration) -> BoxFuture<'_, usize> {
        Box::pin(Self::drain(self, deadline))
    }
}

/// The settings of a door that a door of this kind has none of.
fn of_other_kinds(door: &Door) -> [(&'static str, bool); 12] {
    [
        ("upstream", door.upstream.is_some()),
        ("timeout", door.timeout.is_some()),
        ("idle_timeout", door.idle_timeout.is_some()),
        ("headers", door.headers.is_some()),
        ("principal", door.principal.is_some()),
        ("rules", door.rules.is_some()),
        ("strict", door.strict.is_some()),
        ("fingerprint", door.fingerprint.is_some()),
        ("max_request", door.max_request.is_some()),
        ("max_in_flight", door.max_in_flight.is_some()),
        ("max_buffered", door.max_buffered.is_some()),
        ("wait", door.wait.is_some()),
    ]
}

fn settings(door: &Door) -> &shape::Api {
    static NONE: shape::Api = shape::Api {
        callers: BTreeMap::new(),
        keys: BTreeMap::new(),
    };
    door.api.as_ref().unwrap_or(&NONE)
}

/// The scopes of all callers.
fn scopes(api: &shape::Api) -> BTreeSet<&str> {
    api.callers
        .values()
        .flat_map(|ApiCaller { scopes, .. }| &scopes.0)
        .map(String::as_str)
        .collect()
}

/// The API of a door, over records in `store`.
fn api_of(
    door: &Door,
    store: &Arc<dyn Store>,
    observer: Option<Arc<dyn Observer>>,
    with_token: impl Fn(Caller, &Secret) -> Result<Caller, String>,
) -> Result<Api, String> {
    let api = settings(door);
    let scopes = scopes(api).into_iter().map(|name| {
        let mut gate = match api.keys.get(name) {
            Some(KeySetting(key)) => Gate::new(name, Key::clone(key), Arc::clone(store)),
            None => function_gate(name, Arc::clone(store)),
        };
        gate = gate.settings(door.gate);
        if let Some(observer) = &observer {
            gate = gate.observer(Arc::clone(observer));
        }
        let scope = ApiScope::new(gate);
        match door.max_attempts {
            Some(attempts) => scope.max_attempts(attempts),
            None => scope,
        }
    });
    let mut callers = Vec::new();
    for (name, settings) in &api.callers {
        let Names(scopes) = &settings.scopes;
        let mut caller = Caller::new(name).scopes(scopes);
        if let Some(claims) = settings.max_claims {
            caller = caller.max_claims(count(claims));
        }
        if let Some(requests) = settings.max_waiting {
            caller = caller.max_waiting(count(requests));
        }
        if let Some(Size(bytes)) = settings.max_buffered {
            caller = caller.max_bytes(bytes);
        }
        callers.push(with_token(caller, &settings.token)?);
    }
    let api = Api::new(scopes, callers).map_err(|error| error.to_string())?;
    Ok(match &door.path {
        Some(path) => api.below(path),
        None => api,
    })
}

fn count(count: u32) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The caller with a token that stands for its own, which may not be on this machine.
fn without_token(caller: Caller, _: &Secret) -> Result<Caller, String> {
    Ok(caller.token("x".repeat(32)))
}

/// The caller with its token. A file is left to the library, which reads it again.
fn with_token(caller: Caller, token: &Secret) -> Result<Caller, String> {
    Ok(match token {
        Secret::File(path) => caller.token_file(path),
        Secret::Env(_) | Secret::Literal(_) => caller.token(token.resolve()?),
    })
}
