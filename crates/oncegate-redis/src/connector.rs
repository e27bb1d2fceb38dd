//! Opens the connections of a pipe.

use std::sync::Arc;

use deadpool_redis::{Connection, Pool, PoolError};
use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ConnectionInfo};

use super::errors;
use super::opener::Opener;
use super::sentinel::Sentinels;

/// Opens connections, each to the server that is the right one at that time.
#[derive(Clone)]
pub(super) enum Connector {
    /// Always the same server.
    Server(Arc<ConnectionInfo>, Opener),
    /// The primary that the sentinels name.
    Sentinels(Arc<Sentinels>),
    /// A pool that the caller supplied.
    Pool(Pool),
}

impl Connector {
    /// # Errors
    /// When no connection can be opened. The text names the server, never a user or a password.
    pub(super) async fn connect(&self) -> Result<MultiplexedConnection, StoreError> {
        match self {
            Self::Server(info, opener) => opener.open(ConnectionInfo::clone(info)).await,
            Self::Sentinels(sentinels) => sentinels.connect().await,
            // Removed from the pool: the pipe keeps the connection while it lasts, and the pool
            // gets no dead one back.
            Self::Pool(pool) => match pool.get().await {
                Ok(connection) => Ok(Connection::take(connection)),
                Err(PoolError::Backend(error)) => Err(errors::of_client(&error)),
                Err(other) => Err(StoreError::unavailable(format!(
                    "no connection from the pool: {other}"
                ))),
            },
        }
    }

    /// Returns whether connections speak TLS; unknown of a pool.
    pub(super) fn is_tls(&self) -> bool {
        let info = match self {
            Self::Server(info, _) => info,
            Self::Sentinels(sentinels) => &sentinels.primary,
            Self::Pool(_) => return false,
        };
        matches!(info.addr(), ConnectionAddr::TcpTls { .. })
    }

    /// Returns whether a replica is the wrong server, so that asking again may find the primary.
    pub(super) fn wants_primary(&self) -> bool {
        matches!(self, Self::Sentinels(_))
    }
}
