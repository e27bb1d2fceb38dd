//! Files that change while a program runs.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

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

/// A configuration, and what was in the files that it was made of. Their times say nothing: a copy
/// may keep the time of its original.
struct Loaded {
    config: ClientConfig,
    contents: u64,
}

impl Rotated {
    /// Reads the files of `client`.
    ///
    /// # Errors
    /// When a file cannot be read, or is not what it should be.
    pub fn new(client: TlsClient) -> Result<Self, Unusable> {
        // Before the files are read: a change meanwhile is seen by the next connection.
        let contents = client.contents();
        let config = client.config()?;
        let loaded = Mutex::new(Loaded { config, contents });
        Ok(Self(Arc::new(Shared { client, loaded })))
    }

    /// Returns the configuration of the next connection. If the files have changed to something
    /// unusable, the former one is returned, and `report` gets the reason.
    pub fn config(&self, report: impl FnOnce(Unusable)) -> ClientConfig {
        let Shared { client, loaded } = &*self.0;
        let mut loaded = loaded.lock();
        let contents = client.contents();
        if loaded.contents != contents {
            match client.config() {
                Ok(config) => *loaded = Loaded { config, contents },
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
    /// Returns a number that stands for what is in the files. A file that cannot be read is as good
    /// as an empty one here.
    fn contents(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for path in self.files() {
            std::fs::read(path).unwrap_or_default().hash(&mut hasher);
        }
        hasher.finish()
    }
}
