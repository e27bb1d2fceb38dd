//! The reasons for which a client has failed, and what to do about them.

use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

/// The label of a client that does not begin to read a partition.
const UNREAD: &str = "unread";

/// The reason for which a client cannot continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// The client can never be a member again; a new client can.
    Dropped {
        /// The label of the event.
        cause: &'static str,
        why: String,
    },
    /// The client's password or certificate has changed, and the brokers accept the new one from
    /// another client.
    Outdated,
    /// Another member still holds our static id: a process that has ended, or one that runs at the
    /// same time.
    Held(String),
    /// An operator must change something; a new client would fail as well.
    Hopeless(String),
}

impl Trouble {
    /// Returns the reason why a client that reports this error cannot continue; `None` if it can.
    ///
    /// `fatal` is the fatal error that it has by then.
    pub(crate) fn of(
        error: &KafkaError,
        fatal: Option<(RDKafkaErrorCode, String)>,
        new_protocol: bool,
    ) -> Option<Self> {
        let fatal = match (fatal, error) {
            (Some((code, reason)), _) => Some(Self::of_fatal(code, &reason)),
            (None, KafkaError::MessageConsumptionFatal(code)) => {
                Some(Self::of_fatal(*code, &code.to_string()))
            }
            (None, _) => None,
        };
        let has_exceeded = matches!(
            error,
            KafkaError::MessageConsumption(RDKafkaErrorCode::PollExceeded)
        );
        match fatal {
            // A classic member joins again by itself. A member of the new protocol gets no further
            // notification; that the broker removes it later is only the consequence.
            None | Some(Self::Dropped { .. }) if new_protocol && has_exceeded => {
                Some(Self::poll_interval())
            }
            fatal => fatal,
        }
    }

    /// Classifies a fatal error of the client. Unknown errors are retried with a new client, a
    /// limited number of times.
    fn of_fatal(code: RDKafkaErrorCode, reason: &str) -> Self {
        use RDKafkaErrorCode::{
            FencedInstanceId, GroupMaxSizeReached, InconsistentGroupProtocol, InvalidGroupId,
            UnreleasedInstanceId, UnsupportedAssignor, UnsupportedFeature, UnsupportedVersion,
        };
        let change = match code {
            // A member that joins with a static id removes the one that had it. If we joined again,
            // we would remove that member, and so on.
            FencedInstanceId => {
                "another member has taken our static_member id; give each process its own"
            }
            UnreleasedInstanceId => return Self::Held(format!("{reason} ({code})")),
            GroupMaxSizeReached => "the group is full; see group.max.size of the brokers",
            InconsistentGroupProtocol => {
                "members of one group need one group.protocol and partition.assignment.strategy"
            }
            InvalidGroupId => "the broker does not accept the name of the group",
            UnsupportedAssignor => "the brokers do not know the property group.remote.assignor",
            UnsupportedFeature | UnsupportedVersion => {
                "the brokers are too old for the property group.protocol"
            }
            code if Self::forbidden(code) => "check the credentials and the ACLs",
            _ => {
                return Self::Dropped {
                    cause: "dropped",
                    why: format!("{reason} ({code})"),
                };
            }
        };
        Self::Hopeless(format!("{reason} ({code}): {change}"))
    }

    /// The poll thread did not poll for longer than `max.poll.interval.ms`.
    fn poll_interval() -> Self {
        let why = "the poll thread was held up for longer than max.poll.interval.ms";
        Self::Dropped {
            cause: "poll_interval",
            why: why.to_owned(),
        }
    }

    /// The thread that commits has ended by itself.
    pub(crate) fn no_commits() -> Self {
        Self::Hopeless("the thread that commits offsets has failed; restart the process".to_owned())
    }

    /// The client has no connection, though the brokers answer another client.
    pub(crate) fn disconnected(lasts: Duration) -> Self {
        let why = format!(
            "the client has had no connection for {lasts:.0?}, though the brokers answer another client"
        );
        Self::Dropped {
            cause: "disconnected",
            why,
        }
    }

    /// The client has partitions that it does not begin to read, though it is connected.
    pub(crate) fn unread(lasts: Duration) -> Self {
        let why = format!(
            "the client is connected, and has not begun to read a partition for {lasts:.0?}"
        );
        Self::Dropped { cause: UNREAD, why }
    }

    pub(crate) fn is_unread(&self) -> bool {
        matches!(self, Self::Dropped { cause: UNREAD, .. })
    }

