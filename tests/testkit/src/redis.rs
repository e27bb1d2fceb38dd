//! Redis: the shared server, and servers for one test.

use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use ::redis::AsyncConnectionConfig;
use ::redis::aio::MultiplexedConnection;
use tempfile::TempDir;
use tokio::sync::OnceCell;

use crate::place::{self, Port};
use crate::process::{self, Process};

/// Names the Redis server of the run, as a URL: `redis://127.0.0.1:6379`.
pub const VARIABLE: &str = "ONCEGATE_TEST_REDIS";

/// How long a server may take until it answers; a large append-only file is loaded in this time
/// too.
const START_LIMIT: Duration = Duration::from_secs(240);

/// How long one question of the readiness probe may take.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// How long a server on a busy machine may take to be connected to, and for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

const HINT: &str = "`scripts/fetch-servers` installs redis-server and fetches Valkey";

/// Names a valkey-server, 9.1 or newer, to use instead of the fetched one.
const VALKEY_VARIABLE: &str = "ONCEGATE_VALKEY";

/// The fetched one, under `target/test-servers`; the release of Debian is the one of
/// `scripts/fetch-servers`.
const VALKEY: &str = "valkey-forky/valkey-server";

/// A connection to inspect a server, or to send it commands. The client's own limits are half a
/// second and one second.
pub(crate) async fn connect(url: &str) -> ::redis::RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(ANSWER_LIMIT))
        .set_response_timeout(Some(ANSWER_LIMIT));
    ::redis::Client::open(url)?
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

/// A Redis that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct Redis {
    url: String,
}

impl Redis {
    /// The server of this run: the one that [`VARIABLE`] names, or else one that this process
    /// starts on first use. Other tests use it at the same time: keep to a
    /// [`unique`](crate::unique) scope, and never stop, flush or reconfigure it.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<Redis> = OnceCell::const_new();
        static OWN: OnceCell<RedisServer> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(url) => NAMED.get_or_init(|| Self::reached(url)).await.clone(),
            Err(_) => (**OWN.get_or_init(RedisServer::start).await).clone(),
        }
    }

    async fn reached(url: String) -> Self {
        let redis = Self { url };
        if let Err(error) = redis.server_pid().await {
            panic!(
                "{VARIABLE} names {}, which does not answer: {error}",
                redis.url
            );
        }
        redis
    }

    /// The URL for clients: `redis://host:port`.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A new connection, for looking at what oncegate has done.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn connection(&self) -> MultiplexedConnection {
        let connection = connect(&self.url).await;
        connection.unwrap_or_else(|error| panic!("cannot connect to {}: {error}", self.url))
    }

    /// Deletes the records of a scope, as a careless operator would. Its descriptor stays. How many
    /// there were.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn delete_records(&self, scope: &str) -> usize {
        let mut connection = self.connection().await;
        let mut command = ::redis::cmd("KEYS");
        // A digest has 22 characters; the scope's other keys have words in its place.
        let pattern = format!("{scope}:{}", "?".repeat(22));
        let records: Vec<String> = command
            .arg(pattern)
            .query_async(&mut connection)
            .await
            .expect("it answers");
        for key in &records {
            let deleted = ::redis::cmd("DEL")
                .arg(key)
                .query_async::<()>(&mut connection)
                .await;
            deleted.expect("it answers");
        }
        records.len()
    }

    /// The keys of the server.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn keys(&self) -> Vec<String> {
        let mut connection = self.connection().await;
        ::redis::cmd("KEYS")
            .arg("*")
            .query_async(&mut connection)
            .await
            .expect("it answers")
    }

    /// Runs a command, for example of an administrator; its answer does not matter.
    ///
    /// # Panics
    /// When the server refuses it.
    pub async fn command(&self, words: &[&str]) {
        let (verb, rest) = words.split_first().expect("a command has a name");
        let mut command = ::redis::cmd(verb);
        let done = command
            .arg(rest)
            .query_async::<()>(&mut self.connection().await)
            .await;
        done.unwrap_or_else(|error| panic!("{} refuses {verb}: {error}", self.url));
    }

    /// A section of its `INFO`.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn info(&self, section: &str) -> String {
        let mut info = ::redis::cmd("INFO");
        let answer = info
            .arg(section)
            .query_async(&mut self.connection().await)
            .await;
        answer.unwrap_or_else(|error| panic!("{} does not tell its {section}: {error}", self.url))
    }

    /// How often it was asked for INFO, as a store's watch does. This question counts from the next
    /// one on.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn times_looked_at(&self) -> u64 {
        let stats = self.info("commandstats").await;
        let calls = stats
            .split("cmdstat_info:calls=")
            .nth(1)
            .and_then(|rest| rest.split(',').next());
        calls.map_or(0, |calls| calls.parse().expect("it is a number"))
    }

    /// Fails also while the server loads its data: it answers then, but not about keys.
    async fn server_pid(&self) -> Result<u32, String> {
        let question = async {
            let mut connection = connect(&self.url).await?;
            let () = ::redis::cmd("PING").query_async(&mut connection).await?;
            let mut info = ::redis::cmd("INFO");
            let info: ::redis::InfoDict = info.arg("server").query_async(&mut connection).await?;
            Ok(info.get::<u32>("process_id"))
        };
        match tokio::time::timeout(PROBE_LIMIT, question).await {
            Err(_) => Err(format!("no answer within {PROBE_LIMIT:?}")),
            Ok(Err::<_, ::redis::RedisError>(error)) => Err(error.to_string()),
            Ok(Ok(None)) => Err("INFO has no process_id".to_owned()),
            Ok(Ok(Some(pid))) => Ok(pid),
        }
    }
}

