use bytes::Bytes;
use oncegate_core::record::{FencingToken, Record, State, Token};
use oncegate_core::rules::{Operation, Verdict};
use oncegate_core::testing::conformance::{Bench, conformance};
use oncegate_core::testing::key;
use tempfile::TempDir;

use super::*;

mod disk;
mod equivalence;
mod files;
mod purge;

/// A file that only its user's test knows.
struct SqliteBench {
    store: Arc<SqliteStore>,
    directory: TempDir,
}

impl SqliteBench {
    async fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let store = SqliteStore::open(directory.path().join("records.db"))
            .await
            .unwrap();
        Self {
            store: Arc::new(store),
            directory,
        }
    }
}

#[async_trait]
impl Bench for SqliteBench {
    fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store) as Arc<dyn Store>
    }

    async fn pass(&self, key: &StoreKey, time: Duration) {
        self.store.pass(key, time).await.unwrap();
    }

    async fn spoil(&self, key: &StoreKey) -> bool {
        let other = rusqlite::Connection::open(self.directory.path().join("records.db")).unwrap();
        other.busy_timeout(Duration::from_secs(5)).unwrap();
        other
            .pragma_update(None, "ignore_check_constraints", true)
            .unwrap();
        let spoilt = "INSERT INTO records (key, state, expires_at_ms, owner, attempt, recovery, handed_over, \
                      reason) VALUES (?1, 'from the future', 9e18, x'00', 1, 'none', 0, '')";
        other.execute(spoilt, [key.as_str()]).unwrap() == 1
    }
}

// invariant: store-equals-rules
#[tokio::test]
async fn the_sqlite_store_conforms() {
    conformance(&SqliteBench::new().await).await;
}

/// A folder for a test, and the file in it.
struct TestFolder {
    directory: TempDir,
}

impl TestFolder {
    fn new() -> Self {
        Self {
            directory: TempDir::new().unwrap(),
        }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("records.db")
    }

    async fn open(&self) -> SqliteStore {
        SqliteStore::open(self.path()).await.unwrap()
    }

    /// Another process's view of the file, with rights to do anything.
    fn foreign(&self) -> rusqlite::Connection {
        let foreign = rusqlite::Connection::open(self.path()).unwrap();
        foreign.busy_timeout(Duration::from_secs(5)).unwrap();
        foreign
    }

    /// The number of a key's row.
    fn id_of(&self, name: &str) -> i64 {
        let id = "SELECT id FROM records WHERE key = ?1";
        self.foreign()
            .query_row(id, [key(name).as_str()], |row| row.get(0))
            .unwrap()
    }

    async fn refusal(&self) -> String {
        match SqliteStore::open(self.path()).await {
            Err(StoreError::Refused { reason }) => reason.to_string(),
            other => panic!("expected a refusal, got {other:?}"),
        }
    }
}

fn claim(name: &str, bits: u128) -> Command {
    let token = Token::from_bits(bits);
    let lease = Duration::from_secs(15);
    Command {
        key: key(name),
        operation: Operation::Claim {
            token,
            lease,
            fingerprint: None,
            fenced: true,
            longest_lease: Duration::MAX,
        },
    }
}

fn complete(name: &str, bits: u128, result: impl Into<Bytes>, retention: Duration) -> Command {
    let token = Token::from_bits(bits);
    let result = result.into();
    Command {
        key: key(name),
        operation: Operation::Complete {
            token,
            fingerprint: None,
            result,
            retention,
        },
    }
}

async fn one(store: &SqliteStore, command: Command) -> Result<Reply, StoreError> {
    store.execute(vec![command]).await.pop().unwrap()
}

/// The result of a completed key.
async fn result_of(store: &SqliteStore, name: &str) -> Bytes {
    match store.read(vec![key(name)]).await.pop() {
        Some(Ok(Some(RecordSnapshot {
            record:
                Record {
                    state: State::Completed { result, .. },
                    ..
                },
            ..
        }))) => result,
        other => panic!("{name} is not completed: {other:?}"),
    }
}

