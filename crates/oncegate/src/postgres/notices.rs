//! Opens connections, and hears what the server says on them besides its answers.
//!
//! A commit that waits for synchronous standbys can be made to stop waiting, by `pg_cancel_backend` for example. The server
//! then answers as if all were well, and only a warning says that the standbys may not have the commit.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deadpool_postgres::Connect;
use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client, Config, Error, NoTls};
use tracing::warn;

/// The server's function that warns of a wait that was cut short. The text of the warning is translated, and its
/// SQLSTATE is that of every other warning.
const WAIT_ROUTINE: &str = "SyncRepWaitForLSN";

/// What the server has said on any connection of a store.
#[derive(Clone, Debug, Default)]
pub(super) struct Notices {
    cut_waits: Arc<AtomicU64>,
}

impl Notices {
    /// How often the server has stopped waiting for its synchronous standbys.
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
