//! The handle that reports a consumer's status and health.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::engine::snapshot::keep_most_failed;
use super::shared::{Route, Shared};
use super::watch::{PartitionName, Seen, SeenPartition, Snapshot, Underway, see};
use crate::health::{
    FailedAttempts, FailureLog, Health, PartitionStatus, PauseCause, Permits, Phase, QUIET_LIMIT,
    Run, STORE_LIMIT, ScopePause, ScopeStatus, SourceStatus, Stage, Status, StoreOutage,
    Unfinished, WorkerStatus, beginning,
};
use crate::source::Source;

/// Reports a consumer's status and health, at any time, from any thread. It is cheap to clone and
/// keeps nothing alive.
///
/// ```no_run
/// # use oncegate::{Attempt, Consumer, Gate, Key, MemoryStore, Message};
/// # async fn example(source: oncegate::kafka::KafkaSource) -> Result<(), oncegate::BoxError> {
/// # let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new());
/// let consumer = Consumer::new(source, gate, async |_: Message, _: Attempt| Ok(()));
/// let monitor = consumer.monitor();
/// // … pass clones of it to the tasks that answer probes …
/// consumer.run_until(oncegate::shutdown_signal()).await?;
/// println!("{}", monitor.health()); // "degraded: it was stopped"
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Monitor {
    name: Arc<str>,
    life: Arc<Life>,
}

impl Monitor {
    pub(super) fn new(name: &str, life: Arc<Life>) -> Self {
        Self {
            name: name.into(),
            life,
        }
    }

    /// Returns the consumer's status. What waits in its lanes is counted every second, the rest at
    /// the moment of the call.
    pub fn status(&self) -> Status {
        let worker = self.life.worker.get().map(|WorkerReport(report)| report());
        Status {
            name: self.name.to_string(),
            worker,
            ..self.base_status()
        }
    }

    /// Everything but the name and the worker.
    fn base_status(&self) -> Status {
        let (phase, error) = self.life.phase();
        if matches!(phase, Phase::Starting | Phase::Stopped) {
            let failures = self.life.opening.at(Instant::now().into_std());
            let source = SourceStatus {
                failures,
                ..SourceStatus::default()
            };
            return Status {
                phase,
                error,
                source,
                ..Status::default()
            };
        }
        let running = self.life.running.get().and_then(Running::upgrade);
        let Some((shared, source)) = running else {
            let error = error.or_else(|| Some("the future of `run_until` was dropped".to_owned()));
            return Status {
                phase: Phase::Stopped,
                error,
                ..Status::default()
            };
        };
        Status {
            phase,
            ..shared.status(source.status())
        }
    }

    /// Returns whether the consumer is healthy: [`Health::of`] its [`status`](Self::status).
    pub fn health(&self) -> Health {
        Health::of(&self.status())
    }
}

/// The phase of a consumer, readable for as long as a monitor exists.
#[derive(Debug, Default)]
pub(super) struct Life {
    phase: Mutex<(Phase, Option<String>)>,
    /// Failures that the start waits out.
    pub(super) opening: FailureLog,
    running: OnceLock<Running>,
    /// Set when the consumer is made, if its handler has processes of its own.
    pub(super) worker: OnceLock<WorkerReport>,
}

/// Returns what the processes of a handler do.
pub(super) struct WorkerReport(pub(super) Box<dyn Fn() -> WorkerStatus + Send + Sync>);

impl fmt::Debug for WorkerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerReport").finish_non_exhaustive()
    }
}

struct Running {
    shared: Weak<Shared>,
    source: Weak<dyn Source>,
}

impl Running {
    fn upgrade(&self) -> Option<(Arc<Shared>, Arc<dyn Source>)> {
        Some((self.shared.upgrade()?, self.source.upgrade()?))
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}

impl Life {
    fn phase(&self) -> (Phase, Option<String>) {
        self.lock().clone()
    }

    pub(super) fn enter(&self, phase: Phase) {
        self.lock().0 = phase;
    }

    pub(super) fn begin(&self, shared: &Arc<Shared>, source: &Arc<dyn Source>) {
        let running = Running {
            shared: Arc::downgrade(shared),
            source: Arc::downgrade(source),
        };
        // A consumer runs once: `run_until` takes it.
        _ = self.running.set(running);
        self.enter(Phase::Running);
    }

    /// Notes that the consumer has ended, by itself if there is an error.
    pub(super) fn end(&self, error: Option<String>) {
        *self.lock() = (Phase::Stopped, error);
    }

    fn lock(&self) -> MutexGuard<'_, (Phase, Option<String>)> {
        self.phase.lock()
    }
}

