//! Why a client cannot go on, and what helps.

use std::time::Duration;

use rdkafka::error::RDKafkaErrorCode;

/// Why a client cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// This client is no member any more, for good; another one in its place is a member again.
    Dropped {
        /// The label of the event.
        cause: &'static str,
        why: String,
    },
    /// Our static id belongs to a member that is not gone yet: the process before us, or somebody beside us.
    Held(String),
    /// Somebody has to change something.
    Hopeless(String),
}

impl Trouble {
    /// What a fatal error of the client leaves open. What is not known here is tried with another client, a
    /// bounded number of times.
    pub(crate) fn of_fatal(code: RDKafkaErrorCode, reason: &str) -> Self {
        use RDKafkaErrorCode::{
            FencedInstanceId, GroupMaxSizeReached, InconsistentGroupProtocol, InvalidGroupId,
            UnreleasedInstanceId, UnsupportedAssignor, UnsupportedFeature, UnsupportedVersion,
        };
        let hopeless = |change: &str| Self::Hopeless(format!("{reason} ({code}): {change}"));
        match code {
            // Whoever joins with an id drops the one who had it. In its place we would drop him, and so on.
            FencedInstanceId => {
                hopeless("another member has taken our static_member id; give each process its own")
            }
            UnreleasedInstanceId => Self::Held(format!("{reason} ({code})")),
            GroupMaxSizeReached => hopeless("the group is full; see group.max.size of the brokers"),
            InconsistentGroupProtocol => {
                hopeless("members of one group need one group.protocol and partition.assignment.strategy")
            }
            InvalidGroupId => hopeless("the broker does not take this name for a group"),
            UnsupportedAssignor => hopeless("the brokers do not know the property group.remote.assignor"),
            UnsupportedFeature | UnsupportedVersion => {
                hopeless("the brokers are too old for the property group.protocol")
            }
            code if Self::forbidden(code) => hopeless("check the credentials and the ACLs"),
            _ => Self::Dropped { cause: "dropped", why: format!("{reason} ({code})") },
        }
    }

    /// The poll thread was away longer than the group waits.
    pub(crate) fn poll_interval() -> Self {
        let why = "the poll thread was held up for longer than max.poll.interval.ms";
        Self::Dropped { cause: "poll_interval", why: why.to_owned() }
    }

    /// The client has no connection, though the brokers answer another one.
    pub(crate) fn disconnected(lasts: Duration) -> Self {
        let why = format!(
            "the client has had no connection for {lasts:.0?}, though the brokers answer another client"
        );
        Self::Dropped { cause: "disconnected", why }
    }

    /// Whether the broker refuses who we are.
    pub(crate) fn forbidden(code: RDKafkaErrorCode) -> bool {
        use RDKafkaErrorCode::{
            Authentication, ClusterAuthorizationFailed, GroupAuthorizationFailed, SaslAuthenticationFailed,
            TopicAuthorizationFailed,
        };
        matches!(
            code,
            Authentication
                | ClusterAuthorizationFailed
                | GroupAuthorizationFailed
                | SaslAuthenticationFailed
                | TopicAuthorizationFailed
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fatal_error_is_replaced_waited_for_or_told() {
        use RDKafkaErrorCode as Code;
        let trouble = |code| Trouble::of_fatal(code, "what the client said");
        for code in [Code::InvalidRequest, Code::FencedMemberEpoch, Code::UnknownMemberId, Code::Fatal] {
            assert!(matches!(trouble(code), Trouble::Dropped { .. }), "{code:?}");
        }
        assert!(matches!(trouble(Code::UnreleasedInstanceId), Trouble::Held(_)));
        for (code, named) in [
            (Code::FencedInstanceId, "static_member"),
            (Code::UnsupportedVersion, "group.protocol"),
            (Code::UnsupportedAssignor, "group.remote.assignor"),
            (Code::GroupMaxSizeReached, "group.max.size"),
            (Code::GroupAuthorizationFailed, "ACL"),
        ] {
            let Trouble::Hopeless(why) = trouble(code) else { panic!("{code:?}") };
            assert!(why.contains(named) && why.contains("what the client said"), "{why}");
        }
    }
}
