//! RabbitMQ: the shared server, and servers for one test.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::place::{self, Port};
use crate::process::{self, Process};
use crate::rabbitmq_queue::{QueueKind, RabbitQueue};
use crate::until::until;
use crate::web::{HttpAnswer, HttpClient, Sent};

/// Names the RabbitMQ of the run, by its addresses for AMQP and for its management plugin, with the
/// user `guest`: `127.0.0.1:5672,127.0.0.1:15672`.
pub const VARIABLE: &str = "ONCEGATE_TEST_RABBITMQ";

/// Six seconds on an idle machine; one with two cores and compilers on them has taken 25.
const START_LIMIT: Duration = Duration::from_secs(240);

/// The longest wait for the plugin to list a connection.
const LISTED_LIMIT: Duration = Duration::from_secs(120);

const HINT: &str = "`scripts/fetch-servers` installs rabbitmq-server";

/// Debian's script in the path of the system would change the user; this one is the server's own.
const DEBIAN: &str = "/usr/lib/rabbitmq/bin/rabbitmq-server";

/// Names another `rabbitmq-server` to start.
const PROGRAM_VARIABLE: &str = "ONCEGATE_RABBITMQ";

/// What nodes of one cluster have in common, in the folder that each has as its home.
const COOKIE: &str = ".erlang.cookie";

/// The user of a new server, and its password.
const GUEST: &str = "guest";

/// A RabbitMQ that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct RabbitMq {
    amqp: String,
    management: SocketAddr,
}

