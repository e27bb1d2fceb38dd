//! A client that has joined the group, and the thread that commits through it.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use super::callbacks::MemberContext;
use super::commit;
use super::commit_desk::CommitContext as _;
use super::member::Member;
use crate::ask::history;
use crate::client::inquiry;
use crate::client::settings::{self, Settings};
use crate::client::tokens::Tokens;
use oncegate_runtime::source::SourceError;

/// The time that a commit may take to end before the client is closed under it.
const COMMIT_ENDS: Duration = Duration::from_secs(2);

/// Interval at which a wait checks whether the source is closing.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A client and the thread that commits through it.
pub(super) struct MemberClient {
    pub(super) consumer: Arc<BaseConsumer<MemberContext>>,
    commits: JoinHandle<()>,
}

impl MemberClient {
    /// Joins the group, after a check that the brokers answer, the topics exist, and the user may
    /// consume them.
    pub(super) fn check_and_join(
        settings: &Settings,
        config: &ClientConfig,
        member: &Arc<Member>,
    ) -> Result<Self, SourceError> {
        let asking = inquiry::offsets_client(config.clone())?;
        settings.check_cluster(&asking)?;
        match history::of(settings, &asking) {
            Ok(warnings) => warnings
                .iter()
                .for_each(|warning| tracing::warn!("{warning}")),
            Err(error) => tracing::debug!(%error, "it is not known whether the group is new"),
        }
        Self::join(settings, config, member)
    }

    pub(super) fn join(
        settings: &Settings,
        config: &ClientConfig,
        member: &Arc<Member>,
    ) -> Result<Self, SourceError> {
        Self::subscribe(make(config, member)?, settings)
    }

    fn subscribe(
        consumer: BaseConsumer<MemberContext>,
        settings: &Settings,
    ) -> Result<Self, SourceError> {
        let names: Vec<_> = settings.topics.iter().map(String::as_str).collect();
        consumer
            .subscribe(&names)
            .map_err(|error| SourceError::caused("cannot subscribe to the topics", error))?;
        let consumer = Arc::new(consumer);
        let commits = commit::spawn(Arc::clone(&consumer), settings.source.commit_interval)
            .map_err(|error| {
                SourceError::caused("cannot start the thread for Kafka commits", error)
            })?;
        Ok(Self { consumer, commits })
    }

    /// Ends the commit thread and drops the consumer. Either may take long or forever, so every
    /// wait for this has a time limit.
    ///
    /// A commit that waits for a coordinator ends only when the client is closed: by itself, such a
    /// client would never end.
    pub(super) fn close(self) {
        self.consumer.context().desk().stop();
        let until = Instant::now() + COMMIT_ENDS;
        while !self.commits.is_finished() && Instant::now() < until {
            std::thread::sleep(LOOK_EVERY);
        }
        if !self.commits.is_finished() {
            tracing::warn!("a commit does not end; closing its Kafka client under it");
            if let Err(error) = self.consumer.close_queue() {
                tracing::warn!(%error, "the Kafka client cannot be closed");
            }
            while !self.commits.is_finished() {
                // Its callbacks have no effect, and its messages come again.
                drop(self.consumer.poll(LOOK_EVERY));
            }
        }
        if self.commits.join().is_err() {
            tracing::error!("the commit thread has panicked");
        }
        drop(self.consumer);
    }
}

pub(super) fn make(
    config: &ClientConfig,
    member: &Arc<Member>,
) -> Result<BaseConsumer<MemberContext>, SourceError> {
    let debug = config.get("debug") != Some(crate::client::notices::DEBUG_CONTEXT);
    let mut config = config.clone();
    let tokens = Tokens::take(&mut config)?;
    config
        .create_with_context(MemberContext::new(Arc::clone(member), debug, tokens))
        .map_err(settings::unusable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::consume::source::KafkaSource;
    use crate::partitions::assignment::Begin;
    use crate::partitions::partition::Partition;
    use oncegate_runtime::observe::Counters;

    /// Nothing listens at the address, so the commit waits for a coordinator.
    #[test]
    fn a_client_closes_though_its_commit_waits() {
        let source = KafkaSource::new("127.0.0.1:1", "group", ["orders"]);
        let (config, _) = source.settings.config().unwrap();
        let member = source
            .settings
            .member(Arc::default(), Arc::new(Counters::default()), None)
            .unwrap();
        let member = Arc::new(member);
        let client = MemberClient::join(&source.settings, &config, &member).unwrap();
        let partition = Partition {
            topic: "orders".into(),
            number: 0,
        };
        member.assignments.assign([partition.clone()], Begin::Begun);
        let assignment = member.assignments.get(&partition).unwrap();
        assignment.complete(assignment.receive(0).unwrap().receipt);
        client.consumer.context().desk().ask();
        client.close();
        assert_eq!(member.assignments.due().len(), 1, "nothing was committed");
    }
}