impl Shared {
    /// Everything but the phase.
    fn status(&self, mut source: SourceStatus) -> Status {
        let now = Instant::now();
        let snapshot = self.watch.last_snapshot();
        let underway = self.watch.underway();
        let routes: Vec<&Arc<Route>> = self.routes().collect();
        let mut messages = snapshot.messages;
        (messages.in_flight, messages.bytes) = self.in_flight.held();
        (messages.most, messages.most_bytes) = self.in_flight.limits();
        messages.running = underway.len();
        let mut runs: Vec<Run> = underway.iter().map(|underway| run(now, underway)).collect();
        let overdue = overdue_permits(&underway, &runs);
        let letters_waiting = runs
            .iter()
            .filter(|run| run.stage == Stage::DeadLettering && run.in_stage_for > QUIET_LIMIT)
            .count();
        runs.sort_by_key(|run| std::cmp::Reverse(run.in_stage_for));
        runs.truncate(Status::RUNS_SHOWN);
        let mut seen = snapshot.partitions.clone();
        let mut failing = snapshot.failing.clone();
        for underway in underway.iter().map(under_way) {
            failing.extend(underway.failures.is_some().then(|| underway.clone()));
            see(&mut seen, underway);
        }
        // One that was between two attempts at the last count may have begun since.
        failing.sort_by_key(|seen| seen.until.is_some());
        let mut known = BTreeSet::new();
        failing.retain(|seen| known.insert(seen.origin.to_string()));
        keep_most_failed(&mut failing);
        add_to(&mut source, now, &seen, &routes);
        source.failures.extend(self.failures.at(now.into_std()));
        source.failures.extend(self.retry_writes.at(now.into_std()));
        let mut status = Status {
            up: self.watch.up(),
            scopes: self.scopes(now, &snapshot),
            permits: self.permits_now(),
            messages,
            rates: snapshot.rates,
            handler_p99: self.watch.handler_times.p99(),
            runs,
            overdue: u32::try_from(overdue).unwrap_or(u32::MAX),
            letters_waiting: u32::try_from(letters_waiting).unwrap_or(u32::MAX),
            refusals: self.dead_letter_guard().refusals(),
            waiting: snapshot
                .waiting
                .iter()
                .filter_map(|seen| unfinished(now, seen, &routes))
                .collect(),
            failing: failing
                .iter()
                .filter_map(|seen| unfinished(now, seen, &routes))
                .collect(),
            delivered_ago: self.watch.delivered_ago(),
            nothing_started_for: snapshot
                .ready_since
                .map(|since| now.duration_since(since))
                .unwrap_or_default(),
            looked_ago: self.watch.snapshot_age(),
            source,
            ..Status::default()
        };
        status.paused = self.pauses(&status);
        status
    }

    fn permits_now(&self) -> Permits {
        let free = u32::try_from(self.permits.free()).unwrap_or(u32::MAX);
        Permits {
            total: self.settings.concurrency,
            free,
        }
    }

    fn scopes(&self, now: Instant, snapshot: &Snapshot) -> Vec<ScopeStatus> {
        let fails_open = self.settings.fail_open_after.map(|patience| {
            format!("the consumer fails open: when its store is away for longer than {patience:?}, messages run without it, and duplicates run again")
        });
        let scopes = self.routes.iter().map(|(name, route)| {
            let settings = route.gate.settings();
            let checkup = route.gate.checkup();
            let promise = route.gate.promise();
            let upkeep = route.gate.upkeep();
            let outages = self.outages_of(now, route, snapshot);
            ScopeStatus {
                scope: route.gate.scope().to_owned(),
                route: name.clone(),
                store: checkup.store.clone(),
                promise: promise.name.to_owned(),
                holds: promise.holds.to_owned(),
                warnings: checkup
                    .warnings
                    .iter()
                    .cloned()
                    .chain(fails_open.clone())
                    .chain(route.gate.other_contents())
                    .collect(),
                lease: settings.lease,
                lease_remaining: route.gate.least_lease_remaining(),
                retention: settings.retention,
                max_run: settings.max_run,
                run_remaining: route.gate.least_run_remaining(),
                oldest_expired: upkeep.oldest_expired,
                log_bytes: upkeep.log_bytes,
                memory_bytes: upkeep.memory.map(|memory| memory.used_bytes),
                max_memory_bytes: upkeep.memory.and_then(|memory| memory.max_bytes),
                shards: u32::try_from(snapshot.shards_of(route.number, &outages, now))
                    .unwrap_or(u32::MAX),
                outages,
                handler_paused: route.breaker.has_paused(),
                breaker: route.breaker.status(now),
                pause: paused(route),
            }
        });
        scopes.collect()
    }

    /// The outages of the route's store: those that messages have met, or else one that only the
    /// gate knows.
    fn outages_of(&self, now: Instant, route: &Route, snapshot: &Snapshot) -> Vec<StoreOutage> {
        let of_route = snapshot
            .outages
            .iter()
            .filter(|outage| outage.route == route.number);
        let mut outages: Vec<StoreOutage> = of_route
            .map(|outage| StoreOutage {
                shard: outage.shard,
                lasts: now.duration_since(outage.since),
                error: outage.error.to_string(),
                waiting: outage.waiting,
                open: outage.open,
                halted: route.gate.refusal().is_some(),
            })
            .collect();
        if outages.is_empty() {
            outages.extend(self.idle_outage(now, route).or_else(|| halted(route)));
        }
        outages
    }