impl RabbitMq {
    /// The server of this run: the one that [`VARIABLE`] names, or else one that this process
    /// starts on first use. Other tests use it at the same time: keep to queues and users of
    /// [`unique`](crate::unique) names.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<RabbitMq> = OnceCell::const_new();
        static OWN: OnceCell<RabbitMqServer> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(addresses) => NAMED.get_or_init(|| Self::reached(addresses)).await.clone(),
            Err(_) => (**OWN.get_or_init(RabbitMqServer::start).await).clone(),
        }
    }

    async fn reached(addresses: String) -> Self {
        Self::at(&addresses).await
    }

    /// The server at these addresses, in the form of [`VARIABLE`].
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn at(addresses: &str) -> Self {
        let parts = addresses
            .split_once(',')
            .and_then(|(amqp, http)| Some((amqp, http.parse().ok()?)));
        let (amqp, management) =
            parts.unwrap_or_else(|| panic!("{addresses} is not HOST:PORT,ADDRESS:PORT"));
        let server = Self {
            amqp: amqp.to_owned(),
            management,
        };
        if let Err(error) = server.answers().await {
            panic!("RabbitMQ at {addresses} does not answer: {error}");
        }
        server
    }

    /// The URI of the user `guest`, who may do everything.
    #[must_use]
    pub fn uri(&self) -> String {
        self.uri_as(GUEST)
    }

    /// The URI of a user from [`new_user`](Self::new_user).
    #[must_use]
    pub fn uri_as(&self, user: &str) -> String {
        format!("amqp://{user}:{GUEST}@{}/%2f", self.amqp)
    }

    /// `host:port` for AMQP.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.amqp
    }

    /// The URL of the management plugin.
    #[must_use]
    pub fn management_url(&self) -> String {
        format!("http://{}", self.management)
    }

    /// The addresses as [`VARIABLE`] has them.
    #[must_use]
    pub fn addresses(&self) -> String {
        format!("{},{}", self.amqp, self.management)
    }

    /// Makes a durable queue of a new name that starts with `prefix`.
    ///
    /// # Panics
    /// When the server refuses it.
    pub async fn new_queue(&self, prefix: &str, kind: QueueKind) -> RabbitQueue {
        self.new_queue_with(prefix, kind, &[]).await
    }

    /// The same with further arguments, which are numbers or texts.
    ///
    /// # Panics
    /// As [`RabbitMq::new_queue`].
    pub async fn new_queue_with(
        &self,
        prefix: &str,
        kind: QueueKind,
        arguments: &[(&str, Value)],
    ) -> RabbitQueue {
        let name = crate::unique(prefix);
        let mut all = serde_json::Map::new();
        all.insert("x-queue-type".to_owned(), kind.name().into());
        all.extend(
            arguments
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone())),
        );
        let body = serde_json::json!({ "durable": true, "arguments": all }).to_string();
        self.manage("PUT", &format!("/api/queues/%2F/{name}"), &body)
            .await;
        RabbitQueue::of(self.uri(), name)
    }

    /// Deletes a queue with its messages.
    ///
    /// # Panics
    /// When the server does not.
    pub async fn delete_queue(&self, queue: &RabbitQueue) {
        self.manage("DELETE", &format!("/api/queues/%2F/{}", queue.name()), "")
            .await;
    }

    /// Makes a user of a new name with these rights, as regular expressions: what it may configure,
    /// write and read.
    ///
    /// # Panics
    /// When the server refuses it.
    pub async fn new_user(&self, configure: &str, write: &str, read: &str) -> String {
        let user = crate::unique("user");
        let body = serde_json::json!({ "password": GUEST, "tags": "" }).to_string();
        self.manage("PUT", &format!("/api/users/{user}"), &body)
            .await;
        let rights = serde_json::json!({ "configure": configure, "write": write, "read": read });
        self.manage(
            "PUT",
            &format!("/api/permissions/%2F/{user}"),
            &rights.to_string(),
        )
        .await;
        user
    }

    /// Closes the connection whose given name contains `part`, as an operator does.
    ///
    /// # Panics
    /// When there is none for two minutes.
    pub async fn close_connection(&self, part: &str) {
        until("its connection is listed", LISTED_LIMIT, async || {
            // The plugin knows a connection after some seconds.
            let listed = self.manage("GET", "/api/connections", "").await;
            let listed: Vec<Value> = serde_json::from_slice(&listed.body).expect("it is JSON");
            let wanted = listed.iter().find(|connection| {
                let given = connection
                    .pointer("/client_properties/connection_name")
                    .and_then(Value::as_str);
                given.is_some_and(|given| given.contains(part))
            });
            let name = wanted.and_then(|connection| connection.get("name")?.as_str());
            let name = name.ok_or_else(|| format!("none has `{part}` in its name"))?;
            let name = name.replace(' ', "%20").replace('>', "%3E");
            // It may have ended by itself, and is listed for some seconds more.
            let answer = self
                .ask("DELETE", &format!("/api/connections/{name}"), "")
                .await?;
            if answer.status.is_success() {
                Ok(())
            } else {
                Err(format!("{} for {name}", answer.status))
            }
        })
        .await;
    }

    /// How many messages of the queue are not acknowledged, also those that a consumer has. The
    /// server counts them twice a second.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn left(&self, queue: &RabbitQueue) -> u64 {
        let path = format!("/api/queues/%2F/{}", queue.name());
        let described: Value =
            serde_json::from_slice(&self.manage("GET", &path, "").await.body).expect("it is JSON");
        // Until it has counted once, there may be messages.
        described
            .get("messages")
            .and_then(Value::as_u64)
            .unwrap_or(u64::MAX)
    }

    /// How many consumers the queue has, those included that wait for the single active one. The
    /// server knows it some seconds late.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn consumers(&self, queue: &RabbitQueue) -> usize {
        let path = format!("/api/queues/%2F/{}", queue.name());
        let described: Value =
            serde_json::from_slice(&self.manage("GET", &path, "").await.body).expect("it is JSON");
        described
            .get("consumer_details")
            .and_then(Value::as_array)
            .map_or(0, Vec::len)
    }

    /// Calls the management plugin.
    ///
    /// # Panics
    /// When it refuses.
    pub async fn manage(&self, method: &str, path: &str, body: &str) -> HttpAnswer {
        let answer = self.ask(method, path, body).await;
        let answer = answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        assert!(
            answer.status.is_success(),
            "{method} {path}: {} {:?}",
            answer.status,
            answer.body
        );
        answer
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> Result<HttpAnswer, String> {
        let credentials = format!("Basic {}", STANDARD.encode(format!("{GUEST}:{GUEST}")));
        let headers = [
            ("authorization", credentials.as_str()),
            ("content-type", "application/json"),
        ];
        let sent = Sent::post(path, "", body)
            .unkeyed()
            .method(method)
            .headers(&headers);
        HttpClient::http1(self.management).try_send(sent).await
    }

    /// Whether it takes clients, and its plugin answers.
    async fn answers(&self) -> Result<(), String> {
        let answer = self.ask("GET", "/api/overview", "").await?;
        if !answer.status.is_success() {
            return Err(format!("its management plugin answers {}", answer.status));
        }
        let listener = tokio::net::TcpStream::connect(&self.amqp).await;
        listener.map(drop).map_err(|error| error.to_string())
    }
}

