//! Standard input.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::dead_letters;
use oncegate::source::{Source, SourceError, Terms};
use schemars::JsonSchema;
use serde::Deserialize;

use super::dead_letter_file::DeadLetterFile;
use super::input::{Input, STDIN};
use super::{ConfiguredSource, DeadLetters, SourceFinding, SourceSettings, Template, next};

/// The name of the table.
pub(super) const TABLE: &str = "stdin";
/// The reason that messages of another source cannot have dead letters in a file.
pub(super) const LETTERS_NEED_STDIN: &str =
    "only messages of standard input can have dead letters in a file";

/// The lines of standard input, each a message, to its end.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Stdin {
    /// The route of the lines, a part of their keys: with the name of a topic, a line and a message
    /// of that topic may be duplicates.
    #[schemars(extend("default" = STDIN))]
    pub(crate) route: Option<String>,
}

impl Stdin {
    fn route(&self) -> String {
        self.route.clone().unwrap_or_else(|| STDIN.to_owned())
    }
}

/// Returns what `init` writes.
pub(super) fn template(messages: &str) -> Template {
    Template {
        source: "{ stdin = {} }".to_owned(),
        dead_letters: r#"{ file = "dead.jsonl" }"#.to_owned(),
        about: "Each line of standard input is a message; oncegate ends at the end of the input.",
        store: "sqlite:oncegate.db",
        next: vec![next::CHECK.to_owned(), format!("{} <{messages}", next::RUN)],
    }
}

impl SourceSettings for Stdin {
    fn table(&self) -> &'static str {
        TABLE
    }

    fn findings(&self) -> Vec<SourceFinding<'_>> {
        let is_empty = self.route.as_deref() == Some("");
        is_empty
            .then_some(SourceFinding::Missing(
                "route",
                "the route of the lines, such as \"orders\"",
            ))
            .into_iter()
            .collect()
    }

    fn refuse_letters(&self, letters: &DeadLetters) -> Option<(&'static str, String)> {
        letters.file.is_none().then(|| {
            let why =
                "messages of standard input have their dead letters in a file: { file = \"dead.jsonl\" }";
            ("", why.to_owned())
        })
    }

    fn routes(&self) -> Vec<String> {
        vec![self.route()]
    }

    fn is_complete(&self) -> bool {
        true
    }

    fn open(&self, _: &str, _: Duration) -> Result<Box<dyn ConfiguredSource>, String> {
        Ok(Box::new(Input::standard(self.route())))
    }

    fn open_without_secrets(&self, name: &str) -> Result<Box<dyn ConfiguredSource>, String> {
        self.open(name, Duration::ZERO)
    }
}

#[async_trait]
impl ConfiguredSource for Input {
    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    async fn examine(&self, _: &Terms) -> Result<Vec<String>, SourceError> {
        Ok(Vec::new())
    }

    fn input(&self) -> Option<Input> {
        Some(self.clone())
    }

    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>> {
        Some(Arc::new(DeadLetterFile::new(to.file.as_ref()?)))
    }

    fn into_source(self: Box<Self>) -> Arc<dyn Source> {
        Arc::from(self as Box<dyn Source>)
    }
}
