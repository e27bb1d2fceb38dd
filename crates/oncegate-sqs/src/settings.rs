//! Settings for the connection to a queue and for consuming it.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_sqs::Client;
use aws_sdk_sqs::config::timeout::TimeoutConfig;
use aws_sdk_sqs::config::{BehaviorVersion, Region};

use super::api::CONNECT_TIMEOUT;
use super::payloads::Payloads;
use super::queue_error::QueueError;
use super::source_settings::{SqsSettings, WAIT_MIN};
use oncegate_core::settings::Finding;
use oncegate_runtime::source::SourceError;

/// The settings of a source.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) connection: Connection,
    /// The queue's name or URL.
    pub(crate) queue: String,
    pub(crate) source: SqsSettings,
    #[cfg(feature = "s3")]
    pub(crate) s3_payloads: Option<super::S3Payloads>,
}

/// Time limit of a call outside of the source's loop, including the client's retries.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

impl Settings {
    pub(crate) fn new(connection: Connection, queue: String) -> Self {
        Self {
            connection,
            queue,
            source: SqsSettings::DEFAULT,
            #[cfg(feature = "s3")]
            s3_payloads: None,
        }
    }

    /// Runs every check that needs no queue.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        if has_login(&self.queue)
            || self
                .connection
                .endpoint_url
                .as_deref()
                .is_some_and(has_login)
        {
            return Err(QueueError::Login.into());
        }
        if let Some(Finding { what, .. }) = self.source.check().into_iter().next() {
            return Err(SourceError::new(what));
        }
        #[cfg(feature = "s3")]
        if let Some(payloads) = &self.s3_payloads {
            payloads.check()?;
        }
        Ok(())
    }

    /// Makes the clients for payloads that are not in the queue.
    pub(crate) async fn payloads(
        &self,
        sqs: &Client,
    ) -> Result<Option<Arc<dyn Payloads>>, SourceError> {
        #[cfg(feature = "s3")]
        if let Some(payloads) = &self.s3_payloads {
            return Ok(Some(Arc::new(payloads.open(sqs.config().region()).await?)));
        }
        #[cfg(not(feature = "s3"))]
        let _ = sqs;
        Ok(None)
    }
}

/// Returns how long a receive may wait so that one that begins right before a stop ends before the
/// stop deadline. Cancelling it would hide its messages for the visibility timeout.
pub(crate) fn wait_within(wait: Duration, stop_deadline: Duration) -> Duration {
    const ANSWER: Duration = Duration::from_secs(1);
    let most = Duration::from_secs(stop_deadline.saturating_sub(ANSWER).as_secs());
    wait.min(most).max(WAIT_MIN)
}

/// A client, or what one is created from.
#[derive(Clone, Debug, Default)]
pub(crate) struct Connection {
    pub(crate) client: Option<Client>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint_url: Option<String>,
}

impl Connection {
    /// Returns the given client, or one from the AWS SDK's default chain with a time limit on each
    /// call. If the chain has no region or endpoint, the queue's URL may.
    pub(crate) async fn client(&self, queue: &str) -> Client {
        let client = match &self.client {
            Some(client) => client.clone(),
            None => self.new_client(queue).await,
        };
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .operation_timeout(CALL_TIMEOUT);
        Client::from_conf(
            client
                .config()
                .to_builder()
                .timeout_config(timeouts.build())
                .build(),
        )
    }

    async fn new_client(&self, queue: &str) -> Client {
        let place = QueueLocation::of(queue);
        let mut loader = aws_config::defaults(BehaviorVersion::latest());
        if let Some(region) = self.region.clone().or(place.region) {
            loader = loader.region(Region::new(region));
        }
        let shared = loader.load().await;
        let mut config = aws_sdk_sqs::config::Builder::from(&shared);
        if let Some(endpoint) = self.endpoint_url.clone().or(place.endpoint_url) {
            config = config.endpoint_url(endpoint);
            if shared.region().is_none() {
                // A local server has no regions, but signatures need one.
                config = config.region(Region::new("us-east-1"));
            }
        }
        Client::from_conf(config.build())
    }
}

