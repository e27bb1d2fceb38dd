//! A dead letter of the consumer's own that is delivered again while its record says that the
//! message has failed.

use std::time::Duration;

use oncegate_core::record::TokenTag;
use tracing::warn;

use super::end::End;
use super::item::Item;
use super::settings::ReturnedLetters;
use super::shared::Shared;
use crate::health::WaitCause;

/// Returns whether the delivery is a dead letter that a consumer of this scope has written.
pub(super) fn is_own(item: &Item) -> bool {
    item.delivery.message.dead_letter_of() == Some(item.route.gate.scope())
}

/// Lets the message run again, or writes its dead letter again. The record says that the message
/// has failed, and the delivery is its dead letter: an ack would lose the message.
pub(super) async fn follow(shared: &Shared, item: &Item, (reason, by): (String, TokenTag)) -> End {
    let gate = &item.route.gate;
    let scope = gate.scope();
    let origin = item.delivery.message.origin();
    if shared.settings.returned_letters == ReturnedLetters::WriteBack {
        warn!(scope, %origin, "a dead letter has come back; it is written to the dead letters again");
        return End::NotHandedOver { reason, by };
    }
    warn!(scope, %origin, "a dead letter has come back; its record is reopened, and its message runs again");
    let Ok(identity) = &item.identity else {
        return End::NotHandedOver { reason, by };
    };
    match gate.reopen_failed(&identity.key).await {
        // The next claim is granted, or finds what has changed the record meanwhile.
        Ok(()) => End::NotNow {
            ask_again_in: Duration::ZERO,
            cause: WaitCause::Retry,
        },
        Err(error) => End::NoAnswer { error },
    }
}
