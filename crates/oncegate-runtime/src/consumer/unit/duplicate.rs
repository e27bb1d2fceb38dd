//! Answers a duplicate: its message was completed before, and the handler gets the stored result.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use tokio::time::{sleep, timeout};
use tracing::{Instrument as _, Span, warn};

use super::super::end::End;
use super::super::item::Item;
use super::super::member::Member;
use crate::gate::Unfetched;
use crate::handler::BoxFuture;
use crate::health::WaitCause;
use crate::observe::Event;

/// The number of calls of `Handler::duplicate` before its failure is counted and the message
/// acknowledged.
const DUPLICATE_TRIES: u32 = 3;

/// The delay before it is called again, times the number of its failures.
const DUPLICATE_BACKOFF: Duration = Duration::from_millis(100);

/// The delay before a duplicate asks again for a result whose result store does not answer.
const RESULT_RECHECK: Duration = Duration::from_secs(2);

/// A member whose record is completed, and its result.
#[derive(Debug)]
pub(super) struct Answering {
    pub(super) member: Member,
    stored: Bytes,
    span: Span,
    /// The prefetch has found the result.
    is_found: bool,
}

impl Answering {
    pub(super) fn new(member: Member, stored: Bytes, span: Span) -> Self {
        Self {
            member,
            stored,
            span,
            is_found: false,
        }
    }

    /// A member that the prefetch found completed.
    pub(super) fn found(member: Member, stored: Bytes) -> Self {
        Self {
            is_found: true,
            ..Self::new(member, stored, Span::none())
        }
    }

    /// Returns the member, to be answered later. What was found is not looked for again.
    pub(super) fn put_off(self) -> Member {
        let Self {
            mut member,
            stored,
            is_found,
            ..
        } = self;
        member.permit = None;
        if is_found {
            member.item.found = Some(stored);
        }
        member
    }

    /// Passes the result to the handler. Returns the member with its end.
    pub(super) fn answer(self) -> BoxFuture<'static, (Member, End)> {
        let Self {
            member,
            stored,
            span,
            ..
        } = self;
        let answering = async move {
            let end = answer(&member.item, stored).await;
            (member, end)
        };
        Box::pin(answering.instrument(span))
    }
}

/// Passes the first result to the handler. Whatever the handler does with it, the message is done.
async fn answer(item: &Item, stored: Bytes) -> End {
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
    // A hook that never returned would keep its permit, and its partition could not be committed.
    let max_run = item.route.gate.settings().max_run;
    let is_told = match timeout(max_run, tell(item, result, lost)).await {
        Ok(is_told) => is_told,
        Err(_too_long) => {
            warn!(origin = %item.delivery.message.origin(), ?max_run, "`Handler::duplicate` has run for too long; it is dropped");
            false
        }
    };
    if !is_told {
        item.route.gate.observe(Event::DuplicateHookFailed {
            scope: item.route.gate.scope(),
        });
    }
    End::Duplicate
}

/// Calls the handler's hook, several times if it fails. Returns whether it has succeeded.
async fn tell(item: &Item, result: Bytes, lost: Option<String>) -> bool {
    let handler = &item.route.handler;
    for failures in 1..=DUPLICATE_TRIES {
        let message = item.delivery.message.clone();
        let result = result.clone();
        let lost = lost.clone().map(Into::into);
        let call = async move { handler.duplicate(message, result, lost).await };
        match AssertUnwindSafe(call).catch_unwind().await {
            Ok(Ok(())) => return true,
            Ok(Err(failure)) => {
                warn!(origin = %item.delivery.message.origin(), %failure, "`Handler::duplicate` failed");
            }
            Err(_panic) => {
                warn!(origin = %item.delivery.message.origin(), "`Handler::duplicate` panicked");
            }
        }
        sleep(DUPLICATE_BACKOFF * failures).await;
    }
    false
}
