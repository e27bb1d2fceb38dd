//! `ElasticMQ`: a server that speaks SQS over real HTTP.

use std::collections::BTreeSet;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::broker::{self, OVER_SOON};
use crate::place::{self, Port};
use crate::process::{self, Process};
use crate::sqs::Sqs;
use crate::until::until;

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
    storage: Storage,
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
    /// killed, and is one for a test that is over soon.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with(Storage::Memory, &OVER_SOON).await
    }

    /// Like [`ElasticmqServer::start`], for many tests or for measurements: in the long run it
    /// takes less processor time.
    ///
    /// # Panics
    /// As [`ElasticmqServer::start`].
    pub async fn start_for_long() -> Self {
        Self::start_with(Storage::Memory, &["-XX:+UseSerialGC"]).await
    }

    /// Like [`ElasticmqServer::start`], but queues and messages outlive a kill.
    ///
    /// # Panics
    /// As [`ElasticmqServer::start`].
    pub async fn start_durable() -> Self {
        Self::start_with(Storage::File, &OVER_SOON).await
    }

    async fn start_with(storage: Storage, options: &'static [&'static str]) -> Self {
        let port = Port::reserve();
        let dir = place::server_dir("elasticmq");
        let settings = settings(&port, dir.path(), storage);
        fs::write(dir.path().join(SETTINGS), settings).expect("the server's folder can be written");
        let sqs = Sqs::at(format!("http://{}", port.address()));
        let mut server = Self {
            sqs,
            process: None,
            options,
            storage,
            dir,
            _port: port,
        };
        server.start_again().await;
        server
    }

    /// Waits until everything that a durable server has answered is in its file: it writes later,
    /// and a write that a kill cuts off is lost.
    ///
    /// # Panics
    /// When that takes longer than three minutes.
    pub async fn until_stored(&self) {
        let file = self.dir.path().join("messages.mv.db");
        let marks = self.sqs.new_queue("marks").await;
        // What comes after it is in the file: so its own write is over.
        for _ in 0..2 {
            let mark = crate::unique("stored");
            marks.send([mark.as_str()]).await;
            until("a later message in the file", START_LIMIT, async || {
                let stored = fs::read(&file).map_err(|error| error.to_string())?;
                let mut parts = stored.windows(mark.len());
                if parts.any(|part| part == mark.as_bytes()) {
                    Ok(())
                } else {
                    Err(format!("not within its {} bytes", stored.len()))
                }
            })
            .await;
        }
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
        command.args(broker::archived(&lib()));
        command.arg(format!(
            "-Dconfig.file={}",
            self.dir.path().join(SETTINGS).display()
        ));
        // The star is Java's, not the shell's: all jars of the folder.
        command
            .arg("-cp")
            .arg(lib().join("*"))
            .arg("org.elasticmq.server.Main");
        let log = self.dir.path().join("server.log");
        let earlier = fs::read_to_string(&log).unwrap_or_default();
        let mut process = Process::spawn_logged("ElasticMQ", command, &log);
        process
            .ready(START_LIMIT, HINT, || self.sqs.answers())
            .await;
        self.process = Some(process);
        // It answers before it has read its file.
        if let Storage::File = self.storage {
            let missing = made(&earlier);
            until("the queues of before", START_LIMIT, async || {
                let log = fs::read_to_string(&log).map_err(|error| error.to_string())?;
                let found = restored(log.get(earlier.len()..).unwrap_or_default());
                if missing.is_subset(&found) {
                    Ok(())
                } else {
                    Err(format!("{found:?} of {missing:?}"))
                }
            })
            .await;
        }
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

/// The queues that were made, by its log.
fn made(log: &str) -> BTreeSet<&str> {
    log.lines()
        .filter_map(|line| line.split_once(" - Creating queue CreateQueueData("))
        .filter_map(|(_, queue)| queue.split_once(',').map(|(name, _)| name))
        .collect()
}

/// The queues whose messages it has read from its file, by its log.
fn restored(log: &str) -> BTreeSet<&str> {
    log.lines()
        .filter(|line| line.contains(" - Restored "))
        .filter_map(|line| line.split_once(" messages in queue "))
        .map(|(_, name)| name)
        .collect()
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
