//! Selects one record, by its store key or by a message.

use std::sync::Arc;
use std::time::Duration;

use oncegate::admin;
use oncegate::admin::dry_run::{DryRun, Known};
use oncegate::core::key::{Digest, Fingerprint, Scope, StoreKey};
use oncegate::core::store::{RecordSnapshot, Store};
use oncegate::{FingerprintSpec, GateSettings, Key, Message};
use tracing::warn;

use crate::args::{KEY_FORMS, KEY_HELP, MessageArgs};
use crate::at::{AtArgs, Position, choose_at};
use crate::config::format::Format;
use crate::config::{Loaded, shape};
use crate::configured::{ConfigArgs, StoreFlag, missing, route_of};
use crate::examined::{ExaminedArgs, formatted, routed};
use crate::exit::{Exit, Problem};
use crate::key::{explain, explain_message};
use crate::stores::Opened;

/// One record.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").args(["store_key", "digest", "key"])))]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    config: ConfigArgs,

    #[command(flatten)]
    store: StoreFlag,

    /// The scope of the consumer's gate
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE")]
    scope: Option<Scope>,

    /// The store key: billing:eMT5oSC2v1zTz8Nw5IO50A
    #[arg(long, value_name = "SCOPE:DIGEST", conflicts_with = "at")]
    store_key: Option<StoreKey>,

    /// The second half of the store key
    #[arg(
        long,
        value_name = "DIGEST",
        allow_hyphen_values = true,
        conflicts_with = "at"
    )]
    digest: Option<Digest>,

    #[arg(long, value_name = "SPEC", help = KEY_HELP, long_help = KEY_FORMS)]
    key: Option<Key>,

    /// What the payload is, if it is not JSON: registry:URL, avro:FILE, protobuf:FILE#MESSAGE,
    /// gzip, zstd or base64
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["store_key", "digest"])]
    format: Option<Format>,

    /// The route of the message: its topic or the name of its queue, unless it was retried or
    /// redriven [default: that of the configuration]
    #[arg(long, value_name = "NAME", aliases = ["topic", "queue"], conflicts_with_all = ["store_key", "digest"])]
    route: Option<String>,

    #[command(flatten)]
    at: AtArgs,

    #[command(flatten)]
    message: MessageArgs,

    /// The fingerprint, if a flag of the command says it.
    #[arg(skip)]
    fingerprint: Option<FingerprintSpec>,
}

/// A record that was looked for.
pub(crate) struct Found {
    pub(crate) opened: Opened,
    pub(crate) key: StoreKey,
    pub(crate) record: Option<RecordSnapshot>,
    /// The settings of the consumer for a record that is written anew.
    pub(crate) terms: Terms,
    /// The position of the message, if it was read from its topic.
    pub(crate) origin: Option<String>,
}

/// The settings of the consumer for a record that an operator writes.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) retention: Duration,
    /// The fingerprint of the message, if it was read from its topic and the gate compares
    /// contents.
    pub(crate) fingerprint: Option<Fingerprint>,
}

/// The way in which the record is named.
enum Named {
    ByKey(StoreKey),
    /// By its message, of this scope and route.
    ByMessage {
        scope: Scope,
        key: Box<Key>,
        route: String,
        message: Option<Message>,
    },
}

impl RecordArgs {
    /// The record of the message at a position, or with a store key, of the consumer that these
    /// arguments describe.
    pub(crate) fn of(
        examined: &ExaminedArgs,
        at: Option<Position>,
        store_key: Option<StoreKey>,
    ) -> Self {
        Self {
            config: examined.config.clone(),
            store: examined.store.clone(),
            scope: examined.scope.clone(),
            store_key,
            digest: None,
            key: examined.key.clone(),
            format: examined.format.clone(),
            route: None,
            at: AtArgs {
                at,
                brokers: examined.brokers.clone(),
                properties: examined.properties.clone(),
            },
            message: MessageArgs::default(),
            fingerprint: examined.fingerprint.clone(),
        }
    }

    /// Reads what the store holds for the selected key.
    pub(crate) async fn find(&self) -> Result<Found, Problem> {
        let loaded = self
            .config
            .load(self.store.url.is_some() || self.key.is_some())?;
        let named = self.named(loaded.as_ref()).await?;
        let opened = self.store.or_of(loaded.as_ref())?.open().await?;
        let mut terms = self.terms(loaded.as_ref());
        let key = match named {
            Named::ByKey(key) => key,
            Named::ByMessage {
                scope,
                key,
                route,
                message,
            } => {
                if let Some(message) = &message {
                    terms.fingerprint = self.fingerprint(loaded.as_ref(), &key, message).await?;
                }
                let store = Arc::clone(&opened.store);
                self.derive((&key, &scope, &route), message.as_ref(), store)
                    .await?
            }
        };
        let record = admin::read(&*opened.store, &key).await?;
        Ok(Found {
            opened,
            key,
            record,
            terms,
            origin: self.at.at.as_ref().map(ToString::to_string),
        })
    }

