//! Writes to an SQLite store until its disk is cut off, and reports afterwards whether an answer
//! was lost.
//!
//! ```text
//! power-cut load FILE JOURNAL CYCLE [normal]   works until the store fails; each answer is a line of the journal
//! power-cut check FILE JOURNAL                 compares the journal with the file; exit code 1 when an answer is lost
//! ```
//!
//! `scripts/power-cuts` runs it. The journal stands on a disk that is not cut off. `normal` weakens
//! the store, so that the check can show that it would see a loss.

use std::collections::BTreeMap;
use std::env;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use oncegate::sqlite::{SqliteStore, Synchronous};
use oncegate_core::key::StoreKey;
use oncegate_core::record::{Record, State, Token};
use oncegate_core::rules::{Operation, ReleaseCause, Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_core::testing::key;

const IN_FLIGHT: usize = 64;
/// Nothing expires or is taken over by itself while the test lasts.
const LONG: Duration = Duration::from_secs(86_400);
/// How many keys are compared at once.
const LOOK_KEYS: usize = 1_000;

/// One message: in which cycle it was written, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Message {
    cycle: u64,
    number: u64,
}

/// What is done with a message, in this order. An answered step is never undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Absent,
    Claimed,
    Released,
    ClaimedAgain,
    Completed,
}

impl Message {
    fn key(self) -> StoreKey {
        key(&format!("{}:{}", self.cycle, self.number))
    }

    fn token(self, attempt: u8) -> Token {
        Token::from_bits(
            u128::from(self.cycle) << 72
                | u128::from(self.number) << 8
                | u128::from(attempt)
                | 1 << 127,
        )
    }

    /// Every third message fails once.
    fn steps(self) -> &'static [Step] {
        if self.number.is_multiple_of(3) {
            &[
                Step::Claimed,
                Step::Released,
                Step::ClaimedAgain,
                Step::Completed,
            ]
        } else {
            &[Step::Claimed, Step::Completed]
        }
    }

    /// Mostly small; now and then several pages of the file.
    fn result(self) -> Bytes {
        let bytes = if self.number.is_multiple_of(50) {
            20_000
        } else {
            self.number % 300
        };
        Bytes::from(vec![(self.number % 251) as u8; bytes as usize])
    }

    fn operation(self, step: Step) -> Operation {
        let claim = |attempt| {
            let token = self.token(attempt);
            Operation::Claim {
                token,
                lease: LONG,
                fingerprint: None,
                fenced: true,
                longest_lease: Duration::MAX,
            }
        };
        match step {
            Step::Absent => unreachable!("nothing leads there"),
            Step::Claimed => claim(1),
            Step::ClaimedAgain => claim(2),
            Step::Released => Operation::Release {
                token: self.token(1),
                delay: Duration::ZERO,
                end: ReleaseCause::Failed,
                reason: "once".to_owned(),
            },
            Step::Completed => Operation::Complete {
                token: self.token(if self.steps().len() > 2 { 2 } else { 1 }),
                fingerprint: None,
                result: self.result(),
                retention: LONG,
            },
        }
    }

    /// How far a record has come; an error when this message cannot have left it.
    fn step(self, record: Option<&Record>) -> Result<Step, String> {
        let Some(record) = record else {
            return Ok(Step::Absent);
        };
        match &record.state {
            State::Pending {
                token, attempt: 1, ..
            } if *token == self.token(1) => Ok(Step::Claimed),
            State::Pending {
                token, attempt: 2, ..
            } if *token == self.token(2) => Ok(Step::ClaimedAgain),
            State::Released { attempt: 1, .. } => Ok(Step::Released),
            State::Completed { result, .. } if *result == self.result() => Ok(Step::Completed),
            other => Err(format!("{self:?} has left something else: {other:?}")),
        }
    }
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *arguments {
        ["load", file, journal, cycle, ref synchronous @ ..] => {
            let synchronous = match synchronous {
                [] => Synchronous::Full,
                ["normal"] => Synchronous::Normal,
                other => panic!("unknown arguments: {other:?}"),
            };
            load(
                file,
                journal,
                cycle.parse().expect("a cycle is a number"),
                synchronous,
            )
            .await
        }
        ["check", file, journal] => check(file, journal).await,
        _ => panic!("usage: power-cut load FILE JOURNAL CYCLE [normal] | check FILE JOURNAL"),
    }
}

