//! The state of a message in the engine, and what follows from an event.
//!
//! [`next`] is pure: it has no clock, no I/O and no table. Time and facts about other messages are
//! parameters.

use std::time::Instant;

use super::outages::{Shard, StoreAccess};
use crate::health::WaitCause;

/// The state of a message between its arrival in the engine and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::consumer) enum MessageState {
    /// Other messages are before it in this many of its lanes: at least one.
    Behind { lanes: usize },
    /// The message starts with the next free permit.
    Ready,
    /// The prefetch found it completed: it is answered with the next free permit, and is in no
    /// lane.
    Found,
    /// The message waits for a point in time.
    Delayed(Delay),
    /// The tenant of the message has as many messages running as allowed.
    TenantFull,
    /// The message's shard of the store does not answer.
    StoreAway { shard: Shard },
    /// The message asks no store itself, and waits until a store answers again: it must not
    /// overtake the messages that ask.
    EveryStoreAway,
    /// The circuit breaker has paused the handler of the message.
    HandlerPaused,
    /// A task runs its attempt.
    Running {
        /// The shard of the store that the attempt asks, if any.
        asks: Option<Shard>,
        /// `true` if the attempt finds out whether that shard, which was away, answers again.
        is_probe: bool,
    },
    /// A task answers it with the result that the prefetch found.
    Answering,
    /// The message has left the engine.
    Gone,
}

/// The cause of a wait, and its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::consumer) struct Delay {
    pub(in crate::consumer) cause: WaitCause,
    /// Since when it has been waiting for this, over several attempts.
    pub(in crate::consumer) since: Instant,
    pub(in crate::consumer) until: Instant,
}

/// An event in the life of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MessageEvent {
    /// A message before it has left a lane.
    LaneAdvanced,
    /// A permit is free, and it is the message's turn.
    Offered(Facts),
    /// The time is now this.
    TimeIs(Instant),
    /// Fewer messages of its tenant run than allowed.
    TenantHasRoom,
    /// The message's shard of the store answers again, or messages run without it from now on. If
    /// the message runs to find that out, it has.
    StoreAnswers,
    /// The message's handler may run again, or a message is wanted that finds that out.
    HandlerResumes,
    /// The message belongs to another consumer now: its partition was revoked, or its queue has
    /// taken it back.
    Revoked,
    /// The circuit breaker did not admit the start.
    HandlerRefused,
    /// The attempt has settled the message: it was acknowledged, or belongs to another consumer.
    Finished,
    /// The attempt wants another one after a delay.
    TryAgain(Delay),
    /// The store did not answer its attempt.
    NoAnswer,
    /// The consumer stops. What runs may end.
    Stopped,
}

/// The facts that decide whether an offered message starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) tenant_is_full: bool,
    /// The shard of the store that the attempt must ask, if any.
    pub(super) shard: Option<Shard>,
    /// The access to that shard; without one, to any store that messages wait for.
    pub(super) access: StoreAccess,
}

/// The engine's task after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// Start the task of the new state.
    Start,
    /// Remove the message: those behind it advance.
    Remove,
}

