//! The trait that a user implements for a topic.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;

use crate::attempt::Attempt;
use crate::codec::{Codec, FromStored, Output, ToStored};
use crate::failure::{BoxError, Failure};
use crate::message::Message;

/// The work to be done once per key.
///
/// A closure `async |message: Message, attempt: Attempt| …` or a function works too; it receives
/// owned arguments.
///
/// - On a **crash** before the result is stored, another attempt runs, flagged by
///   [`Attempt::recovered`].
/// - On a **duplicate**, `handle` does not run: [`duplicate`](Self::duplicate) gets the stored
///   result.
/// - On a **cancellation** (the lease is lost, the run takes too long, the consumer stops),
///   [`Attempt::cancelled`] resolves, and a little later the future is dropped at its next `await`.
/// - On a **panic**, the attempt counts as failed.
pub trait Handler: Send + Sync + 'static {
    /// The result: stored with the key, and passed to duplicates. `()` stores nothing.
    type Output: Output;

    /// Does the work.
    ///
    /// # Errors
    /// `?` on any error requests another attempt; [`Failure::permanent`] sends the message to the
    /// dead letters.
    fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
    ) -> impl Future<Output = Result<Self::Output, Failure>> + Send;

    /// Called for a message whose work was done before; `result` is the result of the first one.
    /// Does nothing unless overridden; a request-reply consumer can send its reply here.
    ///
    /// # Errors
    /// After an error it is called again, three times in all; then the message is acknowledged all
    /// the same, and counted.
    fn duplicate(
        &self,
        message: &Message,
        result: Self::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        _ = (message, result);
        std::future::ready(Ok(()))
    }

    /// Called for a duplicate whose stored result does not decode as `Output`, was not kept, or is
    /// missing or damaged in the gate's [`large_results`](crate::Gate::large_results). `error` is
    /// the cause, and `stored` the bytes that were found. Does nothing unless overridden.
    fn undecodable_duplicate(
        &self,
        message: &Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        _ = (message, stored, error);
        std::future::ready(())
    }
}

impl<F, Fut, T> Handler for F
where
    F: Fn(Message, Attempt) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<T, Failure>> + Send,
    T: Output,
{
    type Output = T;

    fn handle(
        &self,
        message: &Message,
        attempt: &Attempt,
    ) -> impl Future<Output = Result<T, Failure>> + Send {
        self(message.clone(), attempt.clone())
    }
}

/// A boxed future.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A handler with its type erased.
pub(crate) trait ErasedHandler: Send + Sync + 'static {
    /// Runs the handler and encodes its result. The effect has happened when it returns `Ok`: even
    /// if the result is unusable, the work must not run again.
    fn handle(
        self: Arc<Self>,
        message: Message,
        attempt: Attempt,
        codec: Codec,
    ) -> BoxFuture<'static, Result<Encoded, Failure>>;

    /// Decodes the stored result and passes it to the handler; `lost` is the reason if the result
    /// is lost.
    fn duplicate(
        &self,
        message: Message,
        stored: Bytes,
        lost: Option<BoxError>,
    ) -> BoxFuture<'_, Result<(), Failure>>;
}

/// A result encoded by its codec.
pub(crate) type Encoded = Result<Bytes, BoxError>;

impl<H: Handler> ErasedHandler for H {
    fn handle(
        self: Arc<Self>,
        message: Message,
        attempt: Attempt,
        codec: Codec,
    ) -> BoxFuture<'static, Result<Encoded, Failure>> {
        Box::pin(async move {
            let output = Handler::handle(&*self, &message, &attempt).await?;
            if attempt.completion().is_attempted() {
                // Its transaction has stored the result, or nothing was stored.
                return Ok(Ok(Bytes::new()));
            }
            Ok(output.to_stored(codec))
        })
    }

    fn duplicate(
        &self,
        message: Message,
        stored: Bytes,
        lost: Option<BoxError>,
    ) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async move {
            match lost.map_or_else(|| H::Output::from_stored(&stored), Err) {
                Ok(result) => Handler::duplicate(self, &message, result).await,
                Err(error) => {
                    self.undecodable_duplicate(&message, stored, error).await;
                    Ok(())
                }
            }
        })
    }
}
