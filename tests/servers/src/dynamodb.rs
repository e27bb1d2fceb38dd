//! A server that speaks DynamoDB: the emulator Dynoxide, which keeps its tables in SQLite.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::place::{self, Port};
use crate::process::{self, Process};

/// The program, under `target/test-servers`; the release is the one of `scripts/fetch-servers`.
const PROGRAM: &str = "dynoxide-3.2.0/bin/dynoxide";

/// A moment on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(120);

const HINT: &str = "`scripts/fetch-servers` installs it";

/// A DynamoDB for one test; it stops when this value is dropped. Its tables outlive a kill.
#[derive(Debug)]
pub struct DynamoDbServer {
    process: Option<Process>,
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    port: Port,
}

impl DynamoDbServer {
    /// Starts a server on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        let mut server = Self {
            process: None,
            dir: place::server_dir("dynamodb"),
            port: Port::reserve(),
        };
        server.start_again().await;
        server
    }

    /// The address for clients: `http://host:port`. It takes any credentials.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// The host and port.
    #[must_use]
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Kills the server with SIGKILL and waits until it is gone.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed server again, on the same port and with its tables, and waits until it
    /// answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "the server still runs");
        let mut command = process::bound_to_parent(program(), "KILL");
        command
            .args(["serve", "--host", "127.0.0.1", "--port"])
            .arg(self.port.number().to_string())
            .arg("--db-path")
            .arg(self.dir.path().join("tables.db"));
        let log = self.dir.path().join("server.log");
        let mut process = Process::spawn_logged("Dynoxide", command, &log);
        let address = self.port.address();
        process
            .ready(START_LIMIT, HINT, || async {
                let connected = TcpStream::connect(&address).await;
                connected.map(drop).map_err(|error| error.to_string())
            })
            .await;
        self.process = Some(process);
    }
}

fn program() -> PathBuf {
    let program = place::test_servers().join(PROGRAM);
    assert!(
        program.is_file(),
        "no Dynoxide at {}: {HINT}",
        program.display()
    );
    program
}
