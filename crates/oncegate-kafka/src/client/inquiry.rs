//! Clients that ask brokers about topics, offsets and groups, and never join one.
//!
//! librdkafka reports a refused password or certificate through its error callback alone: the
//! request that needed the connection goes on until its time limit, as if nothing answered. These
//! clients listen to that callback while they wait, so the reason is known at once, with the
//! property to change.

use std::collections::HashMap;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rdkafka::client::{ClientContext, OAuthToken};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::metadata::{Metadata, MetadataPartition, MetadataTopic};
use rdkafka::topic_partition_list::TopicPartitionList;
use rdkafka::types::RDKafkaRespErr;

use super::log;
use super::login::login_refusal;
use super::settings;
use super::tokens::{self, TokenError, Tokens};
use oncegate_runtime::source::SourceError;

/// A client that asks.
pub(crate) type InquiryClient = BaseConsumer<InquiryContext>;

/// The time that the first request has before the callback is listened to. Each next one has twice
/// as much, because a busy broker may need it.
const LISTEN_AFTER: Duration = Duration::from_millis(500);

/// The pause before a request that has failed is repeated.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// The longest wait for the id of a cluster: old brokers have none, and are waited for.
const CLUSTER_ID_LIMIT: Duration = Duration::from_secs(5);

/// The number of topics that are asked about at the same time. The client repeats a request that
/// the brokers refuse, as some of these are meant to be, so each takes longer than an answer.
const AT_ONCE: usize = 256;

/// The number of topics from which on the brokers are asked about all that they have: one request
/// in place of one a topic.
const MANY_TOPICS: usize = 8;

/// The group of a client that asks about none: without a group, a client hears no callback.
const NO_GROUP: &str = "oncegate-asks";

/// Returns a client with these settings.
pub(crate) fn client(mut config: ClientConfig) -> Result<InquiryClient, SourceError> {
    // It joins no group, and its log is not read.
    config.remove("group.instance.id");
    config.remove("debug");
    if config.get("group.id").is_none() {
        config.set("group.id", NO_GROUP);
    }
    let tokens = Tokens::take(&mut config)?;
    let waits_for_token = tokens.is_some();
    let context = InquiryContext {
        tokens,
        ..InquiryContext::default()
    };
    let client: InquiryClient = config
        .create_with_context(context)
        .map_err(settings::unusable)?;
    // A client asks for its token in `poll`, and no request is sent before it has one.
    let begun = Instant::now();
    while waits_for_token && !client.context().has_asked() && begun.elapsed() < LISTEN_AFTER {
        drop(client.poll(Duration::from_millis(10)));
    }
    Ok(client)
}

/// Returns a client that asks about committed offsets. It gets the last ones that are settled, also
/// of partitions whose next offset is in an open transaction, for which others wait.
pub(crate) fn offsets_client(mut config: ClientConfig) -> Result<InquiryClient, SourceError> {
    config.set("isolation.level", "read_uncommitted");
    client(config)
}

/// Returns what the brokers know about `topic`, or an error: the brokers' refusal, or else what
/// `failed` makes of it.
pub(crate) fn metadata(
    client: &InquiryClient,
    topic: &str,
    timeout: Duration,
    failed: impl FnOnce(KafkaError) -> SourceError,
) -> Result<Metadata, SourceError> {
    let answer = ask(
        client,
        timeout,
        |limit| client.fetch_metadata(Some(topic), limit),
        |_| false,
    )?;
    answer.map_err(failed)
}

/// Returns the id of the cluster; `None` when its brokers have none.
///
/// # Errors
/// The brokers' refusal, or else what `failed` makes of an error.
pub(crate) fn cluster_id(
    client: &InquiryClient,
    topic: &str,
    timeout: Duration,
    failed: impl FnOnce(KafkaError) -> SourceError,
) -> Result<Option<String>, SourceError> {
    // Every answer with metadata has the id, so the second question has waited for its answer.
    metadata(client, topic, timeout, failed)?;
    Ok(client
        .client()
        .fetch_cluster_id(timeout.min(CLUSTER_ID_LIMIT)))
}

