//! The requests to DynamoDB, each repeated within its time limit.
//!
//! - Every answer teaches the clock, errors included: [`Dated`].
//! - The SDK does not repeat: it would not tell whether a first try may have been executed.
//! - Two lanes: heartbeats have connections and permits of their own. A large batch cannot take
//!   them away, and neither can a blocked runtime whose connections they would share.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextRef,
};
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::{BoxError, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::put_item::PutItemError;
use aws_sdk_dynamodb::operation::put_item::builders::PutItemFluentBuilder;
use aws_sdk_dynamodb::types::{KeysAndAttributes, ReturnValuesOnConditionCheckFailure};
use oncegate_core::store::StoreError;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::clock::{Reading, ServiceClock, date_seconds};
use super::errors::Failure;
use super::item::{
    DESCRIPTOR, EXPIRES, ID, Item, OWNER, PENDING, REVISION, Revision, STATE, binary, number, text,
};
use oncegate_core::record::{StoreTime, Token};

/// The most requests in flight at a time, besides heartbeats.
const CALLS_MOST: usize = 128;

/// The most heartbeats in flight at a time.
const HEARTBEATS_MOST: usize = 64;

/// The most keys in one `BatchGetItem`.
const READ_MOST: usize = 100;

/// The share of the time limit of a call that one try may take: a lost answer leaves time for
/// others.
const TRIES: u32 = 4;

/// The longest delays before the second and before every later try.
const FIRST_DELAY: Duration = Duration::from_millis(20);
const LONGEST_DELAY: Duration = Duration::from_millis(500);

/// The connections and permits of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    Call,
    Heartbeat,
}

/// The requirement of a write for the item that it replaces.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Expected<'a> {
    /// There is none.
    Absent,
    /// Nothing that can be: the write is refused, if not for another reason.
    Never,
    /// A descriptor with this text is there.
    Describes(&'a str),
    /// There is none, or its record had expired at this instant.
    AbsentOrExpired(StoreTime),
    /// A claim of this token is there, which has not expired at the instant, and whose end is no
    /// later than the last one.
    OwnedBy {
        token: Token,
        kept_at: StoreTime,
        ends_by: StoreTime,
    },
    /// The item that this write has made is there.
    MadeBy(Revision),
}

/// The outcome of a write.
#[derive(Debug)]
pub(crate) enum Written {
    Done,
    /// The condition does not hold; the item that is there instead.
    Other(Option<Item>),
}

/// The table, and how it is reached.
#[derive(Debug)]
pub(crate) struct Api {
    calls: Client,
    heartbeats: Client,
    pub(crate) table: String,
    pub(crate) clock: Arc<ServiceClock>,
    limit: Duration,
    call_permits: Semaphore,
    heartbeat_permits: Semaphore,
}

impl Api {
    pub(crate) fn new(
        client: &Client,
        table: String,
        clock: ServiceClock,
        (connect, limit): (Duration, Duration),
    ) -> Self {
        let try_limit = limit / TRIES;
        Self {
            calls: limited(client, connect, try_limit),
            // Another time limit also gives it other connections.
            heartbeats: limited(client, connect, try_limit + Duration::from_millis(1)),
            table,
            clock: Arc::new(clock),
            limit,
            call_permits: Semaphore::new(CALLS_MOST),
            heartbeat_permits: Semaphore::new(HEARTBEATS_MOST),
        }
    }

    pub(crate) fn client(&self) -> &Client {
        &self.calls
    }

    /// The instant by which a call that begins now must have ended.
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    /// Marks a request, so that its answer teaches the clock.
    pub(crate) fn dated(&self) -> Dated {
        Dated {
            clock: Arc::clone(&self.clock),
            sent: Mutex::new(None),
        }
    }

    /// Reads an item as it is after all writes before.
    pub(crate) async fn get(
        &self,
        id: &str,
        lane: Lane,
        deadline: Instant,
    ) -> Result<Option<Item>, StoreError> {
        let answer = self
            .repeated(lane, deadline, |client| {
                client
                    .get_item()
                    .table_name(&self.table)
                    .key(ID, text(id))
                    .consistent_read(true)
                    .customize()
                    .interceptor(self.dated())
                    .send()
            })
            .await;
        match answer {
            Ok(answer) => Ok(answer.item),
            Err(Failed { failure, .. }) => Err(failure.of_read()),
        }
    }

