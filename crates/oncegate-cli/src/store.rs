//! Parses `--store` and connects to the store. No other module parses store URLs.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use oncegate::core::key::{Scope, StoreKey};
use oncegate::core::store::{Store, StoreError};
use oncegate::journal::JournalEntry;
use oncegate::postgres::{PostgresSettings, PostgresStore};
use oncegate::redis::{RedisSettings, RedisStore};
use oncegate::sqlite::SqliteStore;

use crate::config::shape;
use crate::config::values::Secret;
use crate::exit::{Exit, Problem};

/// The known forms, for errors about an unknown one.
const KNOWN: &str = "known are redis://host:port, redis+cluster://host:port,host:port, \
                     redis+sentinel://host:port,host:port/name (rediss for TLS), postgres://host:port/database, and \
                     sqlite:path or the plain path of an SQLite file";

/// A store of which only the URL is known.
#[derive(Debug)]
pub(crate) struct StoreUrl {
    pub(crate) url: String,
}

/// Checks that it is the URL of a store that this build knows.
///
/// # Errors
/// With the known ones.
pub(crate) fn check(url: &str) -> Result<(), Problem> {
    address(url).map(drop)
}

/// The purpose for which a store is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Consume,
    Read,
}

/// A store, and the same by its kind, for what only some kinds can be asked.
pub(crate) struct Opened {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) redis: Option<RedisStore>,
    sql: Option<SqlStore>,
}

/// A store in a database, which may have outboxes.
pub(crate) enum SqlStore {
    Postgres(PostgresStore),
    Sqlite(SqliteStore),
}

impl Opened {
    fn redis(store: RedisStore) -> Self {
        Self {
            store: Arc::new(store.clone()),
            redis: Some(store),
            sql: None,
        }
    }

    fn sqlite(store: SqliteStore) -> Self {
        Self {
            store: Arc::new(store.clone()),
            redis: None,
            sql: Some(SqlStore::Sqlite(store)),
        }
    }

    fn postgres(store: PostgresStore) -> Self {
        Self {
            store: Arc::new(store.clone()),
            redis: None,
            sql: Some(SqlStore::Postgres(store)),
        }
    }

    /// The last entries for a key in the store's own journal; empty where it has none.
    pub(crate) async fn history(
        &self,
        key: &StoreKey,
        most: u32,
    ) -> Result<Vec<JournalEntry>, Problem> {
        Ok(match &self.sql {
            Some(SqlStore::Postgres(store)) => store.journal(key, most).await?,
            Some(SqlStore::Sqlite(store)) => store.journal(key, most).await?,
            None => Vec::new(),
        })
    }
}

/// The error of a store that has no outboxes.
const NO_OUTBOX: &str =
    "an outbox is a table beside the rows of its effects: it needs postgres:// or an SQLite file";

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

/// Connects to the database of outboxes, and waits for a server that is away until `patience` is
/// over. It creates no file and purges no records.
///
/// # Errors
/// Also when the store is no SQL database.
pub(crate) async fn open_sql(
    store: &shape::Store,
    patience: Duration,
) -> Result<SqlStore, Problem> {
    let opened = open(store, Purpose::Read, patience).await?;
    opened
        .sql
        .ok_or_else(|| Problem::configuration(format!("store: {NO_OUTBOX}")))
}

/// Connects to a store that must be PostgreSQL. Nothing is purged.
pub(crate) async fn open_postgres(store: &shape::Store) -> Result<PostgresStore, Problem> {
    let address = address(store.url.as_deref().unwrap_or_default())?;
    if matches!(address, Address::Postgres(_))
        && let Some(SqlStore::Postgres(store)) = open_to_read(store).await?.sql
    {
        return Ok(store);
    }
    Err(Problem::configuration(
        "--store: only postgres://host:port/database needs its tables created by a command",
    ))
}

/// A server with records of a trial, which are removed after it.
#[derive(Clone)]
pub(crate) enum TrialServer {
    Redis(RedisStore),
    Postgres(PostgresStore),
}

