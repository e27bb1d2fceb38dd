//! A Kafka broker for one test: Apache Kafka as one process that is broker and controller
//! (`KRaft`).

use std::ffi::OsString;
use std::fs;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rdkafka::consumer::{BaseConsumer, Consumer};
use tempfile::TempDir;
use tokio::net::TcpStream;

use crate::kafka::Kafka;
use crate::place::{self, Port};
use crate::process::{self, Process};

/// Names the folder of Kafka's jars, when it is not the one that `scripts/fetch-servers` fills.
const LIB_VARIABLE: &str = "ONCEGATE_KAFKA_LIB";

/// That folder, under `target/test-servers`. `scripts/fetch-servers` puts beside it the archive of
/// its classes, with which a broker starts in half the time, and what its tool writes as the first
/// entries of a new cluster. The version is the one of `scripts/kafka-pom.xml`.
const LIB_DIR: &str = "kafka-4.1.0/lib";

/// One of Kafka's own tools starts a Java machine, and asks or writes a little.
const TOOL_LIMIT: Duration = Duration::from_secs(60);

/// Three seconds on an idle machine; a busy one with two cores has taken 17.
const START_LIMIT: Duration = Duration::from_secs(240);

/// How long one question of the readiness probe may take.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// Options for a Java program that is over before the optimising compiler pays off: four tenths
/// less processor time.
pub(crate) const OVER_SOON: [&str; 2] = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"];

const HINT: &str = "`scripts/fetch-servers` installs Java and fetches Apache Kafka";

/// A Kafka broker for one test; it stops when this value is dropped.
///
/// It makes no topics by itself, starts groups without a delay, allows short sessions (1 s) in the
/// classic and the new protocol, and takes messages up to 8 MiB. It refuses a message whose
/// timestamp is older than a day.
#[derive(Debug)]
pub struct KafkaBroker {
    kafka: Kafka,
    cluster_id: String,
    /// Its number in the cluster.
    node: usize,
    process: Option<Process>,
    /// Further options for Java.
    options: Vec<String>,
    // After the process: fields are dropped in this order, and the broker must not write any more.
    dir: TempDir,
    _ports: Ports,
}

/// The ports of a broker that is a controller too.
#[derive(Debug)]
pub(crate) struct Ports {
    pub(crate) broker: Port,
    controller: Port,
}

impl Ports {
    pub(crate) fn reserve() -> Self {
        Self {
            broker: Port::reserve(),
            controller: Port::reserve(),
        }
    }

    pub(crate) fn controller_address(&self) -> String {
        self.controller.address()
    }

    /// How the node of this number is named among the controllers.
    pub(crate) fn voter(&self, node: usize) -> String {
        format!("{node}@{}", self.controller.address())
    }
}

impl KafkaBroker {
    /// Starts a broker on free ports and waits until it answers. It is one for a test that is over
    /// soon.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// Like [`KafkaBroker::start`], for many tests or for measurements: in the long run it takes
    /// less processor time.
    ///
    /// # Panics
    /// As [`KafkaBroker::start`].
    pub async fn start_for_long() -> Self {
        let mut server = Self::prepare_alone(Ports::reserve(), &[]);
        server.options.clear();
        server.start_first().await;
        server
    }

    /// Like [`KafkaBroker::start`], with further lines for its configuration, which win over the
    /// usual ones: `["group.consumer.session.timeout.ms=2000"]`.
    ///
    /// # Panics
    /// As [`KafkaBroker::start`].
    pub async fn start_with(settings: &[&str]) -> Self {
        let mut server = Self::prepare_alone(Ports::reserve(), settings);
        server.start_first().await;
        server
    }

    /// A broker without others. Nothing is started.
    pub(crate) fn prepare_alone(ports: Ports, settings: &[&str]) -> Self {
        let voters = ports.voter(1);
        Self::prepare(1, &voters, &random_cluster_id(), ports, settings)
    }

