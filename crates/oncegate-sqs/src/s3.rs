//! Gets the payloads that are too large for a message, and of which the message has a pointer to an
//! object in S3.
//!
//! Amazon's extended clients for SQS and SNS (Java and Python) write such pointers: a JSON array of
//! the name of a Java class, and an object with the bucket and the key.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_sdk_sqs::config::{ProvideCredentials as _, Region};
use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsCredential};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, CredentialProvider, Error, ObjectStoreExt as _, RetryConfig,
};
use oncegate_core::key::is_s3_pointer;
use oncegate_runtime::BoxError;
use oncegate_runtime::message::{Header, Message};
use oncegate_runtime::source::SourceError;
use parking_lot::Mutex;
use serde::Deserialize;

use super::POINTER_HEADER;
use super::payloads::Payloads;

/// Time limit of a request. A payload is read in one.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// The time before its end at which a login is renewed.
const RENEWED_BEFORE: Duration = Duration::from_secs(300);

const NO_POINTER: &str =
    "a pointer with `s3BucketName` and `s3Key`, as Amazon's extended clients write it";
const NO_BUCKET: &str = "a pointer to a bucket that the source's `s3_payloads` name";
const NO_OBJECT: &str =
    "a pointer to an object that exists: this one was deleted, or never written";
const TOO_LARGE: &str = "a payload that is not larger than the source's `s3_payloads` allow";

/// Payloads in S3: the objects that messages of Amazon's extended clients for SQS and SNS point to.
///
/// A message with a pointer has the object as its payload, for its key, its handler and its limits.
/// Its dead letter has the pointer again, and so does a redrive, so an object must be kept for as
/// long as those may be needed: it is never deleted here. The account needs `s3:GetObject`, and
/// `s3:ListBucket`, without which S3 denies that an object is missing.
///
/// Every sender to the queue chooses what is read, so only the named buckets are read from.
#[derive(Clone, Debug)]
pub struct S3Payloads {
    buckets: Vec<String>,
    max_bytes: usize,
    endpoint_url: Option<String>,
    config: Option<SdkConfig>,
}

impl S3Payloads {
    /// 4 MiB.
    pub const DEFAULT_MAX_BYTES: usize = 4 << 20;

    /// Reads from these buckets.
    ///
    /// Credentials come from the AWS SDK's default chain, and the region from the queue's client.
    #[must_use]
    pub fn new(buckets: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let buckets = buckets.into_iter().map(Into::into).collect();
        Self {
            buckets,
            max_bytes: Self::DEFAULT_MAX_BYTES,
            endpoint_url: None,
            config: None,
        }
    }

    /// Sets the largest payload, in bytes: 4 MiB by default. A message with a larger one is bad
    /// input.
    ///
    /// Each message that is in flight may hold one.
    #[must_use]
    pub fn max_bytes(mut self, bytes: usize) -> Self {
        self.max_bytes = bytes;
        self
    }

    /// Sets the address of another server with S3's protocol, such as `http://127.0.0.1:9000`. By
    /// default that of `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, or the region's.
    #[must_use]
    pub fn endpoint_url(mut self, url: impl Into<String>) -> Self {
        self.endpoint_url = Some(url.into());
        self
    }

    /// Takes the credentials from this configuration, and its region.
    #[must_use]
    pub fn config(mut self, config: SdkConfig) -> Self {
        self.config = Some(config);
        self
    }

    pub(crate) fn check(&self) -> Result<(), SourceError> {
        if self.buckets.is_empty() || self.buckets.iter().any(String::is_empty) {
            return refuse("name the buckets that payloads are read from");
        }
        if self.max_bytes == 0 {
            return refuse("its largest payload is 0 bytes; it must be 1 or more");
        }
        Ok(())
    }

    /// Makes the clients, by default in the region of the queue.
    pub(crate) async fn open(&self, queue: Option<&Region>) -> Result<Objects, SourceError> {
        let config = match &self.config {
            Some(config) => config.clone(),
            None => aws_config::defaults(BehaviorVersion::latest()).load().await,
        };
        let own = self.config.as_ref().and_then(SdkConfig::region);
        let region = own.or(queue).or(config.region()).map(ToString::to_string);
        let login = Arc::new(Login {
            config: config.clone(),
            last: Mutex::default(),
        });
        let mut buckets = HashMap::new();
        for bucket in &self.buckets {
            let client = self.client(bucket, region.as_deref(), Arc::clone(&login));
            let client = client.map_err(|error| {
                SourceError::caused(format!("`s3_payloads`: the bucket {bucket}"), error)
            })?;
            buckets.insert(bucket.clone(), client);
        }
        Ok(Objects {
            buckets,
            max_bytes: self.max_bytes,
        })
    }