/// Returns the state after the event, and what the engine must do. An event that does not concern
/// the state changes nothing.
pub(super) fn next(state: MessageState, event: MessageEvent) -> (MessageState, Action) {
    use MessageEvent as On;
    use MessageState as Is;
    match (state, event) {
        (Is::Behind { lanes }, On::LaneAdvanced) if lanes > 1 => {
            (Is::Behind { lanes: lanes - 1 }, Action::Nothing)
        }
        (Is::Behind { .. }, On::LaneAdvanced) => (Is::Ready, Action::Nothing),
        (Is::Ready | Is::StoreAway { .. }, On::Offered(facts)) => offered(facts),
        (Is::Found, On::Offered(_)) => (Is::Answering, Action::Start),
        (Is::Delayed(delay), On::TimeIs(now)) if delay.until <= now => (Is::Ready, Action::Nothing),
        (Is::TenantFull, On::TenantHasRoom)
        | (Is::StoreAway { .. } | Is::EveryStoreAway, On::StoreAnswers)
        | (Is::HandlerPaused, On::HandlerResumes)
        | (Is::Running { asks: None, .. }, On::NoAnswer) => (Is::Ready, Action::Nothing),
        // The probe is over, and its handler may run for a long time yet.
        (
            Is::Running {
                asks,
                is_probe: true,
            },
            On::StoreAnswers,
        ) => (
            Is::Running {
                asks,
                is_probe: false,
            },
            Action::Nothing,
        ),
        (Is::Running { .. }, On::HandlerRefused) => (Is::HandlerPaused, Action::Nothing),
        (Is::Running { .. }, On::TryAgain(delay)) => (Is::Delayed(delay), Action::Nothing),
        (
            Is::Running {
                asks: Some(shard), ..
            },
            On::NoAnswer,
        ) => (Is::StoreAway { shard }, Action::Nothing),
        // No permit was free for its answer in time.
        (Is::Answering, On::TryAgain(_) | On::NoAnswer) => (Is::Found, Action::Nothing),
        (Is::Running { .. } | Is::Answering, On::Finished) => (Is::Gone, Action::Remove),
        // Each is first in its lanes. What is ready finds out when it starts, and what is behind
        // others when it is first.
        (
            Is::Delayed(_)
            | Is::TenantFull
            | Is::StoreAway { .. }
            | Is::EveryStoreAway
            | Is::HandlerPaused,
            On::Revoked,
        ) => (Is::Gone, Action::Remove),
        // The places in the lanes go with the engine: what waits leaves, and nothing advances.
        (Is::Running { .. } | Is::Answering, On::Stopped) => (state, Action::Nothing),
        (_, On::Stopped) => (Is::Gone, Action::Nothing),
        _ => (state, Action::Nothing),
    }
}

