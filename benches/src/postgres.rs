//! Compares the PostgreSQL store with hand-written statements for the same work.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use futures_util::future::join;
use oncegate::postgres::{PostgresStore, PostgresTransaction, PostgresTransactions};
use oncegate::{
    Attempt, Completion, Consumer, Entry, Failure, Gate, Message, Observer, Transactional,
    TransactionalHandler,
};
use oncegate_testkit::{Postgres, PostgresServer};
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_postgres::types::ToSql;

use crate::Benchmark;
use crate::cores::Cores;
use crate::figure::{Bound, Figure, Unit};
use crate::gate::{IN_FLIGHT, rate as gate_rate};
use crate::handler::Queue;
use crate::machine::own_cpu_micros;
use crate::messages::{fresh_scope, key, messages};
use crate::rounds::{Plan, Rounds};
use crate::stopwatch::{Stopwatch, Timed};

pub(crate) const BENCHMARK: Benchmark = Benchmark {
    name: "postgres",
    question: "claim and complete in PostgreSQL, 256 in flight, against INSERT … ON CONFLICT and UPDATE by hand",
    cores: Cores::Apart,
    run: |plan| Box::pin(run(plan)),
};

/// The number of connections: as many as the store uses for claims and completions.
const CONNECTIONS: usize = 4;

/// The planner assumes that the new table is small and would scan all of it for each batch.
const PLAN: &str = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off";

/// The hand-written statements: a claim, and its completion by the owner.
#[derive(Clone, Copy)]
struct ByHand {
    claim: &'static str,
    complete: &'static str,
    /// `true` if the keys are in random order, as digests are; otherwise they ascend.
    digests: bool,
}

/// The same rows as the store's, in the store's table.
const SAME_ROWS: ByHand = ByHand {
    claim: "INSERT INTO oncegate_records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason) \
            SELECT key, 'pending', 4000000000000, owner, 1, 'none', false, '' \
            FROM unnest($1::text[], $2::bytea[]) AS n(key, owner) ON CONFLICT (key) DO NOTHING",
    complete: "UPDATE oncegate_records AS r SET state = 'completed', expires_at_ms = 4100000000000, attempt = 0, \
               result = '' FROM unnest($1::text[], $2::bytea[]) AS n(key, owner) \
               WHERE r.key = n.key AND r.owner = n.owner",
    digests: true,
};

/// The minimal rows: four columns, and keys in ascending order.
const LEAST_ROWS: ByHand = ByHand {
    claim: "INSERT INTO by_hand SELECT key, 'pending', 1, owner FROM unnest($1::text[], $2::bytea[]) AS n(key, owner) \
            ON CONFLICT (key) DO NOTHING",
    complete: "UPDATE by_hand AS r SET state = 'completed', expires_at_ms = 2 \
               FROM unnest($1::text[], $2::bytea[]) AS n(key, owner) WHERE r.key = n.key AND r.owner = n.owner",
    digests: false,
};

const LEAST_TABLE: &str = "\
CREATE TABLE by_hand (
    key           text COLLATE \"C\" NOT NULL PRIMARY KEY,
    state         text   NOT NULL,
    expires_at_ms bigint NOT NULL,
    owner         bytea  NOT NULL
)";

/// An effect in the same database, and the number of connections for effects.
const EFFECTS: &str = "CREATE TABLE effects (id text NOT NULL, amount bigint NOT NULL)";
const EFFECT: &str = "INSERT INTO effects VALUES ($1, 1)";
/// The record of the effect's message, as the store writes it.
const RECORD: &str = "\
INSERT INTO oncegate_records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, reason, result) \
VALUES ($1, 'completed', 4100000000000, '\\x01020304', 0, 'none', false, '', ''::bytea) ON CONFLICT (key) DO NOTHING";
const HANDLERS: usize = 16;
const MANY_HANDLERS: usize = 64;

/// An effect in the one transaction of a transactional handler, the same by hand, and the same
/// effect alone.
struct Series {
    ours: &'static str,
    by_hand: &'static str,
    alone: &'static str,
    server: &'static str,
    server_alone: &'static str,
    handlers: usize,
}

