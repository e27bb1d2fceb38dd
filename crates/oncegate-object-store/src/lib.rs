//! Large results as objects: in a folder, in S3, or in another store that `object_store` supports.

use std::collections::HashMap;
use std::fmt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};
use oncegate_core::key::Scope;

use oncegate_runtime::results::{ResultStore, ResultStoreError, Sweep, Swept};

/// A result store over the `object_store` crate.
///
/// ```no_run
/// # fn example() -> Result<(), oncegate::BoxError> {
/// use oncegate::results::ObjectResults;
/// use oncegate::{Gate, Key, MemoryStore};
///
/// let results = ObjectResults::folder("/var/lib/billing/results")?;
/// let gate = Gate::new("billing", Key::json(["order_id"]), MemoryStore::new()).large_results(results);
/// # drop(gate);
/// # Ok(())
/// # }
/// ```
pub struct ObjectResults {
    objects: Arc<dyn ObjectStore>,
    /// The name of the store, for people.
    place: String,
    /// The folder with unfinished writes of killed processes, which the object store does not list.
    folder: Option<PathBuf>,
}

impl ObjectResults {
    /// A store in files below `path`.
    ///
    /// If only the last component of `path` is missing, it is created for its owner only. Every
    /// process that shares the records must use the same folder. A file and its folder are synced
    /// to the disk before a result counts as kept.
    ///
    /// # Errors
    /// When the folder cannot be created or opened.
    pub fn folder(path: impl AsRef<FilePath>) -> Result<Self, ResultStoreError> {
        let path = path.as_ref();
        let folder = make_folder(path).map_err(|error| {
            ResultStoreError::new(std::io::Error::new(
                error.kind(),
                format!("{}: {error}", path.display()),
            ))
        })?;
        let files = LocalFileSystem::new_with_prefix(&folder).map_err(ResultStoreError::new)?;
        let place = folder.display().to_string();
        Ok(Self {
            objects: Arc::new(files.with_fsync(true)),
            place,
            folder: Some(folder),
        })
    }

