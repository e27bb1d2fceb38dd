//! The door that takes events of a provider: settings of a file as those of the library.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use axum::http::uri::{PathAndQuery, Uri};
use futures_util::future::BoxFuture;
use oncegate::GateError;
use oncegate::http::event_gate;
use oncegate_serve::proxy::{Upstream, UpstreamSettings};
use oncegate_serve::webhook::{AtPath, Preset, Webhook, WebhookError};

use super::kinds::{DoorKind, DoorParts, Flaw, ServedDoor};
use crate::config::shape::Door;
use crate::config::values::{Secret, Size, Time};
use crate::exit::Problem;

/// The events of a provider.
pub(crate) struct WebhookKind;

#[async_trait]
impl DoorKind for WebhookKind {
    fn named(&self, door: &Door) -> Option<(&'static str, bool)> {
        Some(("webhook", door.webhook.is_some()))
    }

    fn check(&self, _: &str, door: &Door) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        match preset(door) {
            Err(why) => flaws.push(Flaw::error("webhook", why)),
            Ok(preset) => {
                for finding in preset.check(door.gate.retention) {
                    let setting = if finding.setting == "retention" {
                        "retention".to_owned()
                    } else {
                        format!("webhook.{}.{}", preset.name(), finding.setting)
                    };
                    flaws.push(Flaw::error(setting, finding.what));
                }
                if matches!(preset, Preset::None(_)) {
                    flaws.push(Flaw::warning(
                        "webhook.none",
                        "events are not signed: everything that reaches this address can send them",
                    ));
                }
            }
        }
        match &door.upstream {
            None => flaws.push(Flaw::error(
                "upstream",
                "it is missing: the handler of the events, as \"http://127.0.0.1:3000\"",
            )),
            Some(_) => {
                if let Err(why) = upstream(door) {
                    flaws.push(Flaw::error("upstream", why));
                }
            }
        }
        for (setting, is_given) in [
            ("rules", door.rules.is_some()),
            ("principal", door.principal.is_some()),
            ("headers", door.headers.is_some()),
            ("strict", door.strict.is_some()),
            ("fingerprint", door.fingerprint.is_some()),
            ("max_attempts", door.max_attempts.is_some()),
            ("wait", door.wait.is_some()),
            ("request_timeout", door.request_timeout.is_some()),
        ] {
            if is_given {
                flaws.push(Flaw::error(
                    setting,
                    "it is for a proxy, and this door is a webhook",
                ));
            }
        }
        if let Some(finding) = door.tls.check() {
            flaws.push(Flaw::error(finding.setting, finding.what));
        }
        flaws
    }

    /// None: they are in files alone, which are read again for each event.
    fn secrets<'a>(&self, _: &'a Door) -> Vec<(String, &'a Secret)> {
        Vec::new()
    }

    async fn build(
        &self,
        name: &str,
        door: &Door,
        parts: &DoorParts<'_>,
    ) -> Result<Arc<dyn ServedDoor>, Problem> {
        let preset = preset(door).map_err(|why| Problem::configuration(why).of(name))?;
        let (upstream, path) =
            upstream(door).map_err(|why| Problem::configuration(why).of(name))?;
        let gate = event_gate(name, Arc::clone(&parts.store))
            .settings(door.gate)
            .observer(Arc::clone(&parts.observer));
        let mut webhook = Webhook::new(gate, preset, AtPath::new(upstream, path));
        if let Some(Size(bytes)) = door.max_request {
            webhook = webhook.max_request_bytes(bytes);
        }
        if let Some(Size(bytes)) = door.max_buffered {
            webhook = webhook.max_buffered_bytes(bytes);
        }
        if let Some(handlers) = door.max_in_flight {
            webhook = webhook.max_in_flight(usize::try_from(handlers).unwrap_or(usize::MAX));
        }
        Ok(Arc::new(webhook))
    }
}

impl ServedDoor for Webhook {
    fn open(&self) -> BoxFuture<'_, Result<(), GateError>> {
        Box::pin(async {
            match Self::open(self).await {
                Ok(_) => Ok(()),
                Err(WebhookError::Gate(error)) => Err(error),
                Err(error) => Err(GateError::Settings {
                    scope: self.name().to_owned(),
                    what: error.to_string(),
                }),
            }
        })
    }

    fn drain(&self, deadline: Duration) -> BoxFuture<'_, usize> {
        Box::pin(Self::drain(self, deadline))
    }
}

fn preset(door: &Door) -> Result<Preset, String> {
    door.webhook.clone().unwrap_or_default().preset()
}

/// The handler of a door, and the path at which it takes events if its URL has one.
fn upstream(door: &Door) -> Result<(Upstream, Option<PathAndQuery>), String> {
    let url = door.upstream.clone().unwrap_or_default();
    let (origin, path) = match url.parse::<Uri>().map(Uri::into_parts) {
        Ok(parts)
            if matches!(
                parts.scheme.as_ref().map(|it| it.as_str()),
                Some("http" | "https")
            ) =>
        {
            let path = parts.path_and_query.filter(|path| path != "/");
            let length = path.as_ref().map_or(0, |path| path.as_str().len());
            let end = url.len().saturating_sub(length);
            (url.get(..end).unwrap_or(&url).to_owned(), path)
        }
        // A Unix socket, or an error that the client words.
        _ => (url.clone(), None),
    };
    let default = UpstreamSettings::at(origin);
    let upstream = Upstream::new(&UpstreamSettings {
        allow_remote: door.allow_remote.unwrap_or(default.allow_remote),
        http2: door.http2.unwrap_or(default.http2),
        tls: door.tls.clone(),
        timeout: door.timeout.map_or(default.timeout, |Time(time)| time),
        idle_timeout: door
            .idle_timeout
            .map_or(default.idle_timeout, |Time(time)| time),
        ..default
    })?;
    Ok((upstream, path))
}
