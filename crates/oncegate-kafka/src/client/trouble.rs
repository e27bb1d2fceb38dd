//! The reasons for which a client has failed, and what to do about them.

use std::time::Duration;

use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};

use super::login::{LOGIN, LoginFailure, TOKEN};

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

#[cfg(test)]
mod tests {
    use super::*;

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
        let fenced = (RDKafkaErrorCode::FencedMemberEpoch, "epoch 3".to_owned());
        for fatal in [None, Some(fenced.clone())] {
            assert_eq!(
                Trouble::of(&exceeded, fatal, true),
                Some(Trouble::poll_interval())
            );
        }
        // A new client would not help.
        let taken = (RDKafkaErrorCode::FencedInstanceId, "taken".to_owned());
        let hopeless = Trouble::of(&exceeded, Some(taken), true);
        assert!(
            matches!(hopeless, Some(Trouble::Hopeless(_))),
            "{hopeless:?}"
        );
        assert_eq!(Trouble::of(&exceeded, None, false), None);
        let dropped = Trouble::of(&exceeded, Some(fenced), false);
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
