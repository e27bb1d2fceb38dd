//! A schema registry that runs, or one that is started.

use oncegate::BoxError;
use oncegate_testkit::SchemaRegistry;
use tokio::runtime::Runtime;

pub(crate) struct RegistryPlace {
    url: String,
    /// The server stops when this is dropped.
    _server: Option<(SchemaRegistry, Runtime)>,
}

impl RegistryPlace {
    pub(crate) fn start(url: Option<&str>) -> Result<Self, BoxError> {
        if let Some(url) = url {
            return Ok(Self {
                url: url.to_owned(),
                _server: None,
            });
        }
        let runtime = Runtime::new()?;
        let server = runtime.block_on(SchemaRegistry::start());
        Ok(Self {
            url: server.url(),
            _server: Some((server, runtime)),
        })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}