impl TrialServer {
    /// Connects to the server. Nothing is purged.
    ///
    /// # Errors
    /// Also when the URL is that of a file.
    pub(crate) async fn open(url: &str) -> Result<Self, Problem> {
        match address(url)? {
            Address::Redis(url) => Ok(Self::Redis(RedisStore::connect(&url).await?)),
            Address::Postgres(url) => Ok(Self::Postgres(postgres(&url).await?)),
            Address::Sqlite(_) => {
                let text = "--store: a trial uses SQLite files of its own without this flag; give redis://host:port or postgres://host:port/database";
                Err(Problem::new(Exit::Usage, text))
            }
        }
    }

    pub(crate) fn store(&self) -> Arc<dyn Store> {
        match self {
            Self::Redis(store) => Arc::new(store.clone()),
            Self::Postgres(store) => Arc::new(store.clone()),
        }
    }

    /// Removes these records, and the descriptor of their scope.
    pub(crate) async fn remove(&self, scope: &Scope, keys: &[StoreKey]) -> Result<(), StoreError> {
        match self {
            Self::Redis(store) => store.remove(scope, keys).await,
            Self::Postgres(store) => store.remove(scope, keys).await,
        }
    }
}

/// The SQLite file of a configuration, if it does not exist yet.
pub(crate) fn file_to_be_made(store: &shape::Store) -> Option<PathBuf> {
    file_of(store.url.as_deref()?).filter(|path| !path.exists())
}

/// The file of a store's URL, if it is one of SQLite.
pub(crate) fn file_of(url: &str) -> Option<PathBuf> {
    match address(url).ok()? {
        Address::Sqlite(path) => Some(path),
        _ => None,
    }
}

/// The store for people: a file by its absolute path, a URL without user, password and parameters.
pub(crate) fn named(url: &str) -> String {
    let file = file_of(url).and_then(|path| std::path::absolute(path).ok());
    file.map_or_else(
        || redacted(url),
        |path| format!("sqlite:{}", path.display()),
    )
}

