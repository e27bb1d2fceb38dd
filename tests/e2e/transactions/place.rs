//! A till, and a store in the same database.

use std::sync::Arc;
use std::time::Duration;

use oncegate::codec::ToStored as _;
use oncegate::consumer::{ConsumerHandler, DeadLetterLimit};
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::record::Token;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::{Command, Store};
use oncegate::journal::JournalEntry;
use oncegate::postgres::{PostgresBuilder, PostgresStore};
use oncegate::sqlite::SqliteStore;
use oncegate::{Attempt, Backoff, Codec, Consumer, Failure, Gate, Handler, Key, Message, Origin};
use oncegate_testkit::{Client, End, Postgres, Till, Watched, unique, until};
use tempfile::TempDir;

use crate::list::{Letters, List, Listed};

/// Records and charges in one database.
pub(crate) struct Place {
    pub(crate) till: Till,
    pub(crate) store: Arc<dyn Store>,
    journal: Journal,
    pub(crate) scope: String,
    /// Of the SQLite file.
    _folder: TempDir,
}

impl Place {
    /// A new file, or the shared server.
    pub(crate) async fn new(client: Client) -> Self {
        let folder = tempfile::tempdir().unwrap();
        if client == Client::Sqlite {
            let store = SqliteStore::open(folder.path().join("oncegate.db"))
                .await
                .unwrap();
            return Self::on_file(store, folder).await;
        }
        let postgres = Postgres::shared().await;
        let store = with_tables(PostgresStore::builder(postgres.url())).await;
        Self::on_server(client, postgres.url(), store, folder).await
    }

    /// A new file, or the shared server, which may take its time for an answer.
    pub(crate) async fn patient(client: Client) -> Self {
        if client == Client::Sqlite {
            return Self::new(client).await;
        }
        let postgres = Postgres::shared().await;
        let store = postgres_store(postgres.url()).await;
        Self::on_server(client, postgres.url(), store, tempfile::tempdir().unwrap()).await
    }

    /// A new file, or a new database, with a journal.
    pub(crate) async fn journaled(client: Client) -> Self {
        Self::journaled_within(client, |builder| builder).await
    }

    /// Like [`Self::journaled`], and the server may take its time for an answer.
    pub(crate) async fn patiently_journaled(client: Client) -> Self {
        Self::journaled_within(client, |builder| builder.response_timeout(PATIENCE)).await
    }

    async fn journaled_within(
        client: Client,
        limits: impl FnOnce(PostgresBuilder) -> PostgresBuilder,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        if client == Client::Sqlite {
            let builder = SqliteStore::builder(folder.path().join("oncegate.db")).journaled();
            return Self::on_file(builder.open().await.unwrap(), folder).await;
        }
        let postgres = Postgres::shared().await.database().await;
        let store = with_tables(limits(PostgresStore::builder(postgres.url()).journaled())).await;
        Self::on_server(client, postgres.url(), store, folder).await
    }

    /// The database at this URL, which a pooler may serve.
    pub(crate) async fn at(client: Client, url: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self::on_server(
            client,
            url,
            with_tables(PostgresStore::builder(url)).await,
            folder,
        )
        .await
    }

    async fn on_file(store: SqliteStore, folder: TempDir) -> Self {
        let till = Till::open(Client::Sqlite, &store.path().display().to_string()).await;
        let journal = Journal::Sqlite(store.clone());
        Self {
            till,
            store: Arc::new(store),
            journal,
            scope: unique("transactions"),
            _folder: folder,
        }
    }

    async fn on_server(client: Client, url: &str, store: PostgresStore, folder: TempDir) -> Self {
        let till = Till::open(client, url).await;
        let journal = Journal::Postgres(store.clone());
        Self {
            till,
            store: Arc::new(store),
            journal,
            scope: unique("transactions"),
            _folder: folder,
        }
    }

    /// Returns the store's journal of a key.
    pub(crate) async fn history(&self, key: &StoreKey) -> Vec<JournalEntry> {
        match &self.journal {
            Journal::Sqlite(store) => store.journal(key, ENTRIES_MOST).await.unwrap(),
            Journal::Postgres(store) => store.journal(key, ENTRIES_MOST).await.unwrap(),
        }
    }

    /// Lets time pass for a key.
    pub(crate) async fn pass(&self, key: &StoreKey, time: Duration) {
        match &self.journal {
            Journal::Sqlite(store) => store.pass(key, time).await.unwrap(),
            Journal::Postgres(store) => store.pass(&[(key.clone(), time)]).await.unwrap(),
        }
    }

    /// The store, which is on PostgreSQL.
    pub(crate) fn postgres(&self) -> &PostgresStore {
        let Journal::Postgres(store) = &self.journal else {
            panic!("the place is a file")
        };
        store
    }

    /// The store, which is on SQLite.
    pub(crate) fn sqlite(&self) -> &SqliteStore {
        let Journal::Sqlite(store) = &self.journal else {
            panic!("the place is a server")
        };
        store
    }

