//! Arguments that several commands share.

use std::fs::File;
use std::future::Future;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::time::Duration;

use oncegate::Key;
use oncegate::core::key::MAX_PAYLOAD_BYTES_LIMIT;

use crate::exit::{Exit, Problem};
use crate::parse::{duration, pair};

/// The help of `--key`, in a line.
pub(crate) const KEY_HELP: &str = "The key: order_id,amount:decimal or payload-except:sent_at or header:x-id or \
                                   message-key or message-id, or JSON, which may have a tenant";

/// The long help of `--key`.
pub(crate) const KEY_FORMS: &str = r#"The key: the parts of a message that identify it. Its forms are

order_id,amount:decimal
    fields of a JSON payload, nested ones as customer.id or items.0.sku; each may have normalisers:
    trim, lowercase, nfc, decimal, timestamp-days, timestamp-seconds, timestamp-millis,
    timestamp-micros, timestamp-nanos, epoch-seconds (or millis, micros, nanos) before a timestamp,
    unordered for arrays, as in email:trim:lowercase,taken_at:epoch-seconds:timestamp-seconds
payload-except:sent_at,trace.id
    the JSON payload without these fields; payload is the whole of it
header:x-id, message-key, message-id
    a header, the broker's key of the message, the queue's id of the message
{"json":["order_id",{"path":"amount","as":"decimal"}],"tenant":{"header":"x-tenant"}}
    the same as JSON, as in a configuration file; only this form has a tenant, which is a header
    or a field ({"json":"customer.tenant"})
{"parts":["order_id",{"path":"coupon","optional":true},{"header":"x-region"}]}
    parts from payload, headers, message key and id, some absent by right; {"cases":[...]} for
    parts that depend on a field: docs/WHICH_KEY.md"#;

/// How the answer is printed.
#[derive(Debug, clap::Args)]
pub(crate) struct AnswerArgs {
    /// Print one JSON document
    #[arg(long)]
    pub(crate) json: bool,

    /// Give up after this time: 500ms, 30s, 5m, 2h [default: never]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) timeout: Option<Duration>,
}

/// A message that is described by flags.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct MessageArgs {
    /// A header of the message, `name=value`; may be repeated
    #[arg(long = "header", value_name = "NAME=VALUE", value_parser = pair)]
    pub(crate) headers: Vec<(String, String)>,

    /// The broker's key of the message
    #[arg(long, value_name = "TEXT")]
    pub(crate) message_key: Option<String>,

    /// The queue's id of the message, for keys of message-id
    #[arg(long, value_name = "ID")]
    pub(crate) message_id: Option<String>,

    /// The file that holds the payload [default: standard input]
    #[arg(value_name = "PAYLOAD")]
    pub(crate) payload: Option<PathBuf>,
}

impl MessageArgs {
    /// The payload, if the key needs one.
    pub(crate) async fn read_payload(&self, key: &Key) -> Result<Option<Vec<u8>>, Problem> {
        if self.payload.is_none() && !key.reads_payload() {
            return Ok(None);
        }
        read_file(self.payload.clone()).await.map(Some)
    }
}

/// Reads a payload from a file, or from standard input if there is no file.
pub(crate) async fn read_file(path: Option<PathBuf>) -> Result<Vec<u8>, Problem> {
    let reading = tokio::task::spawn_blocking(move || read(path));
    reading
        .await
        .map_err(|error| Problem::new(Exit::Bug, format!("no payload was read: {error}")))?
}

fn read(path: Option<PathBuf>) -> Result<Vec<u8>, Problem> {
    let mut payload = Vec::new();
    // One byte over the limit, so that a payload that is too large is detected.
    let most = MAX_PAYLOAD_BYTES_LIMIT as u64 + 1;
    let (name, read) = match path {
        Some(path) => {
            let read = File::open(&path).and_then(|file| file.take(most).read_to_end(&mut payload));
            (path.display().to_string(), read)
        }
        None => {
            let input = std::io::stdin();
            if input.is_terminal() {
                eprintln!("oncegate: reading the payload from standard input, to its end (Ctrl-D)");
            }
            (
                "standard input".to_owned(),
                input.take(most).read_to_end(&mut payload),
            )
        }
    };
    match read {
        Ok(_) => Ok(payload),
        Err(error) => Err(Problem::new(
            Exit::BadData,
            format!("cannot read the payload from {name}: {error}"),
        )),
    }
}

/// Returns the answer, or a problem if it does not come within the limit.
pub(crate) async fn within<T>(
    limit: Option<Duration>,
    answer: impl Future<Output = Result<T, Problem>> + Send,
) -> Result<T, Problem> {
    let Some(limit) = limit else {
        return answer.await;
    };
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(Problem::new(
            Exit::TimedOut,
            format!("no answer within {limit:?} (--timeout)"),
        )),
    }
}
