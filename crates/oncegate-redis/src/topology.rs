//! The servers that hold the keys: one, or the nodes of a cluster.

use std::sync::Arc;

use super::cluster::Cluster;
use super::link::{Node, PipeName};
use super::no_answer;
use super::replies::RawReply;
use super::request::Request;

/// The servers that hold the keys.
pub(super) enum Topology {
    /// A server that holds all keys.
    One(Arc<Node>),
    /// Nodes that each hold the keys of their slots.
    Cluster(Cluster),
}

impl Topology {
    /// Sends one request per item to the server that holds its key. Returns the answers in the
    /// order of the items.
    pub(super) async fn ask<T: Sync>(
        &self,
        pipe: PipeName,
        items: &[T],
        slot: impl Fn(&T) -> u16 + Send,
        request: impl Fn(&T) -> Request + Send + Sync,
    ) -> Vec<RawReply> {
        match self {
            Self::One(node) => {
                let requests = items.iter().map(&request).collect();
                node.ask(pipe, requests).await
            }
            Self::Cluster(cluster) => cluster.ask(pipe, items, slot, request).await,
        }
    }

    /// Sends the request for one item.
    pub(super) async fn ask_one<T: Sync>(
        &self,
        pipe: PipeName,
        item: &T,
        slot: impl Fn(&T) -> u16 + Send,
        request: impl Fn(&T) -> Request + Send + Sync,
    ) -> RawReply {
        match self {
            Self::One(node) => node.ask_one(pipe, request(item)).await,
            Self::Cluster(cluster) => {
                // Boxed: otherwise the future of every message would be larger.
                let answers =
                    Box::pin(cluster.ask(pipe, std::slice::from_ref(item), slot, request)).await;
                answers.into_iter().next().unwrap_or_else(no_answer)
            }
        }
    }

    /// Sends the same request to every server that holds keys. Returns each answer with the
    /// server's address.
    pub(super) async fn ask_all(
        &self,
        request: impl Fn() -> Request + Send,
    ) -> Vec<(Arc<str>, RawReply)> {
        match self {
            Self::One(node) => {
                let answers = node.ask(PipeName::Bulk, vec![request()]).await;
                answers
                    .into_iter()
                    .map(|answer| (Arc::clone(&node.address), answer))
                    .collect()
            }
            Self::Cluster(cluster) => cluster.ask_all(request).await,
        }
    }
}
