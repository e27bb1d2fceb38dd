//! Opens the connections of a pipe.

use std::sync::Arc;
use std::time::Duration;

use deadpool_redis::{Connection, Pool, PoolError};
use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo};
use tokio::time::timeout;

use super::errors;
use super::login::Login;
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

/// Opens connections.
#[derive(Clone, Debug)]
pub(super) struct Opener {
    /// Time limit for one try, greeting and login included.
    pub(super) connect_timeout: Duration,
    pub(super) login: Arc<Login>,
}

impl Opener {
    pub(super) async fn open(
        &self,
        info: ConnectionInfo,
    ) -> Result<MultiplexedConnection, StoreError> {
        let server = format!("Redis at {}", info.addr());
        let info = self
            .login
            .applied(info)
            .map_err(|error| error.at(&server))?;
        let client = Client::open(info).map_err(|error| errors::of_client(&error).at(&server))?;
        // Each pipeline has its own time limit, which grows with its size.
        let config = AsyncConnectionConfig::new()
            .set_response_timeout(None)
            .set_connection_timeout(Some(self.connect_timeout));
        let opening = client.get_multiplexed_async_connection_with_config(&config);
        match timeout(self.connect_timeout, opening).await {
            Ok(opened) => opened.map_err(|error| errors::of_client(&error).at(&server)),
            Err(_) => Err(StoreError::unavailable("the server does not answer").at(&server)),
        }
    }
}

/// The settings of every connection that this crate opens.
pub(super) fn with_settings(info: ConnectionInfo) -> ConnectionInfo {
    // Naming the library to the server is a command that old servers lack and tight rights refuse.
    let settings = info.redis_settings().clone().set_skip_set_lib_name();
    info.set_redis_settings(settings)
        .set_tcp_settings(TcpSettings::default().set_nodelay(true))
}
