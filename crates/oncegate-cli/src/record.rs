//! Selects one record, by its store key or by a message.

use std::sync::Arc;

use oncegate::Key;
use oncegate::admin;
use oncegate::admin::dry_run::{DryRun, Known};
use oncegate::core::key::{Digest, Scope, StoreKey};
use oncegate::core::store::{RecordSnapshot, Store};
use tracing::warn;

use crate::args::{KEY_FORMS, KEY_HELP, MessageArgs};
use crate::config::format::Format;
use crate::examined::formatted;
use crate::exit::{Exit, Problem};
use crate::key::explain;
use crate::store::StoreArgs;

/// One record.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("which").required(true).args(["store_key", "digest", "key"])))]
pub(crate) struct RecordArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,

    /// The scope of the consumer's gate
    #[arg(long, value_name = "NAME", env = "ONCEGATE_SCOPE", required_unless_present = "store_key")]
    scope: Option<Scope>,

    /// The store key: billing:eMT5oSC2v1zTz8Nw5IO50A
    #[arg(long, value_name = "SCOPE:DIGEST")]
    store_key: Option<StoreKey>,

    /// The second half of the store key
    #[arg(long, value_name = "DIGEST", allow_hyphen_values = true)]
    digest: Option<Digest>,

    #[arg(long, value_name = "SPEC", requires = "route", help = KEY_HELP, long_help = KEY_FORMS)]
    key: Option<Key>,

    /// What the payload is, if it is not JSON: registry:URL, avro:FILE, protobuf:FILE#MESSAGE, gzip, zstd or base64
    #[arg(long, value_name = "FORMAT", requires = "key")]
    format: Option<Format>,

    /// The route of the message that --key is for: its topic or the name of its queue, unless it was retried or redriven
    #[arg(long, value_name = "NAME", aliases = ["topic", "queue"], requires = "key")]
    route: Option<String>,

    #[command(flatten)]
    message: MessageArgs,
}

impl RecordArgs {
    /// Returns the store, the selected key, and what the store holds for it.
    pub(crate) async fn find(&self) -> Result<(Arc<dyn Store>, StoreKey, Option<RecordSnapshot>), Problem> {
        let missing = || Problem::new(Exit::Usage, "--scope is missing");
        let store = self.store.open().await?;
        let key = match (&self.store_key, &self.digest, &self.key) {
            (Some(key), _, _) => key.clone(),
            (None, Some(digest), _) => StoreKey::new(self.scope.as_ref().ok_or_else(missing)?, *digest),
            (None, None, Some(spec)) => {
                let scope = self.scope.as_ref().ok_or_else(missing)?;
                self.derive(spec, scope, Arc::clone(&store)).await?
            }
            (None, None, None) => {
                return Err(Problem::new(Exit::Usage, "--store-key, --digest or --key is missing"));
            }
        };
        let found = admin::read(&*store, &key).await?;
        Ok((store, key, found))
    }

    async fn derive(&self, spec: &Key, scope: &Scope, store: Arc<dyn Store>) -> Result<StoreKey, Problem> {
        // With another key than the scope's, the answer would always be "absent".
        let examination = DryRun::new(scope.as_str(), spec.clone(), store).open().await?;
        if examination.known() == Known::Nothing {
            warn!(%scope, "no gate has ever opened this scope in this store: is it the right scope, and the right store?");
        }
        let route = self.route.as_deref().unwrap_or_default();
        let key = formatted(Some(spec.clone()), self.format.as_ref())?;
        let spec = key.as_ref().unwrap_or(spec);
        Ok(explain(spec, scope, route, &self.message).await?.store_key().clone())
    }
}
