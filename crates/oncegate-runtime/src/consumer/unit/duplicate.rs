//! Answers a duplicate: its message was completed before, and the handler gets the stored result.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::time::sleep;
use tracing::warn;

use super::super::end::End;
use super::super::item::Item;
use crate::gate::Unfetched;
use crate::health::WaitCause;
use crate::observe::Event;

/// The number of calls of `Handler::duplicate` before its failure is counted and the message
/// acknowledged.
const DUPLICATE_TRIES: u32 = 3;

/// The delay before it is called again, times the number of its failures.
const DUPLICATE_BACKOFF: Duration = Duration::from_millis(100);

/// The delay before a duplicate asks again for a result whose result store does not answer.
const RESULT_RECHECK: Duration = Duration::from_secs(2);

/// Passes the first result to the handler. Whatever the handler does with it, the message is done.
pub(super) async fn answer(item: &Item, stored: Bytes) -> End {
    let (result, lost) = match item.route.gate.fetch(&stored).await {
        Ok(result) => (result, None),
        Err(Unfetched::Lost(error)) => (stored, Some(error.to_string())),
        Err(Unfetched::NoAnswer(_)) => {
            return End::NotNow {
                ask_again_in: RESULT_RECHECK,
                cause: WaitCause::Result,
            };
        }
    };
    let handler = &item.route.handler;
    for failures in 1..=DUPLICATE_TRIES {
        let message = item.delivery.message.clone();
        let result = result.clone();
        let lost = lost.clone().map(Into::into);
        let call = async move { handler.duplicate(message, result, lost).await };
        match AssertUnwindSafe(call).catch_unwind().await {
            Ok(Ok(())) => return End::Duplicate,
            Ok(Err(failure)) => {
                warn!(origin = %item.delivery.message.origin(), %failure, "`Handler::duplicate` failed");
            }
            Err(_panic) => {
                warn!(origin = %item.delivery.message.origin(), "`Handler::duplicate` panicked");
            }
        }
        sleep(DUPLICATE_BACKOFF * failures).await;
    }
    item.route.gate.observe(Event::DuplicateHookFailed {
        scope: item.route.gate.scope(),
    });
    End::Duplicate
}
