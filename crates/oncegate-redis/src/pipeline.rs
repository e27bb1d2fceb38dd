//! Sends one pipeline, reads its answers, and reloads scripts that the server no longer has.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, timeout, timeout_at};

use super::connector::Connector;
use super::durability::Durability;
use super::first_attempt::FirstAttempt;
use super::info::Info;
use super::replies::RawReply;
use super::request::{Request, What};
use super::scripts::Scripts;
use super::shared::Shared;
use super::shortcut::{Abilities, Kind};
use super::witnesses::{Completed, Witness};
use super::{errors, no_answer};
use oncegate_store_toolkit::batch::{Batch, Item as _};

/// The number of times that missing scripts are loaded again for one pipeline before it gives up.
const MAX_REPAIRS: usize = 3;

/// The time that each command adds to the time limit of a pipeline.
const TIMEOUT_PER_COMMAND: Duration = Duration::from_millis(1);

/// The time that each kibibyte adds to the time limit of a pipeline.
const TIMEOUT_PER_KIBIBYTE: Duration = Duration::from_micros(500);

/// A time limit that is noticed later than this was noticed by a runtime whose threads were
/// blocked.
const LATE: Duration = Duration::from_millis(50);

/// A connection whose server has the scripts.
#[derive(Clone)]
pub(super) struct ReadyConnection {
    connection: MultiplexedConnection,
    abilities: Abilities,
}

/// A server that wants another certificate of its client says so only after its own part of the
/// handshake, and then ends the connection: the client may see no more than that end.
const HANDSHAKE: &str = " right after the TLS handshake: the server may require a certificate that it accepts of this \
                         client: the store's `tls_client`, in a configuration `tls_certificate` and `tls_key`";

/// Connects, loads the scripts and checks whether the server has lost records, before the
/// connection is used.
///
/// Loading the scripts also shows that the server answers.
pub(super) async fn connect(
    connector: &Connector,
    shared: &Shared,
    address: &str,
) -> Result<ReadyConnection, StoreError> {
    // A node that has just taken over slots may not be in the slot map yet, so it is asked about
    // the keys of all nodes: this check alone comes before the node answers a claim. It is made
    // once for each connection, and reads no more than five keys of each node; the node answers
    // those of others with MOVED, without looking for them.
    let question = shared.losses.question(|_| true);
    let mut connection = connector.connect().await?;
    let mut greeting = Pipeline::new();
    for load in shared.scripts.load() {
        greeting.add_command(load);
    }
    let loads = greeting.len();
    greeting.cmd("INFO");
    for cmd in question.commands() {
        greeting.add_command(cmd);
    }
    let deadline = Instant::now() + shared.response_timeout;
    let sent = send(&mut connection, &greeting, deadline).await;
    let answers = sent.map_err(|why| {
        StoreError::unavailable(if connector.is_tls() {
            format!("{why}{HANDSHAKE}")
        } else {
            why
        })
    })?;
    // Reads of keys that are on another server, or of other scopes, may return an error, which is
    // ignored.
    for answer in answers.iter().take(loads + 1) {
        if let Value::ServerError(error) = answer {
            return Err(errors::store_error(error, None));
        }
    }
    let (info, held) = match answers.get(loads..).and_then(<[_]>::split_first) {
        Some((Value::BulkString(info), held)) => (String::from_utf8_lossy(info), held),
        _ => {
            return Err(StoreError::unavailable(
                "INFO returned an unexpected answer",
            ));
        }
    };
    let info = Info(&info);
    if connector.wants_primary() && info.is_replica() {
        return Err(StoreError::unavailable(
            "the sentinels name a server that is not the primary yet",
        ));
    }
    if let Some(refusal) = shared.durability.refusal(&info) {
        return Err(refusal);
    }
    shared.losses.judge(&question, address, &info, held);
    Ok(ReadyConnection {
        connection,
        abilities: Abilities::of(&info),
    })
}