const SERIES: [Series; 2] = [
    Series {
        ours: "one transaction, 16",
        by_hand: "by hand, 16",
        alone: "effect alone",
        server: "server, 16",
        server_alone: "server alone, 16",
        handlers: HANDLERS,
    },
    Series {
        ours: "one transaction, 64",
        by_hand: "by hand, 64",
        alone: "effect alone, 64",
        server: "server, 64",
        server_alone: "server alone, 64",
        handlers: MANY_HANDLERS,
    },
];

/// Microseconds of processor time for each message.
fn per_message(time: Duration, messages: &[Message]) -> f64 {
    time.as_micros() as f64 / messages.len() as f64
}

const CONTESTANTS: [&str; 10] = [
    "public API",
    "same rows",
    "least rows",
    "effect, with the gate",
    "one transaction, 16",
    "by hand, 16",
    "effect alone",
    "one transaction, 64",
    "by hand, 64",
    "effect alone, 64",
];

async fn run(plan: &Plan) -> Vec<Figure> {
    let mut server = PostgresServer::start().await;
    let client = server.connection().await;
    client
        .batch_execute(&format!("{LEAST_TABLE}; {EFFECTS}"))
        .await
        .expect("new tables");
    let store = PostgresStore::connect(server.url())
        .await
        .expect("the server may be used");
    store.create_schema().await.expect("new tables");
    let messages: Arc<[Message]> = messages(plan.size(40_000, 2_000)).into();
    let some: Arc<[Message]> = messages.iter().take(messages.len() / 4).cloned().collect();
    let mut pools = Vec::new();
    for Series { handlers, .. } in SERIES {
        let pool = store
            .transactions()
            .expect("a store with a URL")
            .connections(handlers);
        // Every connection is opened before the clock starts, as those of the baseline are.
        one_transaction(&store, &pool, handlers, &some).await;
        pools.push(pool);
    }
    let mut rounds = plan.rounds("postgres", &CONTESTANTS);
    while rounds.next() {
        empty(&client).await;
        let gate = Gate::new(fresh_scope(), key(), store.clone());
        let cpu = Cpu::now(&mut server);
        rounds
            .measure("public API", gate_rate(gate, &messages, IN_FLIGHT))
            .await;
        rounds.note(
            "CPU, client and server",
            cpu.since(&mut server, messages.len()),
        );
        for (name, cpu_name, rows) in [
            ("same rows", "CPU, same rows", SAME_ROWS),
            ("least rows", "CPU, least rows", LEAST_ROWS),
        ] {
            empty(&client).await;
            let cpu = Cpu::now(&mut server);
            rounds
                .measure(name, by_hand(&server, rows, messages.len()))
                .await;
            rounds.note(cpu_name, cpu.since(&mut server, messages.len()));
        }
        empty(&client).await;
        let gate = Gate::new(fresh_scope(), key(), store.clone());
        let with_gate = effects(&server, Completing::ByGate(Box::new(gate)), HANDLERS, &some);
        rounds.measure("effect, with the gate", with_gate).await;
        for (pool, series) in pools.iter().zip(&SERIES) {
            empty(&client).await;
            let before = server.cpu_time();
            let ours = one_transaction(&store, pool, series.handlers, &messages);
            rounds.measure(series.ours, ours).await;
            let used = server.cpu_time() - before;
            rounds.note(series.server, per_message(used, &messages));
            empty(&client).await;
            let by_hand = effects(&server, Completing::ByHand, series.handlers, &messages);
            rounds.measure(series.by_hand, by_hand).await;
            empty(&client).await;
            let before = server.cpu_time();
            let alone = effects(&server, Completing::Nothing, series.handlers, &messages);
            rounds.measure(series.alone, alone).await;
            let used = server.cpu_time() - before;
            rounds.note(series.server_alone, per_message(used, &messages));
        }
    }
    figures(&rounds)
}

