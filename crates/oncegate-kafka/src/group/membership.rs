//! The poll thread's main loop: it replaces a failed client while the source is open.

use std::sync::Arc;
use std::time::Instant;

use rdkafka::config::ClientConfig;
use tokio::sync::oneshot;

use super::buffer::End;
use super::connection_watch::Watch;
use super::member::Member;
use super::member_client::MemberClient;
use super::poll::{Poller, Terms};
use super::succession::Succession;
use crate::client::properties::FileContents;
use crate::client::rotation::Rotation;
use crate::client::settings::{self, Settings};
use crate::client::trouble::{JoinTerms, Trouble};
use crate::partitions::fetch_limits::FetchLimits;
use oncegate_runtime::source::SourceError;

/// Joins the group, polls, joins again with another client when one has failed, and leaves. Answers
/// `opened` when the first client has joined, and `left` with the result for `close`.
pub(crate) fn run(
    settings: &Settings,
    (mut config, mut contents): (ClientConfig, FileContents),
    member: &Arc<Member>,
    opened: oneshot::Sender<Result<(), SourceError>>,
    left: oneshot::Sender<Result<(), String>>,
) {
    // A receiver must not wait for a thread that has panicked.
    let _end = EndOnDrop(member);
    let first = match MemberClient::check_and_join(settings, &config, member) {
        Ok(first) => first,
        Err(error) => return drop(opened.send(Err(error))),
    };
    // A source that was dropped has asked the member to leave.
    drop(opened.send(Ok(())));
    let mut line = Succession::default();
    let mut client = first;
    loop {
        let joined_at = Instant::now();
        let watch = Watch::new(config.clone());
        let rotation = Rotation::new(settings.clone(), contents);
        let terms = terms(settings, &config, line.may_replace_unread());
        let mut poller = Poller::new(
            Arc::clone(&client.consumer),
            Arc::clone(member),
            terms,
            watch,
            rotation,
        );
        let trouble = match poller.run() {
            Some(Trouble::Hopeless(why)) => {
                tracing::error!(why, "the Kafka consumer has failed");
                member.buffer.end(End::Failed(why));
                // Running handlers may still finish, and their offsets are committed.
                member.leave(Instant::now() + member.drain_timeout + member.commit_patience);
                None
            }
            other => other,
        };
        let Some(trouble) = trouble else {
            drop(left.send(poller.leave()));
            drop(poller);
            client.close();
            break;
        };
        if trouble == Trouble::Outdated {
            poller.give_back();
        }
        drop(poller);
        match settings.config() {
            Ok(made) => (config, contents) = made,
            Err(error) => tracing::warn!(%error, "continuing with the former properties"),
        }
        line.note_failure(
            &trouble,
            !member.assignments.is_empty(),
            joined_at.elapsed(),
        );
        let next = line
            .follow(client, trouble, member)
            .and_then(|()| MemberClient::join(settings, &config, member));
        match next {
            Ok(next) => client = next,
            Err(error) => {
                drop(left.send(give_up(member, &error)));
                break;
            }
        }
    }
    line.end();
}

fn terms(settings: &Settings, config: &ClientConfig, may_replace_unread: bool) -> Terms {
    Terms {
        limits: FetchLimits::new(settings.source.unfinished_messages),
        routes: settings.source.routes(),
        keeps_positions: settings.source.keep_positions_of_recreated_topics,
        new_protocol: settings::new_protocol(config),
        join: JoinTerms::of(config),
        may_replace_unread,
    }
}

/// Ends the source without a replacement client. Other members already own the failed client's
/// partitions.
fn give_up(member: &Member, error: &SourceError) -> Result<(), String> {
    if member.leaving().is_some() {
        return Err("the client failed before the last commit".to_owned());
    }
    let why = error.to_string();
    tracing::error!(why, "the Kafka consumer has failed");
    member.buffer.end(End::Failed(why));
    Ok(())
}

/// Ends the buffer when the poll thread ends.
struct EndOnDrop<'a>(&'a Member);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0
            .buffer
            .end(End::Failed("the Kafka poll thread has ended".to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use rdkafka::consumer::Consumer as _;

    use super::super::commit_desk::CommitContext as _;
    use super::super::member_client::make;
    use super::*;
    use crate::consume::source::KafkaSource;
    use oncegate_runtime::observe::Counters;

    // invariant: consumption-without-commits
    #[test]
    fn a_commit_thread_that_has_ended_ends_the_source() {
        let source = KafkaSource::new("127.0.0.1:1", "group", ["orders"]);
        let (config, contents) = source.settings.config().unwrap();
        let member = source
            .settings
            .member(Arc::default(), Arc::new(Counters::default()), None)
            .unwrap();
        let member = Arc::new(member);
        let consumer = Arc::new(make(&config, &member).unwrap());
        // What the thread does when it panics.
        consumer.context().desk().stop();
        let terms = terms(&source.settings, &config, true);
        let rotation = Rotation::new(source.settings.clone(), contents);
        let mut poller = Poller::new(
            consumer,
            Arc::clone(&member),
            terms,
            Watch::new(config),
            rotation,
        );
        let trouble = poller.run();
        assert!(
            matches!(&trouble, Some(Trouble::Hopeless(why)) if why.contains("commits")),
            "{trouble:?}"
        );
    }
}
