//! The life of a `KafkaSource`: it opens, receives as a member of its group, and closes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use tokio::sync::oneshot;

use super::ack_handle;
use super::source::{KafkaSource, RunningMember};
use super::status;
use crate::ask::{annotations, origin};
use crate::group::buffer::End;
use crate::group::member::Member;
use crate::group::membership;
use oncegate_runtime::health::SourceStatus;
use oncegate_runtime::observe::Observer;
use oncegate_runtime::source::{CommitAnnotation, Delivery, Source, SourceError, StreamOrigin};

#[async_trait]
impl Source for KafkaSource {
    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        let (config, _) = self.settings.config()?;
        let settings = self.settings.clone();
        let read = tokio::task::spawn_blocking(move || {
            annotations::read(&config, &settings.topics, settings.source.open_timeout)
        });
        read.await.map_err(|panic| {
            SourceError::caused("the committed offsets could not be read", panic)
        })?
    }

    fn annotate_commits(&self, annotation: CommitAnnotation) {
        *self.annotation.lock() = Some(annotation);
    }

    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        let (config, _) = self.settings.config()?;
        let settings = self.settings.clone();
        let read = tokio::task::spawn_blocking(move || {
            origin::read(&config, &settings.topics, settings.source.open_timeout)
        });
        read.await.map_err(|panic| {
            SourceError::caused("the id of the Kafka cluster could not be read", panic)
        })?
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        let made = self.settings.config()?;
        if self.is_open() {
            return Err(SourceError::new(
                "the Kafka source is already open; create a second source for a second member",
            ));
        }
        if self.shows_login() {
            tracing::warn!(
                "the login to Kafka is sent to another machine in plain text: set security.protocol to SASL_SSL"
            );
        }
        let annotation = self.annotation.lock().clone();
        let member = Arc::new(self.settings.member(
            Arc::clone(&self.totals),
            observer,
            annotation,
        )?);
        let (opened, opening) = oneshot::channel();
        let (left, leaving) = oneshot::channel();
        let (gone, going) = oneshot::channel();
        let settings = self.settings.clone();
        let shared = Arc::clone(&member);
        let thread = std::thread::Builder::new().name("oncegate-poll".to_owned());
        let spawned = thread.spawn(move || {
            membership::run(&settings, made, &shared, opened, left);
            let _ = gone.send(());
        });
        spawned.map_err(|error| {
            SourceError::caused("cannot start the thread of the Kafka consumer", error)
        })?;
        let joining = Joining(Some(&member));
        let opening = opening.await;
        opening
            .unwrap_or_else(|_| Err(SourceError::new("the Kafka consumer ended while opening")))?;
        joining.done();
        *self.member.lock() = Some(member);
        *self.running.lock() = Some(RunningMember {
            left: leaving,
            gone: going,
        });
        Ok(())
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        let fetched = self.fetch(most).await?;
        Ok(fetched.map(|fetched| fetched.into_iter().map(ack_handle::delivery).collect()))
    }

    fn status(&self) -> SourceStatus {
        let status = self
            .member()
            .map(|member| status::of(&member))
            .unwrap_or_default();
        SourceStatus {
            group: Some(self.settings.group.clone()),
            ..status
        }
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        let Some(running) = self.running.lock().take() else {
            return Ok(());
        };
        let member = self.member()?;
        let by = Instant::now() + deadline;
        member.buffer.end(End::Closed);
        member.leave(by);
        let left = tokio::time::timeout_at(by.into(), running.left).await;
        let left = left.unwrap_or_else(|_| {
            Ok(Err(
                "the handlers and the last commit did not finish in time".to_owned(),
            ))
        });
        let left = left.unwrap_or_else(|_| Err("the poll thread has ended".to_owned()));
        // Dropping a consumer may hang forever inside the client; everything that matters is done
        // by then.
        if left.is_ok()
            && tokio::time::timeout_at(by.into(), running.gone)
                .await
                .is_err()
        {
            tracing::warn!(
                "the Kafka client is still closing its connections; not waiting for it any longer"
            );
        }
        left.map_err(|why| {
            SourceError::new(format!(
                "the last offsets may not be committed, and their messages will be delivered again: {why}"
            ))
        })
    }
}

/// A member whose source is opening. If that is dropped, it leaves: otherwise it would stay for as
/// long as the process, with partitions whose messages are never taken.
struct Joining<'a>(Option<&'a Arc<Member>>);

impl Joining<'_> {
    fn done(mut self) {
        self.0 = None;
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        if let Some(member) = self.0 {
            member.leave(Instant::now());
        }
    }
}

impl Drop for KafkaSource {
    /// Leaves the group as `close` does, without waiting for the end.
    fn drop(&mut self) {
        if let Some(member) = self.member.lock().take() {
            member.leave(Instant::now() + member.drain_timeout + member.commit_patience);
        }
    }
}
