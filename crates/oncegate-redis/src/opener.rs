//! Opens connections to a server: its settings, its login and its time limit.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::store::StoreError;
use redis::aio::MultiplexedConnection;
use redis::io::tcp::TcpSettings;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo};
use tokio::time::timeout;

use super::errors;
use super::login::Login;

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
