//! The part of `oncegate doctor` that examines the servers of a Redis store: their memory, and
//! their slow calls.

use std::time::{Duration, SystemTime};

use bytesize::ByteSize;
use oncegate::core::store::{StoreError, StoreMemory};
use oncegate::redis::{RedisStore, ServerReport};
use tokio::time::Instant;

use super::Report;
use crate::output::span;

/// The least time between two looks at the number of records.
const SHORTEST_LOOK: Duration = Duration::from_secs(2);

/// The share of its memory from which a server is a finding, in percent: the rest is for claims and
/// clients, and for the tables that are doubled while they grow.
const FULL_PERCENT: u64 = 80;

/// The fewest records that were added between two looks, for a forecast: this command's own test of
/// its rights is one.
const FEWEST_ADDED: u64 = 100;

/// The fewest keys of a server over which its memory is divided: with few, most of it is tables and
/// scripts.
const FEWEST_KEYS: u64 = 500;

/// A first look at the servers.
pub(super) struct FirstLook {
    reports: Vec<ServerReport>,
    at: Instant,
}

/// The growth of the records while the servers were looked at, and their size.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Growth {
    records_per_second: f64,
    bytes_per_record: f64,
    /// Memory that is no records.
    other_bytes: u64,
}

impl Report {
    /// Reports memory and slow calls of each server.
    pub(super) async fn servers(&mut self, redis: &RedisStore) -> Option<FirstLook> {
        let at = Instant::now();
        let reports = match redis.server_reports().await {
            Ok(reports) => reports,
            Err(error) => {
                self.server_error(&error);
                return None;
            }
        };
        for server in &reports {
            self.memory(server);
            self.slow_calls(server, SystemTime::now());
        }
        Some(FirstLook { reports, at })
    }

    fn server_error(&mut self, error: &StoreError) {
        match error {
            StoreError::Refused { .. } => self.finding("store", error.to_string(), ""),
            _ => self.unreachable("store", error.to_string()),
        }
    }

    fn memory(&mut self, server: &ServerReport) {
        let Some(StoreMemory {
            used_bytes,
            max_bytes,
        }) = server.memory
        else {
            return;
        };
        let name = &server.address;
        let used = ByteSize(used_bytes);
        let Some(max_bytes) = max_bytes else {
            return self.saw(format!(
                "{name}: {used} of memory used, without a limit (maxmemory)"
            ));
        };
        self.saw(format!(
            "{name}: {used} of {} used (maxmemory)",
            ByteSize(max_bytes)
        ));
        if used_bytes > max_bytes / 100 * FULL_PERCENT {
            let found = format!(
                "{name} uses {used} of {}: a full server refuses new claims, and every consumer waits",
                ByteSize(max_bytes)
            );
            self.finding(
                "store",
                found,
                "raise maxmemory, shorten the retention, or keep large results elsewhere",
            );
        }
    }

    fn slow_calls(&mut self, server: &ServerReport, now: SystemTime) {
        let name = &server.address;
        let calls = match &server.slow_calls {
            Ok(calls) => calls,
            Err(why) => {
                return self.saw(format!(
                    "{name}: its slow log cannot be read (+slowlog|get): {why}"
                ));
            }
        };
        let Some(slowest) = calls.iter().max_by_key(|call| call.took) else {
            return self.saw(format!("{name}: no script of oncegate in its slow log"));
        };
        let ago = calls
            .first()
            .and_then(|newest| now.duration_since(newest.at).ok())
            .unwrap_or_default();
        let found = format!(
            "its slow log has {} calls of oncegate's scripts, the slowest `{}` with {:?}, the newest {} ago: a call takes \
             microseconds, and meanwhile every other one waits",
            calls.len(),
            slowest.script,
            slowest.took,
            span(ago)
        );
        let fix = "look at the other entries of SLOWLOG GET, at LATENCY DOCTOR, at results of megabytes, and at the \
                   machine: swap, a fork for a snapshot, a slow disk under `appendfsync always`";
        self.finding("store", format!("{name}: {found}"), fix);
    }

    /// Forecasts the memory of each server for the time when the first of today's records expire.
    pub(super) async fn forecast(
        &mut self,
        redis: &RedisStore,
        first: FirstLook,
        retention: Duration,
    ) {
        // Records in buckets are no keys of their own, and cannot be counted so.
        if !redis.has_a_key_for_each_record() {
            return;
        }
        tokio::time::sleep_until(first.at + SHORTEST_LOOK).await;
        let looked = first.at.elapsed();
        let reports = match redis.server_reports().await {
            Ok(reports) => reports,
            Err(error) => return self.server_error(&error),
        };
        for (before, after) in first.reports.iter().zip(&reports) {
            if before.address == after.address {
                self.forecast_one(before, after, looked, retention);
            }
        }
    }

    fn forecast_one(
        &mut self,
        before: &ServerReport,
        after: &ServerReport,
        looked: Duration,
        retention: Duration,
    ) {
        let name = &after.address;
        let (Some(memory), Some(growth)) = (after.memory, growth(before, after, looked)) else {
            return self.saw(format!(
                "{name}: too few records were added within {}, so no forecast: `oncegate estimate` computes one from a rate",
                span(looked)
            ));
        };
        let needed = growth.needed_bytes(retention);
        let rate = growth.records_per_second;
        let forecast = format!(
            "{name}: {rate:.0} records were added each second for {}; at that rate, with a retention of {}, it will use {}",
            span(looked),
            span(retention),
            ByteSize(needed)
        );
        match memory.max_bytes {
            Some(max_bytes) if needed > max_bytes / 100 * FULL_PERCENT => {
                let found = format!("{forecast}, of {} (maxmemory)", ByteSize(max_bytes));
                let fix = "raise maxmemory, shorten the retention, or use `?compact` (docs/REDIS.md); `oncegate estimate` \
                           computes it for a whole day's rate";
                self.finding("store", found, fix);
            }
            _ => self.saw(forecast),
        }
    }
}

impl Growth {
    /// Returns what the server uses when as many records expire as are added.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a forecast, of positive numbers"
    )]
    fn needed_bytes(self, retention: Duration) -> u64 {
        let records = self.records_per_second * retention.as_secs_f64();
        self.other_bytes
            .saturating_add((records * self.bytes_per_record) as u64)
    }
}

/// The growth between two looks; `None` if too few records were added, or the servers do not tell
/// what records take.
#[expect(clippy::cast_precision_loss, reason = "a forecast")]
fn growth(before: &ServerReport, after: &ServerReport, looked: Duration) -> Option<Growth> {
    let data_bytes = after.data_bytes?;
    // What has expired meanwhile was replaced by as many others.
    let added = (after.keys + after.expired_keys).checked_sub(before.keys + before.expired_keys)?;
    if added < FEWEST_ADDED || after.keys < FEWEST_KEYS {
        return None;
    }
    Some(Growth {
        records_per_second: added as f64 / looked.as_secs_f64(),
        bytes_per_record: data_bytes as f64 / after.keys as f64,
        other_bytes: after.memory?.used_bytes.saturating_sub(data_bytes),
    })
}