    fn client(
        &self,
        bucket: &str,
        region: Option<&str>,
        login: Arc<Login>,
    ) -> Result<AmazonS3, Error> {
        let endpoint = self.endpoint_url.clone();
        let endpoint = endpoint.or_else(|| {
            ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"]
                .iter()
                .find_map(variable)
        });
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(bucket)
            .with_credentials(login)
            .with_client_options(ClientOptions::new().with_timeout(REQUEST_TIMEOUT))
            // The caller tries again, for as long as the message is its own.
            .with_retry(RetryConfig {
                backoff: BackoffConfig::default(),
                max_retries: 0,
                retry_timeout: REQUEST_TIMEOUT,
            });
        if let Some(region) = region {
            builder = builder.with_region(region);
        }
        if let Some(url) = endpoint {
            builder = builder
                .with_allow_http(url.starts_with("http://"))
                .with_endpoint(url);
        }
        builder.build()
    }
}

fn refuse(why: &str) -> Result<(), SourceError> {
    Err(SourceError::new(format!("`s3_payloads`: {why}")))
}

fn variable(name: &&str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The buckets that payloads are read from.
pub(crate) struct Objects {
    buckets: HashMap<String, AmazonS3>,
    max_bytes: usize,
}

/// The reason for which a message has no payload.
enum Unread {
    /// The payload will never come; the text is what was expected.
    Bad(&'static str),
    /// The payload may come later.
    Away(Error),
}

impl Unread {
    fn of(error: Error) -> Self {
        match error {
            Error::NotFound { .. } => Self::Bad(NO_OBJECT),
            error => Self::Away(error),
        }
    }
}

/// The second part of a pointer, after the name of its class.
#[derive(Deserialize)]
struct Pointer {
    #[serde(rename = "s3BucketName")]
    bucket: String,
    #[serde(rename = "s3Key")]
    key: String,
}

#[async_trait]
impl Payloads for Objects {
    fn has(&self, message: &Message) -> bool {
        message.defect().is_none() && is_s3_pointer(message.payload())
    }

    async fn get(&self, message: &Message) -> Result<Message, BoxError> {
        match self.read(message.payload()).await {
            Ok(payload) => {
                let pointer = message.payload_bytes().unwrap_or_default();
                let pointer = Header {
                    name: POINTER_HEADER.into(),
                    value: Some(pointer),
                };
                let headers = message.headers().iter().cloned().chain([pointer]);
                Ok(message
                    .clone()
                    .with_headers(headers.collect())
                    .with_payload(payload))
            }
            Err(Unread::Bad(expected)) => Ok(message.clone().with_defect(expected)),
            Err(Unread::Away(error)) => Err(error.into()),
        }
    }
}

impl Objects {
    async fn read(&self, pointer: &[u8]) -> Result<Bytes, Unread> {
        let pointer: Result<(String, Pointer), _> = serde_json::from_slice(pointer);
        let (_, Pointer { bucket, key }) = pointer.map_err(|_| Unread::Bad(NO_POINTER))?;
        let bucket = self.buckets.get(&bucket).ok_or(Unread::Bad(NO_BUCKET))?;
        let path = Path::parse(key).map_err(|_| Unread::Bad(NO_POINTER))?;
        let found = bucket.get(&path).await.map_err(Unread::of)?;
        if usize::try_from(found.meta.size).is_ok_and(|size| size <= self.max_bytes) {
            found.bytes().await.map_err(Unread::of)
        } else {
            Err(Unread::Bad(TOO_LARGE))
        }
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Objects")
            .field("buckets", &self.buckets.keys())
            .finish_non_exhaustive()
    }
}

/// The login of the AWS SDK, kept until it ends.
struct Login {
    config: SdkConfig,
    last: Mutex<Option<(Arc<AwsCredential>, Option<SystemTime>)>>,
}

#[async_trait]
impl CredentialProvider for Login {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        if let Some((credential, until)) = &*self.last.lock()
            && until.is_none_or(|until| SystemTime::now() + RENEWED_BEFORE < until)
        {
            return Ok(Arc::clone(credential));
        }
        let provider = self.config.credentials_provider();
        let provider =
            provider.ok_or_else(|| no_login("there are no credentials of AWS".into()))?;
        let found = provider
            .provide_credentials()
            .await
            .map_err(|error| no_login(Box::new(error)))?;
        let credential = Arc::new(AwsCredential {
            key_id: found.access_key_id().to_owned(),
            secret_key: found.secret_access_key().to_owned(),
            token: found.session_token().map(str::to_owned),
        });
        *self.last.lock() = Some((Arc::clone(&credential), found.expiry()));
        Ok(credential)
    }
}

fn no_login(source: BoxError) -> Error {
    Error::Generic {
        store: "S3",
        source,
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login")
    }
}
