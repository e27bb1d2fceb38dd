//! The builder of a store, and its first request.

use std::sync::Arc;
use std::time::Duration;

use aws_config::{BehaviorVersion, Region};
use aws_sdk_dynamodb::Client;
use oncegate_core::store::StoreError;
use oncegate_store_toolkit::start::until_reachable;

use super::api::{Api, Lane};
use super::clock::{ClockSource, ServiceClock};
use super::errors::NO_TABLE;
use super::execute::Claims;
use super::settings::{Address, DynamoDbSettings};
use super::{DynamoDbStore, Inner};

/// The item that the first request reads. There is none: a scope has no such name.
const NOTHING: &str = ":connect";

/// Options for a [`DynamoDbStore`]; made by [`DynamoDbStore::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DynamoDbBuilder {
    url: String,
    client: Option<Client>,
    settings: DynamoDbSettings,
    start_patience: Duration,
    may_be_missing: bool,
    clock: ClockSource,
    wall_error_us: i64,
}

impl DynamoDbBuilder {
    pub(crate) fn new(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            client: None,
            settings: DynamoDbSettings::DEFAULT,
            start_patience: Duration::ZERO,
            may_be_missing: false,
            clock: ClockSource::Answers,
            wall_error_us: 0,
        }
    }

    /// Uses this client: its credentials, region and endpoint. Its time limits and repeats are
    /// replaced by the store's own.
    pub fn client(self, client: Client) -> Self {
        Self {
            client: Some(client),
            ..self
        }
    }

    /// Sets all settings, such as those of a file.
    pub fn settings(self, settings: DynamoDbSettings) -> Self {
        Self { settings, ..self }
    }

    /// Sets the [time that DynamoDB may take to answer](DynamoDbSettings::response_timeout): 4 s by
    /// default.
    pub fn response_timeout(mut self, timeout: Duration) -> Self {
        self.settings.response_timeout = timeout;
        self
    }

    /// Names the [home region](DynamoDbSettings::home_region) of a global table whose replicas are
    /// eventually consistent. None by default.
    pub fn home_region(mut self, region: impl Into<String>) -> Self {
        self.settings.home_region = Some(region.into());
        self
    }

    /// Waits at most this long for a service that cannot be reached when [`connect`](Self::connect)
    /// is called. Default: not at all.
    pub fn start_patience(self, start_patience: Duration) -> Self {
        Self {
            start_patience,
            ..self
        }
    }

    /// Lets [`connect`](Self::connect) succeed without a table, for a program that makes it.
    pub fn may_be_missing(self) -> Self {
        Self {
            may_be_missing: true,
            ..self
        }
    }

    /// Takes the time from this machine instead of the answers, for a server on it. For tests.
    #[cfg(feature = "testing")]
    pub fn machine_clock(self) -> Self {
        Self {
            clock: ClockSource::Machine,
            ..self
        }
    }

    /// Moves the wall clock that the store sees by so many seconds. For tests.
    #[cfg(feature = "testing")]
    pub fn wall_clock_off_by(self, seconds: i64) -> Self {
        Self {
            wall_error_us: seconds.saturating_mul(1_000_000),
            ..self
        }
    }

    /// Connects: loads credentials, and reads from the table once.
    ///
    /// # Errors
    /// [`StoreError::Refused`] when the URL or a setting is wrong, the table does not exist, the
    /// credentials or rights do not suffice, or the answers have no time;
    /// [`StoreError::Unavailable`] when DynamoDB does not answer within the
    /// [`start_patience`](Self::start_patience).
    pub async fn connect(self) -> Result<DynamoDbStore, StoreError> {
        let address = Address::parse(&self.url)?;
        if let Some(wrong) = self.settings.check().into_iter().next() {
            let text = format!("{}: {}", wrong.setting, wrong.what);
            return Err(StoreError::refused(text));
        }
        let client = match self.client {
            Some(client) => client,
            None => client_of(&address).await,
        };
        let region = client.config().region().map(ToString::to_string);
        if region.is_none() {
            return Err(StoreError::refused(
                "no region is known: add ?region= to the URL, or set AWS_REGION",
            ));
        }
        let times = (
            self.settings.connect_timeout,
            self.settings.response_timeout,
        );
        let clock = ServiceClock::new(self.clock, self.wall_error_us);
        let inner = Inner {
            api: Api::new(&client, address.table, clock, times),
            claims: Claims::default(),
            settings: self.settings,
            endpoint: address.endpoint,
            region,
        };
        let store = DynamoDbStore {
            inner: Arc::new(inner),
        };
        let may_be_missing = self.may_be_missing;
        until_reachable(self.start_patience, fastrand::f64, || {
            store.first_look(may_be_missing)
        })
        .await
        .map_err(|error| store.at_table(error))?;
        Ok(store)
    }
}

impl DynamoDbStore {
    async fn first_look(&self, may_be_missing: bool) -> Result<(), StoreError> {
        let api = &self.inner.api;
        match api.get(NOTHING, Lane::Call, api.deadline()).await {
            Ok(_) => {}
            Err(StoreError::Refused { reason }) if may_be_missing && reason.contains(NO_TABLE) => {}
            Err(error) => return Err(error),
        }
        match api.clock.now() {
            Some(_) => Ok(()),
            None => Err(StoreError::refused(
                "the answers have no header `Date`, which is the store's clock: is there a proxy that takes it out?",
            )),
        }
    }
}

async fn client_of(address: &Address) -> Client {
    let mut loader = aws_config::defaults(BehaviorVersion::latest());
    if let Some(region) = &address.region {
        loader = loader.region(Region::new(region.clone()));
    }
    if let Some(endpoint) = &address.endpoint {
        loader = loader.endpoint_url(endpoint);
    }
    Client::new(&loader.load().await)
}