/// The region or endpoint in a queue's URL.
#[derive(Debug, Default, PartialEq, Eq)]
struct QueueLocation {
    region: Option<String>,
    endpoint_url: Option<String>,
}

impl QueueLocation {
    fn of(queue: &str) -> Self {
        let Some((scheme, rest)) = queue.split_once("://") else {
            return Self::default();
        };
        let host = rest.split('/').next().unwrap_or_default();
        // https://sqs.eu-central-1.amazonaws.com/…, in China with the suffix .cn.
        let in_aws = host
            .split_once(".amazonaws.com")
            .is_some_and(|(_, rest)| matches!(rest, "" | ".cn"));
        if in_aws {
            let region = host
                .strip_prefix("sqs.")
                .and_then(|rest| rest.split('.').next());
            return Self {
                region: region.map(str::to_owned),
                endpoint_url: None,
            };
        }
        Self {
            region: None,
            endpoint_url: Some(format!("{scheme}://{host}")),
        }
    }
}

/// Returns the name at the end of a queue's URL, or the name itself.
pub(crate) fn name(queue: &str) -> &str {
    queue
        .trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or(queue)
}

/// Returns whether a queue's name or URL contains a login. Errors and logs name queues.
pub(crate) fn has_login(queue: &str) -> bool {
    queue.contains('@')
}

/// Returns whether the queue is FIFO, by the suffix of its name.
pub(crate) fn is_fifo(queue: &str) -> bool {
    name(queue).ends_with(".fifo")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_where_the_queue_is() {
        let place = |region: Option<&str>, endpoint: Option<&str>| QueueLocation {
            region: region.map(str::to_owned),
            endpoint_url: endpoint.map(str::to_owned),
        };
        let cases = [
            ("orders", place(None, None)),
            (
                "https://sqs.eu-central-1.amazonaws.com/000000000000/orders",
                place(Some("eu-central-1"), None),
            ),
            (
                "https://sqs.cn-north-1.amazonaws.com.cn/000000000000/orders",
                place(Some("cn-north-1"), None),
            ),
            (
                "http://127.0.0.1:9324/000000000000/orders",
                place(None, Some("http://127.0.0.1:9324")),
            ),
        ];
        for (queue, expected) in cases {
            assert_eq!(QueueLocation::of(queue), expected, "{queue}");
            assert_eq!(name(queue), "orders");
        }
        assert!(is_fifo("http://127.0.0.1:9324/queue/orders.fifo") && !is_fifo("orders"));
    }

    #[test]
    fn a_receive_ends_before_the_deadline_of_a_stop() {
        let cases = [
            (20, 60_000, 20),
            (20, 20_000, 19),
            (20, 5_500, 4),
            (5, 20_000, 5),
            (20, 0, 1),
        ];
        for (wait, stop_ms, expected) in cases {
            let within = wait_within(Duration::from_secs(wait), Duration::from_millis(stop_ms));
            assert_eq!(
                within,
                Duration::from_secs(expected),
                "{wait} s within {stop_ms} ms"
            );
        }
    }

    #[test]
    fn settings_that_sqs_would_refuse_are_named() {
        let settings = || Settings::new(Connection::default(), "orders".to_owned());
        settings().check().expect("the defaults are fine");
        let refused = |settings: Settings| settings.check().expect_err("refused").to_string();
        let queue = "https://me:hush@sqs.eu-central-1.amazonaws.com/1/orders".to_owned();
        let said = refused(Settings {
            queue,
            ..settings()
        });
        assert!(
            said.contains("a user or a password") && !said.contains("hush"),
            "{said}"
        );
        let defaults = SqsSettings::DEFAULT;
        let visibility = Duration::from_millis(1_500);
        for (source, words) in [
            (
                SqsSettings {
                    visibility,
                    ..defaults
                },
                "`visibility` is 1.5s",
            ),
            (
                SqsSettings {
                    wait: Duration::ZERO,
                    ..defaults
                },
                "`wait` is 0ns",
            ),
            (
                SqsSettings {
                    wait: Duration::from_secs(21),
                    ..defaults
                },
                "1 s to 20 s",
            ),
        ] {
            let said = refused(Settings {
                source,
                ..settings()
            });
            assert!(said.contains(words), "{said}");
        }
    }
}
