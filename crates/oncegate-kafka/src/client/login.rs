//! Logins that fail: which part is refused, and the properties that decide it.

use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// The name of the operation that fails when the brokers refuse a login. It succeeds with a
/// connection.
pub(crate) const LOGIN: &str = "login";

/// The name of the operation that fails when no token is granted. It succeeds with a token: while
/// the last one is valid, there are connections without another.
pub(crate) const TOKEN: &str = "token";

/// The beginning of librdkafka's error text when it gets no token.
const NO_TOKEN: &str = "Failed to acquire SASL OAUTHBEARER token: ";

/// A login that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoginFailure {
    /// The reason, with the properties that decide it.
    pub(crate) text: String,
    /// `true` if there is no token; otherwise the brokers refuse the login.
    pub(crate) is_token: bool,
}

impl LoginFailure {
    /// As [`login_refusal`].
    pub(crate) fn of(error: &KafkaError, reason: &str, with_tokens: bool) -> Option<Self> {
        let text = login_refusal(error, reason, with_tokens)?;
        Some(Self {
            text,
            is_token: reason.starts_with(NO_TOKEN),
        })
    }
}

/// Returns why the brokers refuse the connection, or why there is no token for it, with the
/// properties that decide it and the words of the brokers or of the TLS library. `None` when the
/// error means something else.
pub(crate) fn login_refusal(error: &KafkaError, reason: &str, with_tokens: bool) -> Option<String> {
    if let Some(why) = reason.strip_prefix(NO_TOKEN) {
        return Some(format!("no token for the login to the brokers: {why}"));
    }
    let refused = match error.rdkafka_error_code()? {
        RDKafkaErrorCode::BrokerTransportFailure if refuses_certificate(reason) => {
            RefusedLogin::Certificate
        }
        RDKafkaErrorCode::SSL => RefusedLogin::Tls,
        RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SaslAuthenticationFailed
            if with_tokens =>
        {
            RefusedLogin::Token
        }
        RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SaslAuthenticationFailed => {
            RefusedLogin::Password
        }
        _ => return None,
    };
    Some(refused.told(reason))
}

/// The part of a login that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusedLogin {
    /// The client's certificate, by the brokers.
    Certificate,
    /// The brokers' certificate, by this client, or the handshake.
    Tls,
    /// A token, by the brokers.
    Token,
    /// A password, by the brokers.
    Password,
}

impl RefusedLogin {
    /// The text of the error, with the properties to look at and the `reason` in the words of the
    /// brokers or the TLS library.
    pub(crate) fn told(self, reason: &str) -> String {
        let refusal = match self {
            // They do not tell what is wrong with it: Kafka says the same of an expired one and of
            // an unknown authority.
            Self::Certificate => {
                "the brokers refuse the client's certificate (ssl.certificate.location and ssl.key.location must be set, and the \
                 certificate must be valid today and signed by an authority that the brokers know)"
            }
            // The client library says the same of an authority that is unknown and of a certificate
            // that has expired.
            Self::Tls => {
                "no TLS with the brokers (ssl.ca.location must have their authority, and their certificate must be valid \
                 today and name them; a client's certificate is set by ssl.certificate.location and ssl.key.location)"
            }
            Self::Token => {
                "the brokers refuse the token (sasl.oauthbearer.client.id, sasl.oauthbearer.scope)"
            }
            Self::Password => {
                "the brokers refuse the login (sasl.mechanism, sasl.username, sasl.password)"
            }
        };
        format!("{refusal}: {reason}")
    }
}

/// Returns whether a connection ended with an alert of the brokers about the client's certificate.
/// In TLS 1.3 it comes after the handshake, so the client library takes it for an error of the
/// network.
fn refuses_certificate(reason: &str) -> bool {
    reason.contains(" alert ") && (reason.contains("certificate") || reason.contains("unknown ca"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::trouble::failed_operation;

    /// The refusal that a lost connection shows, which the client library explains so.
    fn refusal_of_lost(reason: &str) -> Option<String> {
        let error = KafkaError::Global(RDKafkaErrorCode::BrokerTransportFailure);
        login_refusal(&error, reason, false)
    }

    /// The operation that has failed at a login by token, and the text of its error.
    fn failed_login(reason: &str) -> (&'static str, String) {
        let error = KafkaError::Global(RDKafkaErrorCode::Authentication);
        let login = LoginFailure::of(&error, reason, true).expect("it is about the login");
        (failed_operation(&error, Some(&login)), login.text)
    }

    #[test]
    fn only_a_certificate_alert_at_a_connections_end_is_a_refusal() {
        for alert in [
            "tlsv13 alert certificate required",
            "sslv3 alert bad certificate",
            "tlsv1 alert unknown ca",
        ] {
            let told = refusal_of_lost(&format!(
                "Receive failed: error:0A00045C:SSL routines::{alert}"
            ))
            .expect(alert);
            assert!(
                told.contains("ssl.certificate.location") && told.contains(alert),
                "{told}"
            );
        }
        for other in [
            "Receive failed: Connection reset by peer",
            "error:0A000438:SSL routines::tlsv1 alert internal error",
        ] {
            assert_eq!(refusal_of_lost(other), None, "{other}");
        }
    }

    // invariant: stall-unreported
    #[test]
    fn a_refused_login_is_another_failure_than_an_ungranted_token() {
        let (refused, text) =
            failed_login("sasl_ssl://b:1/1: SASL authentication error: invalid_token");
        assert!(
            refused == LOGIN && text.contains("refuse the token"),
            "{refused}: {text}"
        );
        let (not_granted, text) =
            failed_login(&format!("{NO_TOKEN}the token server does not answer"));
        assert!(
            not_granted == TOKEN && !text.contains("refuse") && text.ends_with("not answer"),
            "{text}"
        );
        for (code, named) in [
            (RDKafkaErrorCode::AllBrokersDown, "broker"),
            (RDKafkaErrorCode::SSL, "fetch"),
        ] {
            assert_eq!(failed_operation(&KafkaError::Global(code), None), named);
        }
    }
}
