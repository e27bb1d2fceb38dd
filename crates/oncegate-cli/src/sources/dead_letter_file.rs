//! Dead letters in a file, for messages of standard input: one JSON object a line.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use oncegate::BoxError;
use oncegate::dead_letters::{DeadLetter, DeadLetters};
use parking_lot::Mutex;
use serde::Serialize;

use crate::output;

/// Appends dead letters to a file.
#[derive(Clone)]
pub(crate) struct DeadLetterFile {
    path: Arc<PathBuf>,
    opened: Arc<Mutex<Option<OpenFile>>>,
}

/// The file, once it is open.
struct OpenFile {
    file: File,
    /// `true` if the file ends in the middle of a line, because a write failed.
    is_torn: bool,
}

/// A line of the file.
#[derive(Serialize)]
struct LetterLine<'a> {
    id: String,
    failed_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_failed_at: Option<String>,
    scope: &'a str,
    origin: String,
    route: &'a str,
    cause: &'static str,
    reason: &'a str,
    attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'a str>,
    /// A payload that is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
}

impl DeadLetterFile {
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: Arc::new(path.into()),
            opened: Arc::default(),
        }
    }

    /// Runs `work` on the open file, on a thread that may wait for the disk.
    async fn with_file(
        &self,
        work: impl FnOnce(&mut OpenFile) -> io::Result<()> + Send + 'static,
    ) -> Result<(), BoxError> {
        let path = Arc::clone(&self.path);
        let opened = Arc::clone(&self.opened);
        let working = tokio::task::spawn_blocking(move || {
            let mut opened = opened.lock();
            let file = match opened.take() {
                Some(file) => file,
                None => OpenFile::at(&path)?,
            };
            work(opened.insert(file))
        });
        let written = working.await?;
        written.map_err(|error| {
            let path = self.path.display();
            format!("the dead letters in {path} cannot be written: {error}").into()
        })
    }
}

impl fmt::Debug for DeadLetterFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeadLetterFile")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl DeadLetters for DeadLetterFile {
    async fn open(&self) -> Result<(), BoxError> {
        self.with_file(|_| Ok(())).await
    }

    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        let line = line(letter)?;
        self.with_file(move |opened| opened.append(&line)).await
    }
}

impl OpenFile {
    /// Opens the file, or creates it, readable only for its owner: it holds payloads.
    fn at(path: &Path) -> io::Result<Self> {
        let is_new = !path.exists();
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(path)?;
        let facts = file.metadata()?;
        if !facts.is_file() {
            return Err(io::Error::other(
                "it is not a regular file, which alone keeps what is written to it",
            ));
        }
        if is_new {
            let folder = path
                .parent()
                .filter(|folder| !folder.as_os_str().is_empty());
            // Otherwise a power cut could remove the name of the file with everything in it.
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
        }
        let mut last = [b'\n'];
        if facts.len() > 0 {
            file.seek(SeekFrom::End(-1))?;
            file.read_exact(&mut last)?;
        }
        Ok(Self {
            file,
            is_torn: last != [b'\n'],
        })
    }

    /// Appends a line, and returns when it is on the disk.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let lines = if self.is_torn {
            [b"\n", line].concat()
        } else {
            line.to_vec()
        };
        self.is_torn = true;
        self.file.write_all(&lines)?;
        self.is_torn = false;
        self.file.sync_data()
    }
}

fn line(letter: &DeadLetter) -> Result<Vec<u8>, serde_json::Error> {
    let bytes = letter.message.payload_bytes();
    let payload = bytes.as_deref().map(std::str::from_utf8);
    let of_letter = LetterLine {
        id: letter.id(),
        failed_at: output::time(letter.failed_at),
        first_failed_at: letter.first_failed_at.map(output::time),
        scope: &letter.scope,
        origin: letter.message.origin().to_string(),
        route: letter.message.route(),
        cause: letter.cause.as_str(),
        reason: &letter.reason,
        attempts: letter.attempts,
        key: letter.key.as_deref(),
        payload: payload.and_then(Result::ok),
        payload_base64: match payload {
            Some(Err(_)) => bytes.as_deref().map(|bytes| BASE64_STANDARD.encode(bytes)),
            _ => None,
        },
    };
    let mut line = serde_json::to_vec(&of_letter)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use oncegate::dead_letters::DeadLetterCause;
    use oncegate::{Message, Origin};
    use serde_json::Value;

    use super::*;

    fn letter(payload: &'static [u8]) -> DeadLetter {
        DeadLetter {
            message: Message::new(
                "orders",
                Origin::Other("stdin:3".into()),
                Some(payload.into()),
            ),
            scope: "billing".to_owned(),
            key: None,
            cause: DeadLetterCause::BadKey,
            reason: "no key".to_owned(),
            attempts: 0,
            first_failed_at: None,
            failed_at: SystemTime::now(),
        }
    }

    fn lines(path: &Path) -> Vec<Option<Value>> {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    #[tokio::test]
    async fn a_letter_has_its_payload_unchanged_and_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dead.jsonl");
        let letters = DeadLetterFile::new(&path);
        letters.open().await.unwrap();
        letters.send(&letter(b"{ \"a\" : 1 }")).await.unwrap();
        letters.send(&letter(b"\xff")).await.unwrap();
        let lines = lines(&path);
        let [Some(first), Some(second)] = lines.as_slice() else {
            panic!("{lines:?}")
        };
        assert_eq!(first["payload"], "{ \"a\" : 1 }");
        assert_eq!(
            (&first["cause"], &first["reason"]),
            (&"bad_key".into(), &"no key".into())
        );
        assert_eq!(first["origin"], "stdin:3");
        assert_eq!(
            (&second["payload_base64"], second.get("payload")),
            (&"/w==".into(), None)
        );
    }

    #[tokio::test]
    async fn a_letter_after_a_torn_line_has_a_line_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dead.jsonl");
        std::fs::write(&path, "{\"id\":\"cut sh").unwrap();
        DeadLetterFile::new(&path)
            .send(&letter(b"x"))
            .await
            .unwrap();
        let lines = lines(&path);
        assert!(matches!(lines.as_slice(), [None, Some(_)]), "{lines:?}");
    }

    #[tokio::test]
    async fn only_a_regular_file_keeps_dead_letters() {
        let error = DeadLetterFile::new("/dev/null")
            .open()
            .await
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/dev/null") && error.contains("not a regular file"),
            "{error}"
        );
    }
}