fn figures(rounds: &Rounds) -> Vec<Figure> {
    let rate = Unit::MessagesPerSecond;
    vec![
        rounds
            .against("public API", Unit::MessagesPerSecond, "same rows")
            .target(Bound::RatioAtLeast, 0.7),
        rounds.against(
            "CPU, client and server",
            Unit::MicrosPerMessage,
            "CPU, same rows",
        ),
        rounds.against("public API", Unit::MessagesPerSecond, "least rows"),
        rounds.against(
            "CPU, client and server",
            Unit::MicrosPerMessage,
            "CPU, least rows",
        ),
        rounds.against("effect, with the gate", rate, "effect alone"),
        rounds
            .against("one transaction, 16", rate, "effect alone")
            .target(Bound::RatioAtLeast, 0.75),
        rounds
            .against("one transaction, 64", rate, "effect alone, 64")
            .target(Bound::RatioAtLeast, 0.75),
        rounds.against("one transaction, 16", rate, "by hand, 16"),
        rounds.against("one transaction, 64", rate, "by hand, 64"),
        rounds.against("by hand, 16", rate, "effect alone"),
        rounds.against("by hand, 64", rate, "effect alone, 64"),
        rounds.against("server, 16", Unit::MicrosPerMessage, "server alone, 16"),
        rounds.against("server, 64", Unit::MicrosPerMessage, "server alone, 64"),
    ]
}

/// The processor time of this process and of the server, without that of other processes.
struct Cpu {
    micros: f64,
}

impl Cpu {
    fn now(server: &mut PostgresServer) -> Self {
        Self {
            micros: own_cpu_micros() + server.cpu_time().as_secs_f64() * 1e6,
        }
    }

    fn since(&self, server: &mut PostgresServer, messages: usize) -> f64 {
        (Self::now(server).micros - self.micros) / messages as f64
    }
}

/// Empties the tables and writes a checkpoint, so that every contestant starts with the same server
/// state.
async fn empty(client: &Client) {
    let empty = "TRUNCATE oncegate_records, by_hand, effects; CHECKPOINT";
    client
        .batch_execute(empty)
        .await
        .expect("the tables can be emptied");
}

