//! The promise of the store with its settings: shown by every command that connects to a store.

use oncegate::core::store::{Checkup, Store};
use serde::Serialize;

use crate::output::Table;

/// The row of `docs/STORES.md` that applies.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub(crate) enum Promised {
    Known {
        /// The store in a few words.
        found: String,
        /// The name of the row.
        row: &'static str,
        holds: &'static str,
        adds_a_run: &'static str,
        warnings: Vec<String>,
    },
    /// The store must not be used as it is, or this user may not read its settings.
    Unknown { unknown: String },
}

impl Promised {
    pub(crate) async fn by(store: &dyn Store) -> Self {
        match store.check().await {
            Ok(Checkup {
                store,
                survives,
                warnings,
            }) => {
                let promise = survives.promise();
                Self::Known {
                    found: store,
                    row: promise.name,
                    holds: promise.holds,
                    adds_a_run: promise.adds_a_run,
                    warnings,
                }
            }
            Err(error) => Self::Unknown {
                unknown: error.to_string(),
            },
        }
    }

    /// Adds the lines of the promise to a table.
    pub(crate) fn tell(&self, table: &mut Table) {
        match self {
            Self::Known {
                found,
                row,
                holds,
                adds_a_run,
                warnings,
            } => {
                table.text("found", found);
                table.text("promise", format!("{row}: {holds}"));
                table.text("runs again", format!("after {adds_a_run}"));
                warnings
                    .iter()
                    .for_each(|warning| table.text("warning", warning));
            }
            Self::Unknown { unknown } => table.text("promise", format!("unknown: {unknown}")),
        }
    }
}