/// Sends a batch as one pipeline, behind `ahead` others, and returns the answers to the callers.
///
/// Returns why the connection should be replaced, if it should.
pub(super) async fn send_pipeline(
    shared: Shared,
    address: Arc<str>,
    ready: ReadyConnection,
    mut batch: Batch<Request, RawReply>,
    ahead: usize,
) -> Option<StoreError> {
    let requests = batch.take_items();
    let (answers, broken) = exchange(&shared, &address, &ready, requests, ahead).await;
    batch.answer(answers);
    broken
}

/// Sends requests as one pipeline, behind `ahead` others. Returns the answers in their order, and
/// why the connection should be replaced, if it should.
///
/// The server executes nothing of it while it waits for the durability of a pipeline ahead, so its
/// time limit includes those.
pub(super) async fn exchange(
    shared: &Shared,
    address: &str,
    ready: &ReadyConnection,
    requests: Vec<Request>,
    ahead: usize,
) -> (Vec<RawReply>, Option<StoreError>) {
    let ReadyConnection {
        mut connection,
        abilities,
    } = ready.clone();
    let count = requests.len();
    let waits = u32::try_from(ahead + 1).unwrap_or(u32::MAX);
    let patience = shared.durability.patience().saturating_mul(waits);
    let limit = time_limit(shared.response_timeout.saturating_add(patience), &requests);
    let abilities = abilities.unless_sharded(shared.is_sharded.load(Ordering::Relaxed));
    let builder = PipelineBuilder::of(requests, shared, abilities);
    let mut values = match send(&mut connection, &builder.pipeline, Instant::now() + limit).await {
        Ok(values) => values,
        Err(lost) => {
            // Calls until there is another connection were certainly not sent.
            let broken = StoreError::unavailable(&lost);
            return (vec![Err(StoreError::unknown(lost)); count], Some(broken));
        }
    };
    let mut missing = builder.missing(&mut values, shared.durability);
    let mut lost = None;
    if values.iter().any(lacks_script) {
        match repair(shared, &mut connection, &builder, &mut values, limit).await {
            // The confirmation came later on the same connection, so it also covers the commands
            // before.
            Ok(again) => missing = again,
            Err(error) => lost = Some(error),
        }
    }
    let is_several_slots = values
        .iter()
        .any(|value| matches!(value, Value::ServerError(error) if errors::is_several_slots(error)));
    if is_several_slots && !shared.is_sharded.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            node = address,
            "the server is sharded behind a proxy: from now on each call has one key, and a loss of records is detected \
             only by records that are missing, because INFO shows one of its shards"
        );
    }
    let broken = lost
        .as_ref()
        .map(StoreError::unavailable)
        .or_else(|| values.iter().find_map(end_of_connection));
    let answers = builder.unload(values, |value| match (&lost, &missing) {
        // The command was sent again, and that answer is lost.
        (Some(lost), _) if lacks_script(value) => Some(StoreError::unknown(lost)),
        // An error wrote nothing, so it needs no confirmation.
        (_, Some(missing)) if !matches!(value, Value::ServerError(_)) => Some(missing.clone()),
        _ => None,
    });
    if let Some(witness) = builder.witness(&shared.scripts, &answers) {
        shared.losses.note_completed(address, witness);
    }
    (answers, broken)
}

/// Builds one pipeline from requests, and assigns its answers to them.
#[derive(Default)]
struct PipelineBuilder {
    pipeline: Pipeline,
    /// The purpose of each command.
    carried: Vec<Carried>,
    /// The number of requests.
    count: usize,
    /// The completions, each with the index of its request.
    completed: Vec<(usize, Completed)>,
    /// `true` if the last command asks for the durability of the others.
    confirmed: bool,
}

/// The purpose of a command of a pipeline.
enum Carried {
    /// `ASKING` is not a request. The answer to the next command shows whether it took effect.
    Asking,
    /// Loads a script.
    Load,
    /// The request at this index.
    One(usize),
    /// The requests at these indexes, in one call.
    Many(Kind, Vec<usize>),
}

