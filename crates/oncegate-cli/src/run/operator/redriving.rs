//! Redrives dead letters that a person has counted on the page, in the background.

use std::collections::BTreeSet;

use oncegate::admin::dead_letter_reader::StoredDeadLetter;
use oncegate::admin::{Redrive, Step, Wanted};
use oncegate::journal::JournalEntry;
use oncegate::telemetry::operate::{RedriveOrder, RedriveReport};
use tokio_util::sync::CancellationToken;

use super::{Parts, Redriving, close};
use crate::change::Written;
use crate::exit::Problem;

/// The parts of a redrive that has begun.
pub(super) struct Begun {
    journal: Written,
    stop: CancellationToken,
}

impl Parts {
    /// Writes the beginning into the journal, and notes that the redrive runs.
    ///
    /// # Errors
    /// When another one of the scope runs, its dead letters cannot be read, or the journal cannot
    /// be written.
    pub(super) fn begin_redrive(&self, order: &RedriveOrder) -> Result<Begun, String> {
        let scope = &order.change.scope;
        let place = self.scoped(scope)?.place()?;
        let mut redrives = self.redrives.lock();
        if redrives.get(scope).is_some_and(|last| last.report.runs) {
            return Err(
                "another redrive of this scope runs: wait for its end, or stop it".to_owned(),
            );
        }
        let journal = self.journal(&order.change)?;
        journal
            .note_now(JournalEntry::now("redrive_begins").origin(place.name()))
            .map_err(|problem| problem.to_string())?;
        let stop = self.stop.child_token();
        let report = RedriveReport {
            scope: scope.clone(),
            wanted: order.places.len(),
            runs: true,
            by: order.change.by.clone(),
            ..RedriveReport::default()
        };
        redrives.insert(
            scope.clone(),
            Redriving {
                report,
                stop: stop.clone(),
            },
        );
        self.changed();
        Ok(Begun { journal, stop })
    }

    /// Redrives what was ordered. An end at any moment loses nothing: a message that is sent twice
    /// is answered by its record.
    pub(super) async fn redrive(&self, order: RedriveOrder, begun: Begun) {
        let ended = self.send(&order, &begun).await;
        let trouble = match ended {
            Ok(true) => None,
            Ok(false) => Some("It was stopped; the rest was not sent.".to_owned()),
            Err(problem) => Some(problem.to_string()),
        };
        let noted = begun
            .journal
            .note_now(JournalEntry::now("redrive_ends").key(&order.change.scope));
        let trouble = trouble.or(noted.err().map(|problem| problem.to_string()));
        self.report(&order, |report| {
            report.runs = false;
            report.trouble = trouble.or(report.trouble.take());
        });
        self.changed();
    }

    /// Returns whether it came to the end.
    async fn send(&self, order: &RedriveOrder, begun: &Begun) -> Result<bool, Problem> {
        let scoped = self
            .scoped(&order.change.scope)
            .map_err(Problem::configuration)?;
        let place = scoped.place().map_err(Problem::configuration)?;
        let mut redrive = Redrive::new(std::sync::Arc::clone(&scoped.store));
        if let Some(rate) = order.rate {
            redrive = redrive.per_second(rate);
        }
        let mut unwritten = None;
        let mut letters = place.open(None).await?;
        let running = redrive.run(
            &mut *letters,
            |stored| wanted(&order.places, stored),
            |step| {
                let noted = self.note(order, &begun.journal, &step);
                unwritten = noted.err().or(unwritten.take());
            },
        );
        let ran = begun.stop.run_until_cancelled(running).await;
        // However it ended: what was not sent is returned.
        let closed = close(&mut *letters).await;
        let is_whole = ran.transpose()?.is_some();
        closed?;
        unwritten.map_or(Ok(is_whole), Err)
    }

    /// Notes what was done with one letter.
    fn note(
        &self,
        order: &RedriveOrder,
        journal: &Written,
        step: &Step<'_>,
    ) -> Result<(), Problem> {
        let Step {
            letter: stored,
            action,
        } = *step;
        let key = stored.letter().and_then(|letter| letter.key.as_deref());
        let is_sent = action.to().is_some();
        self.report(order, |report| {
            if is_sent {
                report.sent += 1;
            } else {
                report.passed += 1;
            }
            if action.is_trouble() {
                let word = action.as_str().replace('_', " ");
                let trouble = format!("{} could not be sent: {word}", stored.place);
                report.trouble.get_or_insert(trouble);
            }
        });
        if !is_sent {
            return Ok(());
        }
        let entry = JournalEntry::now("redriven").origin(&stored.place);
        journal.note(match key {
            Some(key) => entry.key(key),
            None => entry,
        })
    }

    fn report(&self, order: &RedriveOrder, change: impl FnOnce(&mut RedriveReport)) {
        if let Some(last) = self.redrives.lock().get_mut(&order.change.scope) {
            change(&mut last.report);
        }
    }
}

fn wanted(places: &BTreeSet<String>, stored: &StoredDeadLetter) -> Wanted {
    if places.contains(&stored.place.to_string()) {
        Wanted::Yes
    } else {
        Wanted::No
    }
}