/// A Redis server for one test; it stops when this value is dropped.
///
/// It keeps an append-only file, refuses to evict, and allows `DEBUG`.
#[derive(Debug)]
pub struct RedisServer {
    redis: Redis,
    program: PathBuf,
    args: Vec<String>,
    process: Option<Process>,
    // After the process: fields are dropped in this order, and the server must not write any more.
    dir: TempDir,
    port: Port,
}

impl RedisServer {
    /// Starts a server on a free port and waits until it answers.
    ///
    /// # Panics
    /// When it does not start; the text has the reason and what to install.
    pub async fn start() -> Self {
        Self::start_with(&[]).await
    }

    /// One that keeps what it has answered when it is killed.
    ///
    /// The default server may not: with `appendfsync everysec` Redis delays a write for up to two
    /// seconds while the sync of an earlier one is in progress.
    ///
    /// # Panics
    /// As [`RedisServer::start`].
    pub async fn synced() -> Self {
        Self::start_with(&["--appendfsync", "always"]).await
    }

    /// Like [`RedisServer::start`], with further arguments, which win over the usual ones:
    /// `["--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru"]`.
    ///
    /// # Panics
    /// As [`RedisServer::start`].
    pub async fn start_with(args: &[&str]) -> Self {
        Self::start_program("redis-server".into(), args).await
    }

    /// The same with Valkey, which supports what the default server does not yet: `SET … IFEQ`,
    /// `WAITAOF`.
    ///
    /// # Panics
    /// As [`RedisServer::start`].
    pub async fn valkey(args: &[&str]) -> Self {
        let program = std::env::var_os(VALKEY_VARIABLE).map(PathBuf::from);
        Self::start_program(
            program.unwrap_or_else(|| place::test_servers().join(VALKEY)),
            args,
        )
        .await
    }

    async fn start_program(program: PathBuf, args: &[&str]) -> Self {
        let port = Port::reserve();
        let mut server = Self {
            redis: Redis {
                url: format!("redis://{}", port.address()),
            },
            program,
            args: args.iter().map(ToString::to_string).collect(),
            process: None,
            dir: place::server_dir("redis"),
            port,
        };
        server.start_again().await;
        server
    }

    /// The port of its plain connections.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Whether it has been started and not killed since.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.process.is_some()
    }

    /// Kills the server with SIGKILL and waits until it is gone. Its data stays.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Starts the killed server again, on the same port and with its data, and waits until it
    /// answers.
    ///
    /// # Panics
    /// When it still runs, or does not start.
    pub async fn start_again(&mut self) {
        assert!(self.process.is_none(), "Redis still runs");
        let log = self.dir.path().join("server.log");
        let mut command = process::bound_to_parent(&self.program, "KILL");
        command
            .args(["--bind", "127.0.0.1", "--port"])
            .arg(self.port.number().to_string())
            .arg("--dir")
            .arg(self.dir.path())
            .args(["--appendonly", "yes", "--save", ""])
            .args(["--maxmemory-policy", "noeviction"])
            .args(["--enable-debug-command", "local"])
            .args(&self.args);
        let mut process = Process::spawn_logged("Redis", command, &log);
        let redis = &self.redis;
        let own_pid = process.id();
        process
            .ready(START_LIMIT, HINT, || async move {
                match redis.server_pid().await {
                    Ok(pid) if pid == own_pid => Ok(()),
                    Ok(pid) => Err(format!("process {pid} answers in its place")),
                    Err(error) => Err(error),
                }
            })
            .await;
        self.process = Some(process);
    }

    /// Deletes the data of the killed server, so that it comes back empty.
    ///
    /// # Panics
    /// When it still runs, or the data cannot be deleted.
    pub fn wipe(&mut self) {
        assert!(self.process.is_none(), "Redis still runs");
        let data = self.dir.path().join("appendonlydir");
        std::fs::remove_dir_all(data).expect("the append-only files can be deleted");
    }

    /// The running server's process, to stop it by a signal for example.
    ///
    /// # Panics
    /// When it has been killed.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("Redis runs")
    }
}

impl Deref for RedisServer {
    type Target = Redis;

    fn deref(&self) -> &Redis {
        &self.redis
    }
}
