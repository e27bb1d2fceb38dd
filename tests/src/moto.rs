//! moto: AWS's services in one Python process. A server that speaks S3.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::place::{self, Port};
use crate::process::{self, Process};

/// Its Python environment, under `target/test-servers`; the version is the one of
/// `scripts/moto-requirements.txt`.
const HOME_DIR: &str = "moto-5.2.5";

/// A second on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(60);

const HINT: &str = "`scripts/fetch-servers` installs moto";

/// A moto of one's own; it dies with this value, and forgets everything when it is killed.
#[derive(Debug)]
pub struct MotoServer {
    process: Option<Process>,
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    port: Port,
    endpoint: String,
}

impl MotoServer {
    /// Starts a server on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text says why and what to install.
    pub async fn start() -> Self {
        let port = Port::reserve();
        let endpoint = format!("http://{}", port.address());
        let mut server = Self { process: None, dir: place::server_dir("moto"), port, endpoint };
        server.start_again().await;
        server
    }

    /// Kills the server with SIGKILL and waits until it is gone.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed server again, on the same port and empty, and waits until it answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "moto still runs");
        let mut command = process::bound_to_parent(python(), "KILL");
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p"]).arg(self.port.number().to_string());
        let mut process = Process::spawn_logged("moto", command, &self.dir.path().join("server.log"));
        let connects = async || {
            TcpStream::connect(self.port.address()).await.map(drop).map_err(|error| error.to_string())
        };
        process.ready(START_LIMIT, HINT, connects).await;
        self.process = Some(process);
    }

    /// The address for clients of any service: `http://host:port`. It takes any credentials.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }
}

fn python() -> PathBuf {
    let python = place::test_servers().join(HOME_DIR).join("bin/python3");
    assert!(python.is_file(), "no moto in {}: {HINT}", python.display());
    python
}