/// A topic as the brokers describe it.
#[derive(Debug)]
pub(crate) struct TopicLayout {
    pub(crate) error: Option<RDKafkaRespErr>,
    /// The numbers of its partitions.
    pub(crate) partitions: Vec<i32>,
    /// The smallest number of replicas of a partition.
    pub(crate) replicas: usize,
}

impl TopicLayout {
    pub(crate) fn of(topic: &MetadataTopic) -> Self {
        let partitions = topic.partitions();
        Self {
            error: topic.error(),
            partitions: partitions.iter().map(MetadataPartition::id).collect(),
            replicas: partitions
                .iter()
                .map(|partition| partition.replicas().len())
                .min()
                .unwrap_or_default(),
        }
    }
}

/// Returns what the brokers know about each of the topics, in their order; `None` about one that
/// they do not name. Each request may take `timeout`.
///
/// # Errors
/// The brokers' refusal, or else what `failed` makes of an error.
pub(crate) fn layouts(
    client: &InquiryClient,
    topics: &[String],
    timeout: Duration,
    failed: impl Fn(KafkaError) -> SourceError,
) -> Result<Vec<Option<TopicLayout>>, SourceError> {
    let all = if topics.len() >= MANY_TOPICS {
        let answer = ask(
            client,
            timeout,
            |limit| client.fetch_metadata(None, limit),
            |_| false,
        )?;
        Some(answer.map_err(&failed)?)
    } else {
        None
    };
    let known: HashMap<&str, &MetadataTopic> = all
        .iter()
        .flat_map(Metadata::topics)
        .map(|topic| (topic.name(), topic))
        .collect();
    let layouts = topics.iter().map(|name| {
        if let Some(topic) = known.get(name.as_str()) {
            return Ok(Some(TopicLayout::of(topic)));
        }
        // Of topics that this user may not see, the brokers speak only when asked.
        let metadata = metadata(client, name, timeout, &failed)?;
        let found = metadata.topics().iter().find(|topic| topic.name() == name);
        Ok(found.map(TopicLayout::of))
    });
    layouts.collect()
}

/// Calls `ask` for each topic, for many at the same time, and returns the answers in the order of
/// the topics.
///
/// # Errors
/// The first error in the order of the topics.
pub(crate) fn of_each<T: Send>(
    topics: &[String],
    ask: impl Fn(&str) -> Result<T, SourceError> + Sync,
) -> Result<Vec<T>, SourceError> {
    if let [only] = topics {
        return Ok(vec![ask(only)?]);
    }
    let mut answers = Vec::with_capacity(topics.len());
    for some in topics.chunks(AT_ONCE) {
        let ask = &ask;
        std::thread::scope(|scope| {
            let asking: Vec<_> = some
                .iter()
                .map(|topic| scope.spawn(move || ask(topic)))
                .collect();
            for answer in asking {
                let answer = answer.join();
                answers
                    .push(answer.map_err(|_| SourceError::new("the Kafka client has panicked"))??);
            }
            Ok::<_, SourceError>(())
        })?;
    }
    Ok(answers)
}

/// Sends a request until it is answered, its error `is_final`, or `timeout` is over. Returns the
/// last answer.
///
/// # Errors
/// When the brokers refuse the connection.
fn ask<T>(
    client: &InquiryClient,
    timeout: Duration,
    request: impl Fn(Duration) -> KafkaResult<T>,
    is_final: impl Fn(&KafkaError) -> bool,
) -> Result<KafkaResult<T>, SourceError> {
    let begun = Instant::now();
    let mut limit = LISTEN_AFTER;
    loop {
        let left = timeout.saturating_sub(begun.elapsed());
        let error = match request(left.clamp(Duration::from_millis(1), limit)) {
            Ok(answer) => return Ok(Ok(answer)),
            Err(error) => error,
        };
        while client.poll(Duration::ZERO).is_some() {}
        if let Some(refusal) = client.context().refusal() {
            return Err(refusal);
        }
        if is_final(&error) || timeout.saturating_sub(begun.elapsed()) <= ASK_AGAIN {
            return Ok(Err(error));
        }
        drop(client.poll(ASK_AGAIN));
        limit = limit.saturating_mul(2);
    }
}

/// The reason for which a client cannot connect.
#[derive(Debug)]
enum LoginRefusal {
    ByBrokers(String),
    NoToken(TokenError),
}

