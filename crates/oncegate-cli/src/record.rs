//! Selects one record, by its store key or by a message.

use std::sync::Arc;

use oncegate::Key;
use oncegate::admin;
use oncegate::admin::dry_run::{DryRun, Known};
use oncegate::core::key::{Digest, Scope, StoreKey};
use oncegate::core::store::{RecordSnapshot, Store};
use tracing::warn;

use crate::args::{KEY_FORMS, KEY_HELP, MessageArgs};
use crate::config::Loaded;
use crate::config::format::Format;
use crate::configured::{ConfigArgs, StoreFlag, choose, missing, route_of};
use crate::examined::{formatted, routed};
use crate::exit::Problem;
use crate::key::explain;
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
    #[arg(long, value_name = "SCOPE:DIGEST")]
    store_key: Option<StoreKey>,

    /// The second half of the store key
    #[arg(long, value_name = "DIGEST", allow_hyphen_values = true)]
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
    message: MessageArgs,
}

/// A record that was looked for.
pub(crate) struct Found {
    pub(crate) opened: Opened,
    pub(crate) key: StoreKey,
    pub(crate) record: Option<RecordSnapshot>,
}

/// The way in which the record is named.
enum Named {
    ByKey(StoreKey),
    /// By its message, of this scope and route.
    ByMessage {
        scope: Scope,
        key: Box<Key>,
        route: String,
    },
}

impl RecordArgs {
    /// Reads what the store holds for the selected key.
    pub(crate) async fn find(&self) -> Result<Found, Problem> {
        let loaded = self
            .config
            .load(self.store.url.is_some() || self.key.is_some())?;
        let named = self.named(loaded.as_ref())?;
        let opened = self.store.or_of(loaded.as_ref())?.open().await?;
        let key = match named {
            Named::ByKey(key) => key,
            Named::ByMessage { scope, key, route } => {
                self.derive(&key, &scope, &route, Arc::clone(&opened.store))
                    .await?
            }
        };
        let record = admin::read(&*opened.store, &key).await?;
        Ok(Found {
            opened,
            key,
            record,
        })
    }

    fn named(&self, loaded: Option<&Loaded>) -> Result<Named, Problem> {
        if let Some(key) = &self.store_key {
            return Ok(Named::ByKey(key.clone()));
        }
        if let (Some(scope), Some(digest)) = (&self.scope, self.digest) {
            return Ok(Named::ByKey(StoreKey::new(scope, digest)));
        }
        let Some(loaded) = loaded else {
            return self.named_by_flags();
        };
        let (name, consumer) = choose(loaded, self.scope.as_ref().map(Scope::as_str))?;
        let scope = Scope::new(name)?;
        if let Some(digest) = self.digest {
            return Ok(Named::ByKey(StoreKey::new(&scope, digest)));
        }
        let refuse = |why: String| Problem::configuration(why).of(name);
        let route = match &self.route {
            Some(route) => Some(route.clone()),
            None => route_of(consumer).map_err(refuse)?,
        };
        let key = self.key.clone().or(consumer.key.clone().map(|key| key.0));
        let key = formatted(key, self.format.as_ref().or(consumer.format.as_ref()))?;
        let key = routed(key, consumer.route.as_ref());
        Ok(Named::ByMessage {
            key: Box::new(key.ok_or_else(|| refuse("there is no key".to_owned()))?),
            route: route.ok_or_else(|| refuse("there is no source: give --route".to_owned()))?,
            scope,
        })
    }

    fn named_by_flags(&self) -> Result<Named, Problem> {
        if self.digest.is_none() && self.key.is_none() {
            return Err(missing("--store-key, --digest or --key"));
        }
        let scope = self.scope.clone().ok_or_else(|| missing("--scope"))?;
        let route = self.route.clone().ok_or_else(|| missing("--route"))?;
        let key =
            formatted(self.key.clone(), self.format.as_ref())?.ok_or_else(|| missing("--key"))?;
        Ok(Named::ByMessage {
            scope,
            key: Box::new(key),
            route,
        })
    }

    async fn derive(
        &self,
        key: &Key,
        scope: &Scope,
        route: &str,
        store: Arc<dyn Store>,
    ) -> Result<StoreKey, Problem> {
        // With another key than the scope's, the answer would always be "absent".
        let examination = DryRun::new(scope.as_str(), key.clone(), store)
            .open()
            .await?;
        if examination.known() == Known::Nothing {
            warn!(%scope, "no gate has ever opened this scope in this store: is it the right scope, and the right store?");
        }
        Ok(explain(key, scope, route, &self.message)
            .await?
            .store_key()
            .clone())
    }
}
