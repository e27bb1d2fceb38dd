//! The registry of stores: one file for each kind that a URL can name. No other module knows the
//! kinds.
//!
//! A [`StoreKind`] says all that the commands ask of a kind before it is opened: its URLs, its
//! settings and what is wrong with them. What it opens is an [`Opened`]: the store itself, and what
//! only some kinds have, such as a journal, outboxes, or tables that a command makes. A new kind is
//! a file here, a line of `KINDS`, and a field of its settings in
//! [`shape::Store`](crate::config::shape::Store).

mod address;
mod dynamodb;
mod postgres;
mod redis;
mod sqlite;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::settings::Finding;
use oncegate::core::store::{Store, StoreError};
use oncegate::journal::JournalEntry;
use oncegate::outbox::OutboxStore;
use oncegate::redis::RedisStore;
use schemars::Schema;

pub(crate) use self::address::{check, named, redacted};
use crate::config::shape;
use crate::config::values::Secret;
use crate::exit::{Exit, Problem};

/// The kinds, in the order in which errors list them. A text without a scheme is for the last one.
const KINDS: [&dyn StoreKind; 4] = [
    &redis::Redis,
    &postgres::Postgres,
    &dynamodb::DynamoDb,
    &sqlite::Sqlite,
];

/// The kind whose tables are printed when no store is named.
const TABLES_OF_DEFAULT: &dyn StoreKind = &postgres::Postgres;

/// A kind of store, by what the commands ask before one is opened.
#[async_trait]
pub(crate) trait StoreKind: Sync {
    /// The name of its product.
    fn name(&self) -> &'static str;

    /// The forms of its URLs, for errors about an unknown one.
    fn forms(&self) -> &'static str;

    /// Returns whether URLs with this scheme are of this kind.
    fn has_scheme(&self, scheme: &str) -> bool;

    /// Checks a URL with a scheme of this kind. Returns the part that the store is opened with.
    ///
    /// # Errors
    /// With what is wrong.
    fn location(&self, url: &str) -> Result<String, String> {
        Ok(url.to_owned())
    }

    /// The schema of its settings.
    fn schema(&self) -> Schema;

    /// Returns what is wrong with these settings in the view of this kind; `url` is that of the
    /// store, and `is_chosen` tells whether it is one of this kind.
    fn findings(&self, _settings: &shape::Store, _url: &str, _is_chosen: bool) -> Vec<Finding> {
        Vec::new()
    }

    /// The file of a store of this kind; `None` where it is on a server.
    fn file(&self, _location: &str) -> Option<PathBuf> {
        None
    }

    /// Returns whether such a store has outboxes: tables beside the rows of effects.
    fn has_outboxes(&self) -> bool {
        false
    }

    /// Returns why trials cannot use such a store; `None` if they can.
    fn why_no_trials(&self) -> Option<&'static str> {
        None
    }

    /// Returns the statements or templates that make its tables, without connecting to it. `None`
    /// if it needs no tables made by a command.
    ///
    /// # Errors
    /// When what is asked for does not exist for this kind.
    fn statements(
        &self,
        _location: &str,
        _asked: &Statements<'_>,
    ) -> Result<Option<String>, String> {
        Ok(None)
    }

    /// Connects.
    ///
    /// # Errors
    /// When it cannot be reached, or refuses.
    async fn open(&self, opening: Opening<'_>) -> Result<Opened, Problem>;
}

/// The parts that are to be printed of a store's tables.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Statements<'a> {
    pub(crate) journal: bool,
    /// The role that is to get the rights of a consumer.
    pub(crate) role: Option<&'a str>,
}

/// The purpose for which a store is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// As a consumer does.
    Consume,
    /// For a command that names the store by its URL: purges nothing.
    Command,
    /// To look at it: purges nothing, and settings that break the promise are no errors yet.
    Read,
}

/// The way in which a store is opened.
pub(crate) struct Opening<'a> {
    /// The URL with its password, or the path of a file.
    location: &'a str,
    settings: &'a shape::Store,
    /// The file of the password, which is read for each new connection.
    password_file: Option<PathBuf>,
    purpose: Purpose,
    /// The time for which a server that is away is waited for.
    patience: Duration,
}

/// The questions that stores of some kinds can be asked besides the port of all stores.
#[async_trait]
trait Extras: Send + Sync {
    /// The last entries for a key in the store's own journal; empty where it has none.
    async fn history(&self, _key: &StoreKey, _most: u32) -> Result<Vec<JournalEntry>, StoreError> {
        Ok(Vec::new())
    }

    /// The outbox of this name.
    async fn outbox(&self, _name: &str) -> Result<Arc<dyn OutboxStore>, Problem> {
        Err(Problem::configuration(format!("store: {NO_OUTBOX}")))
    }

    /// The work that its tables need; `None` if a command makes none.
    async fn table_change(&self) -> Result<Option<TableChange>, StoreError> {
        Ok(None)
    }

