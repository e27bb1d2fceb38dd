//! `oncegate dead-letters show`: one dead letter, with everything that is known about it.

use std::time::SystemTime;

use oncegate::Header;
use oncegate::admin::Wanted;
use oncegate::admin::dead_letter_reader::StoredDeadLetter;
use oncegate::core::key::Scope;
use serde::Serialize;

use super::filter::FilterArgs;
use super::place::PlaceArgs;
use crate::args::{AnswerArgs, within};
use crate::exit::{Exit, Problem};
use crate::output::{self, Table, grouped, time};
use crate::sources::{LetterPlace, check_positions};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.dead-letters.show/1";

/// Show one dead letter: where its message came from, why it was given up, and when
///
/// The payload and the values of headers are printed only with --payload. Exit code 1: there is no
/// such dead letter.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    place: PlaceArgs,

    /// The consumer of the configuration [default: its only one]
    #[arg(long, value_name = "NAME")]
    scope: Option<Scope>,

    /// The position of the dead letter, as list shows it: orders.dead/0@42
    #[arg(value_name = "PLACE")]
    at: String,

    /// Print the payload and the values of headers as well
    #[arg(long)]
    payload: bool,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// Everything that is known about a dead letter. Times are RFC 3339.
#[derive(Debug, Serialize)]
pub(super) struct Known {
    /// The position of the dead letter.
    pub(super) at: String,
    /// `true` if oncegate wrote it; if not, only the next four are known.
    pub(super) known: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    message_key: Option<String>,
    payload_bytes: usize,
    tombstone: bool,
    headers: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) origin: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    produced_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scope: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cause: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) attempts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_failed_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed_at: Option<String>,
}

impl Known {
    pub(super) fn of(stored: &StoredDeadLetter) -> Self {
        let message = stored.message();
        let letter = stored.letter();
        let produced = message
            .timestamp_ms()
            .and_then(|millis| u64::try_from(millis).ok());
        let produced = produced
            .map(|millis| SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(millis));
        Self {
            at: stored.place.to_string(),
            known: letter.is_some(),
            message_key: message
                .key()
                .map(|key| String::from_utf8_lossy(key).into_owned()),
            payload_bytes: message.payload().len(),
            tombstone: message.is_tombstone(),
            headers: message
                .headers()
                .iter()
                .map(|header| header.name.to_string())
                .collect(),
            route: letter.map(|letter| letter.message.route().to_owned()),
            origin: letter.map(|letter| letter.message.origin().to_string()),
            produced_at: produced.map(time),
            scope: letter.map(|letter| letter.scope.clone()),
            key: letter.and_then(|letter| letter.key.clone()),
            cause: letter.map(|letter| letter.cause.as_str()),
            reason: letter.map(|letter| letter.reason.clone()),
            attempts: letter.map(|letter| letter.attempts),
            first_failed_at: letter.and_then(|letter| letter.first_failed_at).map(time),
            failed_at: letter.map(|letter| time(letter.failed_at)),
        }
    }
}

/// The answer of `--json`.
#[derive(Serialize)]
struct ShowDocument {
    schema: &'static str,
    #[serde(flatten)]
    known: Known,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Content>,
}

/// The content that `--payload` prints. Bytes that are not UTF-8 are replaced by U+FFFD.
#[derive(Serialize)]
struct Content {
    payload: String,
    /// `true` if the payload is UTF-8, and shown as it is.
    exact: bool,
    headers: Vec<(String, Option<String>)>,
}

pub(crate) async fn run(args: &ShowArgs) -> Result<Exit, Problem> {
    let loaded = args.place.load(false)?;
    let place = args
        .place
        .find(loaded.as_ref(), args.scope.as_ref().map(Scope::as_str))?;
    check_positions(&*place, [args.at.as_str()])?;
    let Some(stored) = within(args.answer.timeout, find(args, &*place)).await? else {
        eprintln!(
            "oncegate: there is no letter at {} in {}",
            output::plain(&args.at),
            place.name()
        );
        return Ok(Exit::No);
    };
    let known = Known::of(&stored);
    let content = args.payload.then(|| content(&stored));
    if args.answer.json {
        output::answer_json(&ShowDocument {
            schema: SCHEMA,
            known,
            content,
        })?;
    } else {
        output::answer(&text(&known, content.as_ref()))?;
    }
    Ok(Exit::Yes)
}

async fn find(
    args: &ShowArgs,
    place: &dyn LetterPlace,
) -> Result<Option<StoredDeadLetter>, Problem> {
    let filter = FilterArgs::at(&args.at);
    let mut found = None;
    super::read(place, |stored| {
        if filter.judge(&stored) == Wanted::Yes {
            found = Some(stored);
        }
    })
    .await?;
    Ok(found)
}

fn content(stored: &StoredDeadLetter) -> Content {
    let message = stored.message();
    let headers = message.headers().iter();
    Content {
        payload: lossy(message.payload()),
        exact: std::str::from_utf8(message.payload()).is_ok(),
        headers: headers
            .map(|Header { name, value }| (name.to_string(), value.as_deref().map(lossy)))
            .collect(),
    }
}

/// Returns bytes as text, with U+FFFD for what is not UTF-8.
pub(crate) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn text(known: &Known, content: Option<&Content>) -> String {
    let mut table = Table::default();
    table.text("letter", &known.at);
    table.optional("message", known.origin.as_deref());
    table.optional("route", known.route.as_deref());
    table.optional("produced", known.produced_at.as_deref());
    table.optional("scope", known.scope.as_deref());
    table.optional("key", known.key.as_deref());
    table.optional("cause", known.cause);
    table.optional("reason", known.reason.as_deref());
    table.optional("attempts", known.attempts.map(|count| count.to_string()));
    table.optional("first failed", known.first_failed_at.as_deref());
    table.optional("given up", known.failed_at.as_deref());
    table.optional("message key", known.message_key.as_deref());
    let bytes = format!("{} bytes", grouped(known.payload_bytes as u64));
    table.text(
        "payload",
        if known.tombstone {
            "none: a tombstone"
        } else {
            &bytes
        },
    );
    if !known.known {
        table.text("why", "not known: oncegate did not write it");
    }
    match content {
        None => table.text("headers", known.headers.join(", ")),
        Some(content) => {
            for (name, value) in &content.headers {
                table.text(
                    &format!("header {name}"),
                    value.as_deref().unwrap_or("null"),
                );
            }
        }
    }
    let payload = content
        .map(|content| format!("\n{}\n", output::plain(&content.payload)))
        .unwrap_or_default();
    table.render() + &payload
}