/// Works on new messages until the store gives no answer.
async fn load(file: &str, journal: &str, cycle: u64, synchronous: Synchronous) -> ExitCode {
    let store = SqliteStore::builder(file)
        .synchronous(synchronous)
        .open()
        .await
        .expect("the disk is there");
    let journal = OpenOptions::new().append(true).create(true).open(journal);
    let journal = Arc::new(journal.expect("the journal can be written"));
    let next = Arc::new(AtomicU64::new(0));
    let tasks = (0..IN_FLIGHT).map(|_| {
        let store = store.clone();
        let journal = Arc::clone(&journal);
        let next = Arc::clone(&next);
        tokio::spawn(async move {
            loop {
                let message = Message {
                    cycle,
                    number: next.fetch_add(1, Relaxed),
                };
                if let Err(error) = work(&store, &journal, message).await {
                    return error;
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        let error = task.await.expect("a task does not panic");
        println!("the store fails: {error}");
    }
    ExitCode::SUCCESS
}

async fn work(store: &SqliteStore, journal: &File, message: Message) -> Result<(), StoreError> {
    for &step in message.steps() {
        take(store, message, step).await?;
        // One write: lines do not mix, and what is written survives the end of this process.
        let line = format!("{} {} {}\n", message.cycle, message.number, step as u8);
        let mut journal = journal;
        journal
            .write_all(line.as_bytes())
            .expect("the journal is on a good disk");
    }
    Ok(())
}

/// Asks for a step until it is answered that it was taken.
async fn take(store: &SqliteStore, message: Message, step: Step) -> Result<(), StoreError> {
    loop {
        let command = Command {
            key: message.key(),
            operation: message.operation(step),
        };
        match store
            .execute(vec![command])
            .await
            .pop()
            .expect("one answer")?
        {
            Reply::Applied { recreated: false }
            | Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            } => {
                return Ok(());
            }
            // A released key is due in the millisecond after its release, and a fast store answers
            // within it.
            Reply::Verdict {
                verdict: Verdict::Busy { retry_in },
                ..
            } if step == Step::ClaimedAgain => {
                tokio::time::sleep(retry_in).await;
            }
            other => panic!("{message:?} has no other owner, and {step:?} is answered {other:?}"),
        }
    }
}

/// The last answered step of each message.
fn answered(journal: &str) -> (u64, BTreeMap<Message, Step>) {
    let mut answers = 0;
    let mut last = BTreeMap::new();
    for line in BufReader::new(File::open(journal).expect("there is a journal")).lines() {
        let line = line.expect("the journal can be read");
        let fields: Option<Vec<u64>> = line.split(' ').map(|field| field.parse().ok()).collect();
        let Some([cycle, number, step]) = fields.as_deref() else {
            panic!("no line of a journal: {line}")
        };
        let all = [
            Step::Absent,
            Step::Claimed,
            Step::Released,
            Step::ClaimedAgain,
            Step::Completed,
        ];
        let step = all
            .into_iter()
            .find(|known| *known as u64 == *step)
            .expect("a known step");
        answers += 1;
        last.insert(
            Message {
                cycle: *cycle,
                number: *number,
            },
            step,
        );
    }
    (answers, last)
}

/// Compares what was answered with what is there.
async fn check(file: &str, journal: &str) -> ExitCode {
    let (answers, last) = answered(journal);
    let store = match SqliteStore::builder(file).must_exist().open().await {
        Ok(store) => store,
        Err(error) => {
            println!("LOST: the file cannot be used: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut lost = 0;
    let mut unanswered = 0_u64;
    let messages: Vec<(&Message, &Step)> = last.iter().collect();
    for messages in messages.chunks(LOOK_KEYS) {
        let snapshot = store
            .read(messages.iter().map(|(message, _)| message.key()).collect())
            .await;
        for ((message, answered), snapshot) in messages.iter().zip(snapshot) {
            let snapshot = snapshot.expect("the file can be read");
            let found = message.step(snapshot.as_ref().map(|snapshot| &snapshot.record));
            match found {
                Ok(found) if found == **answered => {}
                // What was in progress at the cut may have happened.
                Ok(found) if found > **answered => unanswered += 1,
                other => {
                    lost += 1;
                    println!("LOST: {message:?} was answered {answered:?}, and is {other:?}");
                }
            }
        }
    }
    println!(
        "{answers} answers about {} keys, {lost} lost, {unanswered} keys further than answered",
        last.len()
    );
    if lost == 0 && answers > 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
