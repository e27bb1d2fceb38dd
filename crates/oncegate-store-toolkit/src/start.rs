//! Waits at the start for a server that is away.

use std::time::Duration;

use oncegate_core::store::StoreError;
use tokio::time::{Instant, sleep};
use tracing::warn;

/// The first delay between two tries. It doubles.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// The longest delay: a server that is back stays unused for up to this time.
const LONGEST_DELAY: Duration = Duration::from_secs(5);

/// Connects with `connect`; while the server is away, tries again until `patience` is over. With a
/// patience of zero it tries once. `fraction` gives random numbers from 0 up to 1: each delay is
/// shortened by up to a half.
///
/// # Errors
/// The error of the last try, at once if the server has answered it.
pub async fn until_reachable<T, Connecting>(
    patience: Duration,
    fraction: impl Fn() -> f64,
    connect: impl Fn() -> Connecting,
) -> Result<T, StoreError>
where
    Connecting: Future<Output = Result<T, StoreError>>,
{
    let began = Instant::now();
    let mut delay = FIRST_DELAY;
    loop {
        let error = match connect().await {
            Ok(connected) => return Ok(connected),
            Err(error) => error,
        };
        if !error.is_away() || began.elapsed() >= patience {
            return Err(error);
        }
        warn!(%error, ?patience, "the store is away; trying again until `start_patience` is over");
        sleep(delay.mul_f64(1.0 - fraction() / 2.0)).await;
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// Connects to a server that answers after `away` tries. Returns the number of tries, and their
    /// time.
    async fn connected(
        patience: Duration,
        away: u32,
        error: StoreError,
    ) -> (Result<(), StoreError>, u32, Duration) {
        let tries = AtomicU32::new(0);
        let began = Instant::now();
        let result = until_reachable(
            patience,
            || 0.0,
            || {
                let is_there = tries.fetch_add(1, Ordering::Relaxed) >= away;
                std::future::ready(if is_there { Ok(()) } else { Err(error.clone()) })
            },
        )
        .await;
        (result, tries.into_inner(), began.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn an_absent_server_is_tried_ever_less_often_within_patience() {
        let minute = Duration::from_secs(60);
        let (result, tries, took) =
            connected(minute, 6, StoreError::unavailable("connection refused")).await;
        assert!(result.is_ok(), "{result:?}");
        assert_eq!(
            (tries, took),
            (
                7,
                Duration::from_millis(200 + 400 + 800 + 1_600 + 3_200 + 5_000)
            )
        );
        let (result, tries, took) =
            connected(minute, 1_000, StoreError::unknown("no answer")).await;
        assert!(
            result.is_err() && took >= minute && tries < 20,
            "{tries} tries in {took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn without_patience_or_after_a_refusal_it_is_tried_once() {
        let (result, tries, _) = connected(
            Duration::ZERO,
            1,
            StoreError::unavailable("connection refused"),
        )
        .await;
        assert!(result.is_err() && tries == 1);
        let (result, tries, _) =
            connected(Duration::MAX, 1, StoreError::refused("a wrong password")).await;
        assert!(result.is_err() && tries == 1);
    }
}
