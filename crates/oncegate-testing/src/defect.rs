//! The kinds of defects that the judge tells apart, with what they mean and how they are mended.

use std::fmt;

use schemars::JsonSchema;
use serde::Serialize;

/// A fault of a handler, its key or its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Defect {
    /// No key can be derived from a sample.
    NoKey,
    /// Different events have one key.
    KeyTooNarrow,
    /// The same event has several keys.
    KeyTooWide,
    /// An effect happened twice, and the calls had no `Idempotency-Key`.
    NoDownstreamKey,
    /// An effect happened twice, under different keys.
    ChangingDownstreamKey,
    /// Different effects had one `Idempotency-Key`, so that the second one did not happen.
    SharedDownstreamKey,
    /// A repetition of a call had the `Idempotency-Key` of the first one, and another body.
    ChangingBody,
    /// The witness lists an effect twice.
    RepeatedEffect,
    /// An effect happened again while the handler was told of a duplicate.
    EffectInDuplicate,
    /// An effect happened twice, the second time after the run was asked to stop.
    EffectAfterCancel,
    /// The handler reported success before its effect had happened.
    AnsweredTooEarly,
    /// The handler reported success although the downstream service had not accepted the call.
    SwallowedError,
    /// The handler has noted a message as done before its effect, and skipped it after a failure.
    MarkedBeforeEffect,
    /// The handler gave up although the failure would have passed.
    GaveUp,
    /// An effect did not happen.
    LostEffect,
    /// A fault has led to an effect that its sample does not have without one.
    UnexpectedEffect,
    /// Two runs for one event have returned different results.
    DifferentResults,
    /// A message was never finished.
    Unfinished,
    /// A consumer has failed.
    ConsumerFailed,
    /// A handler or worker did not end when it was asked to.
    DoesNotStop,
}

impl Defect {
    /// Every defect.
    pub const ALL: [Self; 20] = [
        Self::NoKey,
        Self::KeyTooNarrow,
        Self::KeyTooWide,
        Self::NoDownstreamKey,
        Self::ChangingDownstreamKey,
        Self::SharedDownstreamKey,
        Self::ChangingBody,
        Self::RepeatedEffect,
        Self::EffectInDuplicate,
        Self::EffectAfterCancel,
        Self::AnsweredTooEarly,
        Self::SwallowedError,
        Self::MarkedBeforeEffect,
        Self::GaveUp,
        Self::LostEffect,
        Self::UnexpectedEffect,
        Self::DifferentResults,
        Self::Unfinished,
        Self::ConsumerFailed,
        Self::DoesNotStop,
    ];