    /// One of a cluster of this id, whose controllers are `voters`. Nothing is started.
    pub(crate) fn prepare(
        node: usize,
        voters: &str,
        cluster_id: &str,
        ports: Ports,
        settings: &[&str],
    ) -> Self {
        let dir = place::server_dir("kafka");
        let properties = properties(node, voters, &ports, dir.path(), settings);
        write(&dir.path().join("server.properties"), &properties);
        write(&dir.path().join("log4j2.properties"), LOG_SETTINGS);
        let kafka = Kafka::at(ports.broker.address());
        Self {
            kafka,
            cluster_id: cluster_id.to_owned(),
            node,
            process: None,
            options: OVER_SOON.map(str::to_owned).into(),
            dir,
            _ports: ports,
        }
    }

    /// Starts it with this option of Java.
    pub(crate) fn with_option(mut self, option: String) -> Self {
        self.options.push(option);
        self
    }

    /// Makes its storage and starts it.
    pub(crate) async fn start_first(&mut self) {
        self.start_first_with(&[]).await;
    }

    /// The same with users for SCRAM, as Kafka's tool takes them:
    /// `SCRAM-SHA-256=[name=alice,password=secret]`.
    pub(crate) async fn start_first_with(&mut self, users: &[String]) {
        self.format(users).await;
        self.start_again().await;
    }

    /// Kills the broker with SIGKILL and waits until it is gone. Its data stays.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed broker again, on the same port and with its data, and waits until it
    /// answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "Kafka still runs");
        let options = ["-Xmx512m"]
            .into_iter()
            .chain(self.options.iter().map(String::as_str));
        let mut command = self.java(&options.collect::<Vec<_>>(), "kafka.Kafka");
        command.arg(self.file("server.properties"));
        let mut process = Process::spawn_logged("Kafka", command, &self.file("server.log"));
        let bootstrap = self.kafka.bootstrap();
        let cluster_id = self.cluster_id.as_str();
        process
            .ready(START_LIMIT, HINT, || answers(bootstrap, cluster_id))
            .await;
        self.process = Some(process);
    }

    /// The running broker's process, to stop it by a signal for example.
    ///
    /// # Panics
    /// When it has been killed.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("Kafka runs")
    }

    /// A new `KRaft` cluster must be given its id on the disk before its first start. Kafka's tool
    /// writes it, and the first entries of the cluster; without users they are always the same.
    async fn format(&self, users: &[String]) {
        let first_entries = lib().with_extension("checkpoint");
        if users.is_empty() && first_entries.is_file() {
            let data = self.file("data");
            fs::create_dir_all(&data).expect("the server's folder can be written");
            fs::copy(&first_entries, data.join("bootstrap.checkpoint"))
                .expect("the server's folder can be written");
            let (id, node) = (&self.cluster_id, self.node);
            write(
                &data.join("meta.properties"),
                &format!("version=1\ncluster.id={id}\nnode.id={node}\n"),
            );
            return;
        }
        let settings = self.file("server.properties").display().to_string();
        let mut arguments = vec![
            "format",
            "--cluster-id",
            &self.cluster_id,
            "--config",
            &settings,
        ];
        users
            .iter()
            .for_each(|user| arguments.extend(["--add-scram", user]));
        self.tool("kafka.tools.StorageTool", &arguments).await;
    }

    /// Has other brokers keep partitions: `[("orders", 0, [2, 3])]`. Kafka copies them first, so it
    /// takes a moment.
    pub(crate) async fn reassign(&self, partitions: &[(&str, i32, Vec<i32>)]) {
        let partition = |(topic, number, replicas): &(&str, i32, Vec<i32>)| serde_json::json!({"topic": topic, "partition": number, "replicas": replicas});
        let partitions: Vec<serde_json::Value> = partitions.iter().map(partition).collect();
        let wanted = serde_json::json!({"version": 1, "partitions": partitions});
        let file = self.file("reassignment.json");
        write(&file, &wanted.to_string());
        let bootstrap = self.kafka.bootstrap();
        let file = file.display().to_string();
        let arguments = [
            "--bootstrap-server",
            bootstrap,
            "--reassignment-json-file",
            &file,
            "--execute",
        ];
        self.tool(
            "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
            &arguments,
        )
        .await;
    }

    /// Runs one of Kafka's own tools to its end.
    pub(crate) async fn tool(&self, class: &str, arguments: &[&str]) {
        let mut command = self.java(&OVER_SOON, class);
        command.args(arguments);
        let mut process = Process::spawn_logged(class, command, &self.file("tool.log"));
        let status = process.end_within(TOOL_LIMIT).await;
        assert!(
            status.success(),
            "{class} has failed ({status}). {HINT}{}",
            process.log_tail()
        );
    }

    fn java(&self, options: &[&str], class: &str) -> Command {
        let mut settings = OsString::from("-Dlog4j2.configurationFile=");
        settings.push(self.file("log4j2.properties"));
        let mut command = process::bound_to_parent("java", "KILL");
        // Java unpacks libraries there, and one that is killed leaves them.
        let mut temporary = OsString::from("-Djava.io.tmpdir=");
        temporary.push(self.dir.path());
        command.args(options).arg(settings).arg(temporary);
        // The star is Java's, not the shell's: all jars of the folder.
        command.args(archived(&lib()));
        command.arg("-cp").arg(lib().join("*")).arg(class);
        command
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Deref for KafkaBroker {
    type Target = Kafka;

    fn deref(&self) -> &Kafka {
        &self.kafka
    }
}

/// Ok when the broker at this address is the one of the cluster that we formatted.
async fn answers(bootstrap: &str, cluster_id: &str) -> Result<(), String> {
    // A refused connection is cheap here; inside librdkafka it starts a back-off.
    let connected = TcpStream::connect(bootstrap).await;
    connected.map_err(|error| format!("{bootstrap}: {error}"))?;
    let found = cluster_id_at(Kafka::at(bootstrap)).await?;
    if found == cluster_id {
        Ok(())
    } else {
        Err(format!("cluster {found} answers in its place"))
    }
}

/// The id of the cluster that answers.
pub(crate) async fn cluster_id_at(kafka: Kafka) -> Result<String, String> {
    let question = tokio::task::spawn_blocking(move || {
        let client: BaseConsumer = kafka.config().create().expect("the settings are valid");
        let metadata = client.fetch_metadata(None, PROBE_LIMIT);
        metadata.map_err(|error| error.to_string())?;
        let id = client.client().fetch_cluster_id(PROBE_LIMIT);
        id.ok_or_else(|| "the broker does not report its cluster id".to_owned())
    });
    question.await.expect("the question does not panic")
}

/// The option with which Java uses the archive of the classes of these jars, which
/// `scripts/fetch-servers` puts beside them.
pub(crate) fn archived(jars: &Path) -> Option<OsString> {
    let classes = jars.with_extension("jsa");
    classes.is_file().then(|| {
        let mut option = OsString::from("-XX:SharedArchiveFile=");
        option.push(classes);
        option
    })
}

fn lib() -> PathBuf {
    let lib = std::env::var_os(LIB_VARIABLE)
        .map_or_else(|| place::test_servers().join(LIB_DIR), PathBuf::from);
    assert!(lib.is_dir(), "no Kafka in {}: {HINT}", lib.display());
    lib
}

fn write(path: &Path, text: &str) {
    fs::write(path, text)
        .unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()));
}

