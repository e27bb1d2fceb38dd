//! `oncegate inspect`: what the store holds for a key, in words.

use std::sync::Arc;
use std::time::Duration;

use oncegate::Key;
use oncegate::codec::describe_stored;
use oncegate::core::key::{Digest, Scope, StoreKey};
use oncegate::core::record::{Fence, Recovery, State};
use oncegate::core::store::{Looked, Store};
use oncegate::proof::{Known, Proof};
use serde::Serialize;
use tracing::warn;

use crate::args::{MessageArgs, duration, within};
use crate::exit::{Exit, Problem};
use crate::key::explain;
use crate::output::{self, Table, span};
use crate::store::StoreArgs;

/// Names the form of the document that `--json` prints.
const SCHEMA: &str = "oncegate.inspect/1";

/// Show what the store holds for one key, in words
///
/// The key is given as it stands in logs and dead letters, or derived from a message. Exit code 1: there is no record.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["store_key", "digest", "key"])))]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,

    /// The scope of the consumer's gate
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE", required_unless_present = "store_key")]
    scope: Option<Scope>,

    /// The key as the store has it: billing:eMT5oSC2v1zTz8Nw5IO50A
    #[arg(long, value_name = "SCOPE:DIGEST")]
    store_key: Option<StoreKey>,

    /// The second half of that
    #[arg(long, value_name = "DIGEST", allow_hyphen_values = true)]
    digest: Option<Digest>,

    /// The key specification, for a message whose payload comes from a file or from standard input
    #[arg(long, value_name = "SPEC", requires = "route")]
    key: Option<Key>,

    /// The route of that message: its topic or the name of its queue, unless it was retried or redriven
    #[arg(long, value_name = "NAME", aliases = ["topic", "queue"], requires = "key")]
    route: Option<String>,

    #[command(flatten)]
    message: MessageArgs,

    /// Print one JSON document
    #[arg(long)]
    json: bool,

    /// Give up after this time: 500ms, 30s, 5m [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    timeout: Option<Duration>,
}

/// The answer of `--json`. Times are in milliseconds from now, on the store's clock.
#[derive(Debug, Default, PartialEq, Serialize)]
struct Document {
    schema: &'static str,
    key: String,
    /// `absent`, `pending`, `released`, `completed` or `failed`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u8>,
    /// Whether an attempt ever ended without a word.
    #[serde(skip_serializing_if = "Option::is_none")]
    recovered: Option<bool>,
    /// How long the lease lasts, or the retry is put off; 0 when that is over.
    #[serde(skip_serializing_if = "Option::is_none")]
    protected_for_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fence: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    handed_over: Option<bool>,
    fingerprinted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_ms: Option<u64>,
}

pub(crate) async fn run(args: &Args) -> Result<Exit, Problem> {
    let (key, found) = within(args.timeout, look(args)).await?;
    if args.json {
        output::answer_json(&document(&key, found.as_ref()))?;
    } else {
        output::answer(&words(&key, found.as_ref()))?;
    }
    Ok(if found.is_some() { Exit::Yes } else { Exit::No })
}

async fn look(args: &Args) -> Result<(StoreKey, Option<Looked>), Problem> {
    let missing = || Problem::new(Exit::Usage, "--scope is missing");
    let store = args.store.open().await?;
    let key = match (&args.store_key, &args.digest, &args.key) {
        (Some(key), _, _) => key.clone(),
        (None, Some(digest), _) => StoreKey::new(args.scope.as_ref().ok_or_else(missing)?, *digest),
        (None, None, Some(spec)) => {
            let scope = args.scope.as_ref().ok_or_else(missing)?;
            derive(args, spec, scope, Arc::clone(&store)).await?
        }
        (None, None, None) => {
            return Err(Problem::new(Exit::Usage, "--store-key, --digest or --key is missing"));
        }
    };
    let mut answers = store.look(vec![key.clone()]).await;
    let found = answers.pop().ok_or_else(|| Problem::new(Exit::Bug, "the store gave no answer"))??;
    Ok((key, found))
}

async fn derive(args: &Args, spec: &Key, scope: &Scope, store: Arc<dyn Store>) -> Result<StoreKey, Problem> {
    // With another key than the scope's, the answer would be "absent" whatever has happened.
    let examination = Proof::new(scope.as_str(), spec.clone(), store).open().await?;
    if examination.known() == Known::Nothing {
        warn!(%scope, "no gate has ever opened this scope in this store: is it the right scope, and the right store?");
    }
    let route = args.route.as_deref().unwrap_or_default();
    Ok(explain(spec, scope, route, &args.message).await?.store_key().clone())
}

