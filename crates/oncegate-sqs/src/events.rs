//! The events that a queue has besides those of every source, as `source_events` counts them.

use oncegate_runtime::observe::Event;

/// A call that receives messages. SQS charges for each call.
pub(crate) const RECEIVE: &str = "sqs_receive";
/// A call that deletes messages.
pub(crate) const DELETE: &str = "sqs_delete";
/// A call that changes visibility timeouts.
pub(crate) const CHANGE_VISIBILITY: &str = "sqs_change_visibility";
/// A message held for another visibility timeout.
pub(crate) const VISIBILITY_EXTENDED: &str = "sqs_visibility_extended";
/// A message whose visibility timeout has ended, or may end at any moment: it is not deleted by the
/// delivery that lost it.
pub(crate) const VISIBILITY_LOST: &str = "sqs_visibility_lost";
/// A message that went back to the queue: for a retry, or not started before a stop.
pub(crate) const RETURNED: &str = "sqs_returned";
/// A finished message that could not be deleted before the queue delivers it again; its record
/// answers the duplicate.
pub(crate) const DELETE_FAILED: &str = "sqs_delete_failed";
/// A message received for the last time before the queue's redrive policy moves it.
pub(crate) const LAST_RECEIVE: &str = "sqs_last_receive";

/// Returns the event that counts so many of them.
pub(crate) fn count(event: &'static str, count: u64) -> Event<'static> {
    Event::Source { event, count }
}
