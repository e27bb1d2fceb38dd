//! Plays a round: starts its processes, replaces those that were killed, and ends when every
//! message is finished.

use std::collections::BTreeMap;
use std::sync::{Arc, atomic};
use std::time::Duration;

use futures_util::future::BoxFuture;
use oncegate_core::key::{Key, Scope};
use oncegate_core::store::Store;
use oncegate_runtime::consumer::{BadKeys, DeadLetterLimit};
use oncegate_runtime::{Backoff, BoxError, Consumer, ConsumerError, Gate, OnStoreLoss, Ordering};
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use super::process::Process;
use super::store::ProcessStore;
use super::watched::Start;
use super::{Downstream, Letters, Round};
use crate::broker::Broker;
use crate::fault::Fault;
use crate::history::{Event, Form, What};
use crate::launch::Launch;
use crate::witness::{Witness, added};

/// More attempts than all faults of a round together cost a message.
const MAX_ATTEMPTS: u32 = 25;
/// The waits between attempts, in parts of a lease.
const FIRST_WAIT_PARTS: u32 = 40;
const LONGEST_WAIT_PARTS: u32 = 2;
/// The time for which running handlers may go on after a stop, in milliseconds.
pub(crate) const STOP_DEADLINE_MS: u64 = 20_000;
/// The time that a process may take to end in all, its worker included.
const STOP_LIMIT: Duration = Duration::from_secs(90);
/// A round in which nothing happens for this long is given up. A handler that is too slow for that
/// has no time limit.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// A round that has not ended after this time is given up.
const ROUND_LIMIT: Duration = Duration::from_secs(240);
/// The most processes of a round: more than all kills of a round need.
const MOST_PROCESSES: u32 = 40;

/// Opens the store of a round.
pub(crate) type OpenStore =
    dyn Fn() -> BoxFuture<'static, Result<Arc<dyn Store>, BoxError>> + Send + Sync;
/// Changes the gate of a process.
pub(crate) type ChangeGate = dyn Fn(Gate) -> Gate + Send + Sync;
/// Changes the consumer of a process.
pub(crate) type ChangeConsumer = dyn Fn(Consumer) -> Consumer + Send + Sync;

/// The settings that every round has in common.
pub(crate) struct RoundSettings {
    pub(crate) key: Key,
    pub(crate) lease: Duration,
    pub(crate) launch: Arc<dyn Launch>,
    pub(crate) route: Arc<str>,
    /// The beginning of the scopes of rounds.
    pub(crate) scope: Scope,
    pub(crate) open: Box<OpenStore>,
    /// `None`: each round has an embedded one.
    pub(crate) broker: Option<Arc<dyn Broker>>,
    pub(crate) change_gate: Box<ChangeGate>,
    pub(crate) change_consumer: Box<ChangeConsumer>,
    pub(crate) witness: Option<Box<dyn Witness>>,
}

/// The reason why a round has no history.
pub(crate) enum RoundError {
    Launch(BoxError),
    Broker(BoxError),
    Witness(BoxError),
}

/// The end of a process.
enum Ending {
    Killed,
    Stopped,
}

/// Plays the round to its end, and returns its events.
///
/// # Errors
/// When a handler cannot be started, a real broker fails, or the witness lists nothing that can be
/// judged.
pub(crate) async fn play(round: Arc<Round>) -> Result<Vec<Event>, RoundError> {
    let witness = round.settings.witness.as_deref();
    let before = match witness.filter(|witness| witness.is_shared()) {
        Some(witness) => witness
            .effects(round.name())
            .await
            .map_err(RoundError::Witness)?,
        None => Vec::new(),
    };
    tokio::select! {
        biased;
        error = round.group.drive() => return Err(RoundError::Broker(error)),
        played = play_processes(&round) => played.map_err(RoundError::Launch)?,
    }
    if let Some(witness) = witness {
        let after = witness
            .effects(round.name())
            .await
            .map_err(RoundError::Witness)?;
        round
            .note_listed(&added(&before, after))
            .map_err(RoundError::Witness)?;
    }
    Ok(round.recorder.taken())
}

