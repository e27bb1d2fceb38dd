//! The generation of its store that each scope has reached, kept at the broker with each committed
//! position.
//!
//! A loss of the store does not affect the broker, so a process that starts afterwards can detect
//! the loss there when no store can report it.

use std::collections::BTreeMap;
use std::sync::Arc;

use tracing::warn;

use crate::failure::BoxError;
use crate::gate::{GateError, OpenGate, StorePosition};
use crate::source::{CommitAnnotation, Source};

/// The first word: the marker and the version of the format.
const FORMAT: &str = "oncegate=1";

/// Compares each gate's store with what the source's broker holds, and annotates commits from now
/// on.
///
/// # Errors
/// A [`SourceError`](crate::source::SourceError) or a [`GateError`], when the broker or a store
/// does not answer.
pub(super) async fn compare_and_keep(
    gates: Vec<Arc<OpenGate>>,
    source: &dyn Source,
) -> Result<(), BoxError> {
    let lasting = gates
        .into_iter()
        .filter(|gate| gate.store_position().is_some());
    let lasting: BTreeMap<String, Arc<OpenGate>> = lasting
        .map(|gate| (gate.scope().to_owned(), gate))
        .collect();
    if lasting.is_empty() {
        return Ok(());
    }
    let annotations = source.commit_annotations().await?;
    for (scope, gate) in &lasting {
        let kept: Vec<StorePosition> = annotations
            .iter()
            .filter_map(|annotation| position_in(annotation, scope))
            .collect();
        gate.compare_with(&kept).await.map_err(GateError::from)?;
    }
    if text(&lasting).len() > CommitAnnotation::MAX_BYTES {
        warn!(
            scopes = lasting.len(),
            "too many scopes for the metadata of one commit: a loss of the last ones is noticed only by running processes"
        );
    }
    source.annotate_commits(CommitAnnotation::new(move || {
        text_within(&lasting, CommitAnnotation::MAX_BYTES)
    }));
    Ok(())
}

/// The position of `scope` in an annotation; `None` when it is not there, or the annotation is not
/// ours.
fn position_in(annotation: &str, scope: &str) -> Option<StorePosition> {
    let mut words = annotation.split(' ');
    if words.next() != Some(FORMAT) {
        return None;
    }
    let of_scope = words
        .filter_map(|word| word.split_once('='))
        .find(|(name, _)| *name == scope);
    StorePosition::parse(of_scope?.1)
}

fn text(gates: &BTreeMap<String, Arc<OpenGate>>) -> String {
    text_within(gates, usize::MAX)
}

/// As many scopes as fit.
fn text_within(gates: &BTreeMap<String, Arc<OpenGate>>, most_bytes: usize) -> String {
    let mut text = FORMAT.to_owned();
    for (scope, gate) in gates {
        let Some(position) = gate.store_position() else {
            continue;
        };
        let word = format!(" {scope}={position}");
        if text.len() + word.len() > most_bytes {
            break;
        }
        text.push_str(&word);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_finds_its_own_position_and_foreign_text_says_nothing() {
        let position = format!("{:032x}:42", 7);
        let ours = format!("{FORMAT} a.b={position} billing={:032x}:1 c=garbage", 8);
        assert_eq!(
            position_in(&ours, "a.b").map(|found| found.to_string()),
            Some(position)
        );
        for scope in ["b", "c", "oncegate", ""] {
            assert_eq!(position_in(&ours, scope), None, "{scope}");
        }
        for foreign in ["", "oncegate", "oncegate=2 a.b=0:1", "a.b=1", "{}"] {
            assert_eq!(position_in(foreign, "a.b"), None, "{foreign}");
        }
    }
}
