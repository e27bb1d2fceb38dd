//! Opens connections, and receives the server's notices on them.
//!
//! A commit that waits for synchronous standbys can be made to stop waiting, by `pg_cancel_backend`
//! for example. The server then reports success, and only a warning shows that the standbys may not
//! have the commit.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deadpool_postgres::Connect;
use futures_util::future::BoxFuture;
use oncegate_store_toolkit::password::PasswordFile;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Error, NoTls};
use tracing::warn;

use crate::tls::Tls;

/// The function of the server that warns of an interrupted wait. The text of the warning is
/// translated, and its SQLSTATE is that of every other warning, so only this identifies it.
const WAIT_ROUTINE: &str = "SyncRepWaitForLSN";

/// Opens the connections of a store, and receives the notices on them.
#[derive(Clone, Debug)]
pub(super) struct Notices {
    tls: Option<Tls>,
    password: Option<PasswordFile>,
    cut_waits: Arc<AtomicU64>,
}

impl Notices {
    /// Protects the connections by `tls`, and logs in with the password of a file.
    pub(super) fn new(tls: Option<Tls>, password: Option<PasswordFile>) -> Self {
        Self {
            tls,
            password,
            cut_waits: Arc::default(),
        }
    }

    /// The number of times that the server has stopped waiting for its synchronous standbys.
    pub(super) fn cut_waits(&self) -> u64 {
        self.cut_waits.load(Ordering::Acquire)
    }

    /// Drives a connection until it ends.
    async fn drive<S, T>(self, mut connection: Connection<S, T>)
    where
        S: AsyncRead + AsyncWrite + Unpin,
        T: AsyncRead + AsyncWrite + Unpin,
    {
        while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
            match message {
                Ok(message) => self.hear(&message),
                Err(error) => return warn!(%error, "a connection to the server broke"),
            }
        }
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
        let mut config = config.clone();
        let notices = self.clone();
        if let Some(password) = &self.password {
            match password.read() {
                Ok(password) => drop(config.password(password)),
                Err(error) => {
                    warn!(%error, "connecting with the password that the file had at first");
                }
            }
        }
        Box::pin(async move {
            match &self.tls {
                None => {
                    let (client, connection) = config.connect(NoTls).await?;
                    Ok((client, tokio::spawn(notices.drive(connection))))
                }
                Some(tls) => {
                    let (client, connection) = config.connect(tls.connector()).await?;
                    Ok((client, tokio::spawn(notices.drive(connection))))
                }
            }
        })
    }
}