fn words(key: &StoreKey, found: Option<&Looked>) -> String {
    let mut table = Table::default();
    table.text("key", key);
    let Some(found @ Looked { now, record }) = found else {
        table.text("state", "absent");
        table.text("next", "a delivery would run the handler, as attempt 1");
        return table.render();
    };
    let protected = record.protected_for(*now);
    let next = match &record.state {
        State::Pending { token, attempt, recovery, fence } => {
            table.text("state", "pending: claimed, and not finished");
            table.text("attempt", format!("{attempt}{}", recovery_words(*recovery)));
            table.text("owner", format!("{:?}", token.tag()));
            fence_words(&mut table, *fence);
            let (lease, next) = match protected {
                Some(left) => (
                    format!("{} left, unless its owner extends it", span(left)),
                    format!("a delivery would wait, for at most {}", span(left)),
                ),
                None => {
                    let next =
                        format!("a delivery would run the handler, as attempt {}", attempt.saturating_add(1));
                    ("over: its owner has ended without a word, or lost the store".to_owned(), next)
                }
            };
            table.text("lease", lease);
            next
        }
        State::Released { attempt, recovered, fence, reason, .. } => {
            table.text("state", "released: waiting for its next attempt");
            let earlier = if *recovered { ", one of which ended without a word" } else { "" };
            table.text("attempts", format!("{attempt} counted{earlier}"));
            fence_words(&mut table, *fence);
            table.text("reason", if reason.is_empty() { "none given" } else { reason });
            match protected {
                Some(left) => format!("a delivery would run the handler after {}", span(left)),
                None => format!("a delivery would run the handler, as attempt {}", attempt.saturating_add(1)),
            }
        }
        State::Completed { by, result } => {
            table.text("state", "completed");
            table.text("result", describe_stored(result));
            table.text("owner", format!("{by:?}"));
            "a delivery would get that result, and run nothing".to_owned()
        }
        State::Failed { attempt, handed_over, reason, .. } => {
            table.text("state", "failed: given up");
            table.text("attempts", attempt.to_string());
            table.text("reason", if reason.is_empty() { "none given" } else { reason });
            table.text("dead letter", if *handed_over { "written" } else { "not known to be written" });
            match handed_over {
                true => "a delivery would run nothing, and write no second dead letter".to_owned(),
                false => "a delivery would run nothing, and write the dead letter".to_owned(),
            }
        }
    };
    table.text("next", next);
    table.text(
        "content",
        if record.fingerprint.is_some() { "compared by a fingerprint" } else { "not compared" },
    );
    table.text("forgotten", format!("in {}", span(left(found))));
    table.render()
}

fn recovery_words(recovery: Recovery) -> &'static str {
    match recovery {
        Recovery::None => "",
        Recovery::Earlier => "; an earlier one ended without a word, so its effect may have happened",
        Recovery::Takeover => "; the one before ended without a word, so its effect may have happened",
    }
}

fn fence_words(table: &mut Table, fence: Option<Fence>) {
    if let Some(Fence(fence)) = fence {
        table.text("fence", fence.to_string());
    }
}