/// Completes so many keys, named by their numbers.
async fn completed(store: &SqliteStore, keys: u32, retention: Duration) {
    let commands = (0..keys)
        .map(|number| complete(&number.to_string(), 1, vec![7; 300], retention))
        .collect();
    for answer in store.execute(commands).await {
        assert_eq!(answer.unwrap(), Reply::Applied { recreated: true });
    }
}

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test]
async fn a_row_in_the_place_of_a_claims_own_is_not_completed() {
    let place = TestFolder::new();
    let store = place.open().await;
    assert!(one(&store, claim("a", 1)).await.is_ok());
    let id = place.id_of("a");
    assert_eq!(
        place.foreign().execute("DELETE FROM records", []).unwrap(),
        1
    );
    assert!(one(&store, claim("b", 2)).await.is_ok());
    assert_eq!(place.id_of("b"), id, "the id is used again");

    assert_eq!(
        one(&store, complete("a", 1, "of a", DAY)).await.unwrap(),
        Reply::Applied { recreated: true }
    );
    assert_eq!(
        one(&store, complete("b", 2, "of b", DAY)).await.unwrap(),
        Reply::Applied { recreated: false }
    );
    assert_eq!(
        [result_of(&store, "a").await, result_of(&store, "b").await],
        ["of a", "of b"]
    );
}

#[tokio::test]
async fn one_token_for_two_keys_completes_each_by_itself() {
    let place = TestFolder::new();
    let store = place.open().await;
    for name in ["a", "b"] {
        assert!(one(&store, claim(name, 1)).await.is_ok());
    }
    for name in ["a", "b"] {
        let completed = one(&store, complete(name, 1, name.to_owned(), DAY)).await;
        assert_eq!(completed.unwrap(), Reply::Applied { recreated: false });
    }
    assert_eq!(
        [result_of(&store, "a").await, result_of(&store, "b").await],
        ["a", "b"]
    );
}

#[tokio::test]
async fn what_was_answered_is_there_when_the_file_is_opened_again() {
    let place = TestFolder::new();
    completed(&place.open().await, 500, DAY).await;
    let store = SqliteStore::builder(place.path())
        .must_exist()
        .open()
        .await
        .unwrap();
    let found = store
        .read((0..500).map(|number| key(&format!("{number}"))).collect())
        .await;
    assert!(found.into_iter().all(|record| record.unwrap().is_some()));
}

#[tokio::test]
async fn concurrent_calls_share_a_transaction() {
    let place = TestFolder::new();
    let store = place.open().await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    let blocker = store.inner.writer.ask(move |_| {
        // The sender's end is the signal.
        let _ = released.recv();
        Ok(())
    });
    let calls = (0..200_u32).map(|number| {
        let store = store.clone();
        async move { one(&store, claim(&format!("{number}"), 1)).await.unwrap() }
    });
    let calls: Vec<_> = calls.map(|call| tokio::spawn(call)).collect();
    let (blocked, ()) = tokio::join!(blocker, async {
        tokio::task::yield_now().await;
        drop(release);
    });
    blocked.unwrap();
    for call in calls {
        let reply = call.await.unwrap();
        assert!(matches!(
            reply,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ));
    }
    let stats = store.stats();
    assert_eq!(stats.commands, 200);
    // How many of the calls have come before the writer goes on is the scheduler's business.
    assert!(stats.transactions <= 20, "{stats:?}");
}

async fn limit_pages(store: &SqliteStore, pages: u32) {
    let limit = store.inner.writer.ask(move |connection| {
        connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))
    });
    limit.await.unwrap();
}

#[tokio::test]
async fn a_full_disk_is_told_and_got_over() {
    let place = TestFolder::new();
    let store = place.open().await;
    completed(&store, 10, DAY).await;
    limit_pages(&store, 1).await;
    let error = one(&store, complete("large", 1, vec![7; 64 * 1024], DAY))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, StoreError::Unavailable { reason } if reason.contains("full")),
        "{error}"
    );
    assert!(
        store
            .read(vec![key("1")])
            .await
            .pop()
            .unwrap()
            .unwrap()
            .is_some(),
        "looks go on"
    );
    assert_eq!(
        store.read(vec![key("large")]).await.pop().unwrap().unwrap(),
        None,
        "nothing was executed"
    );
    limit_pages(&store, 1_000_000).await;
    assert!(
        one(&store, complete("large", 1, vec![7; 64 * 1024], DAY))
            .await
            .is_ok()
    );
}

