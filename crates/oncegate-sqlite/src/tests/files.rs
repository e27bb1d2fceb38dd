//! Files that are missing, damaged, or not ours.

use super::*;

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
    let mut refused = 0;
    let mut unreadable = 0;
    for _ in 0..150 {
        let at = random.usize(..whole.len());
        let bit = random.u8(..8);
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

/// The records of the test below: more than the caches of the store's connections.
const MANY: u32 = 8_000;

// invariant: outage-of-one-key
#[tokio::test]
async fn a_damaged_page_is_an_error_of_its_keys_alone() {
    let place = TestFolder::new();
    let store = place.open().await;
    let commands = (0..MANY).map(|number| {
        let result = format!("result {number:>8} ").repeat(60);
        complete(&number.to_string(), u128::from(number), result, DAY)
    });
    for done in store.execute(commands.collect()).await {
        done.unwrap();
    }
    drop(store);
    let store = place.open().await;
    let whole = std::fs::read(place.path()).unwrap();
    let damaged = b"result     4000 ";
    let at = whole
        .windows(damaged.len())
        .position(|bytes| bytes == damaged)
        .unwrap();
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(place.path())
        .unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xff; 4_096], (at / 4_096 * 4_096) as u64)
        .unwrap();

    let keys: Vec<StoreKey> = (0..MANY).map(|number| key(&number.to_string())).collect();
    let mut lost = 0;
    for read in store.read(keys).await {
        match read {
            Ok(Some(_)) => {}
            Err(StoreError::Unreadable { .. }) => lost += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!((1..50).contains(&lost), "{lost} records are on one page");
    let claims = (3_990..4_010).map(|number: u32| claim(&number.to_string(), 7));
    let claims = store.execute(claims.collect()).await;
    let mut refused = 0;
    for claimed in claims {
        match claimed {
            Ok(Reply::Verdict {
                verdict: Verdict::Completed { .. },
                ..
            }) => {}
            Err(StoreError::Unreadable { .. }) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!((1..20).contains(&refused), "{refused}");
    let new = claim("new", 7);
    assert!(one(&store, new).await.is_ok(), "other pages can be written");
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
