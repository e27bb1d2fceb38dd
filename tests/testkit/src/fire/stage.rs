//! The servers, the workers and the witnesses of one run.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use fastrand::Rng;
use oncegate::core::key::{CompiledKey, Scope};
use oncegate::dynamodb::DynamoDbStore;
use oncegate::postgres::PostgresStore;
use oncegate::{Key, Message, Origin};
use oncegate_testing::promise::{
    EffectName, History, Occurrence, POINTS, Point, ProducedMessage, completed_keys,
};
use tempfile::TempDir;

use super::points::VARIABLE;
use super::programs::oncegate_run;
use super::records::dynamodb_client;
use super::settings::{StoreKind, WorkerSettings};
use super::work::{ORDERS_OF_EVERY_FATE, PAYS_AT_ONCE};
use crate::broker::KafkaBroker;
use crate::kafka::Kafka;
use crate::ledger::Ledger;
use crate::process::{self, Process};
use crate::proxy::Proxy;
use crate::record::Record;
use crate::redis::RedisServer;
use crate::until::until;
use crate::{DynamoDbServer, PostgresServer};

/// The store's server, where it has one.
pub(super) enum Server {
    Redis(RedisServer),
    Postgres(PostgresServer),
    DynamoDb(DynamoDbServer),
    File,
}

pub(super) struct Worker {
    pub(super) process: Process,
    /// Where its words go.
    log: PathBuf,
    pub(super) is_frozen: bool,
    /// It is to die by itself.
    pub(super) is_doomed: bool,
}

/// Everything that a run has.
pub(super) struct Stage<'a> {
    pub(super) rng: Rng,
    pub(super) history: History,
    pub(super) ledger: Ledger,
    pub(super) kafka: Kafka,
    pub(super) broker: Option<&'a mut KafkaBroker>,
    pub(super) server: Server,
    pub(super) proxy: Option<Proxy>,
    pub(super) settings: WorkerSettings,
    pub(super) workers: Vec<Worker>,
    /// They were asked to stop, and take their time.
    leaving: Vec<Worker>,
    pub(super) produced: Vec<ProducedMessage>,
    /// How workers ended that were not asked to.
    pub(super) surprises: Vec<String>,
    program: PathBuf,
    /// The program `oncegate`, if the members are programs of `oncegate run`.
    pub(super) oncegate: Option<PathBuf>,
    key: CompiledKey,
    next_order: u64,
    /// How many workers were started so far.
    started: usize,
    // After the processes: fields are dropped in this order.
    pub(super) folder: TempDir,
}

/// The URL of the records' table at a server.
fn table_at(endpoint: &str) -> String {
    format!("dynamodb://fire?region=us-east-1&endpoint={endpoint}")
}

/// How many partitions the orders come by.
pub(super) const PARTITIONS: i32 = 4;
/// How many orders back a duplicate may come from.
const DUPLICATES_REACH_BACK: u64 = 200;
/// How long a worker may take to end after it was asked to.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(60);
/// The longest wait for workers to have looked at their store.
const NOTICE_LIMIT: Duration = Duration::from_secs(60);
/// How long nothing may be committed before a run is called stuck.
const STUCK_AFTER: Duration = Duration::from_secs(60);
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// Starts DynamoDB with a table. Returns the server, what stands before it, and the table's
/// address.
async fn start_dynamodb() -> (Server, Option<Proxy>, String) {
    let server = DynamoDbServer::start().await;
    let proxy = Proxy::before_address(server.address()).await;
    let store = DynamoDbStore::builder(&table_at(&server.endpoint()))
        .client(dynamodb_client(&server))
        .may_be_missing();
    let store = store.connect().await.expect("the server answers");
    store.create_table().await.expect("the table can be made");
    let address = table_at(&format!("http://{}", proxy.address()));
    (Server::DynamoDb(server), Some(proxy), address)
}