    /// A connection to the server.
    pub(crate) async fn postgres_client(&self) -> tokio_postgres::Client {
        let (client, connection) = tokio_postgres::connect(&self.till.url, tokio_postgres::NoTls)
            .await
            .unwrap();
        // It ends with its client, which gets its errors.
        tokio::spawn(async { drop(connection.await) });
        client
    }

    /// Waits until a session waits for the row of the key that another one has inserted.
    pub(crate) async fn until_waiting(&self) {
        let client = self.postgres_client().await;
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                       AND query LIKE 'INSERT INTO oncegate_records%' AND datname = current_database()";
        until(
            "a session waits for a row",
            Duration::from_secs(300),
            async || match client
                .query_one(waiting, &[])
                .await
                .unwrap()
                .get::<_, i64>(0)
            {
                0 => Err("none waits".to_owned()),
                _ => Ok(()),
            },
        )
        .await;
    }

    pub(crate) fn gate(&self, lease: Duration) -> Gate {
        Gate::new(&self.scope, Key::json(["id"]), Arc::clone(&self.store)).lease(lease)
    }
}

/// The store, as one that has a journal.
enum Journal {
    Sqlite(SqliteStore),
    Postgres(PostgresStore),
}

/// More than any key of a test has.
const ENTRIES_MOST: u32 = 10_000;

/// A store with its tables, whose server may take its time.
pub(crate) async fn postgres_store(url: &str) -> PostgresStore {
    with_tables(PostgresStore::builder(url).response_timeout(PATIENCE)).await
}

async fn with_tables(builder: PostgresBuilder) -> PostgresStore {
    let store = builder.connect_timeout(PATIENCE).connect().await.unwrap();
    // It may be asked for again, with the limits that the test is about.
    until("the tables", 4 * PATIENCE, async || {
        store
            .create_schema()
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    })
    .await;
    store
}

/// For the answer of a server that is asked outside of a runtime, which would ask again: a disk
/// that is busy with the writes of others is no outage.
const PATIENCE: Duration = Duration::from_secs(60);

/// Long enough for a busy machine.
pub(crate) const LEASE: Duration = Duration::from_secs(20);

/// Payments, and a consumer that works them off.
pub(crate) struct Bench {
    pub(crate) list: Arc<List>,
    pub(crate) letters: Arc<Letters>,
    pub(crate) counters: Arc<Watched>,
}

impl Bench {
    /// How often a payment is tried.
    pub(crate) const MAX_ATTEMPTS: u32 = 3;

    pub(crate) fn of(ids: &[i64]) -> Self {
        let payments = ids.iter().map(|id| ("", format!(r#"{{"id":{id}}}"#)));
        Self {
            list: List::of("payments", payments),
            letters: Arc::default(),
            counters: Watched::new(),
        }
    }

    /// Runs until so many are acknowledged.
    pub(crate) async fn run(&self, gate: Gate, handler: impl ConsumerHandler, acks: usize) {
        let list = Arc::clone(&self.list);
        let consumer = Consumer::new(Listed(Arc::clone(&list)), gate, handler)
            .dead_letters(Arc::clone(&self.letters))
            .max_attempts(Self::MAX_ATTEMPTS)
            .dead_letter_limit(DeadLetterLimit {
                in_a_row: 1_000,
                share: 1.1,
            })
            .backoff(Backoff::new(
                Duration::from_millis(1),
                Duration::from_millis(5),
            ))
            .observer(Arc::clone(&self.counters) as _);
        consumer
            .run_until(async move { list.until_acked(acks).await })
            .await
            .unwrap();
    }
}

/// Charges in a transaction, and returns the result.
pub(crate) struct Charge(pub(crate) Till);

impl Handler for Charge {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let receipt = format!("receipt of attempt {}", attempt.number());
        self.0
            .charge(
                message,
                attempt,
                &receipt,
                End::Commit,
                std::future::ready(()),
            )
            .await?;
        Ok(receipt)
    }
}

/// The key of a payment.
pub(crate) fn key_of(scope: &str, id: i64) -> StoreKey {
    let origin = Origin::Other("a test".into());
    let message = Message::new("payments", origin, Some(format!(r#"{{"id":{id}}}"#).into()));
    Key::json(["id"])
        .compile(&Scope::new(scope).unwrap())
        .unwrap()
        .derive("payments", &message)
        .unwrap()
}

/// An operator reopens the key, and another owner claims and completes it.
pub(crate) async fn take_over(store: &dyn Store, key: StoreKey, result: &str) {
    let expected = store
        .read(vec![key.clone()])
        .await
        .remove(0)
        .unwrap()
        .unwrap()
        .record;
    let token = Token::from_bits(fastrand::u128(..));
    let lease = Duration::from_secs(3_600);
    let retention = Duration::from_secs(86_400);
    let result = result.to_owned().to_stored(Codec::Json).unwrap();
    for operation in [
        Operation::Reopen { expected },
        Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: false,
            longest_lease: Duration::MAX,
        },
        Operation::Complete {
            token,
            fingerprint: None,
            result,
            retention,
        },
    ] {
        let reply = store
            .execute(vec![Command {
                key: key.clone(),
                operation,
            }])
            .await
            .remove(0)
            .unwrap();
        assert_ne!(reply, Reply::NotOwner);
    }
}
