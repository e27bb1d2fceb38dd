//! The consumer that a command is about, from a configuration: what no flag says comes from there.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use oncegate::outbox::OutboxStore;

use crate::config::{self, Loaded, Secrets, shape};
use crate::exit::{Exit, Problem};
use crate::sources::SourceSettings;
use crate::stores::{self, Opened, StoreUrl};

/// The configuration in the working directory of a command that names none.
pub(crate) const BESIDE: &str = "oncegate.toml";

/// The configuration of a command.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ConfigArgs {
    /// The configuration, for what no flag says [default: oncegate.toml in the working directory,
    /// if there is one; for commands that look, only without flags of settings]
    #[arg(long, value_name = "FILE", env = "ONCEGATE_CONFIG")]
    config: Option<PathBuf>,
}

impl ConfigArgs {
    /// Returns the file that is named, or else the one in the working directory if there are no
    /// flags with settings.
    pub(crate) fn file(&self, has_settings: bool) -> Option<&Path> {
        self.config.as_deref().or_else(|| {
            let beside = Some(Path::new(BESIDE));
            beside.filter(|file| !has_settings && file.is_file())
        })
    }

    /// Checks that flags of settings are about one of the tables of the configuration, for a
    /// command whose flags change what the file says. `flag` names one of the `known`;
    /// `has_settings` says whether there are flags about it.
    ///
    /// # Errors
    /// When it does not say which of several, or the file was not named, and has only others.
    pub(crate) fn fits(
        &self,
        flag: &str,
        named: Option<&str>,
        known: &[String],
        has_settings: bool,
    ) -> Result<(), Problem> {
        let names = known.join(", ");
        match named {
            None if has_settings && known.len() > 1 => Err(Problem::new(
                Exit::Usage,
                format!("the flags are about which one? Give {flag} with one of {names}"),
            )),
            Some(named)
                if self.config.is_none()
                    && !known.is_empty()
                    && !known.iter().any(|name| name == named) =>
            {
                let why = format!(
                    "{flag} is `{named}`, and {BESIDE} in the working directory has {names}: give {flag} with one of them, \
                     add the other one to a file with --config, or leave that file out with --config /dev/null"
                );
                Err(Problem::configuration(why))
            }
            _ => Ok(()),
        }
    }

    /// Returns the file, for a command that is about nothing else.
    ///
    /// # Errors
    /// When none is named, and there is none in the working directory.
    pub(crate) fn required(&self) -> Result<&Path, Problem> {
        self.file(false).ok_or_else(|| {
            let why = format!(
                "there is no {BESIDE} in the working directory: name the configuration with --config"
            );
            Problem::new(Exit::Usage, why)
        })
    }

    /// Returns the words for a file that was not named, which must not be used in silence.
    pub(crate) fn unnamed(&self) -> Option<String> {
        let unnamed = self.config.is_none();
        unnamed.then(|| format!("settings come from {BESIDE} in the working directory"))
    }

    /// Reads the configuration. `None` if there is none.
    ///
    /// # Errors
    /// When it cannot be read, or has errors, which are printed.
    pub(crate) fn load(&self, has_settings: bool) -> Result<Option<Loaded>, Problem> {
        let Some(file) = self.file(has_settings) else {
            return Ok(None);
        };
        if let Some(words) = self.unnamed() {
            eprintln!("oncegate: {words}");
        }
        load(file).map(Some)
    }
}

/// Reads a configuration without errors.
///
/// # Errors
/// When it cannot be read, or has errors, which are printed.
pub(crate) fn load(file: &Path) -> Result<Loaded, Problem> {
    let loaded = config::load(Some(file), |_| Vec::new(), Secrets::MayBeLiteral)?;
    if loaded.findings.has_errors() {
        eprintln!("{}", loaded.render());
        return Err(Problem::configuration("the configuration has errors"));
    }
    Ok(loaded)
}

/// Returns the consumer with this scope and what it inherits, or the only one of the configuration.
///
/// # Errors
/// When there is no such consumer, or there are several.
pub(crate) fn choose<'a>(
    loaded: &'a Loaded,
    scope: Option<&str>,
) -> Result<(&'a str, &'a shape::Consumer), Problem> {
    let mut known = loaded.consumers();
    let found = match scope {
        Some(scope) => known.find(|(name, _)| *name == scope),
        None => known.next().filter(|_| known.next().is_none()),
    };
    found.ok_or_else(|| {
        let why = match scope {
            _ if loaded.config.consumer.is_empty() => {
                "the configuration has no consumer".to_owned()
            }
            Some(scope) => {
                format!(
                    "the configuration has no consumer `{scope}`: give --scope with one of {}",
                    names(loaded)
                )
            }
            None => format!(
                "which consumer of the configuration? Give --scope with one of {}",
                names(loaded)
            ),
        };
        Problem::configuration(why)
    })
}

