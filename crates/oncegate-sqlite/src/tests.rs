use bytes::Bytes;
use oncegate_core::record::{Record, State, Token};
use oncegate_core::rules::{Operation, Verdict};
use oncegate_core::testing::conformance::{Bench, conformance};
use oncegate_core::testing::key;
use tempfile::TempDir;

use super::*;

mod disk;
mod equivalence;
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

    async fn refusal(&self) -> String {
        match SqliteStore::open(self.path()).await {
            Err(StoreError::Refused { reason }) => reason.to_string(),
            other => panic!("expected a refusal, got {other:?}"),
        }
    }
}

fn claim(name: &str, bits: u128) -> Command {
    let (token, lease) = (Token::from_bits(bits), Duration::from_secs(15));
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
    let (token, result) = (Token::from_bits(bits), result.into());
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

/// What a completed key keeps.
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
    let complete = |number| complete(&format!("{number}"), 1, vec![7; 300], retention);
    for answer in store.execute((0..keys).map(complete).collect()).await {
        assert_eq!(answer.unwrap(), Reply::Applied { recreated: true });
    }
}

const DAY: Duration = Duration::from_secs(86_400);

#[tokio::test]
async fn a_row_in_the_place_of_a_claims_own_is_not_completed() {
    let place = TestFolder::new();
    let store = place.open().await;
    assert!(one(&store, claim("a", 1)).await.is_ok());
    let id_of = |name: &str| {
        let id = "SELECT id FROM records WHERE key = ?1";
        place
            .foreign()
            .query_row(id, [key(name).as_str()], |row| row.get::<_, i64>(0))
            .unwrap()
    };
    let id = id_of("a");
    assert_eq!(
        place.foreign().execute("DELETE FROM records", []).unwrap(),
        1
    );
    assert!(one(&store, claim("b", 2)).await.is_ok());
    assert_eq!(id_of("b"), id, "the id is used again");

    let held = |recreated| Reply::Applied { recreated };
    assert_eq!(
        one(&store, complete("a", 1, "of a", DAY)).await.unwrap(),
        held(true)
    );
    assert_eq!(
        one(&store, complete("b", 2, "of b", DAY)).await.unwrap(),
        held(false)
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

#[tokio::test]
async fn a_full_disk_is_told_and_got_over() {
    let place = TestFolder::new();
    let store = place.open().await;
    completed(&store, 10, DAY).await;
    let limit = |pages: u32| {
        store.inner.writer.ask(move |connection| {
            connection.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(()))
        })
    };
    limit(1).await.unwrap();
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
    limit(1_000_000).await.unwrap();
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
    let fencing_token = |reply: &Reply| match reply {
        Reply::Verdict {
            verdict: Verdict::Granted(grant),
            ..
        } => grant.fencing_token,
        other => panic!("{other:?}"),
    };
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

#[tokio::test]
async fn a_file_that_was_taken_away_is_refused() {
    let place = TestFolder::new();
    let store = place.open().await;
    completed(&store, 1, DAY).await;
    let elsewhere = place.directory.path().join("elsewhere.db");
    std::fs::rename(place.path(), &elsewhere).unwrap();
    for replaced in [false, true] {
        if replaced {
            std::fs::write(place.path(), b"").unwrap();
        }
        let error = one(&store, claim("0", 2)).await.unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error}");
        let error = store.read(vec![key("0")]).await.pop().unwrap().unwrap_err();
        assert!(matches!(error, StoreError::Refused { .. }), "{error}");
    }
    std::fs::rename(&elsewhere, place.path()).unwrap();
    assert!(one(&store, claim("1", 2)).await.is_ok(), "it is back");
}

#[tokio::test]
async fn a_file_that_must_exist_is_not_made() {
    let place = TestFolder::new();
    for empty in [false, true] {
        if empty {
            std::fs::write(place.path(), b"").unwrap();
        }
        let opened = SqliteStore::builder(place.path()).must_exist().open().await;
        assert!(
            matches!(opened, Err(StoreError::Refused { reason }) if reason.contains("must_exist"))
        );
    }
}

#[tokio::test]
async fn files_of_others_are_refused_and_left_alone() {
    for (sql, text) in [
        ("CREATE TABLE orders (id INTEGER)", "another application"),
        (
            "PRAGMA application_id = 7; CREATE TABLE orders (id INTEGER)",
            "another application",
        ),
        (
            "PRAGMA application_id = 0x6f6e6365; PRAGMA user_version = 2; CREATE TABLE a (b)",
            "newer release",
        ),
    ] {
        let place = TestFolder::new();
        place.foreign().execute_batch(sql).unwrap();
        let before = std::fs::read(place.path()).unwrap();
        let reason = place.refusal().await;
        assert!(reason.contains(text), "{reason}");
        assert!(
            reason.contains("records.db"),
            "the text names the file: {reason}"
        );
        assert!(
            std::fs::read(place.path()).unwrap() == before,
            "nothing was written"
        );
    }
    let place = TestFolder::new();
    std::fs::write(place.path(), [b'x'; 8_192]).unwrap();
    assert!(place.refusal().await.contains("damaged"));
    let directory = SqliteStore::open(place.directory.path()).await;
    assert!(
        matches!(directory, Err(StoreError::Refused { .. })),
        "{directory:?}"
    );
    let memory = SqliteStore::open(":memory:").await;
    assert!(
        matches!(memory, Err(StoreError::Refused { .. })),
        "{memory:?}"
    );
}

// invariant: garbage-as-answer
#[tokio::test]
async fn a_damaged_file_is_never_read_as_empty() {
    let place = TestFolder::new();
    completed(&place.open().await, 500, DAY).await;
    let whole = std::fs::read(place.path()).unwrap();
    let page = 4_096;
    let mut damages: Vec<(String, Vec<u8>)> = Vec::new();
    for kept in [
        page / 2,
        page,
        2 * page,
        whole.len() / 2,
        whole.len() - page,
    ] {
        damages.push((
            format!("cut to {kept} bytes"),
            whole.get(..kept).unwrap().to_vec(),
        ));
    }
    for number in 0..whole.len() / page {
        for garbage in [0x00, 0xff] {
            let mut damaged = whole.clone();
            damaged
                .get_mut(number * page..(number + 1) * page)
                .unwrap()
                .fill(garbage);
            damages.push((format!("page {number} filled with {garbage:#x}"), damaged));
        }
    }
    for (damage, bytes) in damages {
        std::fs::write(place.path(), bytes).unwrap();
        match SqliteStore::open(place.path()).await {
            Err(StoreError::Refused { reason }) => {
                assert!(
                    reason.contains("damaged") || reason.contains("another"),
                    "{damage}: {reason}"
                );
            }
            other => panic!("{damage}: {other:?}"),
        }
    }
    std::fs::write(place.path(), b"").unwrap();
    std::fs::write(place.directory.path().join("records.db-wal"), b"a log").unwrap();
    assert!(
        place.refusal().await.contains("damaged"),
        "an empty file beside a log"
    );
}

/// A retention that is over in some thousand years, also when any one of its bits is flipped.
const AGES: Duration = Duration::from_millis(0b11 << 45);

#[tokio::test]
async fn an_expiry_that_no_record_can_have_is_damage_and_not_the_past() {
    let place = TestFolder::new();
    let store = place.open().await;
    completed(&store, 1, AGES).await;
    let other = rusqlite::Connection::open(place.path()).unwrap();
    other
        .execute("UPDATE records SET expires_at_ms = -expires_at_ms", [])
        .unwrap();
    let snapshot = store.read(vec![key("0")]).await.remove(0);
    assert!(
        matches!(snapshot, Err(StoreError::Unreadable { .. })),
        "{snapshot:?}"
    );
}

// invariant: garbage-as-answer
#[tokio::test]
async fn a_flipped_bit_never_makes_a_record_absent() {
    let place = TestFolder::new();
    completed(&place.open().await, 200, AGES).await;
    let whole = std::fs::read(place.path()).unwrap();
    let keys: Vec<StoreKey> = (0..200).map(|number| key(&format!("{number}"))).collect();
    let seed = fastrand::u64(..);
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut refused, mut unreadable) = (0, 0);
    for _ in 0..150 {
        let (at, bit) = (random.usize(..whole.len()), random.u8(..8));
        let mut damaged = whole.clone();
        *damaged.get_mut(at).unwrap() ^= 1 << bit;
        std::fs::write(place.path(), damaged).unwrap();
        let flip = format!("bit {bit} of byte {at}, seed {seed}");
        let store = match SqliteStore::open(place.path()).await {
            Ok(store) => store,
            Err(StoreError::Refused { .. }) => {
                refused += 1;
                continue;
            }
            Err(other) => panic!("{flip}: {other}"),
        };
        for snapshot in store.read(keys.clone()).await {
            match snapshot {
                Ok(Some(snapshot)) => {
                    assert!(
                        matches!(snapshot.record.state, State::Completed { .. }),
                        "{flip}"
                    );
                }
                Ok(None) => panic!("{flip}: a completed key is new again"),
                Err(StoreError::Unreadable { .. } | StoreError::Refused { .. }) => unreadable += 1,
                Err(other) => panic!("{flip}: {other}"),
            }
        }
    }
    assert!(
        refused > 0,
        "no flip was found when the file was opened; {unreadable} later; seed {seed}"
    );
}

#[tokio::test]
async fn the_check_says_what_weakens_the_promise() {
    let place = TestFolder::new();
    let checkup = place.open().await.check().await.unwrap();
    // Where the tests' own folder is in memory or in a container, that is said too.
    let of_settings = |checkup: &Checkup| {
        checkup
            .warnings
            .iter()
            .filter(|warning| warning.contains("synchronous"))
            .count()
    };
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_new_file_may_be_opened_by_several_at_once() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..60 {
        let path = folder.path().join(format!("{round}.sqlite"));
        let opens = (0..4).map(|_| tokio::spawn(SqliteStore::open(path.clone())));
        for opened in futures_util::future::join_all(opens).await {
            opened
                .unwrap()
                .unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
}