#[tokio::test]
async fn a_lock_of_another_process_is_waited_for_within_the_limit() {
    let place = TestFolder::new();
    let store = SqliteStore::builder(place.path())
        .busy_timeout(Duration::from_millis(20))
        .open()
        .await
        .unwrap();
    completed(&store, 1, DAY).await;
    let foreign = place.foreign();
    foreign.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = one(&store, claim("a", 1)).await.unwrap_err();
    assert!(
        matches!(&error, StoreError::Unavailable { reason } if reason.contains("lock")),
        "{error}"
    );
    assert!(
        store
            .read(vec![key("0")])
            .await
            .pop()
            .unwrap()
            .unwrap()
            .is_some(),
        "reads do not wait"
    );
    foreign.execute_batch("COMMIT").unwrap();
    assert!(one(&store, claim("a", 1)).await.is_ok());
}

fn fencing_token(reply: &Reply) -> Option<FencingToken> {
    match reply {
        Reply::Verdict {
            verdict: Verdict::Granted(grant),
            ..
        } => grant.fencing_token,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_clock_that_was_set_back_strands_no_key() {
    let place = TestFolder::new();
    let store = place.open().await;
    let first = one(&store, claim("a", 1)).await.unwrap();
    // As if the machine's clock had been an hour ahead until now.
    let hour_us = 3_600_000_000_i64;
    let ahead = "UPDATE clock SET reached_us = ?1, ahead_us = 0";
    place
        .foreign()
        .execute(ahead, [clock::wall_us() + hour_us])
        .unwrap();
    let second = one(&store, claim("a", 2)).await.unwrap();
    let third = one(&store, claim("a", 3)).await.unwrap();
    assert!(
        fencing_token(&second) > fencing_token(&first),
        "the lease of the first was over an hour ago"
    );
    let Reply::Verdict {
        verdict: Verdict::Busy { retry_in },
        ..
    } = third
    else {
        panic!("{third:?}")
    };
    assert!(
        retry_in <= Duration::from_millis(15_001),
        "{retry_in:?} is longer than any lease"
    );
}

/// The number of warnings about the settings. The tests' own folder may be in memory or in a
/// container, which gives a warning too.
fn of_settings(checkup: &Checkup) -> usize {
    checkup
        .warnings
        .iter()
        .filter(|warning| warning.contains("synchronous"))
        .count()
}

#[tokio::test]
async fn the_check_says_what_weakens_the_promise() {
    let place = TestFolder::new();
    let checkup = place.open().await.check().await.unwrap();
    assert!(
        checkup.store.contains("journal wal") && of_settings(&checkup) == 0,
        "{checkup:?}"
    );
    let weak = SqliteStore::builder(place.path())
        .synchronous(Synchronous::Normal)
        .open()
        .await
        .unwrap();
    assert_eq!(of_settings(&weak.check().await.unwrap()), 1);
}

/// Without that, the next transaction of a handler, and the one after it, take the lock between two
/// tries of the thread that writes heartbeats.
// invariant: neighbour-held-up
#[tokio::test(flavor = "multi_thread")]
async fn transactions_let_what_is_written_beside_them_through() {
    let bench = SqliteBench::new().await;
    let transactions = bench.store.transactions();
    for round in 0..20 {
        let held = transactions.transaction().await.unwrap();
        held.execute_batch("BEGIN IMMEDIATE").unwrap();
        let store = Arc::clone(&bench.store);
        let claimed =
            tokio::spawn(async move { store.execute_one(claim(&round.to_string(), 7)).await });
        let mut waits = bench.store.inner.writer.waits.clone();
        drop(waits.wait_for(|waits| *waits).await);
        let next = transactions.clone();
        let next = tokio::spawn(async move {
            let next = next.transaction().await.unwrap();
            next.query_row("SELECT count(*) FROM records", [], |row| {
                row.get::<_, i32>(0)
            })
            .unwrap()
        });
        drop(held);
        assert_eq!(next.await.unwrap(), round + 1, "the claim was first");
        claimed.await.unwrap().unwrap();
    }
}
