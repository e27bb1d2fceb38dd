//! How a lane comes by its connection.

use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::{Connection, Pool, PoolError};
use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo};
use tokio::time::timeout;

use super::errors;
use super::sentinel::Sentinels;

/// Makes one connection after the other to what is, at that time, the right server.
#[derive(Clone)]
pub(super) enum Connector {
    /// Always the same server.
    Server(Arc<ConnectionInfo>, Opener),
    /// The primary that the sentinels name.
    Sentinels(Arc<Sentinels>),
    /// A pool of the caller's.
    Pool(Pool),
}

impl Connector {
    /// # Errors
    /// When there is no connection; the text holds neither address nor password.
    pub(super) async fn connect(&self) -> Result<MultiplexedConnection, StoreError> {
        match self {
            Self::Server(info, opener) => opener.open(ConnectionInfo::clone(info)).await,
            Self::Sentinels(sentinels) => sentinels.connect().await,
            // Taken out for good: the lane keeps it for as long as it lasts, and nobody is handed a dead one.
            Self::Pool(pool) => match pool.get().await {
                Ok(connection) => Ok(Connection::take(connection)),
                Err(PoolError::Backend(error)) => Err(errors::of_client(&error)),
                Err(other) => Err(StoreError::unavailable(format!("no connection from the pool: {other}"))),
            },
        }
    }

    /// Whether a server that is no primary is the wrong one, and asking again may find the right one.
    pub(super) fn wants_primary(&self) -> bool {
        matches!(self, Self::Sentinels(_))
    }
}

/// Opens connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opener {
    /// How long one try may take, greeting and login included.
    pub(super) connect_timeout: Duration,
}

impl Opener {
    pub(super) async fn open(self, info: ConnectionInfo) -> Result<MultiplexedConnection, StoreError> {
        let client = Client::open(info).map_err(|error| errors::of_client(&error))?;
        // Pipelines have a time limit of their own, which grows with their size.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(self.connect_timeout));
        let opening = client.get_multiplexed_async_connection_with_config(&config);
        match timeout(self.connect_timeout, opening).await {
            Ok(opened) => opened.map_err(|error| errors::of_client(&error)),
            Err(_) => Err(StoreError::unavailable("the server does not answer")),
        }
    }
}

/// What is set for every connection that this crate opens.
pub(super) fn with_settings(info: ConnectionInfo) -> ConnectionInfo {
    // Naming the library to the server is a command that old servers lack and tight rights refuse.
    let settings = info.redis_settings().clone().set_skip_set_lib_name();
    info.set_redis_settings(settings).set_tcp_settings(TcpSettings::default().set_nodelay(true))
}