    /// Reads items as they are after all writes before. The ids must differ.
    pub(crate) async fn get_all(&self, ids: Vec<String>) -> Result<Vec<Item>, StoreError> {
        let reads = ids
            .chunks(READ_MOST)
            .map(|ids| self.get_some(ids.to_vec(), self.deadline()));
        let found = futures_util::future::try_join_all(reads).await?;
        Ok(found.into_iter().flatten().collect())
    }

    async fn get_some(&self, ids: Vec<String>, deadline: Instant) -> Result<Vec<Item>, StoreError> {
        let mut found = Vec::with_capacity(ids.len());
        let mut keys: Vec<Item> = ids
            .into_iter()
            .map(|id| Item::from([(ID.to_owned(), text(id))]))
            .collect();
        let mut delay = FIRST_DELAY;
        while !keys.is_empty() {
            let wanted = KeysAndAttributes::builder()
                .set_keys(Some(keys.clone()))
                .consistent_read(true)
                .build()
                .map_err(StoreError::refused)?;
            let answer = self
                .repeated(Lane::Call, deadline, |client| {
                    client
                        .batch_get_item()
                        .request_items(&self.table, wanted.clone())
                        .customize()
                        .interceptor(self.dated())
                        .send()
                })
                .await
                .map_err(|Failed { failure, .. }| failure.of_read())?;
            let more = answer.responses.unwrap_or_default().remove(&self.table);
            found.extend(more.unwrap_or_default());
            let left = answer.unprocessed_keys.unwrap_or_default();
            let left = left.into_iter().find(|(table, _)| *table == self.table);
            keys = left.map(|(_, left)| left.keys).unwrap_or_default();
            if !keys.is_empty() {
                // What is over 16 MB or over the table's throughput is left for another request.
                wait(&mut delay, deadline)
                    .await
                    .map_err(|()| StoreError::unavailable("DynamoDB answered for a part only"))?;
            }
        }
        Ok(found)
    }

    /// Replaces an item, if it is as expected.
    ///
    /// A repeat of a write whose answer was lost finds its own revision: then it was executed.
    pub(crate) async fn put(
        &self,
        item: Item,
        revision: Revision,
        expected: Expected<'_>,
        lane: Lane,
        deadline: Instant,
    ) -> Result<Written, StoreError> {
        let answer = self
            .repeated(lane, deadline, |client| {
                let put = client
                    .put_item()
                    .table_name(&self.table)
                    .set_item(Some(item.clone()));
                conditioned(put, expected)
                    .customize()
                    .interceptor(self.dated())
                    .send()
            })
            .await;
        match answer {
            Ok(_) => Ok(Written::Done),
            Err(failed) => failed.written(revision),
        }
    }

    /// Sends a request until it is answered, for as long as there is time.
    async fn repeated<T, E, C, F>(
        &self,
        lane: Lane,
        deadline: Instant,
        call: C,
    ) -> Result<T, Failed<E>>
    where
        C: Fn(&Client) -> F,
        F: Future<Output = Result<T, SdkError<E>>>,
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let (client, permits) = match lane {
            Lane::Call => (&self.calls, &self.call_permits),
            Lane::Heartbeat => (&self.heartbeats, &self.heartbeat_permits),
        };
        let mut delay = FIRST_DELAY;
        // The first failure after which the request may have been executed.
        let mut in_doubt: Option<Failure> = None;
        loop {
            let Ok(Ok(_permit)) = tokio::time::timeout_at(deadline, permits.acquire()).await else {
                let why = Failure::NotExecuted("too many requests wait for DynamoDB".to_owned());
                return Err(Failed::without_answer(why, in_doubt));
            };
            let failure = match tokio::time::timeout_at(deadline, call(client)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) => {
                    let failure = Failure::of(&error, &self.table);
                    if matches!(failure, Failure::Refused(_)) {
                        return Err(Failed {
                            answer: Some(error),
                            failure: in_doubt.unwrap_or(failure),
                        });
                    }
                    failure
                }
                Err(_) => Failure::Unknown("no answer within the time limit".to_owned()),
            };
            if matches!(failure, Failure::Unknown(_)) && in_doubt.is_none() {
                in_doubt = Some(failure.clone());
            }
            if wait(&mut delay, deadline).await.is_err() {
                return Err(Failed::without_answer(failure, in_doubt));
            }
        }
    }
}

/// A call that has failed, with the service's last answer.
struct Failed<E> {
    answer: Option<SdkError<E>>,
    failure: Failure,
}

