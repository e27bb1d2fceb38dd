//! The runs of the moment: they tell to which run a call of the downstream service belongs.

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

/// Runs and notices of duplicates that have begun and not ended.
#[derive(Debug, Default)]
pub(super) struct Active {
    state: Mutex<ActiveState>,
    begun: Notify,
}

#[derive(Debug, Default)]
struct ActiveState {
    runs: u64,
    activities: Vec<Activity>,
}

/// A run, or a duplicate that a handler is told of.
#[derive(Clone, Copy, Debug)]
struct Activity {
    number: u64,
    process: u32,
    message: usize,
    /// `None` when the message stands for no event: it is poison.
    sample: Option<usize>,
    is_duplicate: bool,
}

impl Active {
    /// Begins an activity, and returns its number.
    pub(super) fn begin(
        &self,
        process: u32,
        message: usize,
        sample: Option<usize>,
        is_duplicate: bool,
    ) -> u64 {
        let number = {
            let mut state = self.state();
            state.runs += 1;
            let number = state.runs;
            state.activities.push(Activity {
                number,
                process,
                message,
                sample,
                is_duplicate,
            });
            number
        };
        self.begun.notify_waiters();
        number
    }

    /// The message of the sample that the process handles at the moment.
    pub(super) fn message_of(&self, process: u32, sample: usize) -> Option<usize> {
        self.state()
            .activities
            .iter()
            .rev()
            .find(|activity| activity.process == process && activity.sample == Some(sample))
            .map(|activity| activity.message)
    }

    /// Resolves when another process handles the sample.
    pub(super) async fn elsewhere(&self, process: u32, sample: usize) {
        loop {
            let begun = self.begun.notified();
            let mut begun = std::pin::pin!(begun);
            // Registered before the look: a run that begins between the two would be missed
            // otherwise.
            begun.as_mut().enable();
            if self.state().activities.iter().any(|activity| {
                activity.process != process
                    && activity.sample == Some(sample)
                    && !activity.is_duplicate
            }) {
                return;
            }
            begun.await;
        }
    }

    pub(super) fn end(&self, number: u64) {
        self.state()
            .activities
            .retain(|activity| activity.number != number);
    }

    /// The sample that a call of the process belongs to, its run, and whether a duplicate is being
    /// told of.
    ///
    /// `owners` are the samples that the call's values fit. Where they leave a choice, what runs
    /// decides.
    pub(super) fn context(
        &self,
        process: u32,
        owners: &[usize],
    ) -> (Option<usize>, Option<u64>, bool) {
        let state = self.state();
        let mut here = state
            .activities
            .iter()
            .rev()
            .filter(|activity| activity.process == process);
        let found = match owners {
            // Without any value of a sample, only the one message that is being handled says which
            // it is.
            [] => match (here.next(), here.next()) {
                (Some(only), None) => Some(only),
                _ => None,
            },
            _ => here.find(|activity| {
                activity
                    .sample
                    .is_some_and(|sample| owners.contains(&sample))
            }),
        };
        let sample = found
            .and_then(|activity| activity.sample)
            .or(owners.first().copied());
        let run = found
            .filter(|activity| !activity.is_duplicate)
            .map(|activity| activity.number);
        (
            sample,
            run,
            found.is_some_and(|activity| activity.is_duplicate),
        )
    }

    /// The process that handles one of these samples; the last one that began to handle anything if
    /// none does.
    #[cfg(feature = "http")]
    pub(super) fn process_of(&self, owners: &[usize]) -> Option<u32> {
        let state = self.state();
        let found = state
            .activities
            .iter()
            .rev()
            .find(|activity| {
                activity
                    .sample
                    .is_some_and(|sample| owners.contains(&sample))
            })
            .or(state.activities.last());
        found.map(|activity| activity.process)
    }

    fn state(&self) -> MutexGuard<'_, ActiveState> {
        self.state.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_belongs_to_the_run_of_its_sample_in_its_process() {
        let active = Active::default();
        let first = active.begin(1, 0, Some(7), false);
        let other = active.begin(1, 1, Some(8), false);
        let elsewhere = active.begin(2, 0, Some(7), true);
        assert_eq!(active.context(1, &[7]), (Some(7), Some(first), false));
        assert_eq!(
            active.context(1, &[9, 8]),
            (Some(8), Some(other), false),
            "what runs decides"
        );
        assert_eq!(active.context(2, &[7]), (Some(7), None, true));
        assert_eq!(active.context(1, &[]), (None, None, false), "two run");
        active.end(other);
        assert_eq!(active.context(1, &[]), (Some(7), Some(first), false));
        assert_eq!(
            active.context(1, &[8]),
            (Some(8), None, false),
            "its run has ended"
        );
        active.end(elsewhere);
        assert_eq!(active.context(2, &[7]), (Some(7), None, false));
    }
}