/// A message starts when its tenant has room and its store can be asked, or it waits for the first
/// of them.
fn offered(facts: Facts) -> (MessageState, Action) {
    if facts.tenant_is_full {
        return (MessageState::TenantFull, Action::Nothing);
    }
    let (asks, is_probe) = match (facts.shard, facts.access) {
        (None, StoreAccess::Away) => return (MessageState::EveryStoreAway, Action::Nothing),
        (Some(shard), StoreAccess::Away) => {
            return (MessageState::StoreAway { shard }, Action::Nothing);
        }
        (None, _) | (_, StoreAccess::Bypassed) => (None, false),
        (asks, StoreAccess::Open) => (asks, false),
        (asks, StoreAccess::ProbeDue) => (asks, true),
    };
    (MessageState::Running { asks, is_probe }, Action::Start)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use Action::{Nothing, Remove, Start};
    use MessageEvent as On;
    use MessageState as Is;

    use super::*;

    const SHARD: Shard = Shard {
        route: 1,
        number: 2,
    };
    const AWAY: MessageState = Is::StoreAway { shard: SHARD };
    const RUNNING: [MessageState; 3] = [WITHOUT_STORE, ASKING, PROBING];
    const WITHOUT_STORE: MessageState = Is::Running {
        asks: None,
        is_probe: false,
    };
    const ASKING: MessageState = Is::Running {
        asks: Some(SHARD),
        is_probe: false,
    };
    const PROBING: MessageState = Is::Running {
        asks: Some(SHARD),
        is_probe: true,
    };

    const fn offer(
        tenant_is_full: bool,
        shard: Option<Shard>,
        access: StoreAccess,
    ) -> MessageEvent {
        On::Offered(Facts {
            tenant_is_full,
            shard,
            access,
        })
    }

    /// Each kind of offer, and where it leads a message that is ready.
    const OFFERS: [(MessageEvent, MessageState, Action); 7] = [
        (
            offer(true, Some(SHARD), StoreAccess::Open),
            Is::TenantFull,
            Nothing,
        ),
        (offer(false, Some(SHARD), StoreAccess::Open), ASKING, Start),
        (offer(false, None, StoreAccess::Open), WITHOUT_STORE, Start),
        (
            offer(false, Some(SHARD), StoreAccess::ProbeDue),
            PROBING,
            Start,
        ),
        (offer(false, Some(SHARD), StoreAccess::Away), AWAY, Nothing),
        (
            offer(false, Some(SHARD), StoreAccess::Bypassed),
            WITHOUT_STORE,
            Start,
        ),
        (
            offer(false, None, StoreAccess::Away),
            Is::EveryStoreAway,
            Nothing,
        ),
    ];

    fn delay(until: Instant) -> Delay {
        Delay {
            cause: WaitCause::Retry,
            since: until,
            until,
        }
    }

    fn states(now: Instant) -> Vec<MessageState> {
        let due = Is::Delayed(delay(now));
        let later = Is::Delayed(delay(now + Duration::from_millis(1)));
        let behind_two = Is::Behind { lanes: 2 };
        let behind_one = Is::Behind { lanes: 1 };
        let waiting = [
            behind_two,
            behind_one,
            Is::Ready,
            Is::Found,
            due,
            later,
            Is::TenantFull,
            AWAY,
        ];
        [
            &waiting[..],
            &[
                Is::EveryStoreAway,
                Is::HandlerPaused,
                Is::Answering,
                Is::Gone,
            ],
            &RUNNING,
        ]
        .concat()
    }

    fn events(now: Instant) -> Vec<MessageEvent> {
        let of_others = [
            On::LaneAdvanced,
            On::TenantHasRoom,
            On::StoreAnswers,
            On::HandlerResumes,
            On::Revoked,
            On::Stopped,
        ];
        let of_attempt = [
            On::HandlerRefused,
            On::Finished,
            On::TryAgain(delay(now)),
            On::NoAnswer,
        ];
        [
            &of_others[..],
            &[On::TimeIs(now)],
            &of_attempt,
            &OFFERS.map(|(offer, ..)| offer),
        ]
        .concat()
    }

    /// Every change of a state.
    fn changes(now: Instant) -> Vec<(MessageState, MessageEvent, MessageState, Action)> {
        let due = Is::Delayed(delay(now));
        let mut changes = vec![
            (
                Is::Behind { lanes: 2 },
                On::LaneAdvanced,
                Is::Behind { lanes: 1 },
                Nothing,
            ),
            (
                Is::Behind { lanes: 1 },
                On::LaneAdvanced,
                Is::Ready,
                Nothing,
            ),
            (due, On::TimeIs(now), Is::Ready, Nothing),
            (Is::TenantFull, On::TenantHasRoom, Is::Ready, Nothing),
            (AWAY, On::StoreAnswers, Is::Ready, Nothing),
            (Is::EveryStoreAway, On::StoreAnswers, Is::Ready, Nothing),
            (Is::HandlerPaused, On::HandlerResumes, Is::Ready, Nothing),
            (PROBING, On::StoreAnswers, ASKING, Nothing),
            (WITHOUT_STORE, On::NoAnswer, Is::Ready, Nothing),
            (ASKING, On::NoAnswer, AWAY, Nothing),
            (PROBING, On::NoAnswer, AWAY, Nothing),
            (Is::Answering, On::Finished, Is::Gone, Remove),
            (Is::Answering, On::TryAgain(delay(now)), Is::Found, Nothing),
            (Is::Answering, On::NoAnswer, Is::Found, Nothing),
        ];
        for (offer, to, action) in OFFERS {
            changes.extend([
                (Is::Ready, offer, to, action),
                (AWAY, offer, to, action),
                (Is::Found, offer, Is::Answering, Start),
            ]);
        }
        for state in [Is::TenantFull, AWAY, Is::EveryStoreAway, Is::HandlerPaused] {
            changes.push((state, On::Revoked, Is::Gone, Remove));
        }
        let delayed = states(now)
            .into_iter()
            .filter(|state| matches!(state, Is::Delayed(_)));
        changes.extend(delayed.map(|state| (state, On::Revoked, Is::Gone, Remove)));
        for state in RUNNING {
            changes.extend([
                (state, On::HandlerRefused, Is::HandlerPaused, Nothing),
                (state, On::Finished, Is::Gone, Remove),
                (state, On::TryAgain(delay(now)), due, Nothing),
            ]);
        }
        let stopped = states(now)
            .into_iter()
            .filter(|state| !RUNNING.contains(state) && *state != Is::Answering);
        changes.extend(stopped.map(|state| (state, On::Stopped, Is::Gone, Nothing)));
        changes
    }

    /// Every state with every event. What is not listed as a change must leave the state as it is.
    // invariant: schedule-loses-message
    #[test]
    fn every_event_in_every_state_leads_where_the_table_says() {
        let now = Instant::now();
        let changes = changes(now);
        for state in states(now) {
            for event in events(now) {
                let listed = changes
                    .iter()
                    .find(|(from, on, ..)| (*from, *on) == (state, event));
                let expected = listed.map_or((state, Nothing), |(_, _, to, action)| (*to, *action));
                assert_eq!(next(state, event), expected, "{state:?}, {event:?}");
            }
        }
    }
}
