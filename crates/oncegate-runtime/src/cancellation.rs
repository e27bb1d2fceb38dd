//! Ends a run from outside.

use std::sync::OnceLock;
use std::sync::atomic::{self, AtomicU8, Ordering};

use tokio_util::sync::CancellationToken;

/// The signals that end a run. Their tokens are made on demand: most handlers end before that.
#[derive(Debug, Default)]
pub(crate) struct Cancellation {
    /// The strongest signal that was given.
    given: AtomicU8,
    cancelled: OnceLock<CancellationToken>,
    discarded: OnceLock<CancellationToken>,
}

/// The signal that the run should stop.
const CANCELLED: u8 = 1;
/// The signal that the run should stop, and that its result would not be used.
const DISCARDED: u8 = 2;
/// The same, because the run has lasted too long.
const OVERRUN: u8 = 3;

impl Cancellation {
    /// The signals of a run that is discarded when `parent` is cancelled.
    pub(crate) fn under(parent: &CancellationToken) -> Self {
        Self {
            discarded: OnceLock::from(parent.child_token()),
            ..Self::default()
        }
    }

    /// Tells the run to stop.
    pub(crate) fn cancel(&self) {
        self.give(CANCELLED, &self.cancelled);
    }

    /// Tells the run to stop: its result will not be used.
    pub(crate) fn discard(&self) {
        self.give(DISCARDED, &self.discarded);
    }

    /// Tells the run to stop, because it has lasted too long: its result will not be used.
    pub(crate) fn overrun(&self) {
        self.give(OVERRUN, &self.discarded);
    }

    pub(crate) fn is_overrun(&self) -> bool {
        self.given.load(Ordering::Relaxed) == OVERRUN
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.is_given(CANCELLED, &self.cancelled) || self.is_discarded()
    }

    pub(crate) fn is_discarded(&self) -> bool {
        self.is_given(DISCARDED, &self.discarded)
    }

    /// The token that fires when the run should stop.
    pub(crate) fn cancelled(&self) -> &CancellationToken {
        let token = self
            .cancelled
            .get_or_init(|| self.discarded().child_token());
        self.fire_if_given(CANCELLED, token);
        token
    }

    /// The token that fires when the run should stop and its result would not be used; then
    /// [`cancelled`](Self::cancelled) has fired, too.
    pub(crate) fn discarded(&self) -> &CancellationToken {
        let token = self.discarded.get_or_init(CancellationToken::new);
        self.fire_if_given(DISCARDED, token);
        token
    }

    fn give(&self, signal: u8, token: &OnceLock<CancellationToken>) {
        self.given.fetch_max(signal, Ordering::Relaxed);
        // Either this sees the token, or the thread that makes it sees the signal.
        atomic::fence(Ordering::SeqCst);
        token.get().into_iter().for_each(CancellationToken::cancel);
    }

    fn fire_if_given(&self, signal: u8, token: &CancellationToken) {
        atomic::fence(Ordering::SeqCst);
        if self.given.load(Ordering::Relaxed) >= signal {
            token.cancel();
        }
    }

    /// Returns whether the signal was given. The token is public, so it may have been cancelled
    /// elsewhere.
    fn is_given(&self, signal: u8, token: &OnceLock<CancellationToken>) -> bool {
        self.given.load(Ordering::Relaxed) >= signal
            || token.get().is_some_and(CancellationToken::is_cancelled)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_signal_reaches_a_token_that_is_made_before_or_after_it() {
        let before = Cancellation::default();
        let after = Cancellation::default();
        let token = before.cancelled().clone();
        before.cancel();
        after.cancel();
        assert!(token.is_cancelled() && after.cancelled().is_cancelled() && after.is_cancelled());
        assert!(!before.is_discarded() && !before.discarded().is_cancelled());
        assert!(!after.discarded().is_cancelled());
    }

    #[test]
    fn what_has_lasted_too_long_is_discarded() {
        let signals = Cancellation::default();
        signals.discard();
        assert!(!signals.is_overrun());
        signals.overrun();
        assert!(signals.is_overrun() && signals.is_discarded() && signals.is_cancelled());
    }

    #[test]
    fn what_is_discarded_is_cancelled() {
        let made = Cancellation::default();
        let unmade = Cancellation::default();
        let token = made.cancelled().clone();
        made.discard();
        unmade.discard();
        assert!(token.is_cancelled() && made.is_cancelled() && unmade.is_cancelled());
        assert!(unmade.cancelled().is_cancelled());
        let given_out = Cancellation::default();
        given_out.discarded().cancel();
        assert!(given_out.is_discarded() && given_out.is_cancelled());
        let parent = CancellationToken::new();
        let child = Cancellation::under(&parent);
        parent.cancel();
        assert!(child.is_discarded() && child.is_cancelled());
    }

    #[test]
    fn no_signal_is_lost_between_two_threads() {
        for _ in 0..2_000 {
            let cancellation = Arc::new(Cancellation::default());
            let other = Arc::clone(&cancellation);
            let giving = std::thread::spawn(move || other.cancel());
            let token = cancellation.cancelled().clone();
            giving.join().expect("it does not panic");
            assert!(token.is_cancelled());
        }
    }
}