/// Starts the processes, and returns when all have ended.
async fn play_processes(round: &Arc<Round>) -> Result<(), BoxError> {
    let mut processes = JoinSet::new();
    for _ in 0..round.schedule.consumers {
        processes.spawn(live(Arc::clone(round), round.new_process()));
    }
    {
        let mut finishing = std::pin::pin!(finished(round));
        loop {
            tokio::select! {
                biased;
                ended = processes.join_next() => match ended {
                    Some(Ok(ended)) => {
                        let _: Ending = ended?;
                        let next = round.new_process();
                        let number = next.number;
                        processes.spawn(live(Arc::clone(round), next));
                        if number >= MOST_PROCESSES {
                            break;
                        }
                    }
                    Some(Err(panic)) => return Err(panic.into()),
                    None => break,
                },
                () = &mut finishing => break,
            }
        }
    }
    let samples = (0..round.sent.len()).filter_map(|number| round.sample_of(number));
    if !round.ledger.has_effects_of(samples) {
        // An effect that comes after the answer has still time, so that it is seen for what it is.
        tokio::time::sleep(round.settings.lease).await;
    }
    for message in unfinished(round) {
        round.recorder.note(None, What::Unfinished { message });
    }
    round.recorder.note(None, What::Stopping);
    round.stopping.cancel();
    let ended = timeout(STOP_LIMIT, async {
        while let Some(ended) = processes.join_next().await {
            let _: Ending = ended.map_err(BoxError::from)??;
        }
        Ok::<(), BoxError>(())
    });
    match ended.await {
        Ok(ended) => ended?,
        Err(_) => round.recorder.note(None, What::Hung),
    }
    processes.shutdown().await;
    Ok(())
}

/// Resolves when every message that stands for an event is acknowledged, once more after a
/// redelivery if the round has one; or when the round does not go on.
async fn finished(round: &Round) {
    let give_up_at = Instant::now() + ROUND_LIMIT;
    let mut redeliveries = u32::from(round.schedule.has(Fault::Redelivery));
    loop {
        let moved = round.group.moved();
        let mut moved = std::pin::pin!(moved);
        moved.as_mut().enable();
        if unfinished(round).is_empty() {
            if redeliveries == 0 {
                return;
            }
            redeliveries -= 1;
            round.recorder.note(
                None,
                What::FaultBegan {
                    fault: Fault::Redelivery,
                    sample: None,
                },
            );
            round.group.rewind();
            continue;
        }
        let now = Instant::now();
        // A process that starts is silent for as long as its worker takes; the launch has a limit.
        let is_starting = round.starting.load(atomic::Ordering::Relaxed) > 0;
        let silent_at = if is_starting {
            now
        } else {
            round.recorder.last()
        } + SILENCE_LIMIT;
        if now >= give_up_at || now >= silent_at {
            return;
        }
        tokio::select! {
            () = moved => {}
            () = sleep_until(give_up_at.min(silent_at)) => {}
        }
    }
}

/// The messages that are not finished, without poison: a handler may try that as often as it likes.
fn unfinished(round: &Round) -> Vec<usize> {
    round
        .group
        .unacked()
        .into_iter()
        .filter(|number| {
            round
                .sent
                .get(*number)
                .is_some_and(|sending| sending.form != Form::Poison)
        })
        .collect()
}

