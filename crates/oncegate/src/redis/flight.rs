//! One pipeline: out, back, and repaired where the server had forgotten a script.

use std::time::Duration;

use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, timeout_at};

use super::checkup;
use super::connector::Connector;
use super::errors;
use super::link::{Answer, Shared};
use super::scripts::{Request, Scripts};
use crate::batch::{Batch, Item as _};

/// How often scripts that vanished from under a pipeline are loaded again before it gives up.
const MAX_REPAIRS: usize = 3;

/// What each command adds to the time that a pipeline is given.
const TIMEOUT_PER_COMMAND: Duration = Duration::from_millis(1);

/// What each kibibyte adds to the time that a pipeline is given.
const TIMEOUT_PER_KIBIBYTE: Duration = Duration::from_micros(500);

/// Connects and loads the scripts, which also shows that the server answers.
pub(super) async fn connect(
    connector: &Connector,
    shared: &Shared,
) -> Result<MultiplexedConnection, StoreError> {
    let mut connection = connector.connect().await?;
    let mut greeting = Pipeline::new();
    for load in shared.scripts.load() {
        greeting.add_command(load);
    }
    greeting.cmd("INFO");
    let deadline = Instant::now() + shared.response_timeout;
    let answers = send(&mut connection, &greeting, deadline).await.map_err(StoreError::unavailable)?;
    for answer in &answers {
        if let Value::ServerError(error) = answer {
            return Err(errors::store_error(error, None));
        }
    }
    if let Some(Value::BulkString(info)) = answers.last()
        && connector.wants_primary()
        && checkup::Info(&String::from_utf8_lossy(info)).is_replica()
    {
        return Err(StoreError::unavailable("the sentinels name a server that is not the primary yet"));
    }
    Ok(connection)
}

/// Sends a batch as one pipeline and hands the answers to the callers; tells why the connection should be
/// replaced, if it should.
pub(super) async fn fly(
    shared: Shared,
    mut connection: MultiplexedConnection,
    mut batch: Batch<Request, Answer>,
) -> Option<StoreError> {
    let requests = batch.take_items();
    let deadline = deadline(shared.response_timeout, &requests);
    let freight = Freight::of(requests);
    let mut values = match send(&mut connection, &freight.pipeline, deadline).await {
        Ok(values) => values,
        Err(lost) => {
            batch.answer_all(&Err(StoreError::unknown(&lost)));
            // Whoever calls before there is another connection was surely not heard.
            return Some(StoreError::unavailable(lost));
        }
    };
    let mut lost = None;
    if values.iter().any(lacks_script) {
        lost = repair(&shared.scripts, &mut connection, &freight, &mut values, deadline).await.err();
    }
    let ends = |value: &Value| match value {
        Value::ServerError(error) if errors::ends_connection(error) => Some(errors::store_error(error, None)),
        _ => None,
    };
    let broken = lost.as_ref().map(StoreError::unavailable).or_else(|| values.iter().find_map(ends));
    batch.answer(freight.own(values).map(|value| match &lost {
        // It was sent again, and that answer is lost.
        Some(lost) if lacks_script(&value) => Err(StoreError::unknown(lost)),
        _ => Ok(value),
    }));
    broken
}

/// Requests as one pipeline, and what travels between them.
#[derive(Default)]
struct Freight {
    pipeline: Pipeline,
    /// Where ASKING stands: it is no request, and whether it was heard, the answer to the next one tells.
    asking: Vec<usize>,
}

impl Freight {
    fn of(requests: Vec<Request>) -> Self {
        let mut freight = Self { pipeline: Pipeline::with_capacity(requests.len()), asking: Vec::new() };
        requests.into_iter().for_each(|request| freight.push(request.cmd, request.asking));
        freight
    }

    fn push(&mut self, cmd: Cmd, asking: bool) {
        if asking {
            self.asking.push(self.pipeline.len());
            self.pipeline.cmd("ASKING");
        }
        self.pipeline.add_command(cmd);
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

/// Loads the scripts again and sends those commands again that found none: the others were executed.
///
/// Fails when what was sent again is lost, and tells how; slots that still lack their script were not executed.
async fn repair(
    scripts: &Scripts,
    connection: &mut MultiplexedConnection,
    freight: &Freight,
    values: &mut [Value],
    deadline: Instant,
) -> Result<(), String> {
    for _ in 0..MAX_REPAIRS {
        let mut again = Freight::default();
        scripts.load().for_each(|load| again.push(load, false));
        let loads = again.pipeline.len();
        let commands = freight.pipeline.cmd_iter().enumerate().zip(values.iter());
        for ((place, cmd), _) in commands.filter(|(_, value)| lacks_script(value)) {
            again.push(cmd.clone(), freight.is_asking(place));
        }
        if again.pipeline.len() == loads {
            return Ok(());
        }
        let answers = send(connection, &again.pipeline, deadline).await?;
        let places = values.iter_mut().filter(|value| lacks_script(value));
        for (place, answer) in places.zip(again.own(answers).skip(loads)) {
            *place = answer;
        }
    }
    Ok(())
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
