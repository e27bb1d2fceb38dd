//! Opens connections, and receives the server's notices on them.
//!
//! A commit that waits for synchronous standbys can be made to stop waiting, by `pg_cancel_backend` for example. The
//! server then reports success, and only a warning shows that the standbys may not have the commit.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deadpool_postgres::Connect;
use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client, Config, Error, NoTls};
use tracing::warn;

/// The function of the server that warns of an interrupted wait. The text of the warning is translated, and its
/// SQLSTATE is that of every other warning, so only this identifies it.
const WAIT_ROUTINE: &str = "SyncRepWaitForLSN";

/// The notices on all connections of a store.
#[derive(Clone, Debug, Default)]
pub(super) struct Notices {
    cut_waits: Arc<AtomicU64>,
}

impl Notices {
    /// The number of times that the server has stopped waiting for its synchronous standbys.
    pub(super) fn cut_waits(&self) -> u64 {
        self.cut_waits.load(Ordering::Acquire)
    }

    /// A warning comes before the answer to its commit, on the same connection.
    fn hear(&self, message: &AsyncMessage) {
        if let AsyncMessage::Notice(notice) = message
            && notice.routine() == Some(WAIT_ROUTINE)
        {
            self.cut_waits.fetch_add(1, Ordering::Release);
            warn!(
                sqlstate = notice.code().code(),
                "the server stopped waiting for its synchronous standbys before they had a commit; it is asked again"
            );
        }
    }
}

impl Connect for Notices {
    fn connect(&self, config: &Config) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), Error>> {
        let (config, notices) = (config.clone(), self.clone());
        Box::pin(async move {
            let (client, mut connection) = config.connect(NoTls).await?;
            let drive = async move {
                while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
                    match message {
                        Ok(message) => notices.hear(&message),
                        Err(error) => return warn!(%error, "a connection to the server broke"),
                    }
                }
            };
            Ok((client, tokio::spawn(drive)))
        })
    }
}
