//! Schemas from a registry that speaks Confluent's API.
//!
//! A schema never changes under its id, so it is fetched once and kept. One request at a time is
//! sent, and messages that wait for the same schema share its answer.

mod asking;
mod client;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::header::HeaderValue;
use oncegate_core::key::{KeyError, PrepareError};
use parking_lot::RwLock;
use tokio::sync::Mutex;
use tokio::time::Instant;

use self::asking::{Answer, Questions};
use self::client::{Reference, Registered, RegistryClient};
use crate::SchemaError;
use crate::avro::AvroSchema;
use crate::framing::SchemaName;
use crate::protobuf::{ProtoFile, ProtobufSchema};

/// The most ids without a usable schema that are remembered. Schemas are never forgotten: the
/// registry bounds their number, while a producer may send any id.
const MAX_REFUSED: usize = 10_000;
/// The time in which a schema that does not exist, or is refused, is not asked for again: it may be
/// registered yet.
const MISSING_FOR: Duration = Duration::from_secs(5);
/// The highest id that a registry gives: they count in 32 bits with a sign.
const MAX_ID: u32 = i32::MAX.cast_unsigned();
/// The file name of a Protobuf schema itself; others import each other by the names of their
/// references.
const ROOT_FILE: &str = "oncegate-root.proto";

/// A registry: its address, and the login.
pub struct Registry {
    urls: Vec<String>,
    authorization: Option<HeaderValue>,
    tls_root: Option<PathBuf>,
}

impl Registry {
    /// A registry that speaks Confluent's API at this URL, or at several with commas between them,
    /// of which the first one that answers is used: `http://localhost:8081`,
    /// `https://registry/apis/ccompat/v7`. A login in a URL, `https://user:password@registry`, is
    /// used for it.
    #[must_use]
    pub fn new(url: &str) -> Self {
        let urls = url
            .split(',')
            .map(|url| url.trim().trim_end_matches('/').to_owned());
        Self {
            urls: urls.collect(),
            authorization: None,
            tls_root: None,
        }
    }

    /// Logs in with a user name and a password, or an API key and its secret.
    ///
    /// # Errors
    /// When they cannot be sent.
    pub fn basic_auth(mut self, user: &str, password: &str) -> Result<Self, SchemaError> {
        self.authorization = Some(client::basic(user, password)?);
        Ok(self)
    }

    /// Logs in with a bearer token.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub fn bearer(mut self, token: &str) -> Result<Self, SchemaError> {
        self.authorization = Some(client::bearer(token)?);
        Ok(self)
    }

    /// Trusts the certificate authorities of this file, in PEM, instead of those of the machine.
    #[must_use]
    pub fn tls_root(mut self, file: impl Into<PathBuf>) -> Self {
        self.tls_root = Some(file.into());
        self
    }

    /// The addresses for people: with `***` in the place of a login.
    #[must_use]
    pub fn addresses(&self) -> String {
        client::without_login(&self.urls.join(","))
    }

    pub(crate) fn open(self) -> Result<Schemas, SchemaError> {
        let client = RegistryClient::new(&self.urls, self.authorization, self.tls_root.as_deref())?;
        Ok(Schemas {
            urls: client.urls(),
            client,
            reader: None,
            kept: RwLock::default(),
            asking: Mutex::default(),
        })
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("urls", &self.addresses())
            .finish_non_exhaustive()
    }
}

/// The schemas of a registry, as far as they were needed.
pub(crate) struct Schemas {
    urls: String,
    client: RegistryClient,
    /// The names and defaults that the schemas have besides their own.
    reader: Option<AvroSchema>,
    kept: RwLock<Cache>,
    /// The lock of the caller that asks.
    asking: Mutex<Asking>,
}

#[derive(Default)]
struct Asking {
    /// The last failure, for callers that waited meanwhile.
    last_failure: Option<(Instant, PrepareError)>,
    questions: Questions,
}

#[derive(Default)]
struct Cache {
    schemas: HashMap<SchemaName, Lookup>,
    /// The names without a usable schema, in the order in which they came.
    refused: std::collections::VecDeque<SchemaName>,
}

/// The registry's answer about a schema.
#[derive(Clone)]
enum Lookup {
    Schema(Arc<Schema>),
    Missing {
        since: Instant,
    },
    Unusable {
        why: Arc<str>,
    },
    /// The registry does not give it, or not all of it.
    Refused {
        why: Arc<str>,
        since: Instant,
    },
}

/// A schema that can decode payloads.
#[derive(Debug)]
pub(crate) enum Schema {
    Avro(AvroSchema),
    Protobuf(ProtobufSchema),
    /// A JSON Schema. JSON needs no schema to be read, so nothing is kept of it.
    Json,
}

impl Schemas {
    /// Adds the names and defaults of this reader schema to the schemas that are fetched from now
    /// on.
    pub(crate) fn read_with(&mut self, reader: AvroSchema) {
        self.reader = Some(reader);
    }

