//! Checks the doors of a configuration without a server.

use std::collections::BTreeMap;

use oncegate::core::key::Scope;
use oncegate::core::settings::Finding;
use oncegate_serve::Address;

use super::check::path;
use super::shape::Door;
use super::{Loaded, Path, Secrets, Severity};
use crate::serve::kinds::{self, Flaw};

/// Settings of a gate that mean nothing for requests.
const OF_CONSUMERS: [&str; 2] = ["broker", "max_large_result"];

impl Loaded {
    pub(super) fn check_doors(&mut self, secrets: Secrets) {
        let doors = self.config.door.clone();
        for (name, door) in &doors {
            let own = path(["door", name]);
            if let Err(error) = Scope::new(name) {
                self.error(&own, error.to_string());
            }
            if self.config.consumer.contains_key(name) {
                self.error(
                    &own,
                    format!("[consumer.{name}] has the same name, which is the scope of its keys"),
                );
            }
            for Finding { setting, what } in door.gate.check() {
                self.error(&path(["door", name, setting]), what);
            }
            for setting in OF_CONSUMERS {
                let at = path(["door", name, setting]);
                if self.layers.value(&at).is_some() {
                    self.error(&at, "it is for consumers, and a door has none");
                }
            }
            self.check_place(name, door);
            self.check_kind(name, door, secrets);
        }
        self.check_places(&doors);
    }

    /// Checks the address and the path of a door.
    fn check_place(&mut self, name: &str, door: &Door) {
        if let Err(why) = Address::parse(door.address()) {
            self.error(&path(["door", name, "listen"]), why);
        }
        if let Some(below) = &door.path
            && !(below.starts_with('/') && below.is_ascii() && !below.contains(['?', '#', '{']))
        {
            let at = path(["door", name, "path"]);
            self.error(
                &at,
                "it is the beginning of a path, such as \"/hooks/stripe\"",
            );
        }
    }

    /// Lets the kind of the door check it.
    fn check_kind(&mut self, name: &str, door: &Door, secrets: Secrets) {
        let kind = match kinds::of(door) {
            Ok(kind) => kind,
            Err(why) => return self.error(&path(["door", name]), why),
        };
        let mut flaws = kind.check(name, door);
        for (setting, secret) in kind.secrets(door) {
            let at = below(name, &setting);
            self.check_secret(&at, secret, secrets);
        }
        for Flaw {
            setting,
            severity,
            what,
        } in flaws.drain(..)
        {
            let at = below(name, &setting);
            match severity {
                // A setting that could not be read is reported already.
                _ if self.findings.is_spoilt(&at) => {}
                Severity::Error => self.error(&at, what),
                Severity::Warning => self.warn(&at, what),
            }
        }
    }

    /// Two doors at one address must have different paths: a request goes to one of them.
    fn check_places(&mut self, doors: &BTreeMap<String, Door>) {
        let mut taken: BTreeMap<(&str, String), &str> = BTreeMap::new();
        for (name, door) in doors {
            let place = door.path.as_deref().unwrap_or("/").trim_end_matches('/');
            let place = place.to_ascii_lowercase();
            let Some(other) = taken.insert((door.address(), place), name) else {
                continue;
            };
            let at = path(["door", name, "listen"]);
            let what = format!(
                "[door.{other}] takes the same requests: give one of them another `listen`, or a `path`"
            );
            self.error(&at, what);
        }
    }
}

/// The path of a door's setting, `principal.header` for one of a table.
fn below(name: &str, setting: &str) -> Path {
    let parts = setting
        .split('.')
        .filter(|part| !part.is_empty())
        .map(str::to_owned);
    path(["door", name]).into_iter().chain(parts).collect()
}
