//! The file and its log on the disk: their modes, their sizes, and where they lie.

use super::*;

/// The size of the log that the store cuts back to.
const LOG_BYTES: u64 = log::LOG_BYTES;

/// Writes results until the log is so large.
async fn fill_log(store: &SqliteStore, bytes: u64) {
    let mut number = 0_u32;
    while store.upkeep().log_bytes.unwrap() < bytes {
        let batch = (0..16).map(|_| {
            number += 1;
            complete(&format!("{number}"), 1, vec![7; 256 * 1024], DAY)
        });
        store
            .execute(batch.collect())
            .await
            .into_iter()
            .for_each(|answer| _ = answer.unwrap());
    }
}

#[tokio::test]
async fn a_log_that_an_open_read_transaction_grows_is_told_and_cut() {
    let place = TestFolder::new();
    let store = place.open().await;
    completed(&store, 1, DAY).await;
    let reader = place.foreign();
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM records")
        .unwrap();
    fill_log(&store, 2 * LOG_BYTES).await;
    reader.execute_batch("COMMIT").unwrap();
    while store.upkeep().log_bytes.unwrap() > LOG_BYTES {
        one(&store, claim("a", 1)).await.unwrap();
    }
}

#[cfg(unix)]
#[tokio::test]
async fn the_files_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let place = TestFolder::new();
    let store = place.open().await;
    completed(&store, 1, DAY).await;
    for name in ["records.db", "records.db-wal", "records.db-shm"] {
        let metadata = std::fs::metadata(place.directory.path().join(name)).unwrap();
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{name}");
    }
    // What an operator has opened to others stays so.
    let shared = std::fs::Permissions::from_mode(0o660);
    drop(store);
    std::fs::set_permissions(place.path(), shared).unwrap();
    drop(place.open().await);
    assert_eq!(
        std::fs::metadata(place.path())
            .unwrap()
            .permissions()
            .mode()
            & 0o777,
        0o660
    );
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_file_in_memory_is_not_said_to_be_on_disk() {
    let directory = TempDir::new_in("/dev/shm").unwrap();
    let store = SqliteStore::open(directory.path().join("records.db"))
        .await
        .unwrap();
    let checkup = store.check().await.unwrap();
    assert_eq!(checkup.survives, oncegate_core::store::Survives::Memory);
    assert!(
        checkup
            .warnings
            .iter()
            .any(|warning| warning.contains("tmpfs")),
        "{checkup:?}"
    );
}
