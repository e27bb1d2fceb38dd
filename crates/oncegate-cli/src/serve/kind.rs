//! A kind of door, and what it builds.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use oncegate::GateError;
use oncegate::core::store::Store;
use oncegate::observe::Observer;
use oncegate_serve::Door as Answering;

use crate::config::Severity;
use crate::config::shape::{self, Door};
use crate::config::values::Secret;
use crate::exit::Problem;

/// A kind of door: what is wrong with its settings, and how it is built.
#[async_trait]
pub(crate) trait DoorKind: Sync {
    /// The setting that makes a door one of this kind, and whether this one has it. `None` for the
    /// proxy, which is what a door is that names no other kind.
    fn named(&self, door: &Door) -> Option<(&'static str, bool)>;

    /// Returns what is wrong with the settings of this door. Connects to nothing.
    fn check(&self, name: &str, door: &Door) -> Vec<Flaw>;

    /// The secrets of the door, each with its setting; one that stands in the file itself is
    /// reported.
    fn secrets<'a>(&self, door: &'a Door) -> Vec<(String, &'a Secret)>;

    /// Builds the door, whose scope is `name`. Its settings were checked.
    ///
    /// # Errors
    /// When a file or secret cannot be read, or a server that the door needs does not answer.
    async fn build(
        &self,
        name: &str,
        door: &Door,
        parts: &DoorParts<'_>,
    ) -> Result<Arc<dyn ServedDoor>, Problem>;
}

/// The parts that all doors of a process share.
pub(crate) struct DoorParts<'a> {
    /// The store of the records.
    pub(crate) store: Arc<dyn Store>,
    /// The settings of that store, for a door that needs more of it, such as an outbox.
    #[expect(
        dead_code,
        reason = "for kinds that use more of the store than its records"
    )]
    pub(crate) settings: &'a shape::Store,
    /// The observer of every gate.
    pub(crate) observer: Arc<dyn Observer>,
}

/// A door that is served: it can be opened and drained.
pub(crate) trait ServedDoor: Answering {
    /// Checks the settings against the store, before the first request.
    ///
    /// # Errors
    /// When the gate cannot be opened; the text names what to change.
    fn open(&self) -> BoxFuture<'_, Result<(), GateError>>;

    /// Answers the requests that only wait: the stop has begun, and its end waits for them.
    fn stopping(&self) {}

    /// Takes no new requests, waits until none runs, and drops those that still run after
    /// `deadline`. Returns how many were dropped.
    fn drain(&self, deadline: Duration) -> BoxFuture<'_, usize>;
}

/// Something wrong with a door's settings.
#[derive(Debug)]
pub(crate) struct Flaw {
    /// The setting within the door's table, with dots: `webhook.stripe.secrets`.
    pub(crate) setting: String,
    pub(crate) severity: Severity,
    /// The reason, and what to change.
    pub(crate) what: String,
}

impl Flaw {
    pub(crate) fn error(setting: impl Into<String>, what: impl Into<String>) -> Self {
        Self {
            setting: setting.into(),
            severity: Severity::Error,
            what: what.into(),
        }
    }

    pub(crate) fn warning(setting: impl Into<String>, what: impl Into<String>) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::error(setting, what)
        }
    }
}
