//! The thread that reads: reads never wait for a writer of this process or another.

use std::time::Duration;

use oncegate_core::key::StoreKey;
use oncegate_core::store::{RecordSnapshot, StoreError};
use rusqlite::Connection;
use tokio::sync::oneshot;

use super::errors::{self, Trouble};
use super::file::{self, Settings};
use super::opened_file::OpenedFile;
use super::queue::{Job, JobClass, Queue, Turn};
use super::row::{self, Rows};
use super::thread::{self, Worker};

/// The most keys of one read transaction, so that the log can be truncated between two
/// transactions.
const MAX_TRANSACTION_KEYS: usize = 1_024;

/// The longest sleep of the idle thread; the value has no effect.
const PATIENCE: Duration = Duration::from_secs(3_600);

type Answers = Vec<Result<Option<RecordSnapshot>, StoreError>>;

/// Keys to read, and the channel for the answers.
struct ReadRequest {
    keys: Vec<StoreKey>,
    answer: oneshot::Sender<Answers>,
}

/// A job for the reading thread.
enum Question {
    /// Keys that may share a transaction with others.
    Read(ReadRequest),
    /// Another read, in its own transaction.
    Other(Box<dyn FnOnce(&ReaderThread) + Send>),
}

impl Job for Question {
    fn class(&self) -> JobClass {
        JobClass::Early
    }

    fn size(&self) -> usize {
        match self {
            Self::Read(request) => request.keys.len(),
            Self::Other(_) => 1,
        }
    }

    fn alone(&self) -> bool {
        matches!(self, Self::Other(_))
    }
}

/// The callers' handle on the reading thread.
pub(super) struct Reader {
    worker: Worker<Question>,
}

impl Reader {
    pub(super) async fn start(settings: Settings) -> Result<Self, StoreError> {
        let worker = Worker::start(
            "oncegate-sqlite-read",
            move || {
                Ok(ReaderThread {
                    connection: file::open_for_reading(&settings)?,
                    place: OpenedFile::of(&settings.path),
                })
            },
            ReaderThread::run,
        );
        Ok(Self {
            worker: worker.await?,
        })
    }

    /// Queues keys. The answers include at least everything that was committed before.
    pub(super) fn read(
        &self,
        keys: Vec<StoreKey>,
    ) -> Result<oneshot::Receiver<Answers>, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.worker
            .push(Question::Read(ReadRequest { keys, answer }))?;
        Ok(answered)
    }

    /// Runs a read that is not of records.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.worker.push(Question::Other(Box::new(move |thread| {
            let read = thread.place.check().and_then(|()| {
                ask(&thread.connection)
                    .map_err(|error| thread.place.name(errors::not_executed(&error)))
            });
            // The caller may be gone; then the answer is dropped.
            let _ = answer.send(read);
        })))?;
        answered
            .await
            .map_err(|_| StoreError::unavailable(thread::ENDED))?
    }
}

/// The state of the reading thread.
struct ReaderThread {
    connection: Connection,
    place: OpenedFile,
}

impl ReaderThread {
    fn run(self, queue: &Queue<Question>) {
        loop {
            match queue.take(MAX_TRANSACTION_KEYS, PATIENCE) {
                Turn::Jobs(questions) => self.work(questions),
                Turn::Idle => {}
                Turn::Closed => return,
            }
        }
    }

    fn work(&self, questions: Vec<Question>) {
        let mut requests = Vec::new();
        for question in questions {
            match question {
                Question::Read(request) => requests.push(request),
                Question::Other(answer) => answer(self),
            }
        }
        if !requests.is_empty() {
            self.answer(requests);
        }
    }

    fn answer(&self, requests: Vec<ReadRequest>) {
        let answers = self.read(&requests).unwrap_or_else(|error| {
            let count = requests.iter().map(|request| request.keys.len());
            count
                .map(|count| (0..count).map(|_| Err(error.clone())).collect())
                .collect()
        });
        for (request, answers) in requests.into_iter().zip(answers) {
            // The caller may be gone; then the answer is dropped.
            let _ = request.answer.send(answers);
        }
    }

    fn read(&self, requests: &[ReadRequest]) -> Result<Vec<Answers>, StoreError> {
        self.place.check()?;
        self.read_in_transaction(requests)
            .map_err(|error| self.place.name(errors::not_executed(&error)))
    }

    fn read_in_transaction(&self, requests: &[ReadRequest]) -> rusqlite::Result<Vec<Answers>> {
        let transaction = self.connection.unchecked_transaction()?;
        let now = row::now(&transaction, false)?;
        let mut rows = Rows::of(&transaction)?;
        let mut answers = Vec::with_capacity(requests.len());
        for request in requests {
            let mut own = Answers::with_capacity(request.keys.len());
            for key in &request.keys {
                own.push(match rows.read(key) {
                    Ok(record) => {
                        let kept = record.filter(|record| record.kept(now));
                        Ok(kept.map(|record| RecordSnapshot { now, record }))
                    }
                    Err(Trouble::Sqlite(error)) if errors::is_damage(&error) => {
                        Err(errors::of_damaged_page(key))
                    }
                    Err(Trouble::Sqlite(error)) => return Err(error),
                    Err(unreadable) => Err(StoreError::from(unreadable)),
                });
            }
            answers.push(own);
        }
        Ok(answers)
    }
}