    /// Makes the tables, or changes them.
    async fn make_tables(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Removes these records, and the descriptor of their scope.
    async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError>;
}

/// The work that the tables of a store need.
#[derive(Clone, Debug)]
pub(crate) struct TableChange {
    /// The format of the tables that are there; `None` when there are none.
    pub(crate) from: Option<u32>,
    /// The format of this release.
    pub(crate) to: u32,
    /// The statements or calls, to be read; empty when there is nothing to do.
    pub(crate) text: String,
}

/// A store of which only the URL is known.
#[derive(Debug)]
pub(crate) struct StoreUrl {
    pub(crate) url: String,
}

/// A store, and what its kind has besides.
pub(crate) struct Opened {
    pub(crate) store: Arc<dyn Store>,
    /// The same, for what `doctor` asks the servers of a Redis.
    pub(crate) redis: Option<RedisStore>,
    extras: Box<dyn Extras>,
}

impl Opened {
    fn new<S: Store + Extras + Clone + 'static>(store: S) -> Self {
        Self {
            store: Arc::new(store.clone()),
            redis: None,
            extras: Box::new(store),
        }
    }

    /// The last entries for a key in the store's own journal; empty where it has none.
    pub(crate) async fn history(
        &self,
        key: &StoreKey,
        most: u32,
    ) -> Result<Vec<JournalEntry>, Problem> {
        Ok(self.extras.history(key, most).await?)
    }

    /// The outbox of this name.
    ///
    /// # Errors
    /// Also when the store has no outboxes.
    pub(crate) async fn outbox(&self, name: &str) -> Result<Arc<dyn OutboxStore>, Problem> {
        self.extras.outbox(name).await
    }

    /// The work that the tables of the store need.
    ///
    /// # Errors
    /// Also when it needs none that are made by a command.
    pub(crate) async fn table_change(&self) -> Result<TableChange, Problem> {
        let change = self.extras.table_change().await?;
        change.ok_or_else(no_tables)
    }

    /// Makes the tables, or changes them.
    ///
    /// # Errors
    /// When the store does not answer, or refuses.
    pub(crate) async fn make_tables(&self) -> Result<(), Problem> {
        Ok(self.extras.make_tables().await?)
    }

    /// Removes these records, and the descriptor of their scope.
    ///
    /// # Errors
    /// When the store does not answer, or refuses.
    pub(crate) async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        self.extras.remove(scope, keys).await
    }
}

/// The error of a store that has no outboxes.
pub(crate) const NO_OUTBOX: &str =
    "an outbox is a table beside the rows of its effects: it needs postgres:// or an SQLite file";

fn no_tables() -> Problem {
    let kinds: Vec<&str> = KINDS
        .iter()
        .filter(|kind| matches!(kind.statements("", &Statements::NONE), Ok(Some(_))))
        .map(|kind| kind.forms())
        .collect();
    Problem::configuration(format!(
        "--store: only {} needs its tables created by a command",
        kinds.join(" and ")
    ))
}

impl Statements<'_> {
    const NONE: Self = Self {
        journal: false,
        role: None,
    };
}

/// Returns the statements that make the tables of a store at this URL, or of the kind that most
/// need them for, without connecting to it.
///
/// # Errors
/// When the URL is wrong, or the store needs no tables made by a command.
pub(crate) fn statements(url: Option<&str>, asked: &Statements<'_>) -> Result<String, Problem> {
    let found = match url {
        Some(url) => {
            let address = address::known(url)?;
            address.kind.statements(&address.location, asked)
        }
        None => TABLES_OF_DEFAULT.statements("", asked),
    };
    let found = found.map_err(|why| Problem::new(Exit::Usage, why))?;
    found.ok_or_else(no_tables)
}

/// Connects to the store of a configuration, as a consumer does: purges expired records, creates an
/// SQLite file, and waits for a server that is away until `patience` is over.
pub(crate) async fn open_configured(
    store: &shape::Store,
    patience: Duration,
) -> Result<Arc<dyn Store>, Problem> {
    open(store, Purpose::Consume, patience)
        .await
        .map(|opened| opened.store)
}

/// Connects to the store of a configuration without changing it: purges nothing, and a missing file
/// is an error.
pub(crate) async fn open_existing(store: &shape::Store) -> Result<Opened, Problem> {
    match file_to_be_made(store) {
        Some(path) => Err(no_file(&path)),
        None => open_to_read(store).await,
    }
}

/// Connects to the store of a configuration without changing it: creates no file, and purges
/// nothing.
pub(crate) async fn open_to_read(store: &shape::Store) -> Result<Opened, Problem> {
    open(store, Purpose::Read, Duration::ZERO).await
}

/// Connects to the database of an outbox, and waits for a server that is away until `patience` is
/// over. It creates no file and purges no records.
///
/// # Errors
/// Also when the store has no outboxes.
pub(crate) async fn open_outbox(
    store: &shape::Store,
    name: &str,
    patience: Duration,
) -> Result<Arc<dyn OutboxStore>, Problem> {
    open(store, Purpose::Read, patience)
        .await?
        .outbox(name)
        .await
}

