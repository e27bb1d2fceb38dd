//! Judges a status: a pure function from a status to its reasons.

use std::time::Duration;

use super::stage::{Run, Stage, Unfinished, WaitCause};
use super::status::{PartitionStatus, PauseCause, Phase, ScopeStatus, Status};
use super::{
    COMMIT_LIMIT, CONNECTION_LIMIT, FAILURES_REPORTED, LOOP_LIMIT, POLL_LIMIT, QUIET_LIMIT, Reason,
    TRANSACTION_LIMIT, failures,
};

/// The multiple of the 99th percentile from which on a handler is slow.
const SLOW_FACTOR: u32 = 3;
/// The divisor of the dead-letter limit: from the quotient on, a reason is reported.
const REPORT_DIVISOR: u32 = 2;
/// The number of a worker's processes that end in a row without an outcome from which on they are
/// reported: it is no accident then.
const ENDS_REPORTED: u32 = 2;
/// The number of such processes from which on nothing counts as handled.
const ENDS_OF_ALL: u32 = 3;
/// The most reasons of one kind: a hundred slow handlers are one fact.
const MOST_OF_A_KIND: usize = 3;

/// Returns a reason for everything that is wrong, the worst first.
pub(super) fn reasons(status: &Status) -> Vec<Reason> {
    let mut reasons: Vec<Reason> = life(status).into_iter().collect();
    if status.phase == Phase::Stopped {
        return reasons;
    }
    reasons.extend(failures::reasons(status));
    reasons.extend(worker(status));
    if status.phase != Phase::Starting {
        reasons.extend(stalls(status));
        reasons.extend(stores(status));
        reasons.extend(only_letters_left(status));
        reasons.extend(pauses(status));
        reasons.extend(breakers(status));
        reasons.extend(failing(status));
        reasons.extend(runs(status));
        reasons.extend(
            status
                .source
                .partitions
                .iter()
                .flat_map(partition)
                .take(MOST_OF_A_KIND * 2),
        );
        reasons.extend(
            status
                .waiting
                .iter()
                .filter_map(|message| waits(status, message))
                .take(MOST_OF_A_KIND),
        );
        let refusals = status.refusals;
        if refusals.in_a_row > 0 && refusals.in_a_row >= refusals.most_in_a_row / REPORT_DIVISOR {
            reasons.push(Reason::ManyDeadLetters(refusals));
        }
    }
    reasons.sort_by_key(|reason| !reason.is_stall());
    reasons
}

fn life(status: &Status) -> Option<Reason> {
    match status.phase {
        Phase::Starting => Some(Reason::Starting),
        Phase::Running => None,
        Phase::Stopping => Some(Reason::Stopping),
        Phase::Stopped => Some(Reason::Stopped {
            error: status.error.clone(),
        }),
    }
}

/// Judges the processes of a worker. While the consumer stops, their ends are expected.
fn worker(status: &Status) -> Option<Reason> {
    let worker = status
        .worker
        .as_ref()
        .filter(|_| status.phase != Phase::Stopping)?;
    let in_a_row = worker.ends_in_a_row;
    if in_a_row >= ENDS_REPORTED && status.phase == Phase::Running {
        let why = worker.last_end.clone().unwrap_or_default();
        return Some(Reason::WorkerEnds {
            in_a_row,
            why,
            all: in_a_row >= ENDS_OF_ALL,
        });
    }
    let why = worker.not_ready.clone()?;
    Some(Reason::WorkerNotReady { why })
}

/// Returns the reasons for which no work is done although there is some.
fn stalls(status: &Status) -> Vec<Reason> {
    let mut stalls = Vec::new();
    let permits = status.permits.total;
    if permits > 0 && status.overdue >= permits {
        stalls.push(Reason::NoPermitLeft { permits });
    }
    if status.looked_ago > LOOP_LIMIT {
        stalls.push(Reason::Blocked {
            lasts: status.looked_ago,
        });
    }
    if let Some(lasts) = status.source.polled_ago.filter(|ago| *ago > POLL_LIMIT) {
        stalls.push(Reason::NotPolled { lasts });
    }
    if let Some(lasts) = status
        .source
        .disconnected_for
        .filter(|lasts| *lasts > CONNECTION_LIMIT)
    {
        stalls.push(Reason::NotConnected {
            lasts,
            others_connect: status.source.others_connect,
        });
    }
    if status.phase != Phase::Running {
        return stalls;
    }
    if status.nothing_started_for > QUIET_LIMIT {
        stalls.push(Reason::NothingStarts {
            ready: status.messages.ready,
            lasts: status.nothing_started_for,
        });
    }
    // While the consumer is at its limits, or its store is away, or an operator has paused it, the
    // source is not the cause of missing deliveries.
    let receives_less = [PauseCause::StoreAway, PauseCause::Operator];
    let receives = !status
        .paused
        .iter()
        .any(|cause| receives_less.contains(cause));
    if status.has_room() && receives {
        stalls.extend(
            status
                .source
                .partitions
                .iter()
                .filter_map(delivers_nothing)
                .take(MOST_OF_A_KIND),
        );
    }
    stalls
}

fn delivers_nothing(partition: &PartitionStatus) -> Option<Reason> {
    let undelivered = partition
        .undelivered
        .filter(|undelivered| *undelivered > 0)?;
    let lasts = partition.delivered_ago.filter(|ago| *ago > QUIET_LIMIT)?;
    let reason = Reason::NothingDelivered {
        topic: partition.topic.clone(),
        partition: partition.partition,
        undelivered,
        lasts,
    };
    partition.paused.is_none().then_some(reason)
}

