//! The secrets of a webhook, from files that may change at any time.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::timeout;
use tracing::{info, warn};

use super::settings::{Preset, SecretFile};
use super::signatures::{Secret, check_standard_secret};

/// The most bytes of a file with a secret.
const MAX_BYTES: u64 = 64 * 1024;

/// The time that a request waits for the files.
const READ_PATIENCE: Duration = Duration::from_secs(10);

/// The files, and what they had when they were last read.
#[derive(Debug)]
pub(super) struct Secrets {
    door: String,
    files: Vec<SecretFile>,
    check: fn(&Secret) -> Result<(), &'static str>,
    known: Mutex<Vec<KnownSecret>>,
    /// Held by the thread that reads the files, so that a file system that hangs takes one.
    reading: Arc<AsyncMutex<()>>,
}

#[derive(Clone, Debug, Default)]
struct KnownSecret {
    secret: Option<Secret>,
    /// The reason that the last reading failed, so that it is logged once.
    error: Option<String>,
}

impl Secrets {
    pub(super) fn new(door: &str, preset: &Preset) -> Arc<Self> {
        let files = preset.secret_files().to_vec();
        let check = match preset {
            Preset::Standard(_) => check_standard_secret,
            _ => |_: &Secret| Ok(()),
        };
        Arc::new(Self {
            door: door.to_owned(),
            known: Mutex::new(vec![KnownSecret::default(); files.len()]),
            files,
            check,
            reading: Arc::default(),
        })
    }

    /// Returns the secrets that the files have now. A file that cannot be read keeps its last
    /// secret: it may be about to be replaced. So do all if they cannot be read in time.
    pub(super) async fn current(self: &Arc<Self>) -> Vec<Secret> {
        if !self.files.is_empty()
            && let Ok(reading) = Arc::clone(&self.reading).try_lock_owned()
        {
            let this = Arc::clone(self);
            let reading = tokio::task::spawn_blocking(move || {
                this.read_all();
                drop(reading);
            });
            // The thread only fails if it panics; then the secrets are the last ones, too.
            _ = timeout(READ_PATIENCE, reading).await;
        }
        self.known
            .lock()
            .iter()
            .filter_map(|known| known.secret.clone())
            .collect()
    }

    /// Reads the files, and returns what is wrong with any of them.
    pub(super) async fn check(self: &Arc<Self>) -> Result<(), String> {
        self.current().await;
        let known = self.known.lock();
        match known.iter().find_map(|known| known.error.clone()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn read_all(&self) {
        for (place, SecretFile { file }) in self.files.iter().enumerate() {
            let read = read(file, self.check);
            let mut all = self.known.lock();
            let Some(known) = all.get_mut(place) else {
                continue;
            };
            let door = &self.door;
            match read {
                Ok(secret) => {
                    if known.secret.as_ref().is_some_and(|last| *last != secret) {
                        info!(door, file = %file.display(), "a secret has changed");
                    }
                    known.secret = Some(secret);
                    known.error = None;
                }
                Err(error) => {
                    if known.error.as_ref() != Some(&error) {
                        let kept = known.secret.is_some();
                        warn!(door, %error, kept, "a secret cannot be read; the last one of its file stays valid");
                    }
                    known.error = Some(error);
                }
            }
        }
    }
}

/// Reads a secret. The error has the path, and nothing of what the file has.
fn read(path: &Path, check: fn(&Secret) -> Result<(), &'static str>) -> Result<Secret, String> {
    usable(path, check)
        .map_err(|why| format!("the secret in {} cannot be used: {why}", path.display()))
}

fn usable(path: &Path, check: fn(&Secret) -> Result<(), &'static str>) -> Result<Secret, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let mut file = file.take(MAX_BYTES + 1);
    file.read_to_string(&mut text)
        .map_err(|error| error.to_string())?;
    if file.limit() == 0 {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    if let Some(line) = text.strip_suffix('\n') {
        text.truncate(line.trim_end_matches('\r').len());
    }
    if text.trim().is_empty() {
        return Err("the file is empty".to_owned());
    }
    let secret = Secret::new(text);
    check(&secret)?;
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;
    use crate::webhook::settings::{PlainSettings, TimedSettings};

    fn github(files: &[PathBuf]) -> Arc<Secrets> {
        Secrets::new(
            "door",
            &Preset::Github(PlainSettings::new(files.iter().cloned())),
        )
    }

    #[tokio::test]
    async fn a_change_of_a_file_counts_from_the_next_request_on() {
        let folder = tempfile::tempdir().unwrap();
        let files = [folder.path().join("new"), folder.path().join("old")];
        fs::write(&files[0], "one\n").unwrap();
        fs::write(&files[1], "two\r\n").unwrap();
        let secrets = github(&files);
        assert_eq!(
            secrets.current().await,
            [Secret::new("one"), Secret::new("two")]
        );
        // In place, with as many bytes, and within the same moment.
        fs::write(&files[0], "eno\n").unwrap();
        assert_eq!(
            secrets.current().await,
            [Secret::new("eno"), Secret::new("two")]
        );
        // Away, empty and unreadable: what was known stays, until there is another.
        fs::remove_file(&files[1]).unwrap();
        assert_eq!(secrets.current().await.len(), 2);
        let error = secrets.check().await.unwrap_err();
        assert!(error.contains("old"), "{error}");
        fs::write(&files[1], "\n").unwrap();
        assert_eq!(secrets.current().await.len(), 2);
        fs::write(&files[1], b"\xff").unwrap();
        assert_eq!(secrets.current().await.len(), 2);
        fs::write(&files[1], "three").unwrap();
        assert_eq!(
            secrets.current().await,
            [Secret::new("eno"), Secret::new("three")]
        );
        assert_eq!(secrets.check().await, Ok(()));
    }

    // invariant: secret-of-webhook-shown
    #[tokio::test]
    async fn an_error_names_the_file_and_shows_nothing_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("secret");
        fs::write(&file, "whsec_hunter2!").unwrap();
        let preset = Preset::Standard(TimedSettings::new([file]));
        let secrets = Secrets::new("door", &preset);
        assert_eq!(secrets.current().await, []);
        let error = secrets.check().await.unwrap_err();
        assert!(
            error.contains("base64") && !error.contains("hunter"),
            "{error}"
        );
        assert!(!format!("{secrets:?}").contains("hunter"));
        assert!(!format!("{:?}", Secret::new("hunter2")).contains("hunter"));
    }
}