    /// Returns the consumer of the configuration that the record is of, if it can be told.
    fn consumer<'a>(&self, loaded: Option<&'a Loaded>) -> Option<&'a shape::Consumer> {
        let named = self.store_key.as_ref().map(|key| key.scope().to_owned());
        let scope = named.or_else(|| self.scope.as_ref().map(|scope| scope.as_str().to_owned()));
        let chosen = choose_at(loaded?, scope.as_deref(), self.at.at.as_ref());
        chosen.ok().map(|(_, consumer)| consumer)
    }

    fn terms(&self, loaded: Option<&Loaded>) -> Terms {
        let retention = match self.consumer(loaded) {
            Some(consumer) => consumer.gate.retention,
            None => GateSettings::DEFAULT.retention,
        };
        Terms {
            retention,
            fingerprint: None,
        }
    }

    async fn fingerprint(
        &self,
        loaded: Option<&Loaded>,
        key: &Key,
        message: &Message,
    ) -> Result<Option<Fingerprint>, Problem> {
        let of_consumer = self
            .consumer(loaded)
            .and_then(|consumer| consumer.fingerprint.as_ref());
        let spec = self
            .fingerprint
            .as_ref()
            .or(of_consumer.map(|setting| &setting.0));
        let Some(spec) = spec else { return Ok(None) };
        let compiled = spec.compile(key)?;
        let prepared = compiled.prepare(message).await;
        prepared.map_err(|error| Problem::caused(Exit::Unreachable, &error))?;
        let derived = compiled.derive(message);
        derived
            .map(Some)
            .map_err(|error| Problem::caused(Exit::BadData, &error))
    }

    async fn named(&self, loaded: Option<&Loaded>) -> Result<Named, Problem> {
        if let Some(key) = &self.store_key {
            return Ok(Named::ByKey(key.clone()));
        }
        if let (Some(scope), Some(digest)) = (&self.scope, self.digest) {
            return Ok(Named::ByKey(StoreKey::new(scope, digest)));
        }
        let Some(loaded) = loaded else {
            return self.named_by_flags().await;
        };
        let scope = self.scope.as_ref().map(Scope::as_str);
        let (name, consumer) = choose_at(loaded, scope, self.at.at.as_ref())?;
        let scope = Scope::new(name)?;
        if let Some(digest) = self.digest {
            return Ok(Named::ByKey(StoreKey::new(&scope, digest)));
        }
        let refuse = |why: String| Problem::configuration(why).of(name);
        let message = self.at.message(Some((name, consumer))).await?;
        let route = match (&self.route, &message) {
            (Some(route), _) => Some(route.clone()),
            (None, Some(message)) => Some(message.route().to_owned()),
            (None, None) => route_of(consumer).map_err(refuse)?,
        };
        let key = self.key.clone().or(consumer.key.clone().map(|key| key.0));
        let key = formatted(key, self.format.as_ref().or(consumer.format.as_ref()))?;
        let key = routed(key, consumer.route.as_ref());
        Ok(Named::ByMessage {
            key: Box::new(key.ok_or_else(|| refuse("there is no key".to_owned()))?),
            route: route.ok_or_else(|| refuse("there is no source: give --route".to_owned()))?,
            scope,
            message,
        })
    }

    async fn named_by_flags(&self) -> Result<Named, Problem> {
        if self.digest.is_none() && self.key.is_none() {
            return Err(missing("--store-key, --digest or --key"));
        }
        let scope = self.scope.clone().ok_or_else(|| missing("--scope"))?;
        let message = self.at.message(None).await?;
        let route = match (&self.route, &message) {
            (Some(route), _) => route.clone(),
            (None, Some(message)) => message.route().to_owned(),
            (None, None) => return Err(missing("--route")),
        };
        let key =
            formatted(self.key.clone(), self.format.as_ref())?.ok_or_else(|| missing("--key"))?;
        Ok(Named::ByMessage {
            scope,
            key: Box::new(key),
            route,
            message,
        })
    }

    async fn derive(
        &self,
        (key, scope, route): (&Key, &Scope, &str),
        message: Option<&Message>,
        store: Arc<dyn Store>,
    ) -> Result<StoreKey, Problem> {
        // With another key than the scope's, the answer would always be "absent".
        let examination = DryRun::new(scope.as_str(), key.clone(), store)
            .open()
            .await?;
        if examination.known() == Known::Nothing {
            warn!(%scope, "no gate has ever opened this scope in this store: is it the right scope, and the right store?");
        }
        let explanation = match message {
            Some(message) => explain_message(key, scope, route, message).await?,
            None => explain(key, scope, route, &self.message).await?,
        };
        Ok(explanation.store_key().clone())
    }
}
