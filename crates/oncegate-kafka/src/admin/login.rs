//! The login of a connection with a token: RFC 7628, in requests of Kafka.

use bytes::Bytes;
use kafka_protocol::messages::{
    SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest,
};
use rdkafka::error::RDKafkaErrorCode;

use super::address::{Address, Failure};
use super::connection::{Access, BrokerConnection};
use super::messages::{self, text};
use crate::client::login::RefusedLogin;
use crate::client::tokens::Tokens;

/// The mechanism by its name in SASL.
const MECHANISM: &str = "OAUTHBEARER";

/// The client's answer after a broker has told why it refuses a token. Only then the broker ends
/// the login.
const UNDERSTOOD: Bytes = Bytes::from_static(b"\x01");

/// Connects and logs in. A caller that drops the future closes the connection.
pub(super) async fn open(address: &Address, access: &Access) -> Result<BrokerConnection, Failure> {
    let mut connection = BrokerConnection::open(address, access).await?;
    log_in(&mut connection, &access.tokens).await?;
    Ok(connection)
}

/// Logs in with another token.
async fn log_in(connection: &mut BrokerConnection, tokens: &Tokens) -> Result<(), Failure> {
    let handshake = connection
        .ask(&SaslHandshakeRequest::default().with_mechanism(text(MECHANISM)))
        .await?;
    if messages::result(handshake.error_code).is_err() {
        let offered = handshake
            .mechanisms
            .iter()
            .map(|one| one.as_str())
            .collect::<Vec<_>>()
            .join(", ");
        let address = connection.address();
        return Err(Failure::refused(format!(
            "the broker at {address} takes no tokens (sasl.mechanism is {MECHANISM}, and it offers {offered})"
        )));
    }
    let token = tokens
        .fetch()
        .await
        .map_err(|error| Failure::Refused(error.of_source()))?
        .token;
    let first = Bytes::from(format!("n,,\x01auth=Bearer {token}\x01\x01"));
    let mut answer = send(connection, first).await?;
    // A broker that refuses a token tells why first, and refuses it after the next message.
    if answer.error_code == 0 && !answer.auth_bytes.is_empty() {
        let why = answer.auth_bytes;
        answer = send(connection, UNDERSTOOD).await?;
        answer.error_message = answer
            .error_message
            .or(Some(text(String::from_utf8_lossy(&why))));
        if answer.error_code == 0 {
            return Err(refusal(connection, &answer));
        }
    }
    match messages::result(answer.error_code) {
        Ok(()) => Ok(()),
        Err(RDKafkaErrorCode::SaslAuthenticationFailed) => Err(refusal(connection, &answer)),
        Err(code) => Err(Failure::away(code)),
    }
}

async fn send(
    connection: &mut BrokerConnection,
    bytes: Bytes,
) -> Result<SaslAuthenticateResponse, Failure> {
    connection
        .ask(&SaslAuthenticateRequest::default().with_auth_bytes(bytes))
        .await
}

/// The error that a consumer has, too.
fn refusal(connection: &BrokerConnection, answer: &SaslAuthenticateResponse) -> Failure {
    let why = answer
        .error_message
        .as_ref()
        .map(|why| why.as_str())
        .unwrap_or_default();
    Failure::refused(RefusedLogin::Token.told(&format!("{}: {why}", connection.address())))
}
