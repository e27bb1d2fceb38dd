//! Maps an event to the metric of the catalogue that it counts in, and to its numbers.

use std::time::Duration;

use super::Event;

impl Event<'_> {
    /// The short name and the label under which the event is counted, and the number that it
    /// counts. The label is empty where the event has no kinds.
    pub const fn metric(&self) -> (&'static str, &'static str, u64) {
        match *self {
            Self::Claimed { verdict, .. } => ("claims", verdict, 1),
            Self::StoreCalled { operation, .. } => ("store_calls", operation, 1),
            Self::HandlerRan { outcome, .. } => ("handler_runs", outcome.as_str(), 1),
            Self::BatchCalled { call, .. } => ("batch_calls", call.as_str(), 1),
            Self::ExtraRun { cause, .. } => ("extra_runs", cause.as_str(), 1),
            Self::Completed { .. } => ("completions", "", 1),
            Self::CompleteLost { .. } => ("complete_lost", "", 1),
            Self::FingerprintUncompared { .. } => ("fingerprints_uncompared", "", 1),
            Self::OtherContent { .. } => ("other_contents", "", 1),
            Self::ResultNotKept { .. } => ("results_not_kept", "", 1),
            Self::ResultLost { .. } => ("results_lost", "", 1),
            Self::ResultStoreError { operation, .. } => ("result_store_errors", operation, 1),
            Self::JournalDropped { entries, .. } => ("journal_dropped", "", entries),
            Self::DuplicateHookFailed { .. } => ("duplicate_hooks_failed", "", 1),
            Self::Retried { .. } => ("retries", "", 1),
            Self::DeadLettered { cause, .. } => ("dead_letters", cause.as_str(), 1),
            Self::Answered { answer, .. } => ("answers", answer, 1),
            Self::Acked { count, .. } => ("acks", "", count),
            Self::StoreError { class, .. } => ("store_errors", class, 1),
            Self::StoreLost { .. } => ("store_losses", "", 1),
            Self::StorePaused { paused: true } => ("store_paused", "paused", 1),
            Self::StorePaused { paused: false } => ("store_paused", "resumed", 1),
            Self::BreakerChanged { state, .. } => ("breaker_changes", state.as_str(), 1),
            Self::Quarantined { .. } => ("quarantined", "", 1),
            Self::Rebalanced { .. } => ("rebalances", "", 1),
            Self::SourcePaused { cause } => ("source_pauses", cause, 1),
            Self::MemberReplaced { cause } => ("members_replaced", cause, 1),
            Self::TopicMadeAgain => ("topics_made_again", "", 1),
            Self::MessagesGone { count } => ("messages_gone", "", count),
            Self::Committed { .. } => ("commits", "", 1),
            Self::SourceError { operation } => ("source_errors", operation, 1),
            Self::Source { event, count } => ("source_events", event, count),
            Self::OutboxPublished { .. } => ("outbox_published", "", 1),
            Self::OutboxFailed { class } => ("outbox_failures", class, 1),
            Self::OutboxPurged { count } => ("outbox_purged", "", count),
            Self::OutboxLeaderChanged { change } => ("outbox_leader_changes", change, 1),
        }
    }

    /// The short name and label of the duration that the event tells, if it tells one.
    pub const fn duration(&self) -> Option<(&'static str, &'static str, Duration)> {
        match *self {
            Self::HandlerRan { took, .. } => Some(("handler_seconds", "", took)),
            Self::StoreCalled {
                operation, took, ..
            } => Some(("gate_seconds", operation, took)),
            Self::Acked { age: Some(age), .. } => Some(("message_age_seconds", "", age)),
            Self::OutboxPublished { age } => Some(("outbox_age_seconds", "", age)),
            _ => None,
        }
    }

    /// The short name of the size in bytes that the event tells, if it tells one.
    pub const fn size(&self) -> Option<(&'static str, u64)> {
        match *self {
            Self::Completed { result_bytes, .. } => Some(("result_bytes", result_bytes)),
            _ => None,
        }
    }

    /// The scope of the gate that the event belongs to; `None` for events of a source or an engine,
    /// which serve all gates.
    pub const fn scope(&self) -> Option<&str> {
        match *self {
            Self::Claimed { scope, .. }
            | Self::StoreCalled { scope, .. }
            | Self::HandlerRan { scope, .. }
            | Self::BatchCalled { scope, .. }
            | Self::ExtraRun { scope, .. }
            | Self::Completed { scope, .. }
            | Self::CompleteLost { scope }
            | Self::FingerprintUncompared { scope }
            | Self::OtherContent { scope }
            | Self::ResultNotKept { scope }
            | Self::ResultLost { scope }
            | Self::ResultStoreError { scope, .. }
            | Self::JournalDropped { scope, .. }
            | Self::DuplicateHookFailed { scope }
            | Self::Retried { scope }
            | Self::DeadLettered { scope, .. }
            | Self::Answered { scope, .. }
            | Self::Acked { scope, .. }
            | Self::StoreError { scope, .. }
            | Self::StoreLost { scope }
            | Self::BreakerChanged { scope, .. }
            | Self::Quarantined { scope } => Some(scope),
            Self::StorePaused { .. }
            | Self::Rebalanced { .. }
            | Self::SourcePaused { .. }
            | Self::MemberReplaced { .. }
            | Self::TopicMadeAgain
            | Self::MessagesGone { .. }
            | Self::Committed { .. }
            | Self::SourceError { .. }
            | Self::Source { .. }
            | Self::OutboxPublished { .. }
            | Self::OutboxFailed { .. }
            | Self::OutboxPurged { .. }
            | Self::OutboxLeaderChanged { .. } => None,
        }
    }
}
