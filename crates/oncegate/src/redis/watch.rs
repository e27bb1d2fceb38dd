//! Checks the servers periodically: a loss or a new eviction policy can occur without a broken connection.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;
use tokio::time::sleep;

use super::checkup::Info;
use super::link::{LaneName, Node};
use super::losses::Losses;
use super::scripts::Request;

/// The longest time until a loss without a broken connection is detected.
pub(super) const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Checks the servers that `nodes` returns, again and again. It never ends.
pub(super) async fn watch(
    losses: Arc<Losses>,
    interval: Duration,
    nodes: impl Fn() -> Vec<Arc<Node>> + Send,
) {
    loop {
        sleep(interval).await;
        join_all(nodes().iter().map(|node| look_at(&losses, node))).await;
    }
}

async fn look_at(losses: &Losses, node: &Node) {
    let question = losses.question();
    let requests = std::iter::once(Request::info()).chain(question.commands().map(Request::plain)).collect();
    let answers = node.ask(LaneName::Heartbeats, requests).await;
    // A server that does not answer is checked when it answers again.
    let Ok(values) = answers.into_iter().collect::<Result<Vec<Value>, _>>() else { return };
    if let Some((Value::BulkString(info), held)) = values.split_first() {
        losses.judge(&question, &node.address, &Info(&String::from_utf8_lossy(info)), held);
    }
}