/// The life of one process: until it is killed, or has stopped.
async fn live(round: Arc<Round>, process: Arc<Process>) -> Result<Ending, BoxError> {
    let stop = round.stopping.clone();
    let settings = Arc::clone(&round.settings);
    let downstream = Downstream {
        round: Arc::clone(&round),
        process: Arc::clone(&process),
    };
    let member = Arc::clone(&round.group).member(process.number);
    let gate = gate(&round, &process);
    let letters = Letters {
        round: Arc::clone(&round),
        process: process.number,
        written: Mutex::new(BTreeMap::new()),
    };
    let starting = StartingProcess::of(&round);
    let launched = tokio::select! {
        biased;
        () = process.killed() => return Ok(Ending::Killed),
        () = stop.cancelled() => return Ok(Ending::Stopped),
        launched = settings.launch.launch(downstream) => launched?,
    };
    round.recorder.note(process.number, What::Started);
    drop(starting);
    let concurrency = round.schedule.concurrency.min(launched.most);
    let start = Start {
        round: Arc::clone(&round),
        process: Arc::clone(&process),
        member,
        gate,
    };
    let (consumer, end) = launched.started(start);
    let consumer = (settings.change_consumer)(consumer.ordering(Ordering::Unordered))
        .concurrency(concurrency)
        .bad_keys(BadKeys::default())
        .max_attempts(MAX_ATTEMPTS)
        .backoff(Backoff::new(
            settings.lease / FIRST_WAIT_PARTS,
            settings.lease / LONGEST_WAIT_PARTS,
        ))
        .dead_letter_limit(DeadLetterLimit {
            in_a_row: 1_000_000,
            share: 1.1,
        })
        .without_breaker()
        .stop_deadline(Duration::from_millis(STOP_DEADLINE_MS))
        .dead_letters(letters);
    let ended = tokio::select! {
        biased;
        () = process.killed() => return Ok(Ending::Killed),
        ended = consumer.run_until(stop.cancelled()) => ended,
    };
    note_end(&round, &process, ended);
    // A consumer that ends by itself is replaced, as a supervisor would do.
    let has_ended = end.await;
    let what = if has_ended { What::Stopped } else { What::Hung };
    round.recorder.note(process.number, what);
    round.group.leave(process.number);
    Ok(Ending::Stopped)
}

/// A process that starts, until this is dropped.
struct StartingProcess(Arc<Round>);

impl StartingProcess {
    fn of(round: &Arc<Round>) -> Self {
        round.starting.fetch_add(1, atomic::Ordering::Relaxed);
        Self(Arc::clone(round))
    }
}

impl Drop for StartingProcess {
    fn drop(&mut self) {
        self.0.starting.fetch_sub(1, atomic::Ordering::Relaxed);
    }
}

fn note_end(round: &Round, process: &Process, ended: Result<(), ConsumerError>) {
    let error = match ended {
        // A store that is away at the start is one of the faults.
        Ok(()) | Err(ConsumerError::Gate(oncegate_runtime::GateError::Store(_))) => return,
        Err(error) => error.to_string(),
    };
    round
        .recorder
        .note(process.number, What::ConsumerFailed { error });
}

fn gate(round: &Arc<Round>, process: &Arc<Process>) -> Gate {
    let settings = &round.settings;
    let store = ProcessStore {
        round: Arc::clone(round),
        process: Arc::clone(process),
        inner: Arc::clone(&round.store) as Arc<dyn Store>,
    };
    let gate = Gate::new(round.scope.as_str(), settings.key.clone(), store);
    (settings.change_gate)(gate)
        .lease(settings.lease)
        // A loss is one of the faults.
        .on_store_loss(OnStoreLoss::Continue)
        .simulated(round.schedule.seed ^ u64::from(process.number))
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use oncegate_runtime::{Attempt, Failure, Handler, Message};
    use serde_json::{Value, json};

    use super::*;
    use crate::launch::Launched;
    use crate::trial::{Trial, random_seed};

    /// A worker that starts slowly.
    struct Slow;

    struct Billing(Downstream);

    impl Handler for Billing {
        type Output = String;

        async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
            let order: Value = message.json()?;
            let key = attempt.idempotency_key("charge");
            let answer = self.0.effect(&order).idempotency_key(&key).send().await?;
            Ok(answer["receipt"].to_string())
        }
    }

    #[async_trait]
    impl Launch for Slow {
        async fn launch(&self, downstream: Downstream) -> Result<Launched, BoxError> {
            tokio::time::sleep(SILENCE_LIMIT * 3 / 2).await;
            Ok(Launched::new(Billing(downstream)))
        }
    }

    #[test]
    fn a_worker_that_starts_slowly_is_waited_for() {
        let seed = random_seed();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let orders = (1..=5).map(|id| json!({ "order_id": format!("o-{id:04}") }));
        let trial = Trial::new(Slow)
            .key(Key::json(["order_id"]))
            .messages(orders)
            .seed(seed)
            .rounds(3);
        let verdict = runtime
            .block_on(trial.faults([Fault::Redelivery]).run())
            .unwrap();
        assert!(
            verdict.is_clean(),
            "seed {seed}: {verdict}\n{:#?}",
            verdict.findings
        );
    }
}