impl PipelineBuilder {
    fn of(requests: Vec<Request>, shared: &Shared, abilities: Abilities) -> Self {
        let count = requests.len();
        let mut builder = Self {
            pipeline: Pipeline::with_capacity(count + 1),
            count,
            ..Self::default()
        };
        let mut groups: Vec<(Kind, Vec<(usize, FirstAttempt)>)> = Vec::new();
        let mut confirm = false;
        for (place, request) in requests.into_iter().enumerate() {
            let Request {
                what,
                asking,
                completed,
                ..
            } = request;
            confirm |= request.confirm;
            builder
                .completed
                .extend(completed.map(|completed| (place, completed)));
            match what {
                What::Cmd(cmd) => builder.push(place, cmd, asking),
                What::First(first) => match first.kind(abilities) {
                    Some(kind) => match groups.iter_mut().find(|(known, _)| *known == kind) {
                        Some((_, group)) => group.push((place, first)),
                        None => groups.push((kind, vec![(place, first)])),
                    },
                    None => builder.push_alone(place, first, asking, shared, abilities),
                },
            }
        }
        for (kind, group) in groups {
            match <[_; 1]>::try_from(group) {
                Ok([(place, first)]) => builder.push_alone(place, first, false, shared, abilities),
                Err(group) => builder.push_together(kind, group, shared),
            }
        }
        if confirm {
            builder.confirm(shared.durability);
        }
        builder
    }

    fn push_alone(
        &mut self,
        place: usize,
        first: FirstAttempt,
        asking: bool,
        shared: &Shared,
        abilities: Abilities,
    ) {
        self.push(place, first.alone(&shared.scripts, abilities), asking);
        self.completed
            .extend(first.completed().map(|completed| (place, completed)));
    }

    fn push_together(&mut self, kind: Kind, group: Vec<(usize, FirstAttempt)>, shared: &Shared) {
        self.pipeline
            .add_command(kind.together(&shared.scripts, &group));
        let places = group.iter().map(|(place, _)| *place).collect();
        self.carried.push(Carried::Many(kind, places));
        let completed = group
            .into_iter()
            .filter_map(|(place, first)| Some((place, first.completed()?)));
        self.completed.extend(completed);
    }

    fn push(&mut self, place: usize, cmd: Cmd, asking: bool) {
        if asking {
            self.carried.push(Carried::Asking);
            self.pipeline.cmd("ASKING");
        }
        self.carried.push(Carried::One(place));
        self.pipeline.add_command(cmd);
    }

    fn push_load(&mut self, cmd: Cmd) {
        self.carried.push(Carried::Load);
        self.pipeline.add_command(cmd);
    }

    /// Returns whether the command at `place` needs ASKING before it.
    fn is_asking(&self, place: usize) -> bool {
        let before = place
            .checked_sub(1)
            .and_then(|before| self.carried.get(before));
        matches!(before, Some(Carried::Asking))
    }

    /// Appends the command that confirms the durability of all commands before it.
    ///
    /// On another connection, its answer would mean nothing.
    fn confirm(&mut self, durability: Durability) {
        if let Some(question) = durability.question() {
            self.pipeline.add_command(question);
            self.confirmed = true;
        }
    }

    /// Removes the confirmation, if there is one, from the values. Returns why the others do not
    /// count yet, if so.
    fn missing(&self, values: &mut Vec<Value>, durability: Durability) -> Option<StoreError> {
        let said = if self.confirmed { values.pop() } else { None };
        durability.missing(&said?)
    }

    /// Returns one answer per request, in their order. `spoilt` returns the error that replaces a
    /// value, if any.
    fn unload(
        &self,
        values: Vec<Value>,
        spoilt: impl Fn(&Value) -> Option<StoreError>,
    ) -> Vec<RawReply> {
        let mut answers: Vec<Option<RawReply>> = Vec::new();
        answers.resize_with(self.count, || None);
        for (carried, value) in self.carried.iter().zip(values) {
            let spoilt = spoilt(&value);
            match carried {
                Carried::Asking | Carried::Load => {}
                Carried::One(place) => {
                    put(&mut answers, *place, spoilt.map_or(Ok(value), Err));
                }
                Carried::Many(kind, places) => {
                    let count = places.len();
                    let own = match spoilt {
                        Some(spoilt) => vec![Err(spoilt); count],
                        None => kind.answers(value, count),
                    };
                    for (place, answer) in places.iter().zip(own) {
                        put(&mut answers, *place, answer);
                    }
                }
            }
        }
        answers
            .into_iter()
            .map(|answer| answer.unwrap_or_else(no_answer))
            .collect()
    }

