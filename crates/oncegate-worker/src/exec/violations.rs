//! Counts how often workers break the protocol in a row.

use parking_lot::Mutex;

use tokio_util::sync::CancellationToken;

/// The number of wrong or damaged answers in a row, of all workers of a consumer, that stops the
/// consumer. The first may be an accident, the second says that the program is wrong. Each costs
/// the message an attempt, with an unknown outcome.
const MOST_IN_A_ROW: u32 = 2;

/// The wrong or damaged answers since the last right one.
#[derive(Debug, Default)]
pub(super) struct Violations {
    in_a_row: Mutex<InARow>,
    too_many: CancellationToken,
}

#[derive(Debug, Default)]
struct InARow {
    count: u32,
    /// The reason why the consumer must stop, once it must.
    reason: Option<String>,
}

impl Violations {
    /// Notes a right answer.
    pub(super) fn forget(&self) {
        self.in_a_row.lock().count = 0;
    }

    pub(super) fn note(&self, why: &str) {
        let mut in_a_row = self.in_a_row.lock();
        in_a_row.count += 1;
        if in_a_row.count >= MOST_IN_A_ROW && in_a_row.reason.is_none() {
            in_a_row.reason = Some(format!(
                "the worker breaks the protocol: {MOST_IN_A_ROW} wrong answers in a row, the last one in {why}; \
                 correct the worker, before this uses up the attempts of its messages (docs/RUN.md)"
            ));
            self.too_many.cancel();
        }
    }

    /// Resolves when the consumer must stop.
    pub(super) async fn too_many(&self) {
        self.too_many.cancelled().await;
    }

    /// Returns why the consumer must stop, if it must.
    pub(super) fn reason(&self) -> Option<String> {
        self.in_a_row.lock().reason.clone()
    }
}