fn names(loaded: &Loaded) -> String {
    let names: Vec<&str> = loaded.consumers().map(|(name, _)| name).collect();
    names.join(", ")
}

/// Returns the route of the messages of the consumer's source. `None` if there is no source.
///
/// # Errors
/// When there are several.
pub(crate) fn route_of(settings: &shape::Consumer) -> Result<Option<String>, String> {
    let source = settings
        .source
        .as_ref()
        .and_then(|source| source.settings().ok());
    let routes = source.map(SourceSettings::routes).unwrap_or_default();
    match routes.as_slice() {
        [] => Ok(None),
        [only] => Ok(Some(only.clone())),
        [first, others @ ..]
            if others
                .iter()
                .all(|other| settings.route_of(other) == settings.route_of(first)) =>
        {
            Ok(Some(first.clone()))
        }
        topics => Err(format!(
            "messages of which topic? Give --route with one of {}",
            topics.join(", ")
        )),
    }
}

/// The store of the records, if no configuration names it.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StoreFlag {
    /// The store: redis://host:port, redis+cluster://host:port,…, redis+sentinel://host:port,…/name
    /// (rediss for TLS), postgres://host:port/database, dynamodb://table, or an SQLite file as
    /// sqlite:path or path
    /// [default: that of --config]
    #[arg(
        long = "store",
        value_name = "URL",
        env = "ONCEGATE_STORE",
        hide_env_values = true
    )]
    pub(crate) url: Option<String>,
}

impl StoreFlag {
    /// Returns the store of the flag, or else that of the configuration. The flag's has none of the
    /// other settings: the password belongs to another server.
    ///
    /// # Errors
    /// When neither names a store.
    pub(crate) fn or_of(&self, loaded: Option<&Loaded>) -> Result<NamedStore, Problem> {
        if let Some(url) = &self.url {
            return Ok(NamedStore::ByUrl(StoreUrl { url: url.clone() }));
        }
        let settings = loaded.and_then(|loaded| loaded.config.store.clone());
        settings
            .map(|settings| NamedStore::Configured(Box::new(settings)))
            .ok_or_else(|| missing("--store"))
    }
}

/// Returns the problem that neither this flag nor a configuration was given.
pub(crate) fn missing(flag: &str) -> Problem {
    Problem::new(
        Exit::Usage,
        format!("{flag} is missing, or a configuration with it (--config)"),
    )
}

/// The store of a command.
#[derive(Debug)]
pub(crate) enum NamedStore {
    ByUrl(StoreUrl),
    /// With all settings of a configuration.
    Configured(Box<shape::Store>),
}

impl NamedStore {
    /// Connects. Creates and purges nothing.
    pub(crate) async fn open(&self) -> Result<Opened, Problem> {
        match self {
            Self::ByUrl(store) => store.open().await,
            Self::Configured(store) => stores::open_existing(store).await,
        }
    }

    /// Connects to a store whose tables are made by a command; `journaled`: to one that has, or
    /// will get, a journal.
    pub(crate) async fn open_tables(&self, journaled: bool) -> Result<Opened, Problem> {
        let mut settings = self.settings();
        if journaled {
            settings.postgres.journal = true;
        }
        stores::open_with_tables(&settings).await
    }

    /// Connects to the database of an outbox.
    pub(crate) async fn open_outbox(&self, name: &str) -> Result<Arc<dyn OutboxStore>, Problem> {
        stores::open_outbox(&self.settings(), name, Duration::ZERO).await
    }

    fn settings(&self) -> shape::Store {
        match self {
            Self::ByUrl(store) => store.settings(),
            Self::Configured(store) => (**store).clone(),
        }
    }

    /// For people: a file by its absolute path, a URL without user, password and parameters.
    pub(crate) fn redacted(&self) -> String {
        match self {
            Self::ByUrl(store) => store.redacted(),
            Self::Configured(store) => stores::named(store.url.as_deref().unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(source: &str) -> Result<Option<String>, String> {
        let settings: shape::Consumer = toml::from_str(&format!("source = {source}")).unwrap();
        route_of(&settings)
    }

    #[test]
    fn the_route_is_that_of_the_source() {
        assert_eq!(
            route("{ kafka = { topics = [\"orders\"] } }")
                .unwrap()
                .unwrap(),
            "orders"
        );
        assert_eq!(
            route("{ sqs = { queue = \"https://sqs.eu/1/orders\" } }")
                .unwrap()
                .unwrap(),
            "orders"
        );
        assert_eq!(route("{ stdin = {} }").unwrap().unwrap(), "stdin");
        assert_eq!(route("{}").unwrap(), None);
        let error = route("{ kafka = { topics = [\"orders\", \"refunds\"] } }").unwrap_err();
        assert!(
            error.contains("--route") && error.contains("orders, refunds"),
            "{error}"
        );
    }
}