    /// Returns whether the broker rejects our credentials.
    pub(crate) fn is_about_login(code: RDKafkaErrorCode) -> bool {
        matches!(
            code,
            RDKafkaErrorCode::Authentication | RDKafkaErrorCode::SaslAuthenticationFailed
        )
    }

    /// Returns whether the broker rejects our credentials or rights.
    pub(crate) fn forbidden(code: RDKafkaErrorCode) -> bool {
        use RDKafkaErrorCode::{
            Authentication, ClusterAuthorizationFailed, GroupAuthorizationFailed,
            SaslAuthenticationFailed, TopicAuthorizationFailed, UnsupportedSASLMechanism,
        };
        matches!(
            code,
            Authentication
                | ClusterAuthorizationFailed
                | GroupAuthorizationFailed
                | SaslAuthenticationFailed
                | TopicAuthorizationFailed
                | UnsupportedSASLMechanism
        )
    }
}

/// Returns whether the brokers answer with an error that a retry would not change.
pub(crate) fn is_refusal(error: &KafkaError) -> bool {
    matches!(
        error,
        KafkaError::ClientCreation(_) | KafkaError::ClientConfig(..)
    ) || error
        .rdkafka_error_code()
        .is_some_and(|code| Trouble::forbidden(code) || code == RDKafkaErrorCode::InvalidGroupId)
}

/// The name of the operation that has failed with an error that may pass, in metrics and in the
/// status.
pub(crate) fn failed_operation(error: &KafkaError, login: Option<&LoginFailure>) -> &'static str {
    match error.rdkafka_error_code() {
        Some(
            RDKafkaErrorCode::BrokerTransportFailure
            | RDKafkaErrorCode::AllBrokersDown
            | RDKafkaErrorCode::Resolve
            | RDKafkaErrorCode::OperationTimedOut,
        ) => "broker",
        Some(code) if Trouble::is_about_login(code) => match login {
            Some(LoginFailure { is_token: true, .. }) => TOKEN,
            _ => LOGIN,
        },
        _ => "fetch",
    }
}

/// The name of the operation that fails while the group refuses the member. It succeeds when the
/// group accepts it.
pub(crate) const JOIN: &str = "join";

/// The name of the operation that fails while the brokers withhold a committed offset.
pub(crate) const OFFSET: &str = "offset";

/// The name of the operation that fails while the client does not begin to read a partition.
pub(crate) const READ: &str = "read";

/// The terms on which a member joins its group, in properties of librdkafka.
#[derive(Clone, Debug)]
pub(crate) struct JoinTerms {
    group: String,
    assignors: String,
    session_timeout_ms: String,
}

impl JoinTerms {
    pub(crate) fn of(config: &ClientConfig) -> Self {
        Self {
            group: config.get("group.id").unwrap_or_default().to_owned(),
            assignors: config
                .get("partition.assignment.strategy")
                .unwrap_or("range,roundrobin")
                .to_owned(),
            session_timeout_ms: config
                .get("session.timeout.ms")
                .unwrap_or("45000")
                .to_owned(),
        }
    }