    /// The schema, if it was fetched.
    pub(crate) fn get(&self, name: SchemaName) -> Result<Arc<Schema>, KeyError> {
        let unknown = KeyError::UnknownSchema {
            schema: name.to_string(),
        };
        if cannot_exist(name) {
            return Err(unknown);
        }
        let kept = self.kept.read();
        match kept.schemas.get(&name) {
            None => Err(KeyError::NotPrepared),
            Some(Lookup::Schema(schema)) => Ok(Arc::clone(schema)),
            Some(Lookup::Missing { .. }) => Err(unknown),
            Some(Lookup::Unusable { why } | Lookup::Refused { why, .. }) => {
                Err(KeyError::UnusableSchema {
                    schema: name.to_string(),
                    why: why.as_ref().to_owned(),
                })
            }
        }
    }

    /// Fetches the schema, unless it is known.
    pub(crate) async fn fetch(&self, name: SchemaName) -> Result<(), PrepareError> {
        if self.is_known(name) {
            return Ok(());
        }
        let since = Instant::now();
        let mut asking = self.asking.lock().await;
        if self.is_known(name) {
            return Ok(());
        }
        let Asking {
            last_failure,
            questions,
        } = &mut *asking;
        // A caller that waited while the registry did not answer gets the same failure. Otherwise
        // the waits would follow one after another.
        if let Some((at, error)) = last_failure
            && *at >= since
        {
            return Err(error.clone());
        }
        let is_again = self.kept.read().schemas.contains_key(&name);
        match questions.ask(&self.client, name, is_again).await {
            Ok(answer) => {
                *last_failure = None;
                self.keep(name, self.read(answer));
                Ok(())
            }
            Err(why) => {
                let what = format!(
                    "the schema registry {} does not give schema {name}: {why}",
                    self.urls
                );
                let error = PrepareError { what };
                *last_failure = Some((Instant::now(), error.clone()));
                Err(error)
            }
        }
    }

    /// Asks the registry for something that every registry has.
    pub(crate) async fn check(&self) -> Result<(), PrepareError> {
        let answer = self.client.check().await;
        answer.map_err(|why| PrepareError {
            what: format!("the schema registry {}: {why}", self.urls),
        })
    }

    fn is_known(&self, name: SchemaName) -> bool {
        if cannot_exist(name) {
            return true;
        }
        let kept = self.kept.read();
        match kept.schemas.get(&name) {
            None => false,
            Some(Lookup::Missing { since } | Lookup::Refused { since, .. }) => {
                since.elapsed() < MISSING_FOR
            }
            Some(Lookup::Schema(_) | Lookup::Unusable { .. }) => true,
        }
    }

    fn read(&self, answer: Answer) -> Lookup {
        let since = Instant::now();
        match answer {
            Answer::Given(schema, references) => {
                match compile(&schema, &references, self.reader.as_ref()) {
                    Ok(schema) => Lookup::Schema(schema.into()),
                    Err(why) => Lookup::Unusable { why: why.into() },
                }
            }
            Answer::Missing => Lookup::Missing { since },
            Answer::Refused(why) => Lookup::Refused {
                why: why.into(),
                since,
            },
            Answer::Unfit(why) => Lookup::Unusable { why: why.into() },
        }
    }

    fn keep(&self, name: SchemaName, answer: Lookup) {
        let mut kept = self.kept.write();
        let is_refused = !matches!(answer, Lookup::Schema(_));
        if kept.schemas.insert(name, answer).is_none() && is_refused {
            kept.refused.push_back(name);
        }
        while kept.refused.len() > MAX_REFUSED {
            let Some(oldest) = kept.refused.pop_front() else {
                break;
            };
            // The schema may have been registered since.
            if !matches!(kept.schemas.get(&oldest), Some(Lookup::Schema(_))) {
                kept.schemas.remove(&oldest);
            }
        }
    }
}

/// Returns whether no registry has a schema of this name: it is not asked for it.
fn cannot_exist(name: SchemaName) -> bool {
    matches!(name, SchemaName::Id(id) if id > MAX_ID)
}

impl fmt::Debug for Schemas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Schemas")
            .field("urls", &self.urls)
            .finish_non_exhaustive()
    }
}

fn compile(
    schema: &Registered,
    references: &[(Reference, String)],
    reader: Option<&AvroSchema>,
) -> Result<Schema, String> {
    match schema.kind.as_deref() {
        None | Some("AVRO") => {
            let references: Vec<&str> = references.iter().map(|(_, text)| text.as_str()).collect();
            let schema = AvroSchema::parse(&schema.schema, &references)?;
            Ok(Schema::Avro(match reader {
                Some(reader) => schema.resolved(reader)?,
                None => schema,
            }))
        }
        Some("PROTOBUF") => {
            let root = ProtoFile {
                name: ROOT_FILE.to_owned(),
                text: schema.schema.clone(),
            };
            let imports = references.iter().map(|(reference, text)| ProtoFile {
                name: reference.name.clone(),
                text: text.clone(),
            });
            let files: Vec<ProtoFile> = std::iter::once(root).chain(imports).collect();
            ProtobufSchema::compile(&files).map(Schema::Protobuf)
        }
        Some("JSON") => Ok(Schema::Json),
        Some(other) => Err(format!(
            "it is of the type {other}; known are AVRO, PROTOBUF and JSON"
        )),
    }
}
