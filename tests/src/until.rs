//! Waits for a condition that nobody announces.

use std::time::{Duration, Instant};

/// How often it is looked at again.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Looks again and again until the answer is `Ok`.
///
/// # Panics
/// When it is not within `limit`; the text has `what` and the last answer.
pub async fn until<T>(what: &str, limit: Duration, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(answer) => {
                assert!(Instant::now() < deadline, "waited {limit:?} for {what}: {answer}");
                tokio::time::sleep(LOOK_INTERVAL).await;
            }
        }
    }
}
