//! Bodies that stream through: each pause has a limit, and a break is told from one of the service.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};

use oncegate_runtime::BoxError;

/// A body that fails when nothing of it comes for too long.
pub(super) struct Flowing<B> {
    body: B,
    pause: Duration,
    limit: Option<Pin<Box<Sleep>>>,
    progress: Progress,
}

/// The known facts about a body that is on its way.
#[derive(Clone, Debug)]
pub(super) struct Progress(Arc<Known>);

#[derive(Debug)]
struct Known {
    broke: AtomicBool,
    moved: Mutex<Instant>,
}

impl Progress {
    /// Returns whether the body broke off.
    pub(super) fn has_broken(&self) -> bool {
        self.0.broke.load(Relaxed)
    }

    /// Resolves when the body has not moved for this long: it has ended, or pauses.
    pub(super) async fn rests_for(&self, time: Duration) {
        loop {
            let until = *self.0.moved.lock() + time;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }

    fn moved(&self) {
        *self.0.moved.lock() = Instant::now();
    }

    fn broke(&self) {
        self.0.broke.store(true, Relaxed);
    }
}

impl<B> Flowing<B> {
    /// A body whose pauses are no longer than this.
    pub(super) fn new(body: B, pause: Duration) -> Self {
        let known = Known {
            broke: AtomicBool::default(),
            moved: Mutex::new(Instant::now()),
        };
        Self {
            body,
            pause,
            limit: None,
            progress: Progress(Arc::new(known)),
        }
    }

    pub(super) fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

impl<B> HttpBody for Flowing<B>
where
    B: HttpBody<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Err(error))) => {
                this.progress.broke();
                Poll::Ready(Some(Err(error.into())))
            }
            Poll::Ready(frame) => {
                this.progress.moved();
                // The timer is made when there is a pause, and set again at the next.
                if let Some(limit) = &mut this.limit {
                    limit.as_mut().reset(Instant::now() + this.pause);
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            Poll::Pending => {
                let limit = this
                    .limit
                    .get_or_insert_with(|| Box::pin(tokio::time::sleep(this.pause)));
                if limit.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                this.progress.broke();
                let why = format!("nothing of the body came for {:?}", this.pause);
                Poll::Ready(Some(Err(why.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use http_body_util::{BodyExt as _, StreamBody};

    use super::*;

    /// A body with a pause of so many seconds before each of its pieces.
    fn paused(
        pauses_s: &'static [u64],
    ) -> Flowing<impl HttpBody<Data = Bytes, Error = Infallible> + Unpin> {
        let pieces = stream::unfold(pauses_s.iter(), |mut pauses| async {
            let pause = pauses.next()?;
            tokio::time::sleep(Duration::from_secs(*pause)).await;
            Some((Ok(Frame::data(Bytes::from_static(b"x"))), pauses))
        });
        Flowing::new(StreamBody::new(Box::pin(pieces)), Duration::from_secs(10))
    }

    #[tokio::test(start_paused = true)]
    async fn the_limit_is_one_of_each_pause_and_not_of_the_whole() {
        let whole = paused(&[0, 9, 9, 9]).collect().await.unwrap();
        assert_eq!(whole.to_bytes(), "xxxx");
        let mut broken = paused(&[9, 11]);
        assert!(broken.frame().await.unwrap().is_ok());
        assert!(broken.frame().await.unwrap().is_err() && broken.progress.has_broken());
    }
}