impl<'a> Stage<'a> {
    pub(super) async fn set(
        seed: u64,
        store: StoreKind,
        (program, oncegate): (PathBuf, Option<PathBuf>),
        broker: Option<&'a mut KafkaBroker>,
    ) -> Self {
        let kafka = match &broker {
            Some(broker) => (***broker).clone(),
            None => Kafka::shared().await,
        };
        let folder = tempfile::tempdir().expect("a folder can be made");
        let topic = kafka.new_topic("fire", PARTITIONS).await;
        let dead_topic = kafka.new_topic("fire-dead", 1).await;
        let (server, proxy, address) = match store {
            StoreKind::Redis => {
                let server = RedisServer::synced().await;
                let proxy = Proxy::before(&server).await;
                let address = proxy.url();
                (Server::Redis(server), Some(proxy), address)
            }
            StoreKind::Postgres => {
                let server = PostgresServer::start().await;
                let store = PostgresStore::connect(server.url())
                    .await
                    .expect("PostgreSQL answers");
                store.create_schema().await.expect("the tables can be made");
                let (user, place) = server.url().split_once('@').expect("the URL names a user");
                let (place, database) = place.split_once('/').expect("the URL names a database");
                let proxy = Proxy::before_address(place).await;
                let address = format!("{user}@{}/{database}", proxy.address());
                (Server::Postgres(server), Some(proxy), address)
            }
            StoreKind::DynamoDb => start_dynamodb().await,
            StoreKind::Sqlite => (
                Server::File,
                None,
                folder.path().join("records.db").display().to_string(),
            ),
        };
        let settings = WorkerSettings::new(
            (store, &address),
            &kafka,
            (topic, dead_topic),
            folder.path(),
        );
        let key =
            Key::json(["order"]).compile(&Scope::new(&settings.scope).expect("it is a scope"));
        Self {
            rng: Rng::with_seed(seed),
            history: History::open(&settings.history).expect("a file can be made"),
            ledger: Ledger::open(&settings.ledger),
            kafka,
            broker,
            server,
            proxy,
            settings,
            workers: Vec::new(),
            leaving: Vec::new(),
            produced: Vec::new(),
            surprises: Vec::new(),
            program,
            oncegate,
            key: key.expect("the key is well formed"),
            next_order: 0,
            started: 0,
            folder,
        }
    }

    /// Starts one more worker.
    pub(super) fn start_worker(&mut self, doom: Option<(Point, u32, &str)>) {
        let mut command = match &self.oncegate {
            Some(oncegate) => oncegate_run(oncegate, &self.program, &self.settings),
            None => {
                let mut command = process::bound_to_parent(&self.program, "KILL");
                command.arg(self.settings.as_json());
                command
            }
        };
        if self.settings.store == StoreKind::DynamoDb {
            // Emulators do not check them.
            command.env("AWS_ACCESS_KEY_ID", "test");
            command.env("AWS_SECRET_ACCESS_KEY", "test");
        }
        // Its handlers panic on purpose, and a trace of each costs more than the run.
        command.env("RUST_BACKTRACE", "0");
        if let Some((point, passes, action)) = doom {
            command.env(VARIABLE, format!("{}:{passes}:{action}", point.as_str()));
        }
        self.started += 1;
        let log = self
            .folder
            .path()
            .join(format!("worker-{}.log", self.started));
        let process = Process::spawn_logged("a worker", command, &log);
        self.workers.push(Worker {
            process,
            log,
            is_frozen: false,
            is_doomed: doom.is_some(),
        });
    }

    /// A worker that dies by itself at some point of some message.
    pub(super) fn start_doomed_worker(&mut self) {
        let point = *self.rng.choice(&POINTS).expect("there are points");
        let passes = self.rng.u32(1..12);
        self.start_worker(Some((point, passes, "abort")));
    }

    /// One that runs, at random.
    pub(super) fn some_worker(&mut self) -> Option<usize> {
        let running: Vec<usize> = self
            .workers
            .iter()
            .enumerate()
            .filter(|(_, worker)| !worker.is_frozen && !worker.is_doomed)
            .map(|(index, _)| index)
            .collect();
        self.rng.choice(running)
    }

