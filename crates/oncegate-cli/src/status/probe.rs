//! `oncegate status --probe`: whether all consumers are ready, in the words of the probe.

use axum::http::StatusCode;
use serde::Serialize;

use crate::exit::{Exit, Problem};
use crate::output;

/// The path of the readiness probe.
pub(super) const PATH: &str = "/readyz";

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.status.probe/1";

/// The answer of `--json`.
#[derive(Serialize)]
struct ProbeDocument {
    schema: &'static str,
    ready: bool,
    status: u16,
    /// The answer: JSON as it is, otherwise text.
    said: serde_json::Value,
}

/// Prints the answer of the probe.
pub(super) fn tell((status, said): (StatusCode, String), json: bool) -> Result<Exit, Problem> {
    let ready = status.is_success();
    if json {
        let said = serde_json::from_str(&said).unwrap_or(serde_json::Value::String(said));
        output::answer_json(&ProbeDocument {
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
