//! RabbitMQ servers for one test.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;

use crate::place::{self, Port};
use crate::process::{self, Process};
use crate::rabbitmq::RabbitMq;

/// Six seconds on an idle machine; one with two cores and compilers on them has taken 25.
const START_LIMIT: Duration = Duration::from_secs(240);

const HINT: &str = "`scripts/fetch-servers` installs rabbitmq-server";

/// Debian's script in the path of the system would change the user; this one is the server's own.
const DEBIAN: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";

/// How much memory a server may use, in bytes: more than it needs.
const MEMORY_LIMIT: u64 = 512 << 20;

/// Names another `rabbitmq-server` to start than the system's.
const PROGRAM_VARIABLE: &str = "ONCEGATE_RABBITMQ";

/// Names a `rabbitmq-server`, 4.3 or newer, to use instead of the fetched one.
const NEWER_VARIABLE: &str = "ONCEGATE_RABBITMQ_NEWER";

/// The fetched one, under `target/test-servers`; the release of Debian is the one of
/// `scripts/fetch-servers`.
const NEWER: &str = "rabbitmq-forky/rabbitmq-server";

/// What nodes of one cluster have in common, in the folder that each has as its home.
const COOKIE: &str = ".erlang.cookie";

/// The releases of RabbitMQ that are tested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RabbitRelease {
    /// The system's: 3.10 on Debian 12. Quorum queues count each return, and have no limit by
    /// default.
    System,
    /// 4.3. Quorum queues count failures alone, and drop a message at the 21st.
    Newer,
}

impl RabbitRelease {
    /// Both.
    pub const ALL: [Self; 2] = [Self::System, Self::Newer];

    fn program(self) -> PathBuf {
        let (variable, default) = match self {
            Self::System => (PROGRAM_VARIABLE, DEBIAN.into()),
            Self::Newer => (NEWER_VARIABLE, place::test_servers().join(NEWER)),
        };
        std::env::var_os(variable).map_or(default, PathBuf::from)
    }
}

/// A RabbitMQ for one test; it stops when this value is dropped.
///
/// It listens on loopback alone, also for other nodes, and has a port mapper (epmd) of its own.
#[derive(Debug)]
pub struct RabbitMqServer {
    server: RabbitMq,
    release: RabbitRelease,
    settings: String,
    process: Option<Process>,
    // After the server: fields are dropped in this order. A node that has joined another one uses
    // that one's.
    _mapper: Option<Process>,
    dir: TempDir,
    ports: Ports,
}

impl Drop for RabbitMqServer {
    /// Prints the end of what the node has logged, where a test has failed.
    fn drop(&mut self) {
        if let Some(process) = self.process.as_ref().filter(|_| std::thread::panicking()) {
            eprintln!(
                "RabbitMQ, at port {:?}:\n{}",
                self.ports.amqp,
                process.log_tail()
            );
        }
    }
}

#[derive(Debug)]
struct Ports {
    amqp: Port,
    management: Port,
    nodes: NodePort,
    mapper: Arc<Port>,
}

/// The port for other nodes. Before the server binds it on loopback, it tries it on every address,
/// which a [`Port`] of another loopback address would not allow: this one is marked by the same
/// number of UDP, in a range of its own.
#[derive(Debug)]
struct NodePort {
    number: u16,
    _mark: UdpSocket,
}

impl NodePort {
    /// Between the ports of [`Port`] and those that Linux gives to outgoing connections.
    const RANGE: std::ops::Range<u16> = 32_000..32_768;

    fn reserve() -> Self {
        for number in std::iter::repeat_with(|| fastrand::u16(Self::RANGE)).take(Self::RANGE.len())
        {
            let Ok(mark) = UdpSocket::bind((Ipv4Addr::LOCALHOST, number)) else {
                continue;
            };
            if TcpListener::bind((Ipv4Addr::UNSPECIFIED, number)).is_ok() {
                return Self {
                    number,
                    _mark: mark,
                };
            }
        }
        panic!("no free port in {:?}", Self::RANGE)
    }
}

impl RabbitMqServer {
    /// Whether its program is there.
    #[must_use]
    pub fn is_installed() -> bool {
        RabbitRelease::System.program().is_file()
    }

