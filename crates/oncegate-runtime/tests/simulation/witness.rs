//! What must be true whenever a worker calls a handler, seen from outside: its lease in the store
//! lasts, and the worker was not asked to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use futures_util::FutureExt as _;
use oncegate::core::key::Scope;
use oncegate::core::record::State;
use oncegate::core::store::Store as _;
use oncegate::{Attempt, MemoryStore, Message};

use crate::ledger::Ledger;
use crate::world::key;

/// Watches the handlers of one worker begin. A panic would be taken for the handler's own, so what
/// is wrong goes into the ledger.
pub(crate) struct Witness {
    pub(crate) memory: Arc<MemoryStore>,
    pub(crate) ledger: Arc<Ledger>,
    /// A message is given up when the outcome of an attempt is unknown.
    pub(crate) gives_up_unknown: bool,
    /// The worker was asked to stop, and has had its time to notice.
    pub(crate) has_stopped: AtomicBool,
}

impl Witness {
    /// A handler begins under a claim.
    pub(crate) fn begins(&self, message: &Message, attempt: &Attempt) {
        self.has_not_stopped();
        if attempt.is_fail_open() {
            return;
        }
        if self.gives_up_unknown && attempt.recovered() {
            self.note("a handler begins after an attempt without an outcome");
        }
        let key = key().compile(&Scope::new("sim").unwrap()).unwrap();
        let key = key.derive("payments", message).unwrap();
        // The store is in memory, and answers at once.
        let read = self.memory.read(vec![key]).now_or_never().unwrap();
        let Some(Ok(Some(snapshot))) = read.into_iter().next() else {
            return;
        };
        let is_pending = matches!(snapshot.record.state, State::Pending { .. });
        if is_pending && snapshot.record.protected_for(snapshot.now).is_none() {
            self.note("a handler begins whose lease is over");
        }
    }

    /// A handler or its hook begins.
    pub(crate) fn has_not_stopped(&self) {
        if self.has_stopped.load(Relaxed) {
            self.note("a handler begins after the stop");
        }
    }

    fn note(&self, what: &'static str) {
        self.ledger.wrong.lock().unwrap().push(what);
    }
}
