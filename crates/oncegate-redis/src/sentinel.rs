//! Finds the primary that sentinels monitor.

use std::collections::HashMap;
use std::fmt;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use oncegate_core::store::StoreError;
use redis::ConnectionInfo;
use redis::aio::MultiplexedConnection;
use tokio::time::timeout;

use super::address::moved_to;
use super::opener::Opener;

/// Sentinels, and the connection settings of their primary.
pub(super) struct Sentinels {
    pub(super) sentinels: Vec<ConnectionInfo>,
    pub(super) name: String,
    pub(super) primary: ConnectionInfo,
    pub(super) opener: Opener,
    /// Opens connections to the sentinels, which have a login of their own.
    pub(super) of_sentinels: Opener,
}

/// The answer of one sentinel.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Opinion {
    /// Grows with each failover: the sentinel with the larger epoch knows of more failovers.
    epoch: u64,
    host: String,
    port: u16,
}

impl Sentinels {
    /// Connects to the current primary. The first answers on the connection show whether it is one.
    pub(super) async fn connect(&self) -> Result<MultiplexedConnection, StoreError> {
        let Opinion { host, port, .. } = self.primary().await?;
        self.opener.open(moved_to(&self.primary, &host, port)).await
    }

    /// Asks all sentinels at once, until more than half have answered: a sentinel that was cut off
    /// from the others may still name the old primary.
    async fn primary(&self) -> Result<Opinion, StoreError> {
        let mut asked: FuturesUnordered<_> = self
            .sentinels
            .iter()
            .map(|sentinel| self.ask(sentinel))
            .collect();
        let mut opinions = Vec::with_capacity(self.sentinels.len());
        let mut why = StoreError::unavailable("the URL names no sentinel");
        while opinions.len() <= self.sentinels.len() / 2
            && let Some(answer) = asked.next().await
        {
            match answer {
                Ok(opinion) => opinions.push(opinion),
                Err(error) => why = error,
            }
        }
        opinions
            .into_iter()
            .max_by_key(|opinion| opinion.epoch)
            .ok_or(why)
    }

    async fn ask(&self, sentinel: &ConnectionInfo) -> Result<Opinion, StoreError> {
        let mut connection = self.of_sentinels.open(sentinel.clone()).await?;
        let mut question = redis::cmd("SENTINEL");
        question.arg("MASTER").arg(&self.name);
        let asking = question.query_async::<HashMap<String, String>>(&mut connection);
        let Ok(answer) = timeout(self.opener.connect_timeout, asking).await else {
            return Err(StoreError::unavailable("the sentinels do not answer"));
        };
        let fields = answer.map_err(|error| match error.code() {
            Some("NOPERM" | "NOAUTH") => StoreError::refused("the sentinels refuse the user"),
            // The sentinel reports this as an error without a specific code.
            Some(_) => StoreError::refused(format!(
                "the sentinels know no primary by the name `{}`",
                self.name
            )),
            None => StoreError::unavailable("the sentinels do not answer"),
        })?;
        opinion(&fields)
            .ok_or_else(|| StoreError::unavailable("a sentinel returned an unexpected answer"))
    }
}

fn opinion(fields: &HashMap<String, String>) -> Option<Opinion> {
    Some(Opinion {
        epoch: fields.get("config-epoch")?.parse().ok()?,
        host: fields.get("ip")?.clone(),
        port: fields.get("port")?.parse().ok()?,
    })
}

impl fmt::Debug for Sentinels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sentinels")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}
