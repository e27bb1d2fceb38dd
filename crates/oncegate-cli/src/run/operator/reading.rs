//! Reads dead letters for the page, within limits, with what became of them since.

use std::time::{Duration, SystemTime};

use oncegate::Header;
use oncegate::admin::dead_letter_reader::{DeadLetterReader, StoredDeadLetter};
use oncegate::admin::{LetterState, letter_states};
use oncegate::telemetry::operate::{Letter, LetterDetail, Letters};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{Parts, Scoped, close};
use crate::dead_letters::lossy;
use crate::exit::Problem;

/// The most letters of which nothing was done that are listed.
const OPEN_MOST: usize = 20_000;
/// The most letters of which something was done that are listed beside them.
const DONE_MOST: usize = 2_000;
/// The most bytes of messages that are read.
const BYTES_MOST: usize = 512 * 1024 * 1024;
/// The longest time of a read: a browser is answered within 30 s.
const READ_LIMIT: Duration = Duration::from_secs(20);
/// The longest reason that is kept, in bytes.
const REASON_MAX_BYTES: usize = 1_024;
/// The longest payload, or value of a header, that is shown, in bytes.
const SHOWN_MAX_BYTES: usize = 64 * 1024;

impl Parts {
    /// Reads the dead letters of a scope.
    ///
    /// # Errors
    /// When they cannot be read, or are being read.
    pub(super) async fn read(&self, scope: &str) -> Result<Letters, String> {
        let scoped = self.scoped(scope)?;
        let mut listed = Listed::default();
        let is_whole = scoped.read(&mut listed, &self.stop).await?;
        Ok(listed.letters(is_whole))
    }

    /// Reads one dead letter.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) async fn show(&self, scope: &str, at: &str) -> Result<Option<LetterDetail>, String> {
        let scoped = self.scoped(scope)?;
        let mut found = LetterAt { at, letter: None };
        let is_whole = scoped.read(&mut found, &self.stop).await?;
        let Some((stored, state)) = &found.letter else {
            return if is_whole {
                Ok(None)
            } else {
                Err(format!(
                    "it was not found within {READ_LIMIT:?}: use `oncegate dead-letters show`"
                ))
            };
        };
        Ok(Some(self.detail(stored, *state)))
    }

    fn detail(&self, stored: &StoredDeadLetter, state: LetterState) -> LetterDetail {
        let message = stored.message();
        let headers = message.headers().iter().map(|Header { name, value: of }| {
            let shown = self
                .payloads
                .then(|| of.as_deref().map_or("null".to_owned(), value));
            (name.to_string(), shown)
        });
        LetterDetail {
            letter: letter(stored, state),
            first_failed_at_ms: stored
                .letter()
                .and_then(|letter| letter.first_failed_at)
                .map(millis),
            payload_bytes: message.payload().len(),
            headers: headers.collect(),
            payload: self.payloads.then(|| value(message.payload())),
        }
    }
}

/// A value of a header, or a payload, as far as it is shown.
fn value(bytes: &[u8]) -> String {
    let end = bytes.len().min(SHOWN_MAX_BYTES);
    lossy(bytes.get(..end).unwrap_or_default())
}

impl Scoped {
    /// Passes the dead letters on until `sink` has enough, or a limit is reached. Returns whether
    /// all were read.
    async fn read(
        &self,
        sink: &mut (impl Sink + Send),
        stop: &CancellationToken,
    ) -> Result<bool, String> {
        let place = self.place()?;
        let Ok(_reading) = self.reading.try_lock() else {
            return Err("they are being read by another request: wait for its end".to_owned());
        };
        let until = Instant::now() + READ_LIMIT;
        let opened = timeout_at(until, place.open(None)).await;
        let opened = opened.map_err(|_| format!("no answer within {READ_LIMIT:?}"))?;
        let mut reader = opened.map_err(|problem| problem.to_string())?;
        let reading = self.read_until(&mut *reader, until, sink);
        // A stop waits for no letters.
        let read = stop.run_until_cancelled(reading).await.unwrap_or(Ok(false));
        // However it ended: messages of a queue are returned.
        let closed = close(&mut *reader).await;
        let is_whole = read.map_err(|problem| problem.to_string())?;
        closed.map_err(|problem| problem.to_string())?;
        Ok(is_whole)
    }