/// Keys claimed and completed per second, with as many in flight as the gate has.
async fn by_hand(postgres: &Postgres, rows: ByHand, count: usize) -> f64 {
    let batch = IN_FLIGHT / CONNECTIONS;
    let scope = fresh_scope();
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let client = postgres.connection().await;
        client.batch_execute(PLAN).await.expect("valid SQL");
        clients.push(client);
    }
    let started = Instant::now();
    let mut workers = JoinSet::new();
    for (position, client) in clients.into_iter().enumerate() {
        let scope = scope.clone();
        workers.spawn(async move {
            let claim = client.prepare(rows.claim).await.expect("valid SQL");
            let complete = client.prepare(rows.complete).await.expect("valid SQL");
            for first in (position * batch..count).step_by(CONNECTIONS * batch) {
                let numbers = first..count.min(first + batch);
                let mut keys: Vec<String> = numbers
                    .map(|n| {
                        let digest = if rows.digests {
                            fastrand::u64(..)
                        } else {
                            n as u64
                        };
                        format!("{scope}:{digest:022}")
                    })
                    .collect();
                // Batches that lock their rows in the same order cannot deadlock.
                keys.sort_unstable();
                let owners = vec![&[7_u8; 16][..]; keys.len()];
                for statement in [&claim, &complete] {
                    let changed = client.execute(statement, &[&keys, &owners]).await;
                    assert_eq!(changed.expect("the server answers"), keys.len() as u64);
                }
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.expect("no worker panics");
    }
    count as f64 / started.elapsed().as_secs_f64()
}

/// The record that is written for an effect's message in the effect's transaction.
enum Completing {
    Nothing,
    /// A record under a random key, in the round trip of the beginning.
    ByHand,
    /// The completion of a claim that was made before.
    ByGate(Box<Gate>),
}

/// Messages per second, with one effect in its own transaction each.
async fn effects(
    postgres: &Postgres,
    completing: Completing,
    connections: usize,
    messages: &Arc<[Message]>,
) -> f64 {
    if let Completing::ByGate(gate) = &completing {
        gate.open().await.expect("the gate opens");
    }
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(postgres.connection().await);
    }
    let completing = Arc::new(completing);
    let next = Arc::new(AtomicUsize::new(0));
    let started = Instant::now();
    let mut handlers = JoinSet::new();
    for client in clients {
        let completing = Arc::clone(&completing);
        let next = Arc::clone(&next);
        let messages = Arc::clone(messages);
        handlers.spawn(async move { handle(client, &completing, &next, &messages).await });
    }
    while let Some(handler) = handlers.join_next().await {
        handler.expect("no handler panics");
    }
    messages.len() as f64 / started.elapsed().as_secs_f64()
}

async fn handle(
    mut client: Client,
    completing: &Completing,
    next: &AtomicUsize,
    messages: &[Message],
) {
    let effect = client.prepare(EFFECT).await.expect("valid SQL");
    let record = client.prepare(RECORD).await.expect("valid SQL");
    let scope = fresh_scope();
    loop {
        let number = next.fetch_add(1, Relaxed);
        let Some(message) = messages.get(number) else {
            return;
        };
        let id = number.to_string();
        let parameters: [&(dyn ToSql + Sync); 1] = [&id];
        if let Completing::ByHand = completing {
            let key = format!("{scope}:{:022}", fastrand::u64(..));
            let keys: [&(dyn ToSql + Sync); 1] = [&key];
            let (begun, recorded) = join(
                client.batch_execute("BEGIN"),
                client.execute(&record, &keys),
            )
            .await;
            assert_eq!(
                begun.and(recorded).expect("the server answers"),
                1,
                "the key is new"
            );
            client
                .execute(&effect, &parameters)
                .await
                .expect("the effect is made");
            client
                .batch_execute("COMMIT")
                .await
                .expect("the server commits");
            continue;
        }
        let lease = match completing {
            Completing::ByGate(gate) => match gate.enter(message).await.expect("the store answers")
            {
                Entry::Granted(lease) => Some(lease),
                other => panic!("a fresh key is {other:?}"),
            },
            _ => None,
        };
        let transaction = client.transaction().await.expect("the server answers");
        transaction
            .execute(&effect, &parameters)
            .await
            .expect("the effect is made");
        match lease {
            None => transaction.commit().await.expect("the server commits"),
            Some(lease) => {
                let committed = lease.commit_with(transaction, &()).await;
                assert_eq!(committed.expect("it is committed"), Completion::Applied);
            }
        }
    }
}

/// The effect as a transactional handler.
struct Effect;

impl TransactionalHandler<PostgresTransaction> for Effect {
    type Output = ();

    async fn handle(
        &self,
        message: &Message,
        _: &Attempt,
        transaction: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        let effect = transaction.prepare_cached(EFFECT).await?;
        let id = message.origin().to_string();
        transaction.execute(&effect, &[&id]).await?;
        Ok(())
    }
}

/// Messages per second through a consumer whose handler is given its transaction, with as many
/// connections as handlers.
async fn one_transaction(
    store: &PostgresStore,
    pool: &PostgresTransactions,
    handlers: usize,
    messages: &Arc<[Message]>,
) -> f64 {
    let gate = Gate::new(fresh_scope(), key(), store.clone());
    let stopwatch = Stopwatch::new(messages.len());
    let source = Timed {
        source: Queue::of(messages),
        stopwatch: Arc::clone(&stopwatch),
    };
    let handlers = u32::try_from(handlers).expect("few connections");
    let consumer =
        Consumer::new(source, gate, Transactional::new(pool.clone(), Effect)).concurrency(handlers);
    let consumer = consumer.observer(Arc::clone(&stopwatch) as Arc<dyn Observer>);
    consumer
        .run_until(std::future::pending())
        .await
        .expect("the consumer runs to the end");
    stopwatch.rate()
}