    /// A store in S3, or in a service with its protocol: `s3://bucket/prefix`.
    ///
    /// Credentials, region and endpoint come from the usual variables: `AWS_ACCESS_KEY_ID`,
    /// `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL`, a web identity, or the instance's
    /// role; plain HTTP needs `AWS_ALLOW_HTTP=true`. The account needs `s3:PutObject`,
    /// `s3:GetObject` and `s3:ListBucket` (without the last one S3 reports a missing result as
    /// forbidden, and its duplicates would wait for ever), and `s3:DeleteObject` for the sweep. For
    /// other settings, configure your own client: [`from_object_store`](Self::from_object_store).
    ///
    /// # Errors
    /// When the URL or a variable is invalid. The call does not connect yet.
    #[cfg(feature = "s3")]
    pub fn s3(url: &str) -> Result<Self, ResultStoreError> {
        use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
        use object_store::prefix::PrefixStore;
        use object_store::{BackoffConfig, ClientConfigKey, RetryConfig};

        let prefix = url
            .strip_prefix("s3://")
            .and_then(|rest| rest.split_once('/'))
            .map_or("", |(_, path)| path);
        let timeout = format!("{} seconds", ANSWER_LIMIT.as_secs());
        let builder = AmazonS3Builder::from_env()
            .with_url(url)
            .with_config(AmazonS3ConfigKey::Client(ClientConfigKey::Timeout), timeout)
            // The gate retries by itself, as long as its lease allows.
            .with_retry(RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 1,
                retry_timeout: ANSWER_LIMIT,
            });
        let bucket = builder.build().map_err(ResultStoreError::new)?;
        let prefix = Path::parse(prefix).map_err(ResultStoreError::new)?;
        Ok(Self {
            objects: Arc::new(PrefixStore::new(bucket, prefix)),
            place: url.to_owned(),
            folder: None,
        })
    }

    /// A store over the caller's object store. Its writes must be durable when they return: a
    /// `LocalFileSystem` needs `with_fsync(true)`.
    pub fn from_object_store(objects: Arc<dyn ObjectStore>) -> Self {
        Self {
            place: objects.to_string(),
            objects,
            folder: None,
        }
    }

    /// The store's own clock: the modification time of an object that was written just now.
    async fn now(&self, clock: &Path) -> Result<SystemTime, Error> {
        self.objects
            .put(clock, Bytes::from_static(b"the time of a sweep").into())
            .await?;
        Ok(self.objects.head(clock).await?.last_modified.into())
    }

    async fn try_sweep(
        &self,
        scope: &Scope,
        older_than: Duration,
        sweep: Sweep,
    ) -> Result<Swept, Error> {
        let clock = Path::from(format!("{scope}/clock"));
        let now = self.now(&clock).await?;
        let mut swept = Swept::default();
        let Some(deadline) = now.checked_sub(older_than) else {
            return Ok(swept);
        };
        let mut listed = self.objects.list(Some(&Path::from(scope.as_str())));
        let mut old = HashMap::new();
        while let Some(object) = listed.try_next().await? {
            if SystemTime::from(object.last_modified) < deadline {
                match sweep {
                    Sweep::Delete => drop(old.insert(object.location, object.size)),
                    Sweep::Count => swept.add(object.size),
                }
            } else if object.location != clock {
                swept.kept += 1;
            }
            if old.len() >= DELETED_AT_ONCE {
                self.delete(std::mem::take(&mut old), &mut swept).await?;
            }
        }
        self.delete(old, &mut swept).await?;
        Ok(swept)
    }

    /// Deletes objects, given with their sizes.
    async fn delete(&self, old: HashMap<Path, u64>, swept: &mut Swept) -> Result<(), Error> {
        let names: Vec<_> = old.keys().cloned().map(Ok).collect();
        let mut deleted = self.objects.delete_stream(stream::iter(names).boxed());
        while let Some(deleted) = deleted.next().await {
            match deleted {
                Ok(name) => {
                    swept.add(old.get(&name).copied().unwrap_or(0));
                }
                // Another sweep has deleted it.
                Err(Error::NotFound { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl fmt::Debug for ObjectResults {
    /// Shows the location. The client's own text would show its credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectResults({})", self.place)
    }
}

/// Creates a folder that survives a power cut, if it does not exist. Returns its absolute path.
fn make_folder(path: &FilePath) -> std::io::Result<PathBuf> {
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    match builder.create(path) {
        Ok(()) => {
            #[cfg(unix)]
            std::fs::File::open(path.canonicalize()?.parent().unwrap_or(path))?.sync_all()?;
        }
        Err(_) if path.is_dir() => {}
        Err(error) => return Err(error),
    }
    path.canonicalize()
}

/// Time limit for one request.
#[cfg(feature = "s3")]
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// The number of objects that a sweep deletes with one request, if the store supports that.
const DELETED_AT_ONCE: usize = 1_000;

#[async_trait]
impl ResultStore for ObjectResults {
    async fn put(&self, name: &str, bytes: Bytes) -> Result<(), ResultStoreError> {
        #[cfg(unix)]
        let file = self
            .folder
            .as_ref()
            .map(|folder| (folder.clone(), Path::from(name)));
        #[cfg(unix)]
        if let Some((folder, name)) = file.clone() {
            // The folders come before the file, so that no other user can read it at any time.
            blocking(move || make_private_folders(&folder, name.as_ref())).await?;
        }
        // Overwriting is right: only a repeat of this same attempt uses this name.
        let put = self.objects.put(&Path::from(name), bytes.into()).await;
        put.map_err(ResultStoreError::new)?;
        #[cfg(unix)]
        if let Some((folder, name)) = file {
            blocking(move || make_private(&folder.join(name.as_ref()))).await?;
        }
        Ok(())
    }

    async fn get(&self, name: &str, most_bytes: u64) -> Result<Option<Bytes>, ResultStoreError> {
        let found = match self.objects.get(&Path::from(name)).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(ResultStoreError::new(error)),
        };
        if found.meta.size > most_bytes {
            return Ok(None);
        }
        found.bytes().await.map(Some).map_err(ResultStoreError::new)
    }

    async fn sweep(
        &self,
        scope: &Scope,
        older_than: Duration,
        sweep: Sweep,
    ) -> Result<Swept, ResultStoreError> {
        let mut swept = self
            .try_sweep(scope, older_than, sweep)
            .await
            .map_err(ResultStoreError::new)?;
        if let Some(folder) = &self.folder {
            let folder = folder.join(Path::from(scope.as_str()).as_ref());
            swept = blocking(move || {
                sweep_unfinished(&folder, older_than, sweep, &mut swept)?;
                Ok(swept)
            })
            .await?;
        }
        Ok(swept)
    }
}

/// Runs `work` on a thread that may wait for the disk.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, ResultStoreError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(std::io::Error::other)
        .flatten()
        .map_err(ResultStoreError::new)
}

/// Creates the folders of this result below `root` for their owner only. Folders that exist keep
/// their mode.
#[cfg(unix)]
fn make_private_folders(root: &FilePath, name: &str) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    let mut folder = root.to_owned();
    let (folders, _) = name.rsplit_once('/').unwrap_or(("", name));
    for part in folders.split('/').filter(|part| !part.is_empty()) {
        let parent = folder.clone();
        folder.push(part);
        match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
            // The folder must survive a power cut, as the files of the object store do.
            Ok(()) => std::fs::File::open(&parent)?.sync_all()?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Lets only its owner read a file: the object store creates it with the mode of the process.
#[cfg(unix)]
fn make_private(file: &FilePath) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600))
}

/// Deletes unfinished writes of killed processes: `name#1`, which no listing shows.
fn sweep_unfinished(
    folder: &FilePath,
    older_than: Duration,
    sweep: Sweep,
    swept: &mut Swept,
) -> std::io::Result<()> {
    let Some(deadline) = SystemTime::now().checked_sub(older_than) else {
        return Ok(());
    };
    for shard in std::fs::read_dir(folder)? {
        let shard = shard?;
        if !shard.file_type()?.is_dir() {
            continue;
        }
        for file in std::fs::read_dir(shard.path())? {
            let file = file?;
            let unfinished = file
                .file_name()
                .to_str()
                .is_some_and(|name| name.contains('#'));
            if !unfinished {
                continue;
            }
            // Another sweep may have deleted it, or the write may have ended just now.
            let Ok(about) = file.metadata() else { continue };
            let over = about.is_file() && about.modified()? < deadline;
            if over && (sweep == Sweep::Count || std::fs::remove_file(file.path()).is_ok()) {
                swept.add(about.len());
            }
        }
    }
    Ok(())
}