    /// Returns the lower-case name for reports: `no-downstream-key`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NoKey => "no-key",
            Self::KeyTooNarrow => "key-too-narrow",
            Self::KeyTooWide => "key-too-wide",
            Self::NoDownstreamKey => "no-downstream-key",
            Self::ChangingDownstreamKey => "changing-downstream-key",
            Self::SharedDownstreamKey => "shared-downstream-key",
            Self::ChangingBody => "changing-body",
            Self::RepeatedEffect => "repeated-effect",
            Self::EffectInDuplicate => "effect-in-duplicate",
            Self::EffectAfterCancel => "effect-after-cancel",
            Self::AnsweredTooEarly => "answered-too-early",
            Self::SwallowedError => "swallowed-error",
            Self::MarkedBeforeEffect => "marked-before-effect",
            Self::GaveUp => "gave-up",
            Self::LostEffect => "lost-effect",
            Self::UnexpectedEffect => "unexpected-effect",
            Self::DifferentResults => "different-results",
            Self::Unfinished => "unfinished",
            Self::ConsumerFailed => "consumer-failed",
            Self::DoesNotStop => "does-not-stop",
        }
    }

    /// The defects that may have this one as their only reason. They are mended with it, or found
    /// again without it.
    pub(crate) const fn leads_to(self) -> &'static [Self] {
        match self {
            Self::NoKey | Self::ConsumerFailed => {
                &[Self::GaveUp, Self::LostEffect, Self::Unfinished]
            }
            Self::KeyTooNarrow => &[Self::LostEffect, Self::ChangingBody],
            Self::KeyTooWide => &[Self::RepeatedEffect, Self::ChangingDownstreamKey],
            Self::NoDownstreamKey => &[Self::EffectAfterCancel, Self::DifferentResults],
            Self::ChangingDownstreamKey | Self::RepeatedEffect => &[Self::DifferentResults],
            Self::SharedDownstreamKey => {
                &[Self::LostEffect, Self::UnexpectedEffect, Self::ChangingBody]
            }
            Self::SwallowedError => &[Self::LostEffect, Self::DifferentResults],
            Self::AnsweredTooEarly => &[Self::LostEffect],
            Self::MarkedBeforeEffect => &[Self::LostEffect, Self::DifferentResults],
            Self::Unfinished => &[Self::DoesNotStop],
            _ => &[],
        }
    }

    /// The defects that may have this one as their only reason where they need a fault and this one
    /// needs none: what is lost anyway is lost around a fault, too.
    pub(crate) const fn leads_to_under_faults(self) -> &'static [Self] {
        match self {
            Self::LostEffect => &[Self::AnsweredTooEarly, Self::MarkedBeforeEffect],
            _ => &[],
        }
    }

    /// Returns what the defect means in production.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::NoKey => {
                "Messages like this one go to the dead letters, and their effect never happens."
            }
            Self::KeyTooNarrow => {
                "The key is too narrow: different events count as one, so the effects of all but the first are lost."
            }
            Self::KeyTooWide => {
                "The key is too wide: it has a field that changes when the same event is sent again, so the event is handled again."
            }
            Self::NoDownstreamKey => {
                "The handler calls the downstream service without an idempotency key. After a crash or a lost answer, a message runs again, and its effect happens twice."
            }
            Self::ChangingDownstreamKey => {
                "The handler sends another idempotency key in each attempt, so the downstream service cannot recognise a repetition."
            }
            Self::SharedDownstreamKey => {
                "Different effects have one idempotency key. The downstream service takes the second for a repetition of the first, and it never happens."
            }
            Self::ChangingBody => {
                "The handler calls the downstream service again under the same idempotency key, with another body. Payment services refuse such a call, and others keep the first body."
            }
            Self::RepeatedEffect => {
                "The handler writes its effect again when a message runs again, after a crash or a lost lease."
            }
            Self::EffectInDuplicate => {
                "The handler has its effect again when it is told of a duplicate. Every redelivery then adds one."
            }
            Self::EffectAfterCancel => {
                "A run that had lost its lease went on, while another one had the effect, too."
            }
            Self::AnsweredTooEarly => {
                "The handler reports success before the effect has happened. The message is acknowledged then, and a crash loses the effect."
            }
            Self::SwallowedError => {
                "The handler ignores a failure of the downstream service and reports success. The message is acknowledged, and its effect never happens."
            }
            Self::MarkedBeforeEffect => {
                "The handler keeps its own note that a message is done, and writes it before the effect. When the effect fails, the next attempt skips it."
            }
            Self::GaveUp => {
                "The handler sends a message to the dead letters because of a failure that would have passed."
            }
            Self::LostEffect => "The message was handled, and its effect never happened.",
            Self::UnexpectedEffect => {
                "The handler has an effect after a fault that the same message does not have without one, such as the cancellation of an earlier effect. Another run may have completed the message by then."
            }
            Self::DifferentResults => {
                "Two runs for one event return different results. After a crash, the stored result is not the one that was used before."
            }
            Self::Unfinished => {
                "A message is never finished. It holds up the committed offset, or its queue."
            }
            Self::ConsumerFailed => "A consumer ended with an error.",
            Self::DoesNotStop => {
                "A handler or worker does not end when it is asked to. A deployment then kills it in the middle of its work."
            }
        }
    }

    /// Returns how the defect is usually mended.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::NoKey => {
                "Correct the paths of the key, or make it of fields that every event has."
            }
            Self::KeyTooNarrow => {
                "Add the fields that tell the events apart, such as the currency or the kind of the event."
            }
            Self::KeyTooWide => {
                "Remove times, counters and ids of deliveries from the key, or give a normaliser such as timestamp-days."
            }
            Self::NoDownstreamKey => {
                "Send the idempotency key of the attempt as the header Idempotency-Key: Attempt::idempotency_key in Rust, idempotency_key in a message to a worker. If the service takes none, ask it whether the effect has happened when the attempt is marked as recovered."
            }
            Self::ChangingDownstreamKey => {
                "Send the idempotency key of the attempt as it is. Add no time, random number or number of the attempt."
            }
            Self::SharedDownstreamKey => {
                "Use another step for each effect of a message: Attempt::idempotency_key(\"charge\") in Rust; in a worker, append the step to the idempotency key. Keep nothing of one message for the next."
            }
            Self::ChangingBody => {
                "Make the body of the event alone: leave out times, random numbers, the number of the attempt, and fields that differ when the event is sent again."
            }
            Self::RepeatedEffect => {
                "Write the idempotency key of the attempt with the effect, under a unique constraint, and ignore a second write (INSERT ... ON CONFLICT DO NOTHING); or commit the effect in the transaction that completes the record."
            }
            Self::EffectInDuplicate => {
                "Let the hook for duplicates send the stored result, and nothing else."
            }
            Self::EffectAfterCancel => {
                "Send the idempotency key of the attempt with every effect, and begin no effect when the attempt is cancelled."
            }
            Self::AnsweredTooEarly => {
                "Await the effect before the handler returns. Start no thread, task or timer that does it later."
            }
            Self::SwallowedError => "Return the error, so that the message is tried again.",
            Self::MarkedBeforeEffect => {
                "Remove the note: oncegate keeps it, and writes it after the effect."
            }
            Self::GaveUp => {
                "Give up only where another attempt cannot succeed, such as a payload that cannot be read; return every other failure for another attempt."
            }
            Self::LostEffect => {
                "Look for conditions under which the handler returns without its effect. If the event has no effect, remove it from the samples."
            }
            Self::UnexpectedEffect => {
                "Undo nothing when an attempt is cancelled or has failed: the next one repeats the effect under the same idempotency key. Have the same effects in every attempt."
            }
            Self::DifferentResults => {
                "Make the result of the event and of the downstream service's answer, which is the same for a repetition. Leave out times and random numbers."
            }
            Self::Unfinished => {
                "Give every call a time limit, and answer every message. If the machine was busy, repeat the trial with a longer lease."
            }
            Self::ConsumerFailed => "The error says what to change.",
            Self::DoesNotStop => {
                "End when standard input ends, and let handlers return when their attempt is cancelled."
            }
        }
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
