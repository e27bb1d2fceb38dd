//! A store that has lost its records, and processes that did not write them: each one notices, and
//! the whole scope halts until the loss is accepted.

// invariant (all tests): run-after-loss

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

mod unseen;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use oncegate::admin::{self, AcceptedLoss};
use oncegate::core::key::Scope;
use oncegate::core::store::{Halt, Store};
use oncegate::kafka::KafkaSource;
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::SqliteStore;
use oncegate::{
    Attempt, Consumer, ConsumerError, Entry, Gate, GateError, Key, Message, Monitor, OnStoreLoss,
    Origin,
};
use oncegate_testkit::{
    Kafka, Postgres, PostgresServer, Proxy, Record, Redis, RedisCluster, RedisServer, Watched,
    unique, until,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

const LIMIT: Duration = Duration::from_secs(240);
const PARTITIONS: i32 = 2;
const MESSAGES: u64 = 60;

/// A topic of payments, and how often handlers ran.
struct Payments {
    kafka: Kafka,
    topic: String,
    scope: Scope,
    runs: Arc<AtomicU64>,
}

/// A consumer in this process.
struct Process {
    watched: Arc<Watched>,
    monitor: Monitor,
    stop: oneshot::Sender<()>,
    running: JoinHandle<Result<(), ConsumerError>>,
}

impl Process {
    async fn stop(self) {
        _ = self.stop.send(());
        self.running
            .await
            .expect("it does not panic")
            .expect("it stops well");
    }

    /// Waits until it has been refused because of the loss.
    async fn is_refused(&self) {
        until("claims to be refused", LIMIT, async || {
            match self.watched.get("store_errors", "refused") {
                0 => Err(format!(
                    "{} losses noticed",
                    self.watched.total("store_losses")
                )),
                _ => Ok(()),
            }
        })
        .await;
    }
}

impl Process {
    /// Waits until it is not ready because its scope is halted, though it receives no message.
    async fn is_not_ready(&self) {
        until(
            "an idle consumer of a halted scope to be unready",
            LIMIT,
            async || {
                let health = self.monitor.health();
                let says_so = health
                    .reasons()
                    .iter()
                    .any(|reason| reason.to_string().contains("accept-loss"));
                if says_so && !health.is_ready() {
                    Ok(())
                } else {
                    Err(health.to_string())
                }
            },
        )
        .await;
    }
}

impl Payments {
    async fn new() -> Self {
        let kafka = Kafka::shared().await;
        let topic = kafka.new_topic("loss", PARTITIONS).await;
        let scope = Scope::new(unique("loss")).unwrap();
        let payments = Self {
            kafka,
            topic,
            scope,
            runs: Arc::default(),
        };
        payments.produce().await;
        payments
    }

    /// The same payments once more.
    async fn produce(&self) {
        let records =
            (0..MESSAGES).map(|id| Record::new(format!(r#"{{"id":{id}}}"#)).key(id.to_string()));
        self.kafka.produce(&self.topic, records).await;
    }

    fn gate(&self, store: impl Store + 'static, on_loss: OnStoreLoss) -> Gate {
        Gate::new(self.scope.as_str(), Key::json(["id"]), store).on_store_loss(on_loss)
    }

    fn start(&self, group: &str, store: impl Store + 'static, on_loss: OnStoreLoss) -> Process {
        let runs = Arc::clone(&self.runs);
        let handler = move |_: Message, _: Attempt| {
            runs.fetch_add(1, Relaxed);
            std::future::ready(Ok(()))
        };
        let watched = Watched::new();
        let source = KafkaSource::new(self.kafka.bootstrap(), group, [self.topic.as_str()]);
        let consumer = Consumer::new(source, self.gate(store, on_loss), handler);
        let consumer = consumer.observer(Arc::clone(&watched) as _);
        let monitor = consumer.monitor();
        let (stop, stopped) = oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { _ = stopped.await }));
        Process {
            watched,
            monitor,
            stop,
            running,
        }
    }

    /// Runs every payment once, and commits.
    async fn run_all(&self, group: &str, store: impl Store + 'static) {
        let process = self.start(group, store, OnStoreLoss::Halt);
        process.watched.until("acks", MESSAGES).await;
        // What goes with the commits is a sequence number that an earlier look has seen.
        self.is_kept_at_a_sequence(group).await;
        process.stop().await;
        assert_eq!(self.runs(), MESSAGES);
    }

    /// Waits until the broker keeps a position of the store that this process has reached by its
    /// completions.
    async fn is_kept_at_a_sequence(&self, group: &str) {
        let is_ahead = |annotation: &String| {
            let position = annotation
                .split(' ')
                .find_map(|word| word.strip_prefix(&format!("{}=", self.scope)));
            position
                .and_then(|position| position.split_once(':'))
                .is_some_and(|(_, sequence)| sequence != "0")
        };
        until(
            "a position of the store to be committed",
            LIMIT,
            async || {
                // A commit needs something to commit.
                self.kafka
                    .produce(&self.topic, [Record::new(r#"{"id":0}"#).key("0")])
                    .await;
                let kept = self.kafka.commit_metadata(group, &self.topic).await;
                kept.iter()
                    .any(is_ahead)
                    .then_some(())
                    .ok_or(format!("{kept:?}"))
            },
        )
        .await;
    }

    fn runs(&self) -> u64 {
        self.runs.load(Relaxed)
    }

    /// Waits for the halt: a process refuses claims before it has written it.
    async fn halt(&self, store: &dyn Store) -> Halt {
        until("the scope to be halted", LIMIT, async || {
            admin::halt_of(store, &self.scope)
                .await
                .unwrap()
                .ok_or("it is not".to_owned())
        })
        .await
    }

    async fn reason(&self, store: &dyn Store) -> String {
        self.halt(store).await.reason
    }

    async fn accept(&self, store: &dyn Store) {
        let halt = self.halt(store).await;
        let accepted = admin::accept_loss(store, &self.scope, &halt).await.unwrap();
        assert!(
            matches!(accepted, AcceptedLoss::Accepted(_)),
            "{accepted:?}"
        );
    }

    /// A process that starts now, with nothing but the group's commits and the store, runs nothing
    /// until the loss is accepted; then it runs what was lost, and counts it.
    async fn notices_at_the_start<S: Store + Clone + 'static>(&self, group: &str, store: S) {
        let before = self.runs();
        self.produce().await;
        let process = self.start(group, store.clone(), OnStoreLoss::Halt);
        process.is_refused().await;
        assert_eq!(
            (self.runs(), process.watched.total("acks")),
            (before, 0),
            "it ran again"
        );
        let reason = self.reason(&store).await;
        assert!(reason.contains("consumer group"), "{reason}");

        self.accept(&store).await;
        process.watched.until("acks", MESSAGES).await;
        process.stop().await;
        assert_eq!(admin::halt_of(&store, &self.scope).await.unwrap(), None);
    }
}

fn payment(id: u64) -> Message {
    Message::new(
        "loss",
        Origin::Other("test".into()),
        Some(format!(r#"{{"id":{id}}}"#).into()),
    )
}

/// Asks until the claim is refused. What is granted before the loss is noticed is given back.
async fn until_refused(gate: &Gate, id: u64) -> String {
    until("the claim to be refused", LIMIT, async || {
        match gate.enter(&payment(id)).await {
            Err(GateError::Store(error)) if error.class() == "refused" => Ok(error.to_string()),
            Ok(Entry::Granted(lease)) => {
                lease
                    .release(Duration::ZERO, false, "the loss is not noticed yet")
                    .await;
                Err("granted".to_owned())
            }
            other => Err(format!("{other:?}")),
        }
    })
    .await
}

async fn flush(redis: &Redis) {
    let () = redis::cmd("FLUSHALL")
        .query_async(&mut redis.connection().await)
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_redis_is_noticed_by_idle_members_and_by_those_that_answered_duplicates_alone() {
    let (server, payments) = (RedisServer::start().await, Payments::new().await);
    let connect = async || RedisStore::connect(server.url()).await.unwrap();
    let group = unique("loss");
    payments.run_all(&group, connect().await).await;

    // One replays, and completes nothing itself. One has only joined.
    let replaying = payments.start(&unique("loss"), connect().await, OnStoreLoss::Halt);
    replaying.watched.until("acks", MESSAGES).await;
    let idle = payments.gate(connect().await, OnStoreLoss::Halt);
    idle.open().await.unwrap();
    assert_eq!(payments.runs(), MESSAGES);

    flush(&server).await;
    replaying.watched.until("store_losses", 1).await;
    replaying.is_not_ready().await;
    let refused = until_refused(&idle, 1_000_000).await;
    assert!(
        refused.contains("oncegate accept-loss") && refused.contains(payments.scope.as_str()),
        "{refused}"
    );

    // The same payments again, to the consumers that ran before, and to one that starts now.
    payments.produce().await;
    replaying.is_refused().await;
    let late = payments.gate(connect().await, OnStoreLoss::Halt);
    late.open().await.unwrap();
    assert!(
        matches!(late.enter(&payment(1)).await, Err(GateError::Store(_))),
        "a halt is for the whole fleet"
    );
    replaying.stop().await;
    assert_eq!(payments.runs(), MESSAGES, "a payment ran again");

    // Accepted, all of them go on, and a process that starts later counts what runs again.
    payments.accept(&connect().await).await;
    for gate in [&idle, &late] {
        until("the gate to go on", LIMIT, async || {
            match gate.enter(&payment(2_000_000)).await {
                Ok(Entry::Granted(_) | Entry::Busy { .. }) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
    let restarted = payments.start(&unique("loss"), connect().await, OnStoreLoss::Halt);
    restarted.watched.until("acks", 2 * MESSAGES).await;
    assert_eq!(
        restarted.watched.get("extra_runs", "store_loss"),
        MESSAGES,
        "what runs again is counted"
    );
    restarted.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_came_back_empty_is_noticed_by_a_process_that_starts_afterwards() {
    let (mut server, payments) = (RedisServer::start().await, Payments::new().await);
    let group = unique("loss");
    payments
        .run_all(&group, RedisStore::connect(server.url()).await.unwrap())
        .await;
    server.kill();
    server.wipe();
    server.start_again().await;
    payments
        .notices_at_the_start(&group, RedisStore::connect(server.url()).await.unwrap())
        .await;

    // The same store and a restart of it with its data raise nothing.
    let store = RedisStore::connect(server.url()).await.unwrap();
    let process = payments.start(&group, store, OnStoreLoss::Halt);
    payments.produce().await;
    process.watched.until("acks", MESSAGES).await;
    assert_eq!(process.watched.total("store_losses"), 0);
    process.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_new_to_oncegate_or_to_the_scope_raises_no_alarm_and_a_move_to_another_store_does()
 {
    let (first, second) = (RedisServer::start().await, RedisServer::start().await);
    let (mut payments, group) = (Payments::new().await, unique("loss"));
    // The group has committed without oncegate.
    payments.kafka.commit(&group, &payments.topic, 0, 1).await;
    let runs = MESSAGES - 1;
    let process = payments.start(
        &group,
        RedisStore::connect(first.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    process.watched.until("acks", runs).await;
    payments.is_kept_at_a_sequence(&group).await;
    assert_eq!(process.watched.total("store_losses"), 0, "first adoption");
    process.stop().await;

    // Another scope on the same group is deliberate.
    let old = std::mem::replace(&mut payments.scope, Scope::new(unique("loss")).unwrap());
    payments.produce().await;
    let process = payments.start(
        &group,
        RedisStore::connect(first.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    process.watched.until("acks", MESSAGES).await;
    assert_eq!(process.watched.total("store_losses"), 0, "a new scope");
    payments.is_kept_at_a_sequence(&group).await;
    process.stop().await;
    drop(old);

    // So is a move to another store, which must be declared.
    payments
        .notices_at_the_start(&group, RedisStore::connect(second.url()).await.unwrap())
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_that_may_go_on_counts_one_loss_for_each_process() {
    let (server, payments) = (RedisServer::start().await, Payments::new().await);
    let connect = async || RedisStore::connect(server.url()).await.unwrap();
    let groups = [unique("loss"), unique("loss")];
    let mut processes = Vec::new();
    for group in &groups {
        let process = payments.start(group, connect().await, OnStoreLoss::Continue);
        process.watched.until("acks", MESSAGES).await;
        processes.push(process);
    }
    flush(&server).await;
    for process in &processes {
        process.watched.until("store_losses", 1).await;
    }
    payments.produce().await;
    for process in processes {
        process.watched.until("acks", 2 * MESSAGES).await;
        process.stop().await;
    }
    assert!(payments.runs() > MESSAGES, "what was lost runs again");
    assert_eq!(
        admin::halt_of(&connect().await, &payments.scope)
            .await
            .unwrap(),
        None
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_emptied_shard_of_a_cluster_is_noticed_by_a_process_that_starts_afterwards() {
    let (mut cluster, payments) = (RedisCluster::start().await, Payments::new().await);
    let gate = payments.gate(
        RedisStore::connect(&cluster.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    gate.open().await.unwrap();
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    let text = store.descriptor(&payments.scope).await.unwrap().unwrap();
    let held = oncegate::core::store::ScopeDescriptor::parse(&payments.scope, &text).unwrap();
    assert_eq!(held.markers.len(), 3, "one in each shard");
    drop(gate);

    // Not the shard of the descriptor.
    let descriptor_slot = cluster
        .slot_of(&format!("{}:descriptor", payments.scope))
        .await;
    let with_descriptor = cluster.primary_of(descriptor_slot).await;
    let mut other = None;
    for slot in [0, 8_192, 16_383] {
        let primary = cluster.primary_of(slot).await;
        if primary != with_descriptor {
            other = Some(primary);
        }
    }
    flush(cluster.node(other.expect("there are three shards"))).await;
    let late = payments.gate(
        RedisStore::connect(&cluster.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    late.open().await.unwrap();
    let refused = late.enter(&payment(1)).await.unwrap_err().to_string();
    assert!(refused.contains("shard"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_of_postgresql_that_was_put_back_is_noticed_by_running_processes_and_by_later_ones()
 {
    let (server, payments) = (PostgresServer::start().await, Payments::new().await);
    let database = server.database().await;
    let (_, name) = database.url().rsplit_once('/').unwrap();
    let group = unique("loss");
    // The backup has the scope, and none of its records.
    let first = PostgresStore::connect(database.url()).await.unwrap();
    first.create_schema().await.unwrap();
    payments
        .gate(first, OnStoreLoss::Halt)
        .open()
        .await
        .unwrap();
    copy_database(&server, name, "backup").await;
    payments
        .run_all(
            &group,
            PostgresStore::connect(database.url()).await.unwrap(),
        )
        .await;
    let running = payments.gate(
        PostgresStore::connect(database.url()).await.unwrap(),
        OnStoreLoss::Halt,
    );
    running.open().await.unwrap();
    restore_database(&server, name, "backup").await;

    let refused = until_refused(&running, 1_000_000).await;
    assert!(refused.contains("accept-loss"), "{refused}");
    let store = PostgresStore::connect(database.url()).await.unwrap();
    payments.accept(&store).await;
    drop(running);
    // Once more, with no consumer running.
    restore_database(&server, name, "backup").await;
    payments
        .notices_at_the_start(
            &group,
            PostgresStore::connect(database.url()).await.unwrap(),
        )
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_of_postgresql_that_lagged_is_noticed_when_it_takes_over_and_one_that_did_not_lag_raises_no_alarm()
 {
    for lags in [false, true] {
        let (mut primary, payments) = (PostgresServer::start().await, Payments::new().await);
        PostgresStore::connect(primary.url())
            .await
            .unwrap()
            .create_schema()
            .await
            .unwrap();
        let standby = PostgresServer::standby_of(&primary).await;
        let front = Proxy::before_address(address(primary.url())).await;
        let url = primary
            .url()
            .replace(&address(primary.url()), &front.address().to_string());
        let group = unique("loss");
        payments
            .gate(
                PostgresStore::connect(&url).await.unwrap(),
                OnStoreLoss::Halt,
            )
            .open()
            .await
            .unwrap();
        caught_up(&primary, &standby).await;
        let witness = standby.connection().await;
        if lags {
            witness
                .batch_execute("ALTER SYSTEM SET primary_conninfo = ''")
                .await
                .unwrap();
            witness
                .batch_execute("SELECT pg_reload_conf()")
                .await
                .unwrap();
            until("the standby to follow no more", LIMIT, async || {
                let followed = "SELECT count(*) FROM pg_stat_wal_receiver";
                let receivers: i64 = witness.query_one(followed, &[]).await.unwrap().get(0);
                if receivers == 0 {
                    Ok(())
                } else {
                    Err("it does".to_owned())
                }
            })
            .await;
        }
        payments
            .run_all(&group, PostgresStore::connect(&url).await.unwrap())
            .await;
        let running = payments.gate(
            PostgresStore::connect(&url).await.unwrap(),
            OnStoreLoss::Halt,
        );
        running.open().await.unwrap();
        if !lags {
            caught_up(&primary, &standby).await;
        }
        primary.kill();
        witness.batch_execute("SELECT pg_promote()").await.unwrap();
        front.point_at_address(address(standby.url()));
        if lags {
            assert!(
                until_refused(&running, 1_000_000)
                    .await
                    .contains("accept-loss")
            );
            continue;
        }
        // A later sequence number shows that looks have gone on.
        payments.produce().await;
        let process = payments.start(
            &group,
            PostgresStore::connect(&url).await.unwrap(),
            OnStoreLoss::Halt,
        );
        process.watched.until("acks", MESSAGES).await;
        assert_eq!(process.watched.total("store_losses"), 0);
        assert!(matches!(
            running.enter(&payment(3_000_000)).await,
            Ok(Entry::Granted(_))
        ));
        process.stop().await;
        assert_eq!(payments.runs(), MESSAGES);
    }
}

/// The host and port of a URL.
fn address(url: &str) -> String {
    let (_, rest) = url.split_once('@').unwrap();
    rest.split_once('/').unwrap().0.to_owned()
}

/// Waits until the standby has replayed what the primary has written by now.
async fn caught_up(primary: &Postgres, standby: &Postgres) {
    let written: String = primary
        .connection()
        .await
        .query_one("SELECT pg_current_wal_lsn()::text", &[])
        .await
        .unwrap()
        .get(0);
    let standby = standby.connection().await;
    until("the standby to catch up", LIMIT, async || {
        let replayed = "SELECT coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)";
        let is_there: bool = standby
            .query_one(replayed, &[&written])
            .await
            .unwrap()
            .get(0);
        if is_there {
            Ok(())
        } else {
            Err(format!("not at {written} yet"))
        }
    })
    .await;
}

async fn copy_database(server: &Postgres, from: &str, to: &str) {
    let admin = server.connection().await;
    until("the database to be free", LIMIT, async || {
        end_sessions(&admin, from).await;
        let copied = admin
            .batch_execute(&format!("CREATE DATABASE {to} TEMPLATE {from}"))
            .await;
        copied.map_err(|error| format!("{error:?}"))
    })
    .await;
}

async fn restore_database(server: &Postgres, name: &str, backup: &str) {
    let admin = server.connection().await;
    until("the database to be free", LIMIT, async || {
        let dropped = admin
            .batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
            .await;
        dropped.map_err(|error| format!("{error:?}"))
    })
    .await;
    copy_database(server, backup, name).await;
}

async fn end_sessions(admin: &tokio_postgres::Client, database: &str) {
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1";
    admin.query(end, &[&database]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_of_sqlite_that_was_put_back_is_noticed_by_running_processes_and_by_later_ones() {
    let (folder, payments) = (tempfile::tempdir().unwrap(), Payments::new().await);
    let (file, backup) = (
        folder.path().join("records.db"),
        folder.path().join("backup.db"),
    );
    let group = unique("loss");
    payments
        .gate(SqliteStore::open(&file).await.unwrap(), OnStoreLoss::Halt)
        .open()
        .await
        .unwrap();
    std::fs::copy(&file, &backup).unwrap();
    payments
        .run_all(&group, SqliteStore::open(&file).await.unwrap())
        .await;

    let running = payments.gate(SqliteStore::open(&file).await.unwrap(), OnStoreLoss::Halt);
    running.open().await.unwrap();
    put_back(&backup, &file);
    let refused = until_refused(&running, 1_000_000).await;
    assert!(
        refused.contains("replaced") && refused.contains("restart"),
        "{refused}"
    );
    drop(running);
    payments
        .notices_at_the_start(&group, SqliteStore::open(&file).await.unwrap())
        .await;
}

/// As a restore does it: another file under the same name.
fn put_back(backup: &Path, file: &Path) {
    for suffix in ["-wal", "-shm"] {
        let mut beside = file.as_os_str().to_owned();
        beside.push(suffix);
        _ = std::fs::remove_file(beside);
    }
    let restored = file.with_extension("restored");
    std::fs::copy(backup, &restored).unwrap();
    std::fs::rename(&restored, file).unwrap();
}
