//! Checks the servers periodically: a loss or a new eviction policy can occur without a broken
//! connection.
//!
//! Each server is asked about its own keys. The interval grows with the number of its clients, up
//! to fifteen times, so that the checks of three thousand processes cost a server no more than
//! those of two hundred. The gates' own checks of records are spaced by the same number; each gate
//! still reads the scope's descriptor every two seconds, so that a halt reaches all processes at
//! once.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use oncegate_core::store::StoreMemory;
use redis::Value;
use tokio::time::sleep;

use super::cluster::Primary;
use super::info::Info;
use super::link::PipeName;
use super::losses::Losses;
use super::memory::{self, FullestServer};
use super::request::Request;

/// The time between two checks, plus or minus a quarter: a loss without a broken connection is
/// detected by then.
pub(super) const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Up to this many clients of a server, the interval stays as it is. Each store has two connections
/// to a server.
const CLIENTS_PER_INTERVAL: u64 = 400;

/// The most that the interval is multiplied with.
const MAX_INTERVALS: u64 = 15;

/// Checks the servers that `primaries` returns, again and again. It never ends.
pub(super) async fn watch(
    losses: Arc<Losses>,
    memory: Arc<FullestServer>,
    interval: Duration,
    primaries: impl Fn() -> Vec<Primary> + Send,
) {
    let mut clients = 0;
    loop {
        sleep(
            interval
                .saturating_mul(spacing(clients))
                .mul_f64(0.75 + fastrand::f64() / 2.0),
        )
        .await;
        let checks = join_all(primaries().iter().map(|primary| check(&losses, primary))).await;
        let checks: Vec<Checked> = checks.into_iter().flatten().collect();
        clients = checks
            .iter()
            .filter_map(|checked| checked.clients)
            .max()
            .unwrap_or(clients);
        memory.note(checks.iter().filter_map(|checked| checked.memory));
        losses.set_spacing(spacing(clients));
    }
}

/// The number of intervals between two checks, when one of the servers has this many clients.
fn spacing(clients: u64) -> u32 {
    clients
        .div_ceil(CLIENTS_PER_INTERVAL)
        .clamp(1, MAX_INTERVALS)
        .try_into()
        .unwrap_or(1)
}

/// A server's answers about itself.
struct Checked {
    clients: Option<u64>,
    memory: Option<StoreMemory>,
}

/// Checks a server. Returns what it says about itself, if it answers.
async fn check(losses: &Losses, primary: &Primary) -> Option<Checked> {
    let question = losses.question(|slot| primary.holds(slot));
    let requests = std::iter::once(Request::info())
        .chain(question.commands().map(Request::plain))
        .collect();
    let answers = primary.node.ask(PipeName::Heartbeats, requests).await;
    // A server that does not answer is checked when it answers again.
    let values = answers
        .into_iter()
        .collect::<Result<Vec<Value>, _>>()
        .ok()?;
    let Some((Value::BulkString(info), held)) = values.split_first() else {
        return None;
    };
    let info = String::from_utf8_lossy(info);
    let info = Info(&info);
    losses.judge(&question, &primary.node.address, &info, held);
    Some(Checked {
        clients: info.number("connected_clients"),
        memory: memory::of(&info),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    // invariant: loss-checks-that-spread
    #[test]
    fn the_check_interval_grows_with_the_clients_up_to_a_limit() {
        assert_eq!(
            [0, 1, 400, 401, 2_000, 6_000, u64::MAX]
                .map(|clients| (WATCH_INTERVAL * spacing(clients)).as_secs()),
            [2, 2, 2, 4, 10, 30, 30]
        );
    }
}