impl<E> Failed<E> {
    /// A request that may have been executed by an earlier try stays in doubt.
    fn without_answer(failure: Failure, in_doubt: Option<Failure>) -> Self {
        Self {
            answer: None,
            failure: in_doubt.unwrap_or(failure),
        }
    }
}

impl Failed<PutItemError> {
    /// The outcome of a write. A condition that does not hold is one of them.
    fn written(self, revision: Revision) -> Result<Written, StoreError> {
        if let Some(SdkError::ServiceError(error)) = self.answer
            && let PutItemError::ConditionalCheckFailedException(refused) = error.into_err()
        {
            return Ok(match refused.item {
                Some(item) if revision.has_made(&item) => Written::Done,
                other => Written::Other(other),
            });
        }
        Err(match self.failure {
            Failure::NotExecuted(text) => StoreError::unavailable(text),
            Failure::Unknown(text) => StoreError::unknown(text),
            Failure::Refused(text) => StoreError::refused(text),
        })
    }
}

/// Waits before another try, for a random part of a delay that doubles.
///
/// # Errors
/// When the time would be over.
async fn wait(delay: &mut Duration, deadline: Instant) -> Result<(), ()> {
    let until = Instant::now() + delay.mul_f64(fastrand::f64());
    if until >= deadline {
        return Err(());
    }
    tokio::time::sleep_until(until).await;
    *delay = (*delay * 2).min(LONGEST_DELAY);
    Ok(())
}

/// Adds the condition to a write, and asks for the item if it does not hold.
fn conditioned(put: PutItemFluentBuilder, expected: Expected<'_>) -> PutItemFluentBuilder {
    let put =
        put.return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
    // Names of attributes are passed beside the condition: some of them are words of its grammar.
    match expected {
        Expected::Absent => put
            .condition_expression("attribute_not_exists(#id)")
            .expression_attribute_names("#id", ID),
        Expected::Never => put
            .condition_expression("attribute_exists(#id) AND attribute_not_exists(#id)")
            .expression_attribute_names("#id", ID),
        Expected::Describes(descriptor) => put
            .condition_expression("#descriptor = :descriptor")
            .expression_attribute_names("#descriptor", DESCRIPTOR)
            .expression_attribute_values(":descriptor", text(descriptor)),
        Expected::AbsentOrExpired(at) => put
            .condition_expression("attribute_not_exists(#id) OR #expires < :at")
            .expression_attribute_names("#id", ID)
            .expression_attribute_names("#expires", EXPIRES)
            .expression_attribute_values(":at", number(at.millis())),
        Expected::OwnedBy {
            token,
            kept_at,
            ends_by,
        } => put
            .condition_expression(
                "#owner = :token AND #state = :pending AND #expires BETWEEN :at AND :by",
            )
            .expression_attribute_names("#owner", OWNER)
            .expression_attribute_names("#state", STATE)
            .expression_attribute_names("#expires", EXPIRES)
            .expression_attribute_values(":token", binary(token.as_bytes()))
            .expression_attribute_values(":pending", text(PENDING))
            .expression_attribute_values(":at", number(kept_at.millis()))
            .expression_attribute_values(":by", number(ends_by.millis())),
        Expected::MadeBy(revision) => put
            .condition_expression("#rev = :rev")
            .expression_attribute_names("#rev", REVISION)
            .expression_attribute_values(":rev", revision.value()),
    }
}

/// A client whose tries have this time limit, and are not repeated.
fn limited(client: &Client, connect: Duration, limit: Duration) -> Client {
    let timeouts = TimeoutConfig::builder()
        .connect_timeout(connect)
        .read_timeout(limit)
        .operation_attempt_timeout(limit)
        .operation_timeout(limit)
        .build();
    let config = client.config().to_builder().timeout_config(timeouts);
    Client::from_conf(config.retry_config(RetryConfig::disabled()).build())
}

/// Teaches the clock what the answer to one request says.
#[derive(Debug)]
pub(crate) struct Dated {
    clock: Arc<ServiceClock>,
    sent: Mutex<Option<Reading>>,
}

impl Intercept for Dated {
    fn name(&self) -> &'static str {
        "OncegateDated"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        *self.sent.lock() = Some(self.clock.reading());
        Ok(())
    }

    fn read_after_transmit(
        &self,
        context: &BeforeDeserializationInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let date = context
            .response()
            .headers()
            .get("date")
            .and_then(date_seconds);
        if let (Some(sent), Some(date_s)) = (self.sent.lock().take(), date) {
            self.clock.learn(sent, self.clock.reading(), date_s);
        }
        Ok(())
    }
}