/// A RabbitMQ for one test; it stops when this value is dropped.
///
/// It listens on loopback alone, also for other nodes, and has a port mapper (epmd) of its own.
#[derive(Debug)]
pub struct RabbitMqServer {
    server: RabbitMq,
    settings: String,
    process: Option<Process>,
    // After the server: fields are dropped in this order. A node that has joined another one uses
    // that one's.
    _mapper: Option<Process>,
    dir: TempDir,
    ports: Ports,
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
        Self::program().is_file()
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
        let port = Port::reserve();
        let dir = place::server_dir("rabbitmq");
        let mut mapper = process::bound_to_parent(MAPPER, "KILL");
        mapper.args(["-address", "127.0.0.1", "-port", &port.number().to_string()]);
        let mapper = Process::spawn_logged("epmd", mapper, &dir.path().join("epmd.log"));
        let mut started = Self::place(dir, lines, Arc::new(port), Some(mapper));
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
        let mut joined = Self::place(dir, &self.settings, Arc::clone(&self.ports.mapper), None);
        joined.start_again().await;
        joined.control(&["stop_app"]).await;
        joined.control(&["join_cluster", &self.node()]).await;
        joined.control(&["start_app"]).await;
        joined
    }

    fn place(dir: TempDir, lines: &str, mapper_port: Arc<Port>, mapper: Option<Process>) -> Self {
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
    /// When `rabbitmqctl` fails.
    pub async fn part_from(&self, other: &Self) {
        let other = other.node();
        let parted = format!(
            "erlang:set_cookie('{other}', another), erlang:disconnect_node('{other}'), false = lists:member('{other}', nodes())."
        );
        self.control(&["eval", &parted]).await;
    }

    /// Lets them see each other again.
    ///
    /// # Panics
    /// When `rabbitmqctl` fails, or they do not find each other.
    pub async fn rejoin(&self, other: &Self) {
        let other = other.node();
        // They may refuse each other for a moment.
        let joined = format!(
            "erlang:set_cookie('{other}', erlang:get_cookie()), \
             (fun Meet(Left) when Left > 0 -> case net_kernel:connect_node('{other}') of true -> ok; \
             _ -> timer:sleep(250), Meet(Left - 1) end end)(400)."
        );
        self.control(&["eval", &joined]).await;
    }

    /// Kills the server with SIGKILL and waits until it is gone. Its data stays.
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

    /// Runs `rabbitmqctl` for this server.
    ///
    /// # Panics
    /// When that fails.
    pub async fn control(&self, arguments: &[&str]) {
        let control = Self::program().with_file_name("rabbitmqctl");
        let mut command = process::bound_to_parent(control, "KILL");
        self.environment(&mut command);
        command.args(["--node", &self.node()]).args(arguments);
        let log = self.dir.path().join("control.log");
        let mut process = Process::spawn_logged("rabbitmqctl", command, &log);
        let status = process.end_within(START_LIMIT).await;
        assert!(
            status.success(),
            "rabbitmqctl {arguments:?} failed: {}",
            process.log_tail()
        );
    }

    fn program() -> PathBuf {
        std::env::var_os(PROGRAM_VARIABLE).map_or_else(|| DEBIAN.into(), PathBuf::from)
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
             loopback_users = none\ncollect_statistics_interval = 500\nvm_memory_high_watermark.absolute = 512MB\ndisk_free_limit.absolute = 50MB\n\
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
        let mut command = process::bound_to_parent(Self::program(), "KILL");
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