async fn open(
    store: &shape::Store,
    purpose: Purpose,
    patience: Duration,
) -> Result<Opened, Problem> {
    let (password, password_file) = secret(store.password.as_ref())?;
    let (sentinel_password, sentinel_password_file) = secret(store.sentinel_password.as_ref())?;
    let url = with_password(
        store.url.as_deref().unwrap_or_default(),
        password.as_deref(),
    );
    match address(&url)? {
        Address::Sqlite(path) => {
            let builder = SqliteStore::builder(path);
            let builder = match purpose {
                Purpose::Consume => builder.settings(store.sqlite.clone()),
                // The journal would be created where it is missing, and a command that inspects
                // must change nothing.
                Purpose::Read => builder.must_exist().without_purge(),
            };
            Ok(Opened::sqlite(builder.open().await?))
        }
        Address::Postgres(url) => {
            let settings = PostgresSettings {
                tls: store.tls.clone(),
                password_file,
                ..store.postgres.clone()
            };
            let mut builder = PostgresStore::builder(&url).settings(settings);
            if purpose == Purpose::Read {
                builder = builder.without_purge();
            }
            let opened = builder.start_patience(patience).connect().await?;
            Ok(Opened::postgres(opened))
        }
        Address::Redis(url) => {
            let settings = RedisSettings {
                tls: store.tls.clone(),
                password_file,
                sentinel_password_file,
                ..store.redis.clone()
            };
            let user = settings.sentinel_user.clone().unwrap_or_default();
            let mut builder = RedisStore::builder(&url).settings(settings);
            if let Some(password) = sentinel_password {
                builder = builder.sentinel_login(user, password);
            }
            // A command that inspects reports such a policy with everything else, instead of it
            // alone.
            if purpose == Purpose::Read {
                builder = builder.allow_evicting_policy();
            }
            let opened = builder.start_patience(patience).connect().await?;
            Ok(Opened::redis(opened))
        }
    }
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

/// The URL with a password in it, percent-encoded so that no character of the password ends it
/// early.
fn with_password(url: &str, password: Option<&str>) -> String {
    let (Some(password), Some((scheme, rest))) = (password, url.split_once("://")) else {
        return url.to_owned();
    };
    let (user, rest) = rest
        .rsplit_once('@')
        .map_or(("", rest), |(user, rest)| (user, rest));
    let user = user.split(':').next().unwrap_or_default();
    let spelt: String = password
        .bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect();
    format!("{scheme}://{user}:{spelt}@{rest}")
}

#[derive(Debug, PartialEq, Eq)]
enum Address {
    Redis(String),
    Postgres(String),
    Sqlite(PathBuf),
}

impl StoreUrl {
    /// Connects.
    pub(crate) async fn open(&self) -> Result<Opened, Problem> {
        match address(&self.url)? {
            Address::Redis(url) => Ok(Opened::redis(RedisStore::connect(&url).await?)),
            Address::Postgres(url) => Ok(Opened::postgres(postgres(&url).await?)),
            Address::Sqlite(path) => {
                // Opening would create an empty file, and every message would seem to be new.
                if !path.is_file() {
                    return Err(no_file(&path));
                }
                let store = SqliteStore::builder(path).must_exist().without_purge();
                Ok(Opened::sqlite(store.open().await?))
            }
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

/// Commands do not purge: that is left to the consumers.
async fn postgres(url: &str) -> Result<PostgresStore, Problem> {
    Ok(PostgresStore::builder(url)
        .without_purge()
        .connect()
        .await?)
}

/// Returns the kind of the store at this URL, by the name of its product; `None` for a wrong URL.
pub(crate) fn kind(url: &str) -> Option<&'static str> {
    understood(url).ok().map(|address| match address {
        Address::Redis(_) => "Redis",
        Address::Postgres(_) => "PostgreSQL",
        Address::Sqlite(_) => "SQLite",
    })
}

fn address(url: &str) -> Result<Address, Problem> {
    understood(url).map_err(|why| Problem::configuration(format!("--store: {why}; {KNOWN}")))
}

fn understood(url: &str) -> Result<Address, String> {
    if url.trim() != url {
        return Err("it begins or ends with a blank".to_owned());
    }
    // A single letter is a drive of Windows.
    let parts = url.split_once(':').filter(|(scheme, _)| is_scheme(scheme));
    match parts {
        Some(("postgres" | "postgresql", _)) => Ok(Address::Postgres(url.to_owned())),
        // The store itself reports errors in the rest.
        Some((scheme, _)) if matches!(scheme.split('+').next(), Some("redis" | "rediss")) => {
            Ok(Address::Redis(url.to_owned()))
        }
        Some(("sqlite", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                Err("sqlite: names no file".to_owned())
            } else {
                Ok(Address::Sqlite(path.into()))
            }
        }
        // A file of that name would be a store of each host's own.
        _ if is_like_address(url) => Err(
            "it looks like the address of a server: begin it with redis:// or postgres://"
                .to_owned(),
        ),
        Some((scheme, _)) => Err(format!(
            "`{scheme}` is not a kind of store that this build knows"
        )),
        None if url.is_empty() => Err("it is empty".to_owned()),
        None => Ok(Address::Sqlite(url.into())),
    }
}

/// Returns whether this text without a known scheme names a server: by a login, or by the port of
/// one of its hosts. Paths that begin with `/` or `.` name files, whatever follows.
fn is_like_address(text: &str) -> bool {
    if text.starts_with(['/', '.']) {
        return false;
    }
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    // What another scheme than ours says is told by its name.
    if !scheme.is_empty() && is_scheme(scheme) {
        return false;
    }
    !scheme.is_empty() || rest.contains('@') || rest.split(',').any(has_port)
}

fn has_port(host: &str) -> bool {
    let host = host.split(['/', '?', '#']).next().unwrap_or_default();
    host.rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

fn is_scheme(text: &str) -> bool {
    text.len() > 1
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'))
}

/// For people: without user, password and parameters.
pub(crate) fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        // Only the path of a file has no scheme; before an `@` in anything else may be a password.
        return match url.rsplit_once('@') {
            Some((_, rest)) if !url.starts_with(['/', '.']) && !url.starts_with("sqlite:") => {
                format!("***@{rest}")
            }
            _ => url.to_owned(),
        };
    };
    let (rest, parameters) = rest
        .split_once('?')
        .map_or((rest, ""), |(rest, _)| (rest, "?***"));
    // The last `@` ends the password, whatever the password contains.
    let (user, rest) = rest
        .rsplit_once('@')
        .map_or(("", rest), |(_, rest)| ("***@", rest));
    format!("{scheme}://{user}{rest}{parameters}")
}

#[cfg(test)]
mod tests;
