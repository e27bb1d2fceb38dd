//! The names that streams have in keys.

use std::collections::BTreeMap;

/// The routes that keys have in the place of those of their messages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Routes {
    /// Of all messages whose route is none of those below.
    all: Option<String>,
    of: BTreeMap<String, String>,
}

impl Routes {
    pub(super) fn set_all(&mut self, name: String) {
        self.all = Some(name);
    }

    pub(super) fn set(&mut self, route: String, name: String) {
        self.of.insert(route, name);
    }

    /// The name in keys.
    pub(super) fn name<'a>(&'a self, route: &'a str) -> &'a str {
        self.of
            .get(route)
            .or(self.all.as_ref())
            .map_or(route, String::as_str)
    }

    /// Returns all names that a specification gave.
    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.all
            .iter()
            .chain(self.of.keys())
            .chain(self.of.values())
    }
}