/// 16 random bytes in the base64 of URLs, as Kafka wants it. Letters and digits are enough; the
/// last one stands for two bits only.
pub(crate) fn random_cluster_id() -> String {
    let mut id: String = std::iter::repeat_with(fastrand::alphanumeric)
        .take(21)
        .collect();
    id.push('A');
    id
}

fn properties(node: usize, voters: &str, ports: &Ports, dir: &Path, more: &[&str]) -> String {
    let broker = ports.broker.address();
    let controller = ports.controller.address();
    let data = dir.join("data");
    let data = data.display();
    let more = more.join("\n");
    format!(
        "\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://{broker},CONTROLLER://{controller}
advertised.listeners=PLAINTEXT://{broker}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
message.max.bytes=8388608
# One broker: one replica of everything. Few partitions: the first group waits for all of them.
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=2
# A killed broker is let in again when its session is over.
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
# Retention deletes a message with a date of long ago whenever its pass comes: it is refused here, so that no test has one.
log.message.timestamp.before.max.ms=86400000
# Tests wait for joins, and for the end of killed members' sessions.
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
group.consumer.min.session.timeout.ms=1000
group.consumer.min.heartbeat.interval.ms=100
{more}
"
    )
}

const LOG_SETTINGS: &str = "\
rootLogger.level=INFO
rootLogger.appenderRef.out.ref=OUT
appender.out.name=OUT
appender.out.type=Console
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d{ISO8601} %p %m (%c)%n
";
