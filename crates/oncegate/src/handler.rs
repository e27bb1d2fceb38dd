//! What a user implements for a topic.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;

use crate::codec::{Codec, Output};
use crate::failure::{BoxError, Failure};
use crate::gate::encode;
use crate::message::Message;

/// The work to be done once per key.
///
/// A closure `async |message: Message| …` or a function works too.
///
/// - On a **crash** before the result is stored, another attempt runs; [`Message::recovered`] says so.
/// - On a **duplicate**, `handle` does not run: [`duplicate`](Self::duplicate) gets the stored result.
/// - On a **cancellation** (the lease is lost, the run takes too long, the consumer stops),
///   [`Message::cancelled`] resolves, and a little later the future is dropped at its next `await`.
/// - On a **panic**, the attempt has failed.
pub trait Handler: Send + Sync + 'static {
    /// The result: stored with the key, handed to duplicates. `()` stores nothing.
    type Output: Output;

    /// Does the work.
    ///
    /// # Errors
    /// `?` on any error asks for another attempt; [`Failure::permanent`] sends the message to the dead letters.
    fn handle(&self, message: Message) -> impl Future<Output = Result<Self::Output, Failure>> + Send;

    /// A message whose work was done before; `result` is what the first one returned. Does nothing unless
    /// overridden; a request-reply consumer answers from here.
    ///
    /// # Errors
    /// It is called again, three times in all; then the message is acknowledged all the same, and counted.
    fn duplicate(
        &self,
        message: Message,
        result: Self::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        _ = (message, result);
        std::future::ready(Ok(()))
    }

    /// A duplicate whose stored result no longer decodes as `Output`, or was not kept; `error` says which,
    /// and `stored` is what the record holds. Does nothing unless overridden.
    fn undecodable_duplicate(
        &self,
        message: Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        _ = (message, stored, error);
        std::future::ready(())
    }
}

impl<F, Fut, T> Handler for F
where
    F: Fn(Message) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<T, Failure>> + Send,
    T: Output,
{
    type Output = T;

    fn handle(&self, message: Message) -> impl Future<Output = Result<T, Failure>> + Send {
        self(message)
    }
}

/// A future on the heap.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The same handler without its type.
pub(crate) trait ErasedHandler: Send + Sync + 'static {
    /// Runs the handler and encodes its result.
    fn handle(
        &self,
        message: Message,
        codec: Codec,
        limit_bytes: usize,
    ) -> BoxFuture<'_, Result<Encoded, Failure>>;

    /// Decodes the stored result and hands it to the handler.
    fn duplicate(&self, message: Message, stored: Bytes) -> BoxFuture<'_, Result<(), Failure>>;
}

/// A result as it will be stored.
#[derive(Debug)]
pub(crate) struct Encoded {
    pub(crate) stored: Bytes,
    /// Why the result itself is not in there.
    pub(crate) not_kept: Option<BoxError>,
}

impl<H: Handler> ErasedHandler for H {
    fn handle(
        &self,
        message: Message,
        codec: Codec,
        limit_bytes: usize,
    ) -> BoxFuture<'_, Result<Encoded, Failure>> {
        Box::pin(async move {
            let run = message.run().cloned();
            let output = Handler::handle(self, message).await?;
            if run.is_some_and(|run| run.unit.is_attempted()) {
                // Its transaction has stored the result, or nothing has.
                return Ok(Encoded { stored: Bytes::new(), not_kept: None });
            }
            // The effect has happened. Whatever is wrong with the result, the work must not run again.
            let (stored, not_kept) = encode(&output, codec, limit_bytes);
            Ok(Encoded { stored, not_kept })
        })
    }

    fn duplicate(&self, message: Message, stored: Bytes) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async move {
            match H::Output::from_stored(&stored) {
                Ok(result) => Handler::duplicate(self, message, result).await,
                Err(error) => {
                    self.undecodable_duplicate(message, stored, error).await;
                    Ok(())
                }
            }
        })
    }
}