    /// Starts a server on free ports and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with("").await
    }

    /// Like [`RabbitMqServer::start`], with further lines for its `rabbitmq.conf`.
    ///
    /// # Panics
    /// As [`RabbitMqServer::start`].
    pub async fn start_with(lines: &str) -> Self {
        Self::start_release(RabbitRelease::System, lines).await
    }

    /// Like [`RabbitMqServer::start_with`], of this release.
    ///
    /// # Panics
    /// As [`RabbitMqServer::start`].
    pub async fn start_release(release: RabbitRelease, lines: &str) -> Self {
        let port = Port::reserve();
        let dir = place::server_dir("rabbitmq");
        let mut mapper = process::bound_to_parent(MAPPER, "KILL");
        mapper.args(["-address", "127.0.0.1", "-port", &port.number().to_string()]);
        let mapper = Process::spawn_logged("epmd", mapper, &dir.path().join("epmd.log"));
        let mut started = Self::place(release, dir, lines, Arc::new(port), Some(mapper));
        started.start_again().await;
        started
    }

    /// Starts a second node, with the settings of this one, and joins it to this one's cluster.
    /// This one must run for as long.
    ///
    /// # Panics
    /// As [`RabbitMqServer::start`].
    pub async fn start_joined(&self) -> Self {
        let dir = place::server_dir("rabbitmq");
        fs::copy(self.dir.path().join(COOKIE), dir.path().join(COOKIE))
            .expect("this node has a cookie");
        let mut joined = Self::place(
            self.release,
            dir,
            &self.settings,
            Arc::clone(&self.ports.mapper),
            None,
        );
        // A node without data joins those that it finds there.
        joined.settings += &format!(
            "\ncluster_formation.peer_discovery_backend = classic_config\n\
             cluster_formation.classic_config.nodes.1 = {}\n\
             cluster_formation.classic_config.nodes.2 = {}",
            self.node(),
            joined.node()
        );
        joined.start_again().await;
        joined
    }

    fn place(
        release: RabbitRelease,
        dir: TempDir,
        lines: &str,
        mapper_port: Arc<Port>,
        mapper: Option<Process>,
    ) -> Self {
        let ports = Ports {
            amqp: Port::reserve(),
            management: Port::reserve(),
            nodes: NodePort::reserve(),
            mapper: mapper_port,
        };
        let management = ports
            .management
            .address()
            .parse()
            .expect("it is an address");
        let server = RabbitMq {
            amqp: ports.amqp.address(),
            management,
        };
        Self {
            server,
            release,
            settings: lines.to_owned(),
            process: None,
            _mapper: mapper,
            dir,
            ports,
        }
    }

    /// Parts this node from another one of its cluster: each takes the other for dead, and both
    /// serve clients.
    ///
    /// # Panics
    /// When a node does not answer, or the other one still sees this one.
    pub async fn part_from(&self, other: &Self) {
        let (this, that) = (self.node(), other.node());
        let parted = format!(
            "erlang:set_cookie('{that}', another), erlang:disconnect_node('{that}'), false = lists:member('{that}', nodes())."
        );
        self.eval(&parted).await;
        // Nodes that meet again before both have noticed are another fault.
        let noticed = format!(
            "(fun Notice(Left) when Left > 0 -> case lists:member('{this}', nodes()) of false -> ok; \
             true -> timer:sleep(100), Notice(Left - 1) end end)(400)."
        );
        other.eval(&noticed).await;
    }

    /// Lets them see each other again.
    ///
    /// # Panics
    /// When the node does not answer, or they do not find each other.
    pub async fn rejoin(&self, other: &Self) {
        let other = other.node();
        // They may refuse each other for a moment.
        let joined = format!(
            "erlang:set_cookie('{other}', erlang:get_cookie()), \
             (fun Meet(Left) when Left > 0 -> case net_kernel:connect_node('{other}') of true -> ok; \
             _ -> timer:sleep(250), Meet(Left - 1) end end)(400)."
        );
        self.eval(&joined).await;
    }

    /// Writes down which queues and users there are. RabbitMQ 3.10 does so seconds later, and
    /// minutes later for quorum queues: if it is killed before that, it starts them anew, empty and
    /// without a leader.
    ///
    /// # Panics
    /// When the node does not answer.
    pub async fn write_down(&self) {
        // Later versions keep them elsewhere, and have written them down.
        self.eval("catch mnesia:sync_log(), ok = dets:sync(ra_directory_reverse).")
            .await;
    }

    /// Has the server take itself for short of memory: it reads nothing from connections that
    /// publish.
    ///
    /// # Panics
    /// When the node does not answer.
    pub async fn raise_memory_alarm(&self) {
        self.limit_memory(1 << 20).await;
    }

    /// Has the server read from all connections again.
    ///
    /// # Panics
    /// When the node does not answer.
    pub async fn clear_memory_alarm(&self) {
        self.limit_memory(MEMORY_LIMIT).await;
    }

    async fn limit_memory(&self, bytes: u64) {
        let limited =
            format!("vm_memory_monitor:set_vm_memory_high_watermark({{absolute, {bytes}}}).");
        self.eval(&limited).await;
    }

    /// Kills the server with SIGKILL and waits until it is gone. Its data stays, if it is
    /// [written down](Self::write_down).
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed server again, on the same ports and with its data, and waits until it
    /// answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "RabbitMQ still runs");
        self.write_settings();
        let command = self.command();
        let mut process =
            Process::spawn_logged("RabbitMQ", command, &self.dir.path().join("server.log"));
        process
            .ready(START_LIMIT, HINT, || self.server.answers())
            .await;
        self.process = Some(process);
    }

    /// The running server's process, to stop it by a signal for example.
    ///
    /// # Panics
    /// When it has been killed.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("RabbitMQ runs")
    }

    /// Has the node evaluate Erlang expressions. `erl_call` is a small program; `rabbitmqctl`
    /// would start an Erlang machine of its own each time, as large as the server.
    async fn eval(&self, code: &str) {
        let mut command = process::bound_to_parent("erl_call", "KILL");
        self.environment(&mut command);
        command.args(["-sname", &self.node(), "-e"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::spawn("erl_call", command);
        let mut input = process.child().stdin.take().expect("it is a pipe");
        // A full stop is one before white space alone.
        let written = writeln!(input, "{code}");
        drop(input);
        process.end_within(START_LIMIT).await;
        let mut said = String::new();
        let output = process.child().stdout.take();
        let read = output.expect("it is a pipe").read_to_string(&mut said);
        // It ends with success whatever the node says.
        assert!(
            written.is_ok() && read.is_ok() && said.starts_with("{ok, "),
            "{code} has failed: {said}"
        );
    }

    fn node(&self) -> String {
        format!("oncegate-{}@localhost", self.ports.amqp.number())
    }

    fn write_settings(&self) {
        let Self {
            settings,
            ports,
            dir,
            ..
        } = self;
        let management = ports.management.number();
        let text = format!(
            "listeners.tcp.1 = {}\nmanagement.tcp.ip = 127.0.0.1\nmanagement.tcp.port = {management}\n\
             loopback_users = none\ncollect_statistics_interval = 500\nvm_memory_high_watermark.absolute = {MEMORY_LIMIT}\ndisk_free_limit.absolute = 50MB\n\
             {settings}\n",
            ports.amqp.address()
        );
        for (name, text) in [
            ("rabbitmq.conf", text.as_str()),
            ("plugins", "[rabbitmq_management]."),
        ] {
            fs::write(dir.path().join(name), text).expect("the server's folder can be written");
        }
    }

    fn command(&self) -> Command {
        let path = |name: &str| self.dir.path().join(name);
        let mut command = process::bound_to_parent(self.release.program(), "KILL");
        self.environment(&mut command);
        command
            .env("RABBITMQ_DIST_PORT", self.ports.nodes.number.to_string())
            .env("RABBITMQ_MNESIA_BASE", path("data"))
            .env("RABBITMQ_LOG_BASE", path("log"))
            .env("RABBITMQ_LOGS", "-")
            .env("RABBITMQ_CONFIG_FILE", path("rabbitmq.conf"))
            .env("RABBITMQ_ENABLED_PLUGINS_FILE", path("plugins"))
            // Otherwise a shell stays between this process and the server, and a kill reaches the
            // shell alone.
            .env("RABBITMQ_ALLOW_INPUT", "1")
            .env("RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", ARGUMENTS);
        command
    }

    /// Sets how a program finds the node.
    fn environment(&self, command: &mut Command) {
        command
            // The cookie of the node is in there.
            .env("HOME", self.dir.path())
            .env("ERL_CRASH_DUMP", self.dir.path().join("crash"))
            .env("ERL_EPMD_ADDRESS", "127.0.0.1")
            .env("ERL_EPMD_PORT", self.ports.mapper.number().to_string())
            .env("RABBITMQ_NODENAME", self.node())
            .env("RABBITMQ_CONF_ENV_FILE", "/dev/null");
    }
}

/// The server starts no port mapper, which would outlive it, listens for nodes on loopback, does
/// not spin when idle, and compares with `consumer_timeout` every half second (60 s by default).
const ARGUMENTS: &str = "-noinput -start_epmd false -rabbit channel_tick_interval 500 -kernel inet_dist_use_interface {127,0,0,1} \
                         +sbwt none +sbwtdcpu none +sbwtdio none";

/// Erlang's port mapper, which Debian has in the path.
const MAPPER: &str = "epmd";

impl Deref for RabbitMqServer {
    type Target = RabbitMq;

    fn deref(&self) -> &RabbitMq {
        &self.server
    }
}
