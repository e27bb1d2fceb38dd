//! Waits for a condition by polling.

use std::time::{Duration, Instant};

/// Interval at which the condition is checked.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Polls until the answer is `Ok`, and returns its value.
///
/// # Panics
/// When the answer is not `Ok` within `limit`; the text has `what` and the last answer.
pub async fn until<T>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(answer) => {
                assert!(
                    Instant::now() < deadline,
                    "waited {limit:?} for {what}: {answer}"
                );
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
        }
    }
}