    /// The outage of a store that no message has found: the gate's own checks have failed for a
    /// while.
    fn idle_outage(&self, now: Instant, route: &Route) -> Option<StoreOutage> {
        let (lasts, error) = route
            .gate
            .unanswered_checks(now)
            .filter(|(lasts, _)| *lasts > STORE_LIMIT)?;
        let open = self
            .settings
            .fail_open_after
            .is_some_and(|patience| lasts >= patience);
        Some(StoreOutage {
            shard: 0,
            lasts,
            error,
            waiting: 0,
            open,
            halted: false,
        })
    }

    fn pauses(&self, status: &Status) -> Vec<PauseCause> {
        let of_source = status
            .source
            .partitions
            .iter()
            .filter_map(|partition| partition.paused);
        let mut paused: Vec<PauseCause> = of_source.collect();
        if status
            .scopes
            .iter()
            .flat_map(|scope| &scope.outages)
            .any(|outage| !outage.open)
        {
            paused.push(PauseCause::StoreAway);
        }
        if !status.has_room() {
            paused.push(PauseCause::Full);
        }
        if self
            .routes
            .iter()
            .any(|(_, route)| route.breaker.has_paused())
        {
            paused.push(PauseCause::Breaker);
        }
        if self.routes().any(|route| route.gate.is_paused()) {
            paused.push(PauseCause::Operator);
        }
        if self.stopping.is_cancelled() {
            paused.push(PauseCause::Stopping);
        }
        paused.sort_unstable();
        paused.dedup();
        paused
    }
}

/// The pause of a scope by an operator.
fn paused(route: &Route) -> Option<ScopePause> {
    let pause = route.gate.pause()?;
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(pause.at_ms);
    Some(ScopePause {
        at_unix_ms: pause.at_ms,
        lasts: at.elapsed().unwrap_or_default(),
        reason: pause.reason,
        by: pause.by,
    })
}

/// The outage of a scope that is halted, which no message has found yet.
fn halted(route: &Route) -> Option<StoreOutage> {
    let error = route.gate.refusal()?.to_string();
    Some(StoreOutage {
        shard: 0,
        lasts: Duration::ZERO,
        error,
        waiting: 0,
        open: false,
        halted: true,
    })
}

/// Counts the permits of handlers that have run for longer than allowed: a batch has one.
fn overdue_permits(underway: &[Underway], runs: &[Run]) -> usize {
    let overdue = underway
        .iter()
        .zip(runs)
        .filter(|(_, run)| run.is_overdue());
    let (of_batches, alone): (Vec<_>, Vec<_>) = overdue
        .map(|(underway, _)| underway.one_call)
        .partition(Option::is_some);
    let batches: BTreeSet<u64> = of_batches.into_iter().flatten().collect();
    batches.len() + alone.len()
}

fn run(now: Instant, underway: &Underway) -> Run {
    Run {
        scope: underway.gate.scope().to_owned(),
        origin: underway.origin.to_string(),
        stage: underway.stage,
        in_stage_for: now.duration_since(underway.since),
        max_run: underway.gate.settings().max_run,
    }
}

fn under_way(underway: &Underway) -> Seen {
    Seen {
        route: underway.route,
        origin: underway.origin.clone(),
        stage: underway.stage,
        since: underway.since,
        received_at: underway.received_at,
        until: None,
        key: underway
            .failures
            .as_ref()
            .and_then(|failures| failures.key.clone()),
        failures: underway.failures.clone(),
    }
}

fn unfinished(now: Instant, seen: &Seen, routes: &[&Arc<Route>]) -> Option<Unfinished> {
    Some(Unfinished {
        scope: routes.get(seen.route)?.gate.scope().to_owned(),
        origin: seen.origin.to_string(),
        stage: seen.stage,
        in_stage_for: now.duration_since(seen.since),
        age: now.duration_since(seen.received_at),
        key: seen.key.as_ref().map(ToString::to_string),
        next_try: seen.until.map(|until| until.saturating_duration_since(now)),
        failed: seen.failures.as_ref().map(|failures| FailedAttempts {
            times: failures.times,
            lasts: now.saturating_duration_since(failures.since),
            reason: beginning(&failures.reason).to_owned(),
        }),
    })
}

/// Adds what the consumer has in flight to the source's status of its partitions.
fn add_to(
    source: &mut SourceStatus,
    now: Instant,
    seen: &BTreeMap<PartitionName, SeenPartition>,
    routes: &[&Arc<Route>],
) {
    for ((topic, number), seen) in seen {
        let known = source
            .partitions
            .iter()
            .position(|one| *one.topic == **topic && one.partition == *number);
        let known = known.unwrap_or_else(|| {
            source
                .partitions
                .push(PartitionStatus::new(&**topic, *number));
            source.partitions.len() - 1
        });
        let Some(partition) = source.partitions.get_mut(known) else {
            continue;
        };
        partition.in_flight += seen.in_flight;
        partition.first = unfinished(now, &seen.first, routes);
        let age = partition.first.as_ref().map(|first| first.age);
        partition.oldest_unfinished = partition.oldest_unfinished.or(age);
    }
}
