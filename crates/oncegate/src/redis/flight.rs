//! One pipeline: out, back, and repaired where the server had forgotten a script.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, timeout_at};

use super::checkup::Info;
use super::connector::Connector;
use super::durability::Durability;
use super::errors;
use super::link::{Answer, Shared};
use super::losses::Witness;
use super::native;
use super::scripts::{Request, Scripts};
use crate::batch::{Batch, Item as _};

/// How often scripts that vanished from under a pipeline are loaded again before it gives up.
const MAX_REPAIRS: usize = 3;

/// What each command adds to the time that a pipeline is given.
const TIMEOUT_PER_COMMAND: Duration = Duration::from_millis(1);

/// What each kibibyte adds to the time that a pipeline is given.
const TIMEOUT_PER_KIBIBYTE: Duration = Duration::from_micros(500);

/// Connects and loads the scripts, which also shows that the server answers; and looks whether it has forgotten
/// anything before anybody relies on it.
pub(super) async fn connect(
    connector: &Connector,
    shared: &Shared,
    address: &str,
    has_ifeq: &AtomicBool,
) -> Result<MultiplexedConnection, StoreError> {
    let question = shared.losses.question();
    let mut connection = connector.connect().await?;
    let mut greeting = Freight::default();
    shared.scripts.load().for_each(|load| greeting.push(load, false));
    let loads = greeting.pipeline.len();
    greeting.push(Request::info().cmd, false);
    question.commands().for_each(|cmd| greeting.push(cmd, false));
    let deadline = Instant::now() + shared.response_timeout;
    let answers =
        send(&mut connection, &greeting.pipeline, deadline).await.map_err(StoreError::unavailable)?;
    // Keys that are elsewhere, or of other scopes, are answered by an error, and that is fine.
    for answer in answers.iter().take(loads + 1) {
        if let Value::ServerError(error) = answer {
            return Err(errors::store_error(error, None));
        }
    }
    let (info, held) = match answers.get(loads..).and_then(<[_]>::split_first) {
        Some((Value::BulkString(info), held)) => (String::from_utf8_lossy(info), held),
        _ => return Err(StoreError::unavailable("INFO said something unheard of")),
    };
    let info = Info(&info);
    if connector.wants_primary() && info.is_replica() {
        return Err(StoreError::unavailable("the sentinels name a server that is not the primary yet"));
    }
    if let Some(refusal) = shared.durability.refusal(&info) {
        return Err(refusal);
    }
    shared.losses.judge(&question, address, &info, held);
    has_ifeq.store(native::has_ifeq(&info), Ordering::Relaxed);
    Ok(connection)
}

/// Sends a batch as one pipeline and hands the answers to the callers; tells why the connection should be
/// replaced, if it should.
pub(super) async fn fly(
    shared: Shared,
    address: Arc<str>,
    mut connection: MultiplexedConnection,
    mut batch: Batch<Request, Answer>,
) -> Option<StoreError> {
    let requests = batch.take_items();
    let deadline = deadline(shared.response_timeout + shared.durability.patience(), &requests);
    let freight = Freight::of(requests, shared.durability);
    let mut values = match send(&mut connection, &freight.pipeline, deadline).await {
        Ok(values) => values,
        Err(lost) => {
            batch.answer_all(&Err(StoreError::unknown(&lost)));
            // Whoever calls before there is another connection was surely not heard.
            return Some(StoreError::unavailable(lost));
        }
    };
    let mut missing = freight.missing(&mut values, shared.durability);
    let mut lost = None;
    if values.iter().any(lacks_script) {
        match repair(&shared, &mut connection, &freight, &mut values, deadline).await {
            // It came later on the same connection, so it speaks for what was before, too.
            Ok(again) => missing = again,
            Err(error) => lost = Some(error),
        }
    }
    if let Some(witness) = freight.witness(&shared.scripts, &values) {
        shared.losses.note_completed(&address, witness);
    }
    let ends = |value: &Value| match value {
        Value::ServerError(error) if errors::ends_connection(error) => Some(errors::store_error(error, None)),
        _ => None,
    };
    let broken = lost.as_ref().map(StoreError::unavailable).or_else(|| values.iter().find_map(ends));
    batch.answer(freight.own(values).map(|value| match (&lost, &missing) {
        // It was sent again, and that answer is lost.
        (Some(lost), _) if lacks_script(&value) => Err(StoreError::unknown(lost)),
        // An error was no write, and is as good as ever.
        (_, Some(missing)) if !matches!(value, Value::ServerError(_)) => Err(missing.clone()),
        _ => Ok(value),
    }));
    broken
}

/// Requests as one pipeline, and what travels with them.
#[derive(Default)]
struct Freight {
    pipeline: Pipeline,
    /// Where ASKING stands: it is no request, and whether it was heard, the answer to the next one tells.
    asking: Vec<usize>,
    /// Where completions stand.
    completing: Vec<usize>,
    /// Whether the last command asks how far the others have gone.
    confirmed: bool,
}