/// How long the store keeps the record.
fn left(found: &Looked) -> Duration {
    Duration::from_millis(found.record.expires_at.millis().saturating_sub(found.now.millis()))
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn document(key: &StoreKey, found: Option<&Looked>) -> Document {
    let base = Document { schema: SCHEMA, key: key.to_string(), state: "absent", ..Document::default() };
    let Some(found @ Looked { now, record }) = found else {
        return base;
    };
    let base = Document {
        fingerprinted: record.fingerprint.is_some(),
        expires_in_ms: Some(millis(left(found))),
        ..base
    };
    let protected_for_ms = Some(record.protected_for(*now).map_or(0, millis));
    let number = |fence: &Option<Fence>| fence.map(|Fence(fence)| fence);
    match &record.state {
        State::Pending { attempt, recovery, fence, .. } => Document {
            state: "pending",
            attempt: Some(*attempt),
            recovered: Some(recovery.recovered()),
            fence: number(fence),
            protected_for_ms,
            ..base
        },
        State::Released { attempt, recovered, fence, reason, .. } => Document {
            state: "released",
            attempt: Some(*attempt),
            recovered: Some(*recovered),
            fence: number(fence),
            reason: Some(reason.clone()),
            protected_for_ms,
            ..base
        },
        State::Completed { result, .. } => Document {
            state: "completed",
            result: Some(describe_stored(result)),
            result_bytes: Some(result.len()),
            ..base
        },
        State::Failed { attempt, handed_over, reason, .. } => Document {
            state: "failed",
            attempt: Some(*attempt),
            handed_over: Some(*handed_over),
            reason: Some(reason.clone()),
            ..base
        },
    }
}

#[cfg(test)]
mod tests {
    use oncegate::core::record::{Record, StoreTime, TAIL, Token, TokenTag};

    use super::*;

    const NOW: StoreTime = StoreTime::from_millis(1_000_000);

    fn shown(expires_in: Duration, state: State) -> (String, Document) {
        let key: StoreKey = "billing:eMT5oSC2v1zTz8Nw5IO50A".parse().unwrap();
        let record = Record { expires_at: NOW + expires_in, fingerprint: None, state };
        let found = Looked { now: NOW, record };
        (words(&key, Some(&found)), document(&key, Some(&found)))
    }

    fn pending(recovery: Recovery) -> State {
        let token = Token::from_bits(u128::MAX);
        State::Pending { token, attempt: 2, recovery, fence: Some(Fence(77)) }
    }

    fn check(text: &str, lines: &[&str]) {
        for line in lines {
            assert!(text.contains(line), "{line:?} is missing in:\n{text}");
        }
    }

    #[test]
    fn a_running_attempt() {
        let (text, json) = shown(TAIL + Duration::from_secs(26), pending(Recovery::Takeover));
        check(
            &text,
            &["attempt    2; the one before", "26.0 s left", "fence      77", "ffffffff…", "would wait"],
        );
        assert!(!text.contains("ffffffffff"), "the token is the owner's alone");
        assert_eq!(
            (json.state, json.protected_for_ms, json.recovered),
            ("pending", Some(26_001), Some(true))
        );
    }

    #[test]
    fn an_abandoned_attempt() {
        let (text, json) = shown(TAIL - Duration::from_secs(5), pending(Recovery::None));
        check(&text, &["lease      over", "run the handler, as attempt 3", "forgotten  in 29 d 23 h"]);
        assert_eq!((json.protected_for_ms, json.recovered), (Some(0), Some(false)));
    }

    #[test]
    fn a_retry_that_waits() {
        let by = TokenTag([0; 4]);
        let reason = "bank\nis closed".to_owned();
        let state = State::Released { by, attempt: 1, recovered: false, fence: None, reason };
        let (text, json) = shown(TAIL + Duration::from_secs(90), state);
        check(&text, &[r"reason     bank\nis closed", "after 1 min 30 s", "attempts   1 counted"]);
        assert_eq!((json.state, json.attempt, json.fence), ("released", Some(1), None));
    }

    #[test]
    fn a_result_is_described_and_never_shown() {
        let state = State::Completed { by: TokenTag([1; 4]), result: b"\x01\"secret\"".as_slice().into() };
        let (text, json) = shown(Duration::from_secs(86_400), state);
        check(&text, &["result     8 bytes of JSON", "forgotten  in 1 d 0 h"]);
        assert!(!text.contains("secret"));
        assert_eq!((json.state, json.result_bytes), ("completed", Some(9)));
    }

    #[test]
    fn a_failure_and_its_dead_letter() {
        let failed = |handed_over| State::Failed {
            by: TokenTag([1; 4]),
            attempt: 10,
            handed_over,
            reason: "no such account".to_owned(),
        };
        check(
            &shown(TAIL, failed(true)).0,
            &["dead letter  written", "no second dead letter", "no such account"],
        );
        check(&shown(TAIL, failed(false)).0, &["not known to be written", "and write the dead letter"]);
    }

    #[test]
    fn absence_is_said_in_words() {
        let key: StoreKey = "billing:eMT5oSC2v1zTz8Nw5IO50A".parse().unwrap();
        check(&words(&key, None), &["state  absent", "as attempt 1"]);
        assert_eq!(document(&key, None).state, "absent");
    }
}
