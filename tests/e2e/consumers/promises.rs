//! The table of promises in `docs/STORES.md`, compared with the code, and with what real stores
//! declare.

use std::path::Path;
use std::time::{Duration, Instant};

use oncegate::MemoryStore;
use oncegate::core::store::{Promise, Store, Survives};
use oncegate::postgres::PostgresStore;
use oncegate::redis::RedisStore;
use oncegate::sqlite::{SqliteStore, Synchronous};
use oncegate_testkit::{PostgresServer, RedisServer};

/// The table's rows, each as its cells.
fn table() -> Vec<Vec<String>> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/STORES.md");
    let page = std::fs::read_to_string(page).unwrap();
    let cells = |line: &str| {
        line.trim_matches('|')
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect()
    };
    // The first table of the page.
    let from_table = page.lines().skip_while(|line| !line.starts_with('|'));
    from_table
        .take_while(|line| line.starts_with('|'))
        .skip(2)
        .map(cells)
        .collect()
}

// invariant: documented-promise
#[test]
fn the_documented_rows_are_those_of_the_code() {
    let documented: Vec<Vec<String>> = table()
        .into_iter()
        .map(|cells| cells[1..].to_vec())
        .collect();
    let coded = |row: Promise| {
        [row.name, row.holds, row.adds_a_run, row.noticed_by]
            .map(String::from)
            .to_vec()
    };
    assert_eq!(documented, Promise::all().map(coded).collect::<Vec<_>>());
}

/// Whether the store declares what the row with these words in its first cell promises.
async fn says(store: &dyn Store, found: &str) {
    let rows = table();
    let mut named = rows.iter().filter(|cells| cells[0].contains(found));
    let (Some(row), None) = (named.next(), named.next()) else {
        panic!("no row, or more than one, has {found:?}")
    };
    let checkup = store.check().await.unwrap();
    assert_eq!(checkup.survives.as_str(), row[1], "{found}: {checkup:?}");
    let worth_a_warning = checkup.survives < Survives::Moments;
    assert!(
        !worth_a_warning || !checkup.warnings.is_empty(),
        "{checkup:?}"
    );
}

// invariant: documented-promise
#[tokio::test]
async fn memory_and_sqlite_say_their_row() {
    says(&MemoryStore::new(), "`MemoryStore`").await;
    // Not in `/tmp`, which may be in memory.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("records.db");
    says(
        &SqliteStore::open(&path).await.unwrap(),
        "SQLite (its default",
    )
    .await;
    let builder = SqliteStore::builder(&path).synchronous(Synchronous::Normal);
    says(
        &builder.open().await.unwrap(),
        "SQLite with `Synchronous::Normal`",
    )
    .await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_file_in_memory_says_its_row() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    says(
        &SqliteStore::open(folder.path().join("records.db"))
            .await
            .unwrap(),
        "SQLite in memory",
    )
    .await;
}

// invariant: documented-promise
#[tokio::test]
async fn redis_says_its_row() {
    const AOF: &str = "--appendonly";
    for (settings, found) in [
        (vec!["--appendfsync", "always"], "`appendfsync always`"),
        (vec!["--appendfsync", "everysec"], "`appendfsync everysec`"),
        (vec!["--appendfsync", "no"], "`appendfsync no`"),
        (vec![AOF, "no", "--save", "3600 1"], "with `save`"),
        (vec![AOF, "no", "--save", ""], "no `save`"),
        (
            vec!["--maxmemory-policy", "allkeys-lru"],
            "`allow_evicting_policy()`",
        ),
    ] {
        let server = RedisServer::start_with(&settings).await;
        let store = RedisStore::builder(server.url())
            .allow_evicting_policy()
            .connect()
            .await
            .unwrap();
        says(&store, found).await;
    }
}

#[tokio::test]
async fn a_redis_user_who_may_not_ask_gets_the_row_of_the_defaults() {
    let server = RedisServer::synced().await;
    let rights = "ACL SETUSER billing on >secret ~* -@all +evalsha +script|load +set +get +pttl +pexpire +pexpiretime \
                  +time +info +ping";
    let mut command = ::redis::Cmd::new();
    for word in rights.split_whitespace() {
        command.arg(word);
    }
    let () = command
        .query_async(&mut server.connection().await)
        .await
        .unwrap();
    let url = server.url().replace("redis://", "redis://billing:secret@");
    says(
        &RedisStore::connect(&url).await.unwrap(),
        "`appendfsync everysec`",
    )
    .await;
}

// invariant: documented-promise
#[tokio::test]
async fn postgres_says_its_row() {
    for (settings, found) in [
        (vec![], "PostgreSQL (its default)"),
        (vec!["synchronous_commit=off"], "`synchronous_commit=off`"),
        (vec!["fsync=off"], "`fsync=off`"),
        (vec!["full_page_writes=off"], "`full_page_writes=off`"),
    ] {
        let server = PostgresServer::start_with(&settings).await;
        let builder = PostgresStore::builder(server.url())
            .allow_asynchronous_commit()
            .allow_fsync_off();
        let store = builder.connect().await.unwrap();
        store.create_schema().await.unwrap();
        says(&store, found).await;
    }
}

#[tokio::test]
async fn postgres_with_a_synchronous_standby_says_its_row() {
    let server = PostgresServer::start_with(&[]).await;
    PostgresStore::connect(server.url())
        .await
        .unwrap()
        .create_schema()
        .await
        .unwrap();
    // No such standby ever answers, so from now on nothing is committed; to be asked, that is
    // enough.
    let client = server.connection().await;
    client
        .batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'another'")
        .await
        .unwrap();
    client
        .batch_execute("SELECT pg_reload_conf()")
        .await
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while client
        .query_one("SHOW synchronous_standby_names", &[])
        .await
        .unwrap()
        .get::<_, String>(0)
        != "another"
    {
        assert!(
            Instant::now() < deadline,
            "the server does not read its settings"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // A new connection has the new settings; one that was open may learn them a little later.
    says(
        &PostgresStore::connect(server.url()).await.unwrap(),
        "`synchronous_standby_names`",
    )
    .await;
}