/// The answer of the coordinator of a client's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coordinator {
    /// The coordinator answers this user.
    Answers,
    /// The coordinator denies access to the group.
    Denies,
    /// The coordinator does not answer in time.
    Away,
}

/// Asks the coordinator of the client's group for the committed offsets of these partitions.
///
/// # Errors
/// When the brokers refuse the connection.
pub(crate) fn coordinator(
    client: &InquiryClient,
    partitions: &TopicPartitionList,
    timeout: Duration,
) -> Result<Coordinator, SourceError> {
    let Err(error) = committed_offsets(client, partitions, timeout)? else {
        return Ok(Coordinator::Answers);
    };
    Ok(match error.rdkafka_error_code() {
        Some(RDKafkaErrorCode::GroupAuthorizationFailed) => Coordinator::Denies,
        _ if client.context().is_group_denied() => Coordinator::Denies,
        Some(RDKafkaErrorCode::TopicAuthorizationFailed) => Coordinator::Answers,
        _ => Coordinator::Away,
    })
}

/// Returns what the group of the client has committed for these partitions. Asks again within
/// `timeout`, unless access is denied: a coordinator that starts or moves answers with an error.
///
/// # Errors
/// When the brokers refuse the connection.
pub(crate) fn committed_offsets(
    client: &InquiryClient,
    partitions: &TopicPartitionList,
    timeout: Duration,
) -> Result<KafkaResult<TopicPartitionList>, SourceError> {
    use RDKafkaErrorCode::{GroupAuthorizationFailed, TopicAuthorizationFailed};
    ask(
        client,
        timeout,
        |limit| client.committed_offsets(partitions.clone(), limit),
        |error| {
            let code = error.rdkafka_error_code();
            matches!(
                code,
                Some(GroupAuthorizationFailed | TopicAuthorizationFailed)
            ) || client.context().is_group_denied()
        },
    )
}

/// Remembers why brokers refuse the connection, or access to the group.
#[derive(Debug, Default)]
pub(crate) struct InquiryContext {
    refusal: Mutex<Option<LoginRefusal>>,
    is_group_denied: AtomicBool,
    tokens: Option<Tokens>,
    has_asked: AtomicBool,
}

impl InquiryContext {
    fn refusal(&self) -> Option<SourceError> {
        self.first_refusal().as_ref().map(|refusal| match refusal {
            LoginRefusal::ByBrokers(text) => SourceError::new(text.clone()),
            LoginRefusal::NoToken(error) => error.of_source(),
        })
    }

    /// Returns whether the client has asked for a token, and got one or not.
    fn has_asked(&self) -> bool {
        self.has_asked.load(Ordering::Relaxed)
    }

    fn first_refusal(&self) -> MutexGuard<'_, Option<LoginRefusal>> {
        self.refusal.lock()
    }

    fn is_group_denied(&self) -> bool {
        self.is_group_denied.load(Ordering::Relaxed)
    }
}

impl ClientContext for InquiryContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log::log(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::debug!(reason, "Kafka client error");
        if error.rdkafka_error_code() == Some(RDKafkaErrorCode::GroupAuthorizationFailed) {
            self.is_group_denied.store(true, Ordering::Relaxed);
        }
        if let Some(refusal) = login_refusal(&error, reason, self.tokens.is_some()) {
            // The first one is the cause of the others.
            self.first_refusal()
                .get_or_insert(LoginRefusal::ByBrokers(refusal));
        }
    }

    const ENABLE_REFRESH_OAUTH_TOKEN: bool = true;

    fn generate_oauth_token(&self, _config: Option<&str>) -> Result<OAuthToken, Box<dyn Error>> {
        let token = match self.tokens.as_ref().map(Tokens::next) {
            Some(Ok(token)) => Ok(token),
            Some(Err(error)) => {
                let text = error.to_string();
                self.first_refusal()
                    .get_or_insert(LoginRefusal::NoToken(error));
                Err(text.into())
            }
            None => tokens::generate(None),
        };
        self.has_asked.store(true, Ordering::Relaxed);
        token
    }

    fn stats_raw(&self, _statistics: &[u8]) {}
}

impl ConsumerContext for InquiryContext {
    fn commit_callback(&self, _result: KafkaResult<()>, _offsets: &TopicPartitionList) {}
}
