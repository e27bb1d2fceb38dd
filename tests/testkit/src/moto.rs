//! moto: AWS's services in one Python process. A second opinion about SQS, and a server that speaks
//! S3.
//!
//! # Not obvious
//!
//! Implementation notes: facts about moto that this code depends on.
//!
//! - moto gives one FIFO group to two receives at once, which SQS never does. Tests of an order on
//!   it receive one message at a time.
//! - moto handles calls in threads and keeps no lock over a queue's messages: two receives at the
//!   same time may bring the same ten. `moto.py` lets its SQS handle one call at a time.
//! - moto and ElasticMQ are two imitations of SQS; neither is SQS.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::place::{self, Port};
use crate::process::{self, Process};
use crate::sqs::Sqs;

/// Names the moto server of the run: `http://127.0.0.1:5000`.
pub const VARIABLE: &str = "ONCEGATE_TEST_MOTO";

/// Its Python environment, under `target/test-servers`; the version is the one of
/// `scripts/moto-requirements.txt`.
const HOME_DIR: &str = "moto-5.2.5";

/// Starts it; its arguments are those of `moto_server`.
const SERVER: &str = include_str!("moto.py");

/// A second on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(180);

const HINT: &str = "`scripts/fetch-servers` installs moto";

/// A moto that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct Moto {
    sqs: Sqs,
}

impl Moto {
    /// The server of this run: the one that [`VARIABLE`] names, or else one that this process
    /// starts on first use. Other tests use it at the same time: keep to queues and buckets of
    /// [`unique`](crate::unique) names.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<Moto> = OnceCell::const_new();
        static OWN: OnceCell<MotoServer> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(endpoint) => {
                let reached = async || Self {
                    sqs: Sqs::reached(VARIABLE, endpoint).await,
                };
                NAMED.get_or_init(reached).await.again()
            }
            Err(_) => OWN.get_or_init(MotoServer::start).await.again(),
        }
    }

    fn again(&self) -> Self {
        Self {
            sqs: self.sqs.again(),
        }
    }

    /// The address for clients of any service: `http://host:port`. It takes any credentials.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        self.sqs.endpoint()
    }

    /// Its SQS.
    #[must_use]
    pub fn sqs(&self) -> &Sqs {
        &self.sqs
    }
}

/// A moto for one test; it stops when this value is dropped, and loses all data when it is killed.
#[derive(Debug)]
pub struct MotoServer {
    moto: Moto,
    process: Option<Process>,
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    port: Port,
}

impl MotoServer {
    /// Starts a server on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        let port = Port::reserve();
        let moto = Moto {
            sqs: Sqs::at(format!("http://{}", port.address())),
        };
        let mut server = Self {
            moto,
            process: None,
            dir: place::server_dir("moto"),
            port,
        };
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
        let mut command = process::bound_to_parent(aws_python(), "KILL");
        command
            .args(["-c", SERVER, "-H", "127.0.0.1", "-p"])
            .arg(self.port.number().to_string());
        let mut process =
            Process::spawn_logged("moto", command, &self.dir.path().join("server.log"));
        process
            .ready(START_LIMIT, HINT, || self.moto.sqs.answers())
            .await;
        self.process = Some(process);
    }
}

impl Deref for MotoServer {
    type Target = Moto;

    fn deref(&self) -> &Moto {
        &self.moto
    }
}

/// A Python with moto, boto3 and Amazon's extended client for SQS.
///
/// # Panics
/// When it is not installed; the text says how.
#[must_use]
pub fn aws_python() -> PathBuf {
    let python = place::test_servers().join(HOME_DIR).join("bin/python3");
    assert!(python.is_file(), "no moto in {}: {HINT}", python.display());
    python
}