/// Connects to a store whose tables are made by a command. Nothing is purged.
///
/// # Errors
/// Also when it needs none, before it is connected to.
pub(crate) async fn open_with_tables(store: &shape::Store) -> Result<Opened, Problem> {
    statements(
        Some(store.url.as_deref().unwrap_or_default()),
        &Statements::NONE,
    )?;
    open_to_read(store).await
}

/// A server with records of a trial, which are removed after it.
#[derive(Clone)]
pub(crate) struct TrialServer(Arc<Opened>);

impl TrialServer {
    /// Connects to the server. Nothing is purged.
    ///
    /// # Errors
    /// Also when the URL is that of a file.
    pub(crate) async fn open(url: &str) -> Result<Self, Problem> {
        if let Some(why) = address::known(url)?.kind.why_no_trials() {
            return Err(Problem::new(Exit::Usage, format!("--store: {why}")));
        }
        let settings = StoreUrl {
            url: url.to_owned(),
        }
        .settings();
        let opened = open(&settings, Purpose::Command, Duration::ZERO).await?;
        Ok(Self(Arc::new(opened)))
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.0.store)
    }

    /// Removes these records, and the descriptor of their scope.
    pub(crate) async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        self.0.remove(scope, keys).await
    }
}

/// The file of a configuration's store, if it is one and does not exist yet.
pub(crate) fn file_to_be_made(store: &shape::Store) -> Option<PathBuf> {
    file_of(store.url.as_deref()?).filter(|path| !path.exists())
}

/// The file of a store's URL, if it is one.
pub(crate) fn file_of(url: &str) -> Option<PathBuf> {
    let address = address::understood(url).ok()?;
    address.kind.file(&address.location)
}

/// Returns the kind of the store at this URL, by the name of its product; `None` for a wrong URL.
pub(crate) fn kind(url: &str) -> Option<&'static str> {
    address::understood(url)
        .ok()
        .map(|address| address.kind.name())
}

/// The schema of the settings of each kind, with the name of its product.
pub(crate) fn schemas() -> Vec<(&'static str, Schema)> {
    KINDS
        .iter()
        .map(|kind| (kind.name(), kind.schema()))
        .collect()
}

/// Returns whether the store at this URL has no outboxes. A wrong URL is reported elsewhere.
pub(crate) fn lacks_outboxes(url: &str) -> bool {
    address::understood(url).is_ok_and(|address| !address.kind.has_outboxes())
}

/// Returns what does not fit the store at this URL in its settings, in the words of each kind.
pub(crate) fn findings(settings: &shape::Store, url: &str) -> Vec<Finding> {
    let chosen = kind(url);
    KINDS
        .iter()
        .flat_map(|kind| kind.findings(settings, url, chosen == Some(kind.name())))
        .collect()
}

async fn open(
    store: &shape::Store,
    purpose: Purpose,
    patience: Duration,
) -> Result<Opened, Problem> {
    let (password, password_file) = secret(store.password.as_ref())?;
    let url = address::with_password(
        store.url.as_deref().unwrap_or_default(),
        password.as_deref(),
    );
    let address::Address { kind, location } = address::known(&url)?;
    let opening = Opening {
        location: &location,
        settings: store,
        password_file,
        purpose,
        patience,
    };
    kind.open(opening).await
}

/// Returns a secret, or the file that the store itself reads it from whenever it connects.
fn secret(secret: Option<&Secret>) -> Result<(Option<String>, Option<PathBuf>), Problem> {
    match secret {
        None => Ok((None, None)),
        Some(Secret::File(path)) => Ok((None, Some(path.clone()))),
        Some(other) => other
            .resolve()
            .map(|secret| (Some(secret), None))
            .map_err(|why| Problem::configuration(format!("store: {why}"))),
    }
}

impl StoreUrl {
    /// Connects. Creates and purges nothing.
    pub(crate) async fn open(&self) -> Result<Opened, Problem> {
        let settings = self.settings();
        // Opening would create an empty file, and every message would seem to be new.
        match file_of(&self.url).filter(|path| !path.is_file()) {
            Some(path) => Err(no_file(&path)),
            None => open(&settings, Purpose::Command, Duration::ZERO).await,
        }
    }

    /// Connects for an examination, which reports a policy that may evict records with everything
    /// else.
    pub(crate) async fn open_to_examine(&self, allow_no_replica: bool) -> Result<Opened, Problem> {
        let mut store = self.settings();
        store.redis.allow_no_replica = allow_no_replica;
        open_existing(&store).await
    }

    /// The settings of the store.
    pub(crate) fn settings(&self) -> shape::Store {
        shape::Store {
            url: Some(self.url.clone()),
            ..shape::Store::default()
        }
    }

    /// For people: a file by its absolute path, a URL without user, password and parameters.
    pub(crate) fn redacted(&self) -> String {
        named(&self.url)
    }
}

fn no_file(path: &std::path::Path) -> Problem {
    Problem::new(
        Exit::Unreachable,
        format!("there is no SQLite file {}", path.display()),
    )
}

#[cfg(test)]
mod tests;
