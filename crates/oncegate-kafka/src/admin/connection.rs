//! A connection to one broker: addresses, frames, and the versions that both sides know.
//!
//! Source: <https://kafka.apache.org/protocol>. A frame is its length in four bytes, a header and a
//! message. The header of an answer repeats the number of its request.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use kafka_protocol::messages::{ApiKey, ApiVersionsRequest, RequestHeader, ResponseHeader};
use kafka_protocol::protocol::{
    Decodable as _, Encodable as _, HeaderVersion as _, StrBytes, VersionRange,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::address::{Address, Failure};
use super::messages::Call;
use super::tls::{self, Tls};
use crate::client::tokens::Tokens;
use oncegate_runtime::failure::BoxError;

/// Time limit of a connection without its login, so that one broker that is away does not use up a
/// request's limit.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The largest answer. The metadata of a cluster with thousands of brokers is smaller.
const ANSWER_MAX_BYTES: usize = 4 * 1024 * 1024;

/// The name of this client in the brokers' logs: the default of the other clients.
const CLIENT_ID: &str = "oncegate";

/// The protection of connections, and the client's identity.
pub(super) struct Access {
    pub(super) tls: Option<Tls>,
    pub(super) tokens: Tokens,
}

/// A stream that frames are read from and written to.
trait Duplex: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Duplex for T {}

/// A connection that has logged in. One that has failed is of no further use.
pub(super) struct BrokerConnection {
    address: Address,
    stream: Box<dyn Duplex>,
    /// The versions that the broker knows, by the number of the request.
    versions: BTreeMap<i16, VersionRange>,
    /// The number of the last request.
    sent: i32,
}

impl BrokerConnection {
    /// Connects. A caller that drops the future closes the connection.
    pub(super) async fn open(address: &Address, access: &Access) -> Result<Self, Failure> {
        let connecting = timeout(CONNECT_TIMEOUT, connect(address, access.tls.as_ref())).await;
        let stream = connecting.unwrap_or_else(|_| {
            Err(Failure::away(format!(
                "{address}: no connection within {CONNECT_TIMEOUT:?}"
            )))
        })?;
        let versions = BTreeMap::from([(ApiKey::ApiVersions as i16, ApiVersionsRequest::VERSIONS)]);
        let mut connection = Self {
            address: address.clone(),
            stream,
            versions,
            sent: 0,
        };
        let known = connection
            .ask(&ApiVersionsRequest::default())
            .await?
            .api_keys;
        connection.versions = known
            .into_iter()
            .map(|known| {
                let versions = VersionRange {
                    min: known.min_version,
                    max: known.max_version,
                };
                (known.api_key, versions)
            })
            .collect();
        Ok(connection)
    }

    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// Sends a request, and returns its answer.
    pub(super) async fn ask<C: Call>(&mut self, request: &C) -> Result<C::Response, Failure> {
        let version = self.version::<C>()?;
        self.sent = self.sent.wrapping_add(1);
        let frame = frame(request, version, self.sent).map_err(|error| {
            Failure::refused(format!(
                "the request {:?} cannot be made in version {version}: {error}",
                C::KEY
            ))
        })?;
        let mut answer = self.exchange(&frame).await?;
        let header = ResponseHeader::decode(&mut answer, C::Response::header_version(version))
            .map_err(|error| self.unreadable::<C>(version, error))?;
        if header.correlation_id != self.sent {
            return Err(self.unreadable::<C>(version, "it belongs to another request"));
        }
        C::Response::decode(&mut answer, version)
            .map_err(|error| self.unreadable::<C>(version, error))
    }

    fn unreadable<C: Call>(&self, version: i16, error: impl fmt::Display) -> Failure {
        Failure::refused(format!(
            "the answer of the broker at {} to {:?} in version {version} cannot be read: {error}",
            self.address,
            C::KEY
        ))
    }

    /// The newest version of a request that both sides know.
    fn version<C: Call>(&self) -> Result<i16, Failure> {
        let theirs = self.versions.get(&(C::KEY as i16));
        let both = theirs
            .map(|theirs| theirs.intersect(&C::VERSIONS))
            .filter(|both| !both.is_empty());
        both.map(|both| both.max).ok_or_else(|| {
            Failure::refused(format!(
                "the broker at {} does not know the request {:?} in a version from {} to {}",
                self.address,
                C::KEY,
                C::VERSIONS.min,
                C::VERSIONS.max
            ))
        })
    }

    /// Writes a frame, and reads the next one.
    async fn exchange(&mut self, frame: &[u8]) -> Result<Bytes, Failure> {
        let lost = |error: io::Error| tls::failure(&self.address, error);
        self.stream.write_all(frame).await.map_err(lost)?;
        self.stream.flush().await.map_err(lost)?;
        let length = self.stream.read_i32().await.map_err(lost)?;
        let length = usize::try_from(length)
            .ok()
            .filter(|length| *length <= ANSWER_MAX_BYTES);
        let length = length.ok_or_else(|| {
            Failure::refused(format!(
                "what listens at {} does not answer as a Kafka broker: check the address and security.protocol",
                self.address
            ))
        })?;
        let mut answer = BytesMut::zeroed(length);
        self.stream.read_exact(&mut answer).await.map_err(lost)?;
        Ok(answer.freeze())
    }
}

async fn connect(address: &Address, tls: Option<&Tls>) -> Result<Box<dyn Duplex>, Failure> {
    let tcp = TcpStream::connect((address.host.as_str(), address.port)).await;
    let tcp = tcp.map_err(|error| tls::failure(address, error))?;
    Ok(match tls {
        Some(tls) => Box::new(tls.connect(address, tcp).await?),
        None => Box::new(tcp),
    })
}

/// The bytes of a request.
fn frame<C: Call>(request: &C, version: i16, number: i32) -> Result<Bytes, BoxError> {
    let header = RequestHeader::default()
        .with_request_api_key(C::KEY as i16)
        .with_request_api_version(version)
        .with_correlation_id(number)
        .with_client_id(Some(StrBytes::from_static_str(CLIENT_ID)));
    let mut message = BytesMut::new();
    header.encode(&mut message, C::header_version(version))?;
    request.encode(&mut message, version)?;
    let mut frame = BytesMut::with_capacity(size_of::<i32>() + message.len());
    frame.put_i32(i32::try_from(message.len())?);
    frame.put(message);
    Ok(frame.freeze())
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::{CreateTopicsRequest, DeleteTopicsRequest, MetadataRequest};

    use super::*;

    /// Returns the outcome of a request for versions when a broker answers so.
    async fn asked(answer: &[u8]) -> Result<usize, String> {
        let (stream, mut broker) = tokio::io::duplex(1024);
        broker.write_all(answer).await.expect("there is room");
        let address = Address {
            host: "kafka".to_owned(),
            port: 9098,
        };
        let versions = BTreeMap::from([(ApiKey::ApiVersions as i16, ApiVersionsRequest::VERSIONS)]);
        let mut connection = BrokerConnection {
            address,
            stream: Box::new(stream),
            versions,
            sent: 0,
        };
        match connection.ask(&ApiVersionsRequest::default()).await {
            Ok(answer) => Ok(answer.api_keys.len()),
            Err(Failure::Away(error)) => Err(format!("away: {error}")),
            Err(Failure::Refused(error)) => Err(error.to_string()),
        }
    }

    #[tokio::test]
    async fn only_the_answer_to_the_request_is_taken() {
        // Its length and number, no error, and no versions.
        let answer = |length: i32, number: i32| {
            [
                &length.to_be_bytes()[..],
                &number.to_be_bytes(),
                &[0, 0],
                &[0, 0, 0, 0],
            ]
            .concat()
        };
        assert_eq!(asked(&answer(10, 1)).await, Ok(0));
        for (answer, why) in [
            (answer(10, 2), "another request"),
            (answer(6, 1), "cannot be read"),
            (b"HTTP/1.1 400 Bad Request".to_vec(), "security.protocol"),
            (vec![0x15, 3, 3, 0, 2, 2, 80], "security.protocol"),
            (answer(-1, 1), "security.protocol"),
        ] {
            let error = asked(&answer).await.expect_err(why);
            assert!(
                error.contains(why) && error.contains("kafka:9098"),
                "{error}"
            );
        }
    }

    #[tokio::test]
    async fn a_request_that_the_broker_does_not_know_is_not_sent() {
        let (stream, _broker) = tokio::io::duplex(1024);
        let address = Address {
            host: "kafka".to_owned(),
            port: 9098,
        };
        let versions = |min, max| VersionRange { min, max };
        let known = BTreeMap::from([
            (ApiKey::DeleteTopics as i16, versions(6, 9)),
            (ApiKey::CreateTopics as i16, versions(0, 5)),
        ]);
        let connection = BrokerConnection {
            address,
            stream: Box::new(stream),
            versions: known,
            sent: 0,
        };
        assert_eq!(
            connection
                .version::<CreateTopicsRequest>()
                .expect("both know it"),
            5
        );
        for refused in [
            connection.version::<DeleteTopicsRequest>(),
            connection.version::<MetadataRequest>(),
        ] {
            let Err(Failure::Refused(error)) = refused else {
                panic!("{refused:?}")
            };
            assert!(error.to_string().contains("kafka:9098"), "{error}");
        }
    }
}
