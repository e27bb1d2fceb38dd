//! A status with nothing wrong, and parts of others.

use super::super::super::stage::FailedAttempts;
use super::super::super::status::{Permits, Refusals, ScopePause, SourceFailure, StoreOutage};
use super::super::super::{Messages, SourceStatus};
use super::super::*;

pub(super) const S: Duration = Duration::from_secs(1);

/// A consumer with nothing wrong: two partitions, one of them with a backlog that is hours old.
pub(super) fn well() -> Status {
    let mut orders = PartitionStatus::new("orders", 0);
    orders.undelivered = Some(1_000_000);
    orders.delivered_ago = Some(S);
    orders.oldest_unfinished = Some(S * 7_200);
    let mut idle = PartitionStatus::new("orders", 1);
    idle.undelivered = Some(0);
    idle.delivered_ago = Some(S * 9_000);
    let scope = ScopeStatus {
        scope: "billing".into(),
        route: None,
        store: "memory".into(),
        promise: "process".into(),
        holds: String::new(),
        warnings: Vec::new(),
        lease: S * 30,
        lease_remaining: S * 20,
        retention: S * 604_800,
        max_run: S * 900,
        run_remaining: S * 900,
        oldest_expired: None,
        log_bytes: None,
        memory_bytes: None,
        max_memory_bytes: None,
        shards: 2,
        outages: Vec::new(),
        handler_paused: false,
        breaker: None,
        pause: None,
    };
    Status {
        phase: Phase::Running,
        scopes: vec![scope],
        permits: Permits { total: 4, free: 2 },
        messages: Messages {
            in_flight: 10,
            most: 100,
            most_bytes: 1,
            ..Messages::default()
        },
        handler_p99: Some(S * 2),
        runs: vec![run(Stage::Running, 20), run(Stage::Claiming, 1)],
        refusals: Refusals {
            in_a_row: 0,
            most_in_a_row: 100,
        },
        delivered_ago: S * 9_000,
        source: SourceStatus {
            polled_ago: Some(S),
            partitions: vec![orders, idle],
            ..SourceStatus::default()
        },
        ..Status::default()
    }
}

pub(super) fn run(stage: Stage, seconds: u32) -> Run {
    Run {
        scope: "billing".into(),
        origin: "orders/0@42".into(),
        stage,
        in_stage_for: S * seconds,
        max_run: S * 900,
    }
}

pub(super) fn parked(cause: WaitCause, seconds: u32) -> Unfinished {
    Unfinished {
        scope: "billing".into(),
        origin: "orders/0@7".into(),
        stage: Stage::Parked(cause),
        in_stage_for: S * seconds,
        age: S * seconds,
        key: None,
        next_try: None,
        failed: None,
    }
}

/// A message that has failed this many times, and is tried again in 23 seconds.
pub(super) fn failing(times: u32) -> Unfinished {
    Unfinished {
        origin: "pay/0@703".into(),
        key: Some("billing:eMT5oSC2v1zTz8Nw5IO50A".into()),
        next_try: Some(S * 23),
        failed: Some(FailedAttempts {
            times,
            lasts: S * 90,
            reason: "ledger 7 is locked".into(),
        }),
        ..parked(WaitCause::Retry, 90)
    }
}

pub(super) fn pause() -> ScopePause {
    ScopePause {
        at_unix_ms: 1_700_000_000_000,
        lasts: S * 180,
        reason: "the bank is away".into(),
        by: "ada".into(),
    }
}

pub(super) fn outage(shard: u64) -> StoreOutage {
    StoreOutage {
        shard,
        lasts: S * 3,
        error: "connection refused".into(),
        waiting: 1,
        open: false,
        halted: false,
    }
}

pub(super) fn failure(operation: &str, seconds: u32) -> SourceFailure {
    SourceFailure {
        operation: operation.to_owned(),
        error: "AccessDenied".to_owned(),
        lasts: S * seconds,
        stops_delivery: operation != "delete",
        ..SourceFailure::default()
    }
}
