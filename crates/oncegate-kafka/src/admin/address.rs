//! The address of a broker, and the reasons for which it gives no answer.

use std::fmt;

use oncegate_runtime::failure::BoxError;
use oncegate_runtime::source::SourceError;

/// librdkafka's port of a broker that is named without one.
const DEFAULT_PORT: u16 = 9092;

/// The address of a broker.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

/// The reason for which a request has no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// A later attempt, or another broker, may answer.
    Away(BoxError),
    /// Something must be changed first.
    Refused(SourceError),
}

impl Address {
    /// The address of a broker as an answer has it.
    pub(super) fn new(host: &str, port: i32) -> Self {
        Self {
            host: host.to_owned(),
            port: u16::try_from(port).unwrap_or_default(),
        }
    }

    /// Parses `host`, `host:port` or `PROTOCOL://host:port`; an address of IP version 6 with a port
    /// stands in brackets.
    ///
    /// # Errors
    /// When the port is no number of a port.
    pub(super) fn parse(broker: &str) -> Result<Self, SourceError> {
        let place = broker
            .rsplit_once("://")
            .map_or(broker, |(_, place)| place)
            .trim();
        let (host, port) = match place.rsplit_once(':') {
            // Without brackets, more than one colon is an address without a port.
            Some((host, port)) if host.ends_with(']') || !host.contains(':') => (host, Some(port)),
            _ => (place, None),
        };
        let port = port.map_or(Ok(DEFAULT_PORT), str::parse);
        let port =
            port.map_err(|_| SourceError::new(format!("the broker {broker:?} is not host:port")))?;
        Ok(Self {
            host: host.trim_matches(['[', ']']).to_owned(),
            port,
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Failure {
    pub(super) fn away(error: impl Into<BoxError>) -> Self {
        Self::Away(error.into())
    }

    pub(super) fn refused(text: impl Into<String>) -> Self {
        Self::Refused(SourceError::new(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_is_named_with_or_without_protocol_and_port() {
        for (broker, host, port) in [
            ("kafka", "kafka", 9092),
            ("kafka:9098", "kafka", 9098),
            (" SASL_SSL://kafka:9098", "kafka", 9098),
            ("[::1]:9098", "::1", 9098),
            ("[::1]", "::1", 9092),
            ("::1", "::1", 9092),
        ] {
            let address = Address::parse(broker).expect(broker);
            assert_eq!((&*address.host, address.port), (host, port), "{broker}");
        }
        assert!(Address::parse("kafka:x").is_err() && Address::parse("kafka:99999").is_err());
    }
}
