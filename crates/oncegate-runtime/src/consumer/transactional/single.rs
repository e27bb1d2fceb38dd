//! Handlers of single messages.

use bytes::Bytes;

use crate::batch::BatchMessage;
use crate::failure::{BoxError, Failure};
use crate::message::Message;
use crate::transactional::{TransactionalBatchHandler, TransactionalHandler};

/// A handler for single messages as one for batches, which do its work one message after another.
pub(super) struct Single<H>(pub(super) H);

impl<Tx: Send + 'static, H: TransactionalHandler<Tx>> TransactionalBatchHandler<Tx> for Single<H> {
    type Output = H::Output;

    async fn handle(
        &self,
        batch: &[BatchMessage],
        transaction: &mut Tx,
    ) -> Result<Vec<Result<H::Output, Failure>>, Failure> {
        let mut outcomes = Vec::with_capacity(batch.len());
        for one in batch {
            let work = self.0.handle(one.message(), one.attempt(), transaction);
            outcomes.push(work.await);
        }
        Ok(outcomes)
    }

    fn duplicate(
        &self,
        message: &Message,
        result: H::Output,
    ) -> impl Future<Output = Result<(), Failure>> + Send {
        self.0.duplicate(message, result)
    }

    fn undecodable_duplicate(
        &self,
        message: &Message,
        stored: Bytes,
        error: BoxError,
    ) -> impl Future<Output = ()> + Send {
        self.0.undecodable_duplicate(message, stored, error)
    }
}