    /// The last completion that the server has applied. One that it had applied before is none: its
    /// retention began then.
    fn witness(&self, scripts: &Scripts, answers: &[RawReply]) -> Option<Witness> {
        let (_, completed) =
            self.completed
                .iter()
                .rev()
                .find(|(place, _)| match answers.get(*place) {
                    Some(Ok(Value::BulkString(said))) => matches!(said.as_slice(), b"H" | b"R"),
                    Some(Ok(value)) => *value == Value::Okay,
                    _ => false,
                })?;
        scripts.witness(completed)
    }
}

fn put(answers: &mut [Option<RawReply>], place: usize, answer: RawReply) {
    if let Some(slot) = answers.get_mut(place) {
        *slot = Some(answer);
    }
}

fn time_limit(response_timeout: Duration, requests: &[Request]) -> Duration {
    let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
    let bytes: usize = requests.iter().map(|request| request.bytes()).sum();
    let kibibytes = u32::try_from(bytes / 1_024).unwrap_or(u32::MAX);
    response_timeout + TIMEOUT_PER_COMMAND * count + TIMEOUT_PER_KIBIBYTE * kibibytes
}

/// The error in an answer that ends the connection, if it is one.
fn end_of_connection(value: &Value) -> Option<StoreError> {
    match value {
        Value::ServerError(error) if errors::ends_connection(error) => {
            Some(errors::store_error(error, None))
        }
        _ => None,
    }
}

fn lacks_script(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if errors::lacks_script(error))
}

/// Loads the scripts again and repeats the commands that lacked one; the others were executed. Each
/// repeat has the whole time limit, for it waits for its durability once more.
///
/// Returns why nothing counts yet, if so. Fails with the reason when the answers to the repeated
/// commands are lost. Commands whose value still reports a missing script were not executed.
async fn repair(
    shared: &Shared,
    connection: &mut MultiplexedConnection,
    builder: &PipelineBuilder,
    values: &mut [Value],
    limit: Duration,
) -> Result<Option<StoreError>, String> {
    let mut missing = None;
    for _ in 0..MAX_REPAIRS {
        let mut again = PipelineBuilder::default();
        if !values.iter().any(lacks_script) {
            break;
        }
        shared.scripts.load().for_each(|load| again.push_load(load));
        // Here a place is the index of a command.
        let commands = builder.pipeline.cmd_iter().enumerate().zip(values.iter());
        for ((place, cmd), _) in commands.filter(|(_, value)| lacks_script(value)) {
            again.push(place, cmd.clone(), builder.is_asking(place));
        }
        if builder.confirmed {
            again.confirm(shared.durability);
        }
        let mut answers = send(connection, &again.pipeline, Instant::now() + limit).await?;
        missing = again.missing(&mut answers, shared.durability);
        for (carried, answer) in again.carried.iter().zip(answers) {
            if let Carried::One(place) = carried
                && let Some(value) = values.get_mut(*place)
            {
                *value = answer;
            }
        }
    }
    Ok(missing)
}

/// Returns the server's answers, errors included, or why they were lost.
async fn send(
    connection: &mut MultiplexedConnection,
    pipeline: &Pipeline,
    deadline: Instant,
) -> Result<Vec<Value>, String> {
    let count = pipeline.len();
    let mut sending = std::pin::pin!(connection.send_packed_commands(pipeline, 0, count));
    let mut sent = timeout_at(deadline, &mut sending).await;
    if sent.is_err() && deadline.elapsed() > LATE {
        // The threads of this runtime were blocked, by handlers perhaps: the answer may be here and
        // not yet read.
        sent = timeout(LATE, sending).await;
    }
    match sent {
        Ok(Ok(values)) if values.len() == count => Ok(values),
        Ok(Ok(_)) => Err("the server returned the wrong number of answers".to_owned()),
        Ok(Err(error)) => Err(format!("the connection broke: {}", error.category())),
        Err(_) => Err("no answer in time".to_owned()),
    }
}
