//! Asks a registry for a schema and all that it refers to, and judges what it answers.
//!
//! A registry that is away holds up its messages. A schema that it does not give while it answers
//! other questions is the fault of the message that names it: otherwise one payload would hold up
//! all that come behind it, for ever.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::client::{Failure, Reference, Registered, RegistryClient};
use crate::framing::SchemaName;

/// The most schemas that one schema uses, directly or not.
const MAX_REFERENCES: usize = 1_000;
/// The time for which a schema that does not exist is asked for again: a follower may be that far
/// behind the registry's leader.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same when a long wait was in vain a short while ago: a producer may send any number of ids
/// that do not exist, and each would hold up the others.
const SHORT_PATIENCE: Duration = Duration::from_millis(500);
/// The time between two long waits that are in vain.
const PATIENT_AGAIN_AFTER: Duration = Duration::from_secs(60);
/// The time between two questions for a schema that does not exist.
const ASKED_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// The number of times that a registry refuses a schema before it is believed.
const REFUSALS: u32 = 3;
/// The time between two questions for a schema that is refused.
const REFUSED_AGAIN_AFTER: Duration = Duration::from_millis(250);

/// The answer of a registry about a schema.
pub(super) enum Answer {
    /// The schema and all that it refers to, each after those that it refers to itself.
    Given(Registered, Vec<(Reference, String)>),
    Missing,
    /// The registry does not give it, or not all of it. It may do so later.
    Refused(String),
    /// The answer can never be used.
    Unfit(String),
}

/// Asks for schemas, with what earlier questions have shown.
#[derive(Default)]
pub(super) struct Questions {
    /// The end of the last long wait for a schema that did not come.
    vain_since: Option<Instant>,
    /// A schema that the registry has given: one that answers for it again is not away.
    good: Option<SchemaName>,
}

impl Questions {
    /// Asks for a schema until the registry has given it, or has made clear that it does not.
    /// `is_again` for one that it did not have a short while ago.
    ///
    /// # Errors
    /// As text: the registry is away, or refuses everything.
    pub(super) async fn ask(
        &mut self,
        client: &RegistryClient,
        name: SchemaName,
        is_again: bool,
    ) -> Result<Answer, String> {
        let begun = Instant::now();
        let patience = if is_again {
            Duration::ZERO
        } else {
            self.patience()
        };
        let mut refusals = 0;
        loop {
            match ask_once(client, name).await {
                Ok(given @ Answer::Given(..)) => {
                    self.good = Some(name);
                    return Ok(given);
                }
                Ok(missing) => {
                    if begun.elapsed() >= patience {
                        if patience == PATIENCE {
                            self.vain_since = Some(Instant::now());
                        }
                        return Ok(missing);
                    }
                    sleep(ASKED_AGAIN_AFTER).await;
                }
                Err(Failure::Away(why)) => return Err(why),
                Err(Failure::Unfit(why)) => return Ok(Answer::Unfit(why)),
                Err(refused) => {
                    refusals += 1;
                    if refusals >= REFUSALS {
                        return self.judge(client, refused).await;
                    }
                    sleep(REFUSED_AGAIN_AFTER).await;
                }
            }
        }
    }

    fn patience(&self) -> Duration {
        match self.vain_since {
            Some(since) if since.elapsed() < PATIENT_AGAIN_AFTER => SHORT_PATIENCE,
            _ => PATIENCE,
        }
    }

    /// Finds out whether a registry that refuses a schema answers other questions.
    async fn judge(&self, client: &RegistryClient, refused: Failure) -> Result<Answer, String> {
        let answers = match (&refused, self.good) {
            (_, Some(good)) => matches!(client.schema(&path(good)).await, Ok(Some(_))),
            (Failure::Refused(_), None) => client.check().await.is_ok(),
            // It may refuse all of them. Only a schema that it gives would show that it does not.
            _ => false,
        };
        let why = refused.into_text();
        if answers {
            Ok(Answer::Refused(why))
        } else {
            Err(why)
        }
    }
}

async fn ask_once(client: &RegistryClient, name: SchemaName) -> Result<Answer, Failure> {
    let Some(registered) = client.schema(&path(name)).await? else {
        return Ok(Answer::Missing);
    };
    Ok(match references(client, &registered).await? {
        Ok(references) => Answer::Given(registered, references),
        Err(missing) => {
            Answer::Refused(format!("the registry has no {missing}, to which it refers"))
        }
    })
}

/// The schemas that a schema uses, each after those that it uses itself; or the path of one
/// that the registry does not have.
async fn references(
    client: &RegistryClient,
    schema: &Registered,
) -> Result<Result<Vec<(Reference, String)>, String>, Failure> {
    let mut found: Vec<(Reference, String)> = Vec::new();
    // Each reference is visited twice: first for its own references, then for itself.
    let mut open: Vec<(Reference, Option<String>)> = pending(schema);
    let mut fetched = 0;
    while let Some((reference, text)) = open.pop() {
        if found.iter().any(|(known, _)| *known == reference) {
            continue;
        }
        if let Some(text) = text {
            found.push((reference, text));
            continue;
        }
        // What has been visited once and is still open leads here.
        if open
            .iter()
            .any(|(before, text)| text.is_some() && before.names_same(&reference))
        {
            return Err(Failure::Unfit(
                "its references lead back to themselves".to_owned(),
            ));
        }
        fetched += 1;
        if fetched > MAX_REFERENCES {
            return Err(Failure::Unfit(format!(
                "it refers to more than {MAX_REFERENCES} schemas"
            )));
        }
        let path = reference.path();
        let Some(registered) = client.schema(&path).await? else {
            return Ok(Err(path));
        };
        let inner = pending(&registered);
        open.push((reference, Some(registered.schema)));
        open.extend(inner);
    }
    Ok(Ok(found))
}

fn path(name: SchemaName) -> String {
    match name {
        SchemaName::Id(id) => format!("/schemas/ids/{id}"),
        SchemaName::Guid(_) => format!("/schemas/guids/{name}"),
    }
}

fn pending(schema: &Registered) -> Vec<(Reference, Option<String>)> {
    let references = schema.references.iter().flatten().rev();
    references
        .map(|reference| (reference.clone(), None))
        .collect()
}

impl Reference {
    fn names_same(&self, other: &Self) -> bool {
        self.subject == other.subject && self.version == other.version
    }

    fn path(&self) -> String {
        format!(
            "/subjects/{}/versions/{}",
            escaped(&self.subject),
            self.version
        )
    }
}

/// A subject in a path.
fn escaped(subject: &str) -> String {
    let mut text = String::new();
    for byte in subject.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}
