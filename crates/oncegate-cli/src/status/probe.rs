//! `oncegate health`: asks a running consumer whether it is ready.

use std::time::Duration;

use axum::http::{StatusCode, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;

use crate::args::within;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::parse::duration;

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.health/1";

/// The longest answer that is read, in bytes.
const ANSWER_MAX_BYTES: usize = 1024 * 1024;

/// Ask a running consumer whether it takes and handles messages
///
/// For container health checks and scripts: it requests /readyz once and prints the answer, with
/// its reasons. Exit code 0: the consumer is ready; 1: it is not ready; 69: there is no answer.
#[derive(Debug, clap::Args)]
pub(crate) struct HealthArgs {
    /// The URL of the consumer's readiness probe
    #[arg(
        long,
        value_name = "URL",
        env = "ONCEGATE_HEALTH",
        default_value = "http://127.0.0.1:9464/readyz"
    )]
    url: Uri,

    /// Print one JSON document
    #[arg(long)]
    json: bool,

    /// Give up after this time: 500ms, 30s, 5m
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "5s")]
    timeout: Duration,
}

/// The answer of `--json`.
#[derive(Serialize)]
struct HealthDocument {
    schema: &'static str,
    ready: bool,
    status: u16,
    /// The answer: JSON as it is, otherwise text.
    said: serde_json::Value,
}

pub(crate) async fn run(args: &HealthArgs) -> Result<Exit, Problem> {
    if args.url.scheme_str() != Some("http") || args.url.host().is_none() {
        return Err(Problem::new(
            Exit::Usage,
            "--url must be http://host:port/path; there is no TLS here",
        ));
    }
    let (status, said) = within(Some(args.timeout), ask(args)).await?;
    let ready = status.is_success();
    if args.json {
        let said = serde_json::from_str(&said).unwrap_or(serde_json::Value::String(said));
        output::answer_json(&HealthDocument {
            schema: SCHEMA,
            ready,
            status: status.as_u16(),
            said,
        })?;
    } else {
        let word = if ready { "ready" } else { "not ready" };
        output::answer(&format!(
            "{word} ({status})\n{}",
            output::plain(said.trim())
        ))?;
    }
    Ok(if ready { Exit::Yes } else { Exit::No })
}

async fn ask(args: &HealthArgs) -> Result<(StatusCode, String), Problem> {
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let response = client
        .get(args.url.clone())
        .await
        .map_err(|error| no_answer(args, &error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES)
        .collect()
        .await;
    let body = body.map_err(|error| no_answer(args, &*error))?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

fn no_answer(args: &HealthArgs, error: &dyn std::error::Error) -> Problem {
    let why = Problem::caused(Exit::Unreachable, error);
    Problem::new(
        Exit::Unreachable,
        format!("no answer from {}: {why}", args.url),
    )
}