    /// Reads until the end, the limit of time or of bytes, or until the sink has enough. Returns
    /// whether it was the end.
    async fn read_until(
        &self,
        reader: &mut dyn DeadLetterReader,
        until: Instant,
        sink: &mut (impl Sink + Send),
    ) -> Result<bool, Problem> {
        let mut bytes = 0;
        while bytes < BYTES_MOST {
            let Ok(batch) = timeout_at(until, reader.next_batch()).await else {
                return Ok(false);
            };
            let Some(batch) = batch? else {
                return Ok(true);
            };
            bytes += batch
                .iter()
                .map(|stored| stored.message().size_bytes())
                .sum::<usize>();
            let wanted = sink.wanted(batch);
            let states = letter_states(&*self.store, &wanted).await?;
            sink.take(wanted.into_iter().zip(states));
            if sink.is_full() {
                return Ok(false);
            }
        }
        Ok(false)
    }
}

/// A receiver of dead letters with what became of them.
trait Sink {
    /// Returns those that it takes.
    fn wanted(&self, batch: Vec<StoredDeadLetter>) -> Vec<StoredDeadLetter>;

    fn take(&mut self, letters: impl Iterator<Item = (StoredDeadLetter, LetterState)>);

    fn is_full(&self) -> bool;
}

/// The letter at one position.
struct LetterAt<'a> {
    at: &'a str,
    letter: Option<(StoredDeadLetter, LetterState)>,
}

impl Sink for LetterAt<'_> {
    fn wanted(&self, mut batch: Vec<StoredDeadLetter>) -> Vec<StoredDeadLetter> {
        batch.retain(|stored| stored.place.to_string() == self.at);
        batch.truncate(1);
        batch
    }

    fn take(&mut self, mut letters: impl Iterator<Item = (StoredDeadLetter, LetterState)>) {
        self.letter = letters.next().or(self.letter.take());
    }

    fn is_full(&self) -> bool {
        self.letter.is_some()
    }
}

/// The dead letters that are listed so far.
#[derive(Default)]
struct Listed {
    letters: Vec<Letter>,
    open: usize,
    /// The letters of which something was done, and how many of them are not listed.
    done: usize,
    unlisted: usize,
}

impl Sink for Listed {
    fn wanted(&self, batch: Vec<StoredDeadLetter>) -> Vec<StoredDeadLetter> {
        batch
    }

    fn take(&mut self, letters: impl Iterator<Item = (StoredDeadLetter, LetterState)>) {
        for (stored, state) in letters {
            let (count, most) = if state.is_open() {
                (&mut self.open, OPEN_MOST)
            } else {
                (&mut self.done, DONE_MOST)
            };
            if *count >= most {
                self.unlisted += 1;
                continue;
            }
            *count += 1;
            self.letters.push(letter(&stored, state));
        }
    }

    fn is_full(&self) -> bool {
        self.open >= OPEN_MOST
    }
}

impl Listed {
    fn letters(self, is_whole: bool) -> Letters {
        let cut = if !is_whole {
            Some("There are more: only the first ones were read, up to 20,000 open ones, 512 MiB or 20 s. `oncegate dead-letters list` reads all.".to_owned())
        } else if self.unlisted > 0 {
            Some(format!(
                "{} more about which something was done are not listed.",
                self.unlisted
            ))
        } else {
            None
        };
        Letters {
            letters: self.letters,
            cut,
        }
    }
}

fn letter(stored: &StoredDeadLetter, state: LetterState) -> Letter {
    let known = stored.letter();
    let reason = known.map_or("", |letter| letter.reason.as_str());
    let end = reason.floor_char_boundary(REASON_MAX_BYTES);
    Letter {
        at: stored.place.to_string(),
        cause: known
            .map_or("foreign", |letter| letter.cause.as_str())
            .to_owned(),
        reason: reason.get(..end).unwrap_or_default().to_owned(),
        origin: stored.message().origin().to_string(),
        key: known.and_then(|letter| letter.key.clone()),
        attempts: known.map(|letter| letter.attempts),
        failed_at_ms: known.map(|letter| millis(letter.failed_at)),
        state: state.as_str().to_owned(),
        is_open: state.is_open(),
    }
}

fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}
