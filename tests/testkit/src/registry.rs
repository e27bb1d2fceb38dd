//! Apicurio Registry: a schema registry that speaks Confluent's API, and the serialisers of
//! confluent-kafka-python.

use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::broker::{self, OVER_SOON};
use crate::certificates::Certificates;
use crate::place::{self, Port};
use crate::process::{self, Process};

/// Its folder, under `target/test-servers`; the version is the one of `scripts/fetch-servers`.
const HOME_DIR: &str = "apicurio-2.6.13.Final";
const JAR: &str = "apicurio-registry-app-2.6.13.Final-runner.jar";
/// The Python environment with the serialisers; the version is the one of
/// `scripts/schemas-requirements.txt`.
const PYTHON_DIR: &str = "schemas-2.16.1";

/// Four seconds on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(180);

const HINT: &str = "`scripts/fetch-servers` installs Java and fetches Apicurio Registry";

/// A registry for one test, in memory; it stops when this value is dropped.
#[derive(Debug)]
pub struct SchemaRegistry {
    process: Option<Process>,
    /// The port for TLS, and what it shows there.
    tls: Option<(Port, Certificates)>,
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    port: Port,
}

impl SchemaRegistry {
    /// Starts a registry on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with(None).await
    }

    /// The same with a port for TLS, whose certificate is that of a server.
    ///
    /// # Panics
    /// As [`SchemaRegistry::start`].
    pub async fn start_tls(certificates: Certificates) -> Self {
        Self::start_with(Some((Port::reserve(), certificates))).await
    }

    async fn start_with(tls: Option<(Port, Certificates)>) -> Self {
        let dir = place::server_dir("apicurio");
        let port = Port::reserve();
        let mut registry = Self {
            process: None,
            tls,
            dir,
            port,
        };
        registry.start_again().await;
        registry
    }

    /// Its certificates, and the address with TLS.
    ///
    /// # Panics
    /// When it has none.
    #[must_use]
    pub fn tls(&self) -> (&Certificates, String) {
        let (port, certificates) = self.tls.as_ref().expect("it was started with TLS");
        (
            certificates,
            self.url_at(&port.address()).replace("http://", "https://"),
        )
    }

    /// The address of Confluent's API, as clients take it.
    #[must_use]
    pub fn url(&self) -> String {
        self.url_at(&self.port.address())
    }

    /// The same at another address, such as that of a proxy.
    #[must_use]
    pub fn url_at(&self, address: &str) -> String {
        format!("http://{address}/apis/ccompat/v7")
    }

    /// `host:port`.
    #[must_use]
    pub fn address(&self) -> String {
        self.port.address()
    }

    /// Kills the registry with SIGKILL and waits until it is gone. Its schemas are lost.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed registry again, on the same port and empty, and waits until it answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "the registry still runs");
        let home = place::test_servers().join(HOME_DIR);
        assert!(
            home.is_dir(),
            "no Apicurio Registry in {}: {HINT}",
            home.display()
        );
        let mut command = process::bound_to_parent("java", "KILL");
        command
            .args(OVER_SOON)
            .arg("-Xmx512m")
            .args(broker::archived(&home.join(JAR)))
            .arg("-jar")
            .arg(home.join(JAR));
        command.env("QUARKUS_HTTP_HOST", "127.0.0.1");
        command.env("QUARKUS_HTTP_PORT", self.port.number().to_string());
        if let Some((port, certificates)) = &self.tls {
            command.env("QUARKUS_HTTP_SSL_PORT", port.number().to_string());
            command.env(
                "QUARKUS_HTTP_SSL_CERTIFICATE_FILES",
                certificates.file("server.pem"),
            );
            command.env(
                "QUARKUS_HTTP_SSL_CERTIFICATE_KEY_FILES",
                certificates.file("server.key"),
            );
            command.env("QUARKUS_HTTP_INSECURE_REQUESTS", "enabled");
        }
        command.current_dir(self.dir.path());
        let mut process =
            Process::spawn_logged("the registry", command, &self.dir.path().join("server.log"));
        let address = self.address();
        let encrypted = self.tls.as_ref().map(|(port, _)| port.address());
        process
            .ready(START_LIMIT, HINT, async || {
                answers(&address).await?;
                // It listens there after it answers on the other port.
                match &encrypted {
                    Some(encrypted) => connects(encrypted).await,
                    None => Ok(()),
                }
            })
            .await;
        self.process = Some(process);
    }
}

async fn connects(address: &str) -> Result<(), String> {
    let connected = TcpStream::connect(address).await;
    connected
        .map(drop)
        .map_err(|error| format!("{address}: {error}"))
}

/// Asks for the types of schemas.
async fn answers(address: &str) -> Result<(), String> {
    let asked = async {
        let mut stream = TcpStream::connect(address).await?;
        let question =
            format!("GET /apis/ccompat/v7/schemas/types HTTP/1.0\r\nHost: {address}\r\n\r\n");
        stream.write_all(question.as_bytes()).await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    match tokio::time::timeout(Duration::from_secs(5), asked).await {
        Ok(Ok(answer)) if answer.windows(5).any(|word| word == b" 200 ") => Ok(()),
        Ok(Ok(answer)) => Err(String::from_utf8_lossy(&answer).chars().take(200).collect()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer".to_owned()),
    }
}

/// The Python that has confluent-kafka with its serialisers, and BLAKE3.
///
/// # Panics
/// When it is not installed.
#[must_use]
pub fn schema_python() -> PathBuf {
    let python = place::test_servers().join(PYTHON_DIR).join("bin/python3");
    assert!(
        python.is_file(),
        "no confluent-kafka in {}: `scripts/fetch-servers` installs it",
        python.display()
    );
    python
}
