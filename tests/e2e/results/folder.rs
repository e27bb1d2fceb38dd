//! Results in a folder.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use oncegate::results::{ObjectResults, ResultStore as _, Swept};
use oncegate_testkit::unique;
use tempfile::tempdir;

use super::{DAY, answer, complete, conforms, gate};

/// The files of a scope's results, in order.
pub(crate) fn files(folder: &Path, scope: &str) -> Vec<PathBuf> {
    let inside = |folder: PathBuf| {
        fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().path())
    };
    let shards = inside(folder.join(scope)).filter(|path| path.is_dir());
    let mut files: Vec<PathBuf> = shards.flat_map(inside).collect();
    files.sort();
    files
}

fn age(file: &Path, by: Duration) {
    File::options()
        .write(true)
        .open(file)
        .unwrap()
        .set_modified(SystemTime::now() - by)
        .unwrap();
}

#[tokio::test]
async fn a_folder_conforms() {
    let place = tempdir().unwrap();
    conforms(&ObjectResults::folder(place.path().join("results")).unwrap()).await;
    let outside: Vec<_> = fs::read_dir(place.path()).unwrap().collect();
    assert_eq!(
        outside.len(),
        1,
        "nothing is beside the folder: {outside:?}"
    );
}

// invariant: result-swept
#[tokio::test]
async fn results_come_back_and_are_swept_when_their_records_are_over() {
    let place = tempdir().unwrap();
    let folder = place.path().join("results");
    let scope = unique("folder");
    let gate = gate(&scope, ObjectResults::folder(&folder).unwrap());
    let first = complete(&gate, 1).await;
    let [file] = &files(&folder, &scope)[..] else {
        panic!("one result, one file")
    };
    let second = complete(&gate, 2).await;
    assert_eq!(
        (answer(&gate, 1).await, answer(&gate, 2).await),
        (Ok(first), Ok(second.clone()))
    );

    // What a killed process was writing, and what another one writes just now.
    let dead = file.with_extension("dead#1");
    let alive = file.with_extension("alive#1");
    fs::write(&dead, b"half").unwrap();
    fs::write(&alive, b"half").unwrap();
    age(&dead, 4 * DAY);
    // The record lasts for a day; the margin is two.
    age(file, 3 * DAY - Duration::from_secs(60));
    assert_eq!(
        gate.sweep_results().await.unwrap(),
        Swept {
            kept: 3,
            over: 1,
            over_bytes: 4
        }
    );
    age(file, 3 * DAY + Duration::from_secs(60));
    let over_bytes = file.metadata().unwrap().len();
    // The third file that is kept marks that the gate was opened.
    assert_eq!(
        gate.sweep_results().await.unwrap(),
        Swept {
            kept: 2,
            over: 1,
            over_bytes
        }
    );
    assert!(!file.exists() && !dead.exists() && alive.exists());
    assert_eq!(answer(&gate, 2).await, Ok(second));
    let gone = answer(&gate, 1).await.unwrap_err();
    assert!(gone.contains("not in the result store"), "{gone}");
}

// invariant: result-swept
#[tokio::test]
async fn a_damaged_file_is_never_an_answer() {
    let place = tempdir().unwrap();
    let scope = unique("folder");
    let gate = gate(&scope, ObjectResults::folder(place.path()).unwrap());
    let result = complete(&gate, 1).await;
    let [file] = &files(place.path(), &scope)[..] else {
        panic!("one result, one file")
    };
    let whole = fs::read(file).unwrap();
    let mut flipped = whole.clone();
    flipped[500_000] ^= 1;
    for (damaged, says) in [
        (&flipped[..], "damaged"),
        (&whole[..999], "damaged"),
        (b"", "damaged"),
        (&[&whole[..], b"x"].concat(), "not in"),
    ] {
        fs::write(file, damaged).unwrap();
        let error = answer(&gate, 1).await.unwrap_err();
        assert!(error.contains(says), "{error}");
    }
    fs::write(file, whole).unwrap();
    assert_eq!(answer(&gate, 1).await, Ok(result));
}

#[tokio::test]
async fn results_are_private_and_a_wrong_folder_is_refused_by_name() {
    let place = tempdir().unwrap();
    let folder = place.path().join("results");
    drop(ObjectResults::folder(&folder).unwrap());
    assert_eq!(
        fs::metadata(&folder).unwrap().permissions().mode() & 0o777,
        0o700
    );
    let results = ObjectResults::folder(&folder).unwrap();
    results
        .put("billing/ab/one", "a card number".into())
        .await
        .unwrap();
    let mode = |path: &str| {
        fs::metadata(folder.join(path))
            .unwrap()
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(
        [mode("billing"), mode("billing/ab"), mode("billing/ab/one")],
        [0o700, 0o700, 0o600]
    );
    let missing = place.path().join("missing/results");
    let refused = ObjectResults::folder(&missing).unwrap_err().to_string();
    assert!(refused.contains("missing/results"), "{refused}");
    let file = place.path().join("file");
    fs::write(&file, b"").unwrap();
    ObjectResults::folder(&file).unwrap_err();
}