impl Freight {
    fn of(requests: Vec<Request>, durability: Durability) -> Self {
        let pipeline = Pipeline::with_capacity(requests.len() + 1);
        let mut freight = Self { pipeline, ..Self::default() };
        let mut confirm = false;
        for request in requests {
            confirm |= request.confirm;
            freight.push(request.cmd, request.asking);
            if request.completes {
                freight.completing.push(freight.pipeline.len() - 1);
            }
        }
        if confirm {
            freight.confirm(durability);
        }
        freight
    }

    fn push(&mut self, cmd: Cmd, asking: bool) {
        if asking {
            self.asking.push(self.pipeline.len());
            self.pipeline.cmd("ASKING");
        }
        self.pipeline.add_command(cmd);
    }

    /// Asks at the end how far all of it has gone: on another connection, the answer would mean nothing.
    fn confirm(&mut self, durability: Durability) {
        if let Some(question) = durability.question() {
            self.pipeline.add_command(question);
            self.confirmed = true;
        }
    }

    /// Takes the last value away if it says how far the others have gone: why they do not count yet, if so.
    fn missing(&self, values: &mut Vec<Value>, durability: Durability) -> Option<StoreError> {
        let said = if self.confirmed { values.pop() } else { None };
        durability.missing(&said?)
    }

    /// Whether the command at `place` needs ASKING before it.
    fn is_asking(&self, place: usize) -> bool {
        place.checked_sub(1).is_some_and(|before| self.asking.binary_search(&before).is_ok())
    }

    /// Of one value for each command, those that answer requests.
    fn own(&self, values: Vec<Value>) -> impl Iterator<Item = Value> {
        let places = values.into_iter().enumerate();
        places.filter(|(place, _)| self.asking.binary_search(place).is_err()).map(|(_, value)| value)
    }

    /// The last completion that the server has said yes to.
    fn witness(&self, scripts: &Scripts, values: &[Value]) -> Option<Witness> {
        let is_held = |place: &&usize| match values.get(**place) {
            Some(Value::BulkString(said)) => matches!(said.as_slice(), b"H" | b"R"),
            Some(value) => *value == Value::Okay,
            None => false,
        };
        let place = self.completing.iter().rev().find(is_held)?;
        scripts.witness(self.pipeline.cmd_iter().nth(*place)?)
    }
}

fn deadline(response_timeout: Duration, requests: &[Request]) -> Instant {
    let count = u32::try_from(requests.len()).unwrap_or(u32::MAX);
    let bytes: usize = requests.iter().map(|request| request.bytes()).sum();
    let kibibytes = u32::try_from(bytes / 1_024).unwrap_or(u32::MAX);
    Instant::now() + response_timeout + TIMEOUT_PER_COMMAND * count + TIMEOUT_PER_KIBIBYTE * kibibytes
}

fn lacks_script(value: &Value) -> bool {
    matches!(value, Value::ServerError(error) if errors::lacks_script(error))
}

/// Loads the scripts again and sends those commands again that found none: the others were executed. Returns why
/// nothing counts yet, if so.
///
/// Fails when what was sent again is lost, and tells how; slots that still lack their script were not executed.
async fn repair(
    shared: &Shared,
    connection: &mut MultiplexedConnection,
    freight: &Freight,
    values: &mut [Value],
    deadline: Instant,
) -> Result<Option<StoreError>, String> {
    let mut missing = None;
    for _ in 0..MAX_REPAIRS {
        let mut again = Freight::default();
        shared.scripts.load().for_each(|load| again.push(load, false));
        let loads = again.pipeline.len();
        let commands = freight.pipeline.cmd_iter().enumerate().zip(values.iter());
        for ((place, cmd), _) in commands.filter(|(_, value)| lacks_script(value)) {
            again.push(cmd.clone(), freight.is_asking(place));
        }
        if again.pipeline.len() == loads {
            break;
        }
        if freight.confirmed {
            again.confirm(shared.durability);
        }
        let mut answers = send(connection, &again.pipeline, deadline).await?;
        missing = again.missing(&mut answers, shared.durability);
        let places = values.iter_mut().filter(|value| lacks_script(value));
        for (place, answer) in places.zip(again.own(answers).skip(loads)) {
            *place = answer;
        }
    }
    Ok(missing)
}

/// The server's answers, its errors among them; or how they were lost.
async fn send(
    connection: &mut MultiplexedConnection,
    pipeline: &Pipeline,
    deadline: Instant,
) -> Result<Vec<Value>, String> {
    let count = pipeline.len();
    match timeout_at(deadline, connection.send_packed_commands(pipeline, 0, count)).await {
        Ok(Ok(values)) if values.len() == count => Ok(values),
        Ok(Ok(_)) => Err("the server answered another number of commands".to_owned()),
        Ok(Err(error)) => Err(format!("the connection broke: {}", error.category())),
        Err(_) => Err("no answer in time".to_owned()),
    }
}
