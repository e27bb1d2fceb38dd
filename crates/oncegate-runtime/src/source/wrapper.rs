//! Sources that change what another source does in a few places.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::{
    CommitAnnotation, Delivery, RetryQueue, Source, SourceError, StreamOrigin, Supply, Terms,
};
use crate::health::SourceStatus;
use crate::observe::Observer;

/// A source that passes every call on to another one, except those that it changes.
///
/// Each type that implements it is a [`Source`].
#[async_trait]
pub trait SourceWrapper: Send + Sync + fmt::Debug {
    /// The other source.
    fn inner(&self) -> &dyn Source;

    /// See [`Source::open`].
    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        self.inner().open(observer).await
    }

    /// See [`Source::receive`].
    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        self.inner().receive(most).await
    }

    /// See [`Source::close`].
    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        self.inner().close(deadline).await
    }
}

#[async_trait]
impl<W: SourceWrapper> Source for W {
    fn agree(&self, terms: &Terms) -> Supply {
        self.inner().agree(terms)
    }

    async fn commit_annotations(&self) -> Result<Vec<String>, SourceError> {
        self.inner().commit_annotations().await
    }

    fn annotate_commits(&self, annotation: CommitAnnotation) {
        self.inner().annotate_commits(annotation);
    }

    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        self.inner().streams().await
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        SourceWrapper::open(self, observer).await
    }

    async fn receive(&self, most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
        SourceWrapper::receive(self, most).await
    }

    fn stop_receiving(&self) {
        self.inner().stop_receiving();
    }

    fn retry_queue(&self) -> Option<Arc<dyn RetryQueue>> {
        self.inner().retry_queue()
    }

    fn status(&self) -> SourceStatus {
        self.inner().status()
    }

    async fn close(&self, deadline: Duration) -> Result<(), SourceError> {
        SourceWrapper::close(self, deadline).await
    }
}
