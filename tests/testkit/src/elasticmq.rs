//! `ElasticMQ`: a server that speaks SQS over real HTTP.

use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::broker::OVER_SOON;
use crate::place::{self, Port};
use crate::process::{self, Process};
use crate::sqs::Sqs;

/// The folder of its jars, under `target/test-servers`; the version is the one of
/// `scripts/elasticmq-pom.xml`.
const LIB_DIR: &str = "elasticmq-1.7.1/lib";

/// Two seconds on an idle machine; one with two cores and twenty compilers on them has taken 60.
const START_LIMIT: Duration = Duration::from_secs(180);

const HINT: &str = "`scripts/fetch-servers` installs Java and fetches ElasticMQ";

/// An `ElasticMQ` for one test; it stops when this value is dropped.
///
/// It keeps SQS's limits, and its messages in memory or in a file.
#[derive(Debug)]
pub struct ElasticmqServer {
    sqs: Sqs,
    process: Option<Process>,
    /// Further options for Java.
    options: &'static [&'static str],
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    _port: Port,
}

impl ElasticmqServer {
    /// Whether its jars are there; Java may still be missing.
    #[must_use]
    pub fn is_fetched() -> bool {
        lib().is_dir()
    }

    /// Starts a server on a free port and waits until it answers. It forgets everything when it is
    /// killed.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with(Storage::Memory).await
    }

    /// Like [`ElasticmqServer::start`], but queues and messages outlive a kill. It is one for a
    /// test that is over soon.
    ///
    /// # Panics
    /// As [`ElasticmqServer::start`].
    pub async fn start_durable() -> Self {
        Self::start_with(Storage::File).await
    }

    async fn start_with(storage: Storage) -> Self {
        let port = Port::reserve();
        let dir = place::server_dir("elasticmq");
        let settings = settings(&port, dir.path(), storage);
        fs::write(dir.path().join(SETTINGS), settings).expect("the server's folder can be written");
        let sqs = Sqs::at(format!("http://{}", port.address()));
        let options = match storage {
            Storage::Memory => &["-XX:+UseSerialGC"][..],
            Storage::File => &OVER_SOON,
        };
        let mut server = Self {
            sqs,
            process: None,
            options,
            dir,
            _port: port,
        };
        server.start_again().await;
        server
    }

    /// Kills the server with SIGKILL and waits until it is gone.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed server again, on the same port, and waits until it answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "ElasticMQ still runs");
        assert!(
            Self::is_fetched(),
            "no ElasticMQ in {}: {HINT}",
            lib().display()
        );
        let mut command = process::bound_to_parent("java", "KILL");
        command.arg("-Xmx512m").args(self.options);
        command.arg(format!(
            "-Dconfig.file={}",
            self.dir.path().join(SETTINGS).display()
        ));
        // The star is Java's, not the shell's: all jars of the folder.
        command
            .arg("-cp")
            .arg(lib().join("*"))
            .arg("org.elasticmq.server.Main");
        let mut process =
            Process::spawn_logged("ElasticMQ", command, &self.dir.path().join("server.log"));
        process
            .ready(START_LIMIT, HINT, || self.sqs.answers())
            .await;
        self.process = Some(process);
    }

    /// The running server's process, to stop it by a signal for example.
    ///
    /// # Panics
    /// When it has been killed.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("ElasticMQ runs")
    }
}

impl Deref for ElasticmqServer {
    type Target = Sqs;

    fn deref(&self) -> &Sqs {
        &self.sqs
    }
}

const SETTINGS: &str = "elasticmq.conf";

/// Where the messages are.
#[derive(Clone, Copy, Debug)]
enum Storage {
    Memory,
    File,
}

fn settings(port: &Port, dir: &Path, storage: Storage) -> String {
    let number = port.number();
    let storage = match storage {
        Storage::Memory => String::new(),
        Storage::File => format!(
            r#"messages-storage {{
  enabled = true
  driver-class-name = "org.h2.Driver"
  uri = "jdbc:h2:{};WRITE_DELAY=0"
  username = ""
  password = ""
}}"#,
            dir.join("messages").display()
        ),
    };
    format!(
        r#"include classpath("application.conf")
generate-node-address = false
node-address {{ protocol = http, host = "127.0.0.1", port = {number}, context-path = "" }}
rest-sqs {{ enabled = true, bind-hostname = "127.0.0.1", bind-port = {number}, sqs-limits = strict }}
rest-stats {{ enabled = false }}
# A busy machine is no reason to refuse a call.
pekko.http.server.request-timeout = 60 s
{storage}
"#
    )
}

fn lib() -> PathBuf {
    place::test_servers().join(LIB_DIR)
}
