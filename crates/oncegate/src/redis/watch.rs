//! Looks at the servers now and then: a loss or a new eviction policy needs no broken connection.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use redis::Value;
use tokio::time::sleep;

use super::checkup::Info;
use super::link::{LaneName, Node};
use super::losses::Losses;
use super::scripts::Request;

/// How long a loss without a broken connection may go unnoticed.
pub(super) const WATCH_INTERVAL: Duration = Duration::from_secs(2);

/// Watches the servers that `nodes` names each time, for ever.
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
    // A server that does not answer is judged when it does.
    let Ok(values) = answers.into_iter().collect::<Result<Vec<Value>, _>>() else { return };
    if let Some((Value::BulkString(info), held)) = values.split_first() {
        losses.judge(&question, &node.address, &Info(&String::from_utf8_lossy(info)), held);
    }
}
