//! Files that change while a program runs.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rustls::ClientConfig;

use super::{TlsClient, Unusable};

/// A client's configuration whose files are read again when they change. Clones share it.
#[derive(Clone)]
pub struct Rotated(Arc<Shared>);

struct Shared {
    client: TlsClient,
    loaded: Mutex<Loaded>,
}

/// A configuration, and when the files changed that it was made of.
struct Loaded {
    config: ClientConfig,
    changed_at: Vec<Option<SystemTime>>,
}

impl Rotated {
    /// Reads the files of `client`.
    ///
    /// # Errors
    /// When a file cannot be read, or is not what it should be.
    pub fn new(client: TlsClient) -> Result<Self, Unusable> {
        // Before the files are read: a change meanwhile is seen by the next connection.
        let changed_at = client.changed_at();
        let config = client.config()?;
        let loaded = Mutex::new(Loaded { config, changed_at });
        Ok(Self(Arc::new(Shared { client, loaded })))
    }

    /// Returns the configuration of the next connection. If the files have changed to something
    /// unusable, the former one is returned, and `report` gets the reason.
    pub fn config(&self, report: impl FnOnce(Unusable)) -> ClientConfig {
        let Shared { client, loaded } = &*self.0;
        let mut loaded = loaded.lock();
        let changed_at = client.changed_at();
        if loaded.changed_at != changed_at {
            match client.config() {
                Ok(config) => *loaded = Loaded { config, changed_at },
                Err(unusable) => report(unusable),
            }
        }
        loaded.config.clone()
    }
}

impl fmt::Debug for Rotated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rotated")
            .field("client", &self.0.client)
            .finish_non_exhaustive()
    }
}

impl TlsClient {
    fn changed_at(&self) -> Vec<Option<SystemTime>> {
        self.files()
            .map(|path| std::fs::metadata(path).ok()?.modified().ok())
            .collect()
    }
}
