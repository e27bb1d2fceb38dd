//! The opening of a gate.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use oncegate_core::key::{ContentMark, Descriptor, Scope};
use oncegate_core::store::Store;
use tokio_util::sync::CancellationToken;

use super::fail_open::FailOpenStore;
use super::journal::Notes;
use super::lease_renewer::{Duty, LeaseRenewer};
use super::loss::LossWatch;
use super::{Gate, GateError, OpenGate};
use crate::observe::{Counters, Observer};

impl Gate {
    /// Checks the settings and the store, and starts the lease renewer.
    pub(super) async fn try_open(&self) -> Result<Arc<OpenGate>, GateError> {
        self.check_settings()?;
        let scope = Scope::new(&self.scope)?;
        let key = self.key.compile(&scope)?;
        let fingerprint = self
            .fingerprint
            .as_ref()
            .map(|spec| spec.compile(&self.key))
            .transpose()?;
        let checkup = self.store.check().await?;
        let descriptor = Descriptor::new(&self.key, self.fingerprint.as_ref())?;
        let losses = LossWatch::open(
            scope.clone(),
            Arc::clone(&self.store),
            descriptor.as_str(),
            self.settings.lease,
            self.settings.on_store_loss,
            Arc::clone(&self.observer),
            Arc::clone(&self.entropy),
        );
        let losses = Arc::new(losses.await?);
        let notes = self.notes(&scope, Arc::clone(&self.observer));
        let lease_renewer = self.lease_renewer(
            &scope,
            Arc::clone(&self.store),
            notes.clone(),
            Some(Arc::clone(&losses)),
        )?;
        let gate = OpenGate {
            scope,
            key,
            fingerprint,
            content_mark: ContentMark::default(),
            other_contents: AtomicU64::default(),
            settings: self.settings,
            fail_open_after: self.fail_open_after,
            store: Arc::clone(&self.store),
            results: self.results.clone(),
            notes,
            observer: Arc::clone(&self.observer),
            entropy: Arc::clone(&self.entropy),
            lease_renewer,
            losses: Some(losses),
            checkup,
            transactions: CancellationToken::new(),
            stops: Arc::default(),
            is_fail_open: false,
        };
        gate.check_results().await?;
        Ok(Arc::new(gate))
    }

    /// Returns a gate with the same settings that uses no store: it admits every key that does not
    /// already run in this process, and counts it. `None` unless the consumer fails open.
    pub(crate) fn fail_open(&self) -> Result<Option<Arc<OpenGate>>, GateError> {
        if self.fail_open_after.is_none() {
            return Ok(None);
        }
        let scope = Scope::new(&self.scope)?;
        let store: Arc<dyn Store> = Arc::new(FailOpenStore::new());
        // Its heartbeats are no calls to the store, so they are not counted.
        let uncounted = self.notes(&scope, Arc::new(Counters::default()));
        let lease_renewer = self.lease_renewer(&scope, Arc::clone(&store), uncounted, None)?;
        let notes = self.notes(&scope, Arc::clone(&self.observer));
        Ok(Some(Arc::new(OpenGate {
            key: self.key.compile(&scope)?,
            fingerprint: self
                .fingerprint
                .as_ref()
                .map(|spec| spec.compile(&self.key))
                .transpose()?,
            content_mark: ContentMark::default(),
            other_contents: AtomicU64::default(),
            scope,
            settings: self.settings,
            fail_open_after: None,
            store,
            results: None,
            notes,
            observer: Arc::clone(&self.observer),
            entropy: Arc::clone(&self.entropy),
            lease_renewer,
            losses: None,
            checkup: FailOpenStore::checkup(),
            transactions: CancellationToken::new(),
            stops: Arc::default(),
            is_fail_open: true,
        })))
    }

    fn notes(&self, scope: &Scope, observer: Arc<dyn Observer>) -> Notes {
        Notes {
            scope: scope.as_str().into(),
            journal: self.journal.clone(),
            observer,
        }
    }

    /// Starts the lease renewer: heartbeats, operations whose callers are gone, and checks for
    /// losses.
    fn lease_renewer(
        &self,
        scope: &Scope,
        store: Arc<dyn Store>,
        notes: Notes,
        losses: Option<Arc<LossWatch>>,
    ) -> Result<LeaseRenewer, GateError> {
        LeaseRenewer::start(Duty {
            scope: scope.clone(),
            store,
            observer: Arc::clone(&notes.observer),
            notes,
            entropy: Arc::clone(&self.entropy),
            lease: self.settings.lease,
            max_run: self.settings.max_run,
            runs_on: self.heartbeats,
            losses,
        })
    }
}
