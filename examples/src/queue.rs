//! The proof of payments from a queue, the same for every broker: consumed while a worker is
//! killed, sent a second time, and compared with what the bank was asked for.

use std::path::Path;

use indicatif::ProgressBar;
use oncegate::BoxError;

use crate::crew::Crew;
use crate::hang::Hang;
use crate::payments::{Bank, Ledger, Proof, bank_place, store_place};
use crate::stage::Stage;

/// The number of messages that are sent before the bar moves.
const CHUNK: usize = 500;

/// A queue of a broker that runs.
pub trait Queue {
    /// Sends messages with these payloads.
    fn send(&self, payments: Vec<String>);

    /// Returns whether every message is finished. Messages in flight are not.
    fn is_empty(&self) -> bool;

    /// Returns the arguments by which a worker finds it.
    fn arguments(&self) -> [&str; 4];
}

/// Sends, consumes, kills, sends again, and returns whether the proof holds. `create` makes a queue
/// for a run of this name; without a Redis server, the records are in one SQLite file.
///
/// # Errors
/// When a server, a worker or a file cannot be used.
pub fn prove<Q: Queue>(
    stage: &Stage,
    redis: Option<&str>,
    create: impl FnOnce(&str) -> Result<Q, BoxError>,
) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let bar = stage.sending("sending");
    let queue = create(&stage.name)?;
    send(&queue, &stage.payments.payloads, bar);
    let store = store_place(redis, folder.path());
    let bank = Bank::open(&bank_place(folder.path()))?;
    let hang = stage.hang(folder.path());
    let shared = Shared {
        queue: &queue,
        store,
        run: &stage.name,
        hang,
        folder: folder.path(),
    };

    let bar = stage.charging("consuming; one worker is killed on the way");
    let mut first = shared.start("first")?;
    let killed = first
        .crew
        .kill_in(&shared.hang, bar, || first.ledger.progress())?;
    let messages = stage.payments.payloads.len();
    first.finish(messages, &queue, bar)?;

    let bar = stage.sending("everything comes a second time");
    send(&queue, &stage.payments.payloads, bar);
    let mut second = shared.start("replay")?;
    second.finish(messages, &queue, bar)?;
    stage.end();

    let first = first.ledger.read()?;
    let second = second.ledger.read()?;
    let proof = Proof::new(&stage.payments, killed, &bank.charges()?, &first, &second);
    stage.print(&proof)?;
    Ok(proof.holds())
}

fn send(queue: &impl Queue, payments: &[String], bar: &ProgressBar) {
    for chunk in payments.chunks(CHUNK) {
        queue.send(chunk.to_vec());
        bar.inc(chunk.len() as u64);
    }
}

/// The parts of a run that all workers share.
struct Shared<'a, Q> {
    queue: &'a Q,
    store: String,
    run: &'a str,
    hang: Hang,
    folder: &'a Path,
}

/// A pass over everything: worker processes, and their ledger.
struct Pass {
    ledger: Ledger,
    crew: Crew,
}

impl<Q: Queue> Shared<'_, Q> {
    fn start(&self, pass: &str) -> Result<Pass, BoxError> {
        let path = self.folder.join(format!("{pass}.ledger"));
        let ledger = Ledger::open(&path)?;
        let path = path.display().to_string();
        let hang = self.hang.arguments();
        let arguments = self.queue.arguments().into_iter();
        let arguments = arguments.chain(["--store", &self.store, "--scope", self.run]);
        let arguments = arguments
            .chain(["--ledger", &path])
            .chain(hang.iter().map(String::as_str));
        let bank = bank_place(self.folder).display().to_string();
        let crew = Crew::start_workers(arguments.chain(["--bank", &bank]))?;
        Ok(Pass { ledger, crew })
    }
}

impl Pass {
    /// Waits until so many messages were handled and the queue is empty, and stops the workers. A
    /// broker counts its messages now and then, and may not know yet of those that were just sent.
    fn finish(
        &mut self,
        messages: usize,
        queue: &impl Queue,
        bar: &ProgressBar,
    ) -> Result<(), BoxError> {
        self.crew.wait_for(
            bar,
            || self.ledger.progress(),
            |progress| {
                Ok(progress.charges + progress.answers >= messages as u64 && queue.is_empty())
            },
        )?;
        self.crew.stop()
    }
}