    /// This one was asked to stop.
    pub(super) fn leaving(&mut self, worker: Worker) {
        self.leaving.push(worker);
    }

    /// Ends the phase of planned crashes: kills the workers whose crash has not happened yet.
    pub(super) fn doom_is_over(&mut self) {
        let (doomed, others) = self
            .workers
            .drain(..)
            .partition(|worker: &Worker| worker.is_doomed);
        self.workers = others;
        let doomed: Vec<Worker> = doomed;
        // Dropping kills those that still run: a late crash.
        drop(doomed);
    }

    /// Takes away those that have ended, and starts others in their place.
    pub(super) fn replace_the_dead(&mut self) {
        for mut worker in std::mem::take(&mut self.workers) {
            match worker.process.try_wait() {
                None => self.workers.push(worker),
                Some(_) if worker.is_doomed => {}
                Some(status) => {
                    let words = std::fs::read_to_string(&worker.log).unwrap_or_default();
                    let last = words.lines().next_back().unwrap_or_default();
                    self.surprises
                        .push(format!("a worker ended by itself ({status}): {last}"));
                    self.start_worker(None);
                }
            }
        }
    }

    /// Produces orders: some repeated, some repeated with other content, some unreadable.
    pub(super) async fn produce(&mut self, count: usize) {
        let mut orders = Vec::new();
        for _ in 0..count {
            let n = self.produced.len() + orders.len();
            let first = self.next_order.saturating_sub(DUPLICATES_REACH_BACK);
            let (order, amount) = match self.rng.u32(..100) {
                0..2 => (None, 0),
                2..4 if self.next_order > 0 => (Some(self.rng.u64(first..self.next_order)), 2),
                4..35 if self.next_order > 0 => (Some(self.rng.u64(first..self.next_order)), 1),
                _ => {
                    self.next_order += 1;
                    (Some(self.next_order - 1), 1)
                }
            };
            let payload = match order {
                Some(order) => format!(r#"{{"order":{order},"amount":{amount},"n":{n}}}"#),
                None => format!(r#"{{"amount":{amount},"n":{n}}}"#),
            };
            // Half of the duplicates come by another partition than the first.
            let key = if self.rng.bool() {
                order.unwrap_or_default()
            } else {
                self.rng.u64(..)
            };
            orders.push((
                order,
                amount,
                payload.clone(),
                Record::new(payload).key(key.to_string()),
            ));
        }
        self.send(orders).await;
    }

    /// An order of this fate for every partition, that never comes again; their store keys.
    pub(super) async fn produce_unique(&mut self, fate: u64) -> BTreeSet<String> {
        let before = self.produced.len();
        let orders = (0..PARTITIONS).map(|partition| {
            let order = self.next_order.next_multiple_of(ORDERS_OF_EVERY_FATE) + fate;
            self.next_order = order + 1;
            let n = before + usize::try_from(partition).unwrap_or_default();
            let payload = format!(r#"{{"order":{order},"amount":1,"n":{n}}}"#);
            (
                Some(order),
                1,
                payload.clone(),
                Record::new(payload).partition(partition),
            )
        });
        let orders = orders.collect();
        self.next_order += DUPLICATES_REACH_BACK;
        self.send(orders).await;
        self.produced
            .iter()
            .skip(before)
            .filter_map(|one| one.key.clone())
            .collect()
    }

    async fn send(&mut self, orders: Vec<(Option<u64>, u64, String, Record)>) {
        let (contents, records): (Vec<_>, Vec<_>) = orders
            .into_iter()
            .map(|(order, amount, payload, record)| ((order, amount, payload), record))
            .unzip();
        let places = self.kafka.produce(&self.settings.topic, records).await;
        for ((order, amount, payload), (partition, offset)) in contents.into_iter().zip(places) {
            let origin = format!("{}/{partition}@{offset}", self.settings.topic);
            let message = Message::new(
                self.settings.topic.as_str(),
                Origin::Other("produced".into()),
                Some(payload.into()),
            );
            let key = self
                .key
                .derive(message.route(), &message)
                .ok()
                .map(|key| key.as_str().to_owned());
            let order = order.map_or_else(|| "none".to_owned(), |order| order.to_string());
            let effect = EffectName::new(order, amount.to_string());
            self.produced.push(ProducedMessage {
                origin,
                effect,
                key,
            });
        }
    }

    /// Waits until everything is committed. Returns why not, when nothing has moved for a minute.
    pub(super) async fn quiet(&mut self) -> Result<(), String> {
        let ends = i64::try_from(self.produced.len()).expect("it is not that many");
        let mut last = -1;
        let mut moved_at = Instant::now();
        loop {
            self.replace_the_dead();
            let kafka = self.kafka.clone();
            let settings = self.settings.clone();
            let asked = tokio::spawn(async move {
                kafka
                    .committed_offsets(&settings.group, &settings.topic)
                    .await
            });
            // A broker that has just come back may not know yet, which fails the question.
            let committed: i64 = asked
                .await
                .map_or(last, |committed| committed.values().sum());
            if committed == ends {
                return Ok(());
            }
            if committed != last {
                last = committed;
                moved_at = Instant::now();
            }
            if moved_at.elapsed() > STUCK_AFTER {
                return Err(format!(
                    "stuck at {committed} of {ends} for {STUCK_AFTER:?}"
                ));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Asks every worker to stop, and returns what was wrong with how they did.
    pub(super) async fn stop(&mut self) -> Vec<String> {
        let mut wrong = Vec::new();
        for worker in &mut self.workers {
            worker.process.signal("TERM");
        }
        let all = self.workers.iter_mut().map(|one| (one, false));
        // A worker that left during faults may report that its last commit did not arrive.
        for (worker, may_complain) in all.chain(self.leaving.iter_mut().map(|one| (one, true))) {
            match tokio::time::timeout(STOP_LIMIT, worker.process.end()).await {
                Ok(status) if status.success() || may_complain => {}
                Ok(status) => wrong.push(format!(
                    "a worker that was asked to stop ended with {status}"
                )),
                Err(_) => wrong.push(format!(
                    "a worker that was asked to stop runs after {STOP_LIMIT:?}"
                )),
            }
        }
        self.workers.clear();
        self.leaving.clear();
        wrong
    }

    /// Waits until the workers would notice that Redis has lost all records: they have completed
    /// what will not run again, and their watches have seen the server twice since.
    pub(super) async fn until_a_loss_would_be_noticed(&mut self) {
        if !matches!(self.server, Server::Redis(_)) {
            return;
        }
        let keys = self.produce_unique(PAYS_AT_ONCE).await;
        until(
            "the completions of these orders",
            NOTICE_LIMIT,
            async || {
                let completed =
                    completed_keys(&self.history.read().expect("the history can be read"));
                let completed = keys.intersection(&completed).count();
                if completed == keys.len() {
                    Ok(())
                } else {
                    Err(format!("{completed} of {}", keys.len()))
                }
            },
        )
        .await;
        self.until_the_watches_have_looked().await;
    }

    /// Waits until the workers' watches have seen Redis twice.
    pub(super) async fn until_the_watches_have_looked(&self) {
        let Server::Redis(server) = &self.server else {
            return;
        };
        // Less the questions of this wait itself.
        let before = server.times_looked_at().await;
        let mut asked = 0;
        let enough = 2 * self
            .workers
            .iter()
            .filter(|worker| !worker.is_frozen)
            .count() as u64;
        until("the watches of the workers", NOTICE_LIMIT, async || {
            asked += 1;
            let seen = server
                .times_looked_at()
                .await
                .saturating_sub(before + asked);
            if seen >= enough {
                Ok(())
            } else {
                Err(format!("{seen} of {enough} looks"))
            }
        })
        .await;
    }

    /// Notes a fault that is over at once.
    pub(super) fn note(&self, fault: &str, pid: u32) {
        self.history.note_of(
            pid,
            Occurrence::FaultBegins {
                fault: fault.to_owned(),
            },
        );
    }
}
