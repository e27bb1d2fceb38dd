// A worker of oncegate. It gets each order once, as a line of JSON on standard input, and answers
// with a line on standard output. So print with `eprintln!`; oncegate writes that into its log.
use std::fs::OpenOptions;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A line from oncegate.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Line {
    /// Without a payload, it is a tombstone, or the payload is not UTF-8.
    Message {
        id: String,
        idempotency_key: String,
        payload: Option<String>,
    },
    /// This worker handles one message at a time, so it has answered by then.
    Cancel,
}

#[derive(Deserialize, Serialize)]
struct Order {
    order_id: String,
    amount: serde_json::Number,
}

#[derive(Serialize)]
struct Receipt {
    charged: String,
}

#[derive(Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
enum Outcome {
    Complete { result: Receipt },
    Retry { reason: String },
    DeadLetter { reason: String },
}

#[derive(Serialize)]
struct Answer {
    id: String,
    #[serde(flatten)]
    outcome: Outcome,
}

/// Your effect. The key is the same in every attempt for this order: pass it to the systems that
/// you call.
fn charge(order: &Order, idempotency_key: &str) -> io::Result<Receipt> {
    let receipt = Receipt {
        charged: order.order_id.clone(),
    };
    // `oncegate prove`, which tries this worker, sets the address of what stands for your bank.
    if let Ok(bank) = std::env::var("ONCEGATE_DOWNSTREAM") {
        call_bank(&bank, &serde_json::to_string(order)?, idempotency_key)?;
        return Ok(receipt);
    }
    let mut charges = OpenOptions::new()
        .append(true)
        .create(true)
        .open("charges.txt")?;
    charges.write_all(format!("{} {}\n", order.order_id, order.amount).as_bytes())?;
    Ok(receipt)
}

/// Your bank's own client does this better.
fn call_bank(url: &str, body: &str, idempotency_key: &str) -> io::Result<()> {
    let url = url.trim_start_matches("http://");
    let (address, path) = url.split_once('/').unwrap_or((url, ""));
    let mut bank = TcpStream::connect(address)?;
    bank.set_read_timeout(Some(Duration::from_secs(10)))?;
    write!(
        bank,
        "POST /{path}/effects HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\
         Idempotency-Key: {idempotency_key}\r\n\r\n{body}",
        body.len()
    )?;
    let mut status = String::new();
    BufReader::new(bank).read_line(&mut status)?;
    match status.split(' ').nth(1) {
        Some("200") => Ok(()),
        _ => Err(io::Error::other(format!("the bank answers {status:?}"))),
    }
}

fn handle(idempotency_key: &str, payload: &str) -> Outcome {
    let order: Order = match serde_json::from_str(payload) {
        Ok(order) => order,
        Err(error) => {
            return Outcome::DeadLetter {
                reason: format!("it is no order: {error}"),
            }
        }
    };
    match charge(&order, idempotency_key) {
        Ok(result) => Outcome::Complete { result },
        Err(error) => Outcome::Retry {
            reason: error.to_string(),
        },
    }
}

/// Writes a line at once: standard output flushes at each end of a line.
fn say(line: &impl Serialize) -> io::Result<()> {
    writeln!(io::stdout(), "{}", serde_json::to_string(line)?)
}

fn main() -> io::Result<()> {
    say(&serde_json::json!({ "type": "ready", "v": 1 }))?;
    for line in io::stdin().lines() {
        if let Line::Message {
            id,
            idempotency_key,
            payload,
        } = serde_json::from_str(&line?)?
        {
            let outcome = handle(&idempotency_key, payload.as_deref().unwrap_or_default());
            let is_completed = matches!(outcome, Outcome::Complete { .. });
            let answer = serde_json::to_value(Answer {
                id: id.clone(),
                outcome,
            });
            match answer {
                Ok(answer) => say(&answer)?,
                // The order is charged, so it must not run again because its result is no JSON.
                Err(error) if is_completed => {
                    eprintln!("the result is not kept: {error}");
                    say(&serde_json::json!({ "id": id, "outcome": "complete" }))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