    /// Returns why the group refuses the member, and what to change; `None` when the error means
    /// something else.
    ///
    /// A classic client asks again and again, because the answer may be another one when other
    /// members have left.
    pub(crate) fn refusal(&self, error: &KafkaError) -> Option<String> {
        let Self {
            group,
            assignors,
            session_timeout_ms,
        } = self;
        let change = match error.rdkafka_error_code()? {
            RDKafkaErrorCode::InvalidSessionTimeout => format!(
                "session.timeout.ms is {session_timeout_ms}; set the property to a value between \
                 group.min.session.timeout.ms and group.max.session.timeout.ms of the brokers"
            ),
            RDKafkaErrorCode::InconsistentGroupProtocol => format!(
                "partition.assignment.strategy is {assignors} here, and the other members have none of these, or \
                 another group.protocol; set the property to theirs, such as range: docs/KAFKA.md describes how an \
                 existing group is moved"
            ),
            RDKafkaErrorCode::GroupMaxSizeReached => {
                "it has as many members as group.max.size of the brokers allows; raise that, or run fewer members"
                    .to_owned()
            }
            _ => return None,
        };
        Some(format!("the group {group} refuses this member: {change}"))
    }
}

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

    #[test]
    fn only_a_certificate_alert_at_a_connections_end_is_a_refusal() {
        let refusal = |reason: &str| {
            let error = KafkaError::Global(RDKafkaErrorCode::BrokerTransportFailure);
            login_refusal(&error, reason, false)
        };
        for alert in [
            "tlsv13 alert certificate required",
            "sslv3 alert bad certificate",
            "tlsv1 alert unknown ca",
        ] {
            let told = refusal(&format!(
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
            assert_eq!(refusal(other), None, "{other}");
        }
    }

    // invariant: stall-unreported
    #[test]
    fn a_refused_login_is_another_failure_than_an_ungranted_token() {
        let error = KafkaError::Global(RDKafkaErrorCode::Authentication);
        let operation = |reason: &str| {
            let login = LoginFailure::of(&error, reason, true).expect("it is about the login");
            (failed_operation(&error, Some(&login)), login.text)
        };
        let (refused, text) =
            operation("sasl_ssl://b:1/1: SASL authentication error: invalid_token");
        assert!(
            refused == LOGIN && text.contains("refuse the token"),
            "{refused}: {text}"
        );
        let (not_granted, text) = operation(&format!("{NO_TOKEN}the token server does not answer"));
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

    #[test]
    fn a_refused_member_learns_which_setting_to_change() {
        let mut config = ClientConfig::new();
        config
            .set("group.id", "billing")
            .set("partition.assignment.strategy", "cooperative-sticky");
        let terms = JoinTerms::of(&config);
        for (code, named) in [
            (
                RDKafkaErrorCode::InvalidSessionTimeout,
                "session.timeout.ms is 45000",
            ),
            (
                RDKafkaErrorCode::InconsistentGroupProtocol,
                "assignment.strategy is cooperative-sticky",
            ),
            (RDKafkaErrorCode::GroupMaxSizeReached, "group.max.size"),
        ] {
            let text = terms
                .refusal(&KafkaError::MessageConsumption(code))
                .expect("it is refused");
            assert!(text.contains(named) && text.contains("billing"), "{text}");
        }
        let other = KafkaError::MessageConsumption(RDKafkaErrorCode::AllBrokersDown);
        assert_eq!(terms.refusal(&other), None);
    }

    #[test]
    fn a_missed_poll_stays_the_cause_when_the_member_is_fenced() {
        let exceeded = KafkaError::MessageConsumption(RDKafkaErrorCode::PollExceeded);
        let fatal = |code| Some((code, "what the client said".to_owned()));
        let fenced = || fatal(RDKafkaErrorCode::FencedMemberEpoch);
        for fatal in [None, fenced()] {
            assert_eq!(
                Trouble::of(&exceeded, fatal, true),
                Some(Trouble::poll_interval())
            );
        }
        // A new client would not help.
        let hopeless = Trouble::of(&exceeded, fatal(RDKafkaErrorCode::FencedInstanceId), true);
        assert!(
            matches!(hopeless, Some(Trouble::Hopeless(_))),
            "{hopeless:?}"
        );
        assert_eq!(Trouble::of(&exceeded, None, false), None);
        let dropped = Trouble::of(&exceeded, fenced(), false);
        assert!(
            matches!(
                dropped,
                Some(Trouble::Dropped {
                    cause: "dropped",
                    ..
                })
            ),
            "{dropped:?}"
        );
    }

    #[test]
    fn every_fatal_error_is_replaced_waited_for_or_told() {
        use RDKafkaErrorCode as Code;
        let trouble = |code| Trouble::of_fatal(code, "what the client said");
        for code in [
            Code::InvalidRequest,
            Code::FencedMemberEpoch,
            Code::UnknownMemberId,
            Code::Fatal,
        ] {
            assert!(matches!(trouble(code), Trouble::Dropped { .. }), "{code:?}");
        }
        assert!(matches!(
            trouble(Code::UnreleasedInstanceId),
            Trouble::Held(_)
        ));
        for (code, named) in [
            (Code::FencedInstanceId, "static_member"),
            (Code::UnsupportedVersion, "group.protocol"),
            (Code::UnsupportedAssignor, "group.remote.assignor"),
            (Code::GroupMaxSizeReached, "group.max.size"),
            (Code::GroupAuthorizationFailed, "ACL"),
        ] {
            let Trouble::Hopeless(why) = trouble(code) else {
                panic!("{code:?}")
            };
            assert!(
                why.contains(named) && why.contains("what the client said"),
                "{why}"
            );
        }
    }
}