fn stores(status: &Status) -> Vec<Reason> {
    let mut reasons = Vec::new();
    let all = !status.scopes.is_empty() && status.scopes.iter().all(waits_for_store);
    for scope in &status.scopes {
        // Of a cluster with many shards down, only the one that has been down for longest is
        // reported.
        if let Some(outage) = scope.outages.iter().max_by_key(|outage| outage.lasts) {
            let scope = scope.scope.clone();
            let error = outage.error.clone();
            reasons.push(if outage.halted {
                Reason::Halted { scope, error, all }
            } else {
                Reason::StoreAway {
                    scope,
                    error,
                    lasts: outage.lasts,
                    all,
                }
            });
        }
    }
    reasons
}

/// Returns whether the scope waits for its store. A scope that runs without it does not.
fn waits_for_store(scope: &ScopeStatus) -> bool {
    scope.is_store_away() && scope.outages.iter().all(|outage| !outage.open)
}

/// Returns a reason when only messages whose dead letters cannot be written are in progress, ready
/// or waiting, and no other message can be received or start before they are written.
fn only_letters_left(status: &Status) -> Option<Reason> {
    let letters = status.letters_waiting;
    let messages = status.messages;
    let waiting = letters as usize;
    let others = messages.running.saturating_sub(waiting) + messages.ready + messages.parked;
    let fills_permits = letters >= status.permits.total && status.delivered_ago > QUIET_LIMIT;
    let holds_up = !status.has_room() || messages.behind > 0 || fills_permits;
    (letters > 0 && others == 0 && holds_up).then_some(Reason::OnlyLettersLeft { letters })
}

fn breakers(status: &Status) -> impl Iterator<Item = Reason> {
    let all = status.scopes.iter().all(|scope| scope.handler_paused);
    let paused = status.scopes.iter().filter(|scope| scope.handler_paused);
    paused.map(move |scope| Reason::HandlerPaused {
        scope: scope.scope.clone(),
        all,
        breaker: scope.breaker.clone(),
    })
}

fn pauses(status: &Status) -> impl Iterator<Item = Reason> {
    let all = status.scopes.iter().all(|scope| scope.pause.is_some());
    let paused = status
        .scopes
        .iter()
        .filter_map(|scope| Some((&scope.scope, scope.pause.clone()?)));
    paused.map(move |(scope, pause)| Reason::PausedByOperator {
        scope: scope.clone(),
        pause,
        all,
    })
}

/// Returns the messages that have failed too often for an accident.
fn failing(status: &Status) -> impl Iterator<Item = Reason> {
    let often = status.failing.iter().filter(|message| {
        let failed = message.failed.as_ref();
        failed.is_some_and(|failed| failed.times >= FAILURES_REPORTED)
    });
    often
        .take(MOST_OF_A_KIND)
        .map(|message| Reason::KeepsFailing {
            message: message.clone(),
        })
}

fn runs(status: &Status) -> impl Iterator<Item = Reason> {
    status
        .runs
        .iter()
        .filter_map(|run| judge_run(status, run))
        .take(MOST_OF_A_KIND)
}

fn judge_run(status: &Status, run: &Run) -> Option<Reason> {
    let lease = lease_of(status, &run.scope);
    match run.stage {
        Stage::Running | Stage::Answering if run.is_overdue() => {
            Some(Reason::OverdueHandler { run: run.clone() })
        }
        Stage::Running => {
            let usual = status.handler_p99?;
            let slow = run.in_stage_for > lease.max(usual * SLOW_FACTOR);
            slow.then(|| Reason::SlowHandler {
                run: run.clone(),
                usual,
            })
        }
        Stage::Ending if run.in_stage_for > lease => Some(Reason::NotStored { run: run.clone() }),
        Stage::DeadLettering if run.in_stage_for > QUIET_LIMIT => {
            Some(Reason::LetterNotWritten { run: run.clone() })
        }
        _ => None,
    }
}

fn partition(partition: &PartitionStatus) -> Vec<Reason> {
    let mut reasons = Vec::new();
    if let Some(lasts) = partition
        .withheld_for
        .filter(|lasts| *lasts > TRANSACTION_LIMIT)
    {
        reasons.push(Reason::OpenTransaction {
            topic: partition.topic.clone(),
            partition: partition.partition,
            withheld: partition.withheld.unwrap_or_default(),
            lasts,
        });
    }
    if let Some(lasts) = partition
        .uncommitted_for
        .filter(|lasts| *lasts > COMMIT_LIMIT)
    {
        reasons.push(Reason::NotCommitted {
            topic: partition.topic.clone(),
            partition: partition.partition,
            lasts,
        });
    }
    if partition.paused == Some(PauseCause::Span) {
        reasons.push(Reason::SpanFull {
            topic: partition.topic.clone(),
            partition: partition.partition,
            first: partition.first.clone(),
        });
    }
    reasons
}

fn waits(status: &Status, message: &Unfinished) -> Option<Reason> {
    match message.stage {
        Stage::Parked(WaitCause::Unreadable) => Some(Reason::Unreadable {
            message: message.clone(),
        }),
        Stage::Parked(WaitCause::Alone) => Some(Reason::WaitsAlone {
            message: message.clone(),
        }),
        Stage::Parked(WaitCause::Busy) => {
            let lasts = message.in_stage_for;
            let longest = status
                .scopes
                .iter()
                .find(|scope| scope.scope == message.scope)?
                .max_run;
            (lasts > longest).then(|| Reason::BusyElsewhere {
                message: message.clone(),
                lasts,
            })
        }
        _ => None,
    }
}

fn lease_of(status: &Status, scope: &str) -> Duration {
    let of_scope = status.scopes.iter().find(|one| one.scope == scope);
    of_scope.map_or(QUIET_LIMIT, |scope| scope.lease)
}

#[cfg(test)]
mod tests;
