//! One pipeline: out, back, and repaired where the server had forgotten a script.

use std::time::Duration;

use deadpool_redis::{Connection, PoolError};
use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, Value};
use tokio::time::{Instant, timeout_at};

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

/// Checks a connection out and loads the scripts through it, which also shows that the server answers.
pub(super) async fn connect(shared: &Shared) -> Result<Connection, StoreError> {
    let mut connection = shared.pool.get().await.map_err(|error| not_connected(&error))?;
    let mut pipeline = Pipeline::new();
    append_scripts(&mut pipeline, &shared.scripts);
    let deadline = Instant::now() + shared.response_timeout;
    let loaded = match send(&mut connection, &pipeline, deadline).await {
        Ok(values) => values.into_iter().find_map(|value| match value {
            Value::ServerError(error) => Some(errors::store_error(&error, None)),
            _ => None,
        }),
        Err(lost) => Some(StoreError::unavailable(lost)),
    };
    match loaded {
        None => Ok(connection),
        Some(error) => {
            drop(Connection::take(connection));
            Err(error)
        }
    }
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
    let mut pipeline = Pipeline::with_capacity(requests.len());
    for request in requests {
        pipeline.add_command(request.cmd);
    }
    let mut values = match send(&mut connection, &pipeline, deadline).await {
        Ok(values) => values,
        Err(lost) => {
            batch.answer_all(&Err(StoreError::unknown(&lost)));
            // Whoever calls before there is another connection was surely not heard.
            return Some(StoreError::unavailable(lost));
        }
    };
    let mut lost = None;
    if values.iter().any(lacks_script) {
        lost = repair(&shared.scripts, &mut connection, &pipeline, &mut values, deadline).await.err();
    }
    let ends = |value: &Value| match value {
        Value::ServerError(error) if errors::ends_connection(error) => Some(errors::store_error(error, None)),
        _ => None,
    };
    let broken = lost.as_ref().map(StoreError::unavailable).or_else(|| values.iter().find_map(ends));
    batch.answer(values.into_iter().map(|value| match &lost {
        // It was sent again, and that answer is lost.
        Some(lost) if lacks_script(&value) => Err(StoreError::unknown(lost)),
        _ => Ok(value),
    }));
    broken
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

fn append_scripts(pipeline: &mut Pipeline, scripts: &Scripts) -> usize {
    let load = scripts.load();
    let count = load.len();
    for cmd in load {
        pipeline.add_command(cmd);
    }
    count
}

/// Loads the scripts again and sends those commands again that found none: the others were executed.
///
/// Fails when what was sent again is lost, and tells how; slots that still lack their script were not executed.
async fn repair(
    scripts: &Scripts,
    connection: &mut MultiplexedConnection,
    pipeline: &Pipeline,
    values: &mut [Value],
    deadline: Instant,
) -> Result<(), String> {
    for _ in 0..MAX_REPAIRS {
        let mut again = Pipeline::new();
        let loads = append_scripts(&mut again, scripts);
        let lacking = pipeline.cmd_iter().zip(values.iter()).filter(|(_, value)| lacks_script(value));
        let lacking: Vec<Cmd> = lacking.map(|(cmd, _)| cmd.clone()).collect();
        if lacking.is_empty() {
            return Ok(());
        }
        for cmd in lacking {
            again.add_command(cmd);
        }
        let answers = send(connection, &again, deadline).await?;
        let places = values.iter_mut().filter(|value| lacks_script(value));
        for (place, answer) in places.zip(answers.into_iter().skip(loads)) {
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

/// Why there is no connection. The address and the password are not in the text.
fn not_connected(error: &PoolError) -> StoreError {
    match error {
        PoolError::Backend(error) => connect_error(error),
        other => StoreError::unavailable(format!("no connection from the pool: {other}")),
    }
}

fn connect_error(error: &RedisError) -> StoreError {
    let server_error = error.clone().into_server_errors();
    if let Some((_, error)) = server_error.as_deref().and_then(<[_]>::first) {
        return errors::store_error(error, None);
    }
    match error.kind() {
        ErrorKind::AuthenticationFailed => {
            StoreError::refused("the server refuses the user name or password, or is not ready for them")
        }
        ErrorKind::InvalidClientConfig => StoreError::refused("the connection's settings are invalid"),
        _ if error.is_connection_refusal() => StoreError::unavailable("nobody listens there"),
        _ if error.is_timeout() => StoreError::unavailable("the server does not answer"),
        _ => StoreError::unavailable(format!("cannot connect: {}", error.category())),
    }
}
