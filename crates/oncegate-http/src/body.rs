//! Bodies of requests and responses, read up to a limit or streamed.

use std::fmt;
use std::mem;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use ::http::HeaderMap;
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::time::{Instant, timeout_at};

use oncegate_runtime::failure::BoxError;

/// A body that the layer passes on: bytes that it has read, or a stream that it has not. Empty by
/// default.
#[derive(Default)]
pub struct Body {
    /// The content before the stream.
    read: Bytes,
    /// The trailers, if the stream was read up to them.
    trailers: Option<Box<HeaderMap>>,
    rest: Option<UnsyncBoxBody<Bytes, BoxError>>,
}

impl Body {
    /// An empty body.
    pub fn empty() -> Self {
        Self::default()
    }

    /// A body that is passed on as it comes.
    pub fn stream<B>(body: B) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self {
            rest: Some(body.map_err(Into::into).boxed_unsync()),
            ..Self::default()
        }
    }
}

impl From<Bytes> for Body {
    fn from(read: Bytes) -> Self {
        Self {
            read,
            ..Self::default()
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let read = mem::take(&mut self.read);
        if !read.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(read))));
        }
        if let Some(trailers) = self.trailers.take() {
            return Poll::Ready(Some(Ok(Frame::trailers(*trailers))));
        }
        match &mut self.rest {
            Some(rest) => Pin::new(rest).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty()
            && self.trailers.is_none()
            && self.rest.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read = u64::try_from(self.read.len()).unwrap_or(u64::MAX);
        let rest = self
            .rest
            .as_ref()
            .map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint);
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower().saturating_add(read));
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper.saturating_add(read));
        }
        hint
    }
}

impl fmt::Debug for Body {
    /// Shows its size, never its content.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Body")
            .field("size", &HttpBody::size_hint(self))
            .finish_non_exhaustive()
    }
}

/// The result of reading a body.
#[derive(Debug)]
pub(super) struct Collected {
    /// The whole content, or the reason that reading ended before the body did.
    pub(super) whole: Result<Bytes, Cut>,
    /// The complete body, including the part that was read.
    pub(super) body: Body,
}

/// The reason that reading ended before the body did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    TooLarge,
    /// The bodies that are held at once would have become too large.
    NoRoom,
    TooSlow,
    Broken,
}

/// Reads up to `limit_bytes` for up to `patience`, as long as there is `room` for the bytes.
/// Trailers stay in the body, and are not part of the content.
///
/// The pieces are joined as they arrive, because a piece of one byte would take a hundred bytes by
/// itself.
pub(super) async fn collect(
    mut body: Body,
    limit_bytes: usize,
    patience: Duration,
    mut room: impl FnMut(usize) -> bool,
) -> Collected {
    let announced = HttpBody::size_hint(&body).lower();
    if usize::try_from(announced).map_or(true, |announced| announced > limit_bytes) {
        return Collected {
            whole: Err(Cut::TooLarge),
            body,
        };
    }
    let deadline = Instant::now() + patience;
    let mut content = BytesMut::new();
    let mut trailers = None;
    let cut = loop {
        let next = AssertUnwindSafe(body.frame()).catch_unwind();
        let frame = match timeout_at(deadline, next).await {
            Ok(Ok(None)) => break None,
            Ok(Ok(Some(Ok(frame)))) => frame,
            Ok(Ok(Some(Err(error)))) => {
                body = Body::stream(Failed { error: Some(error) });
                break Some(Cut::Broken);
            }
            // The handler has ended, so a body that panics counts as one that breaks off: nothing
            // runs again for it.
            Ok(Err(_panic)) => {
                body = Body::stream(Failed {
                    error: Some("the body has panicked".into()),
                });
                break Some(Cut::Broken);
            }
            Err(_elapsed) => break Some(Cut::TooSlow),
        };
        match frame.into_data() {
            Ok(data) => {
                content.extend_from_slice(&data);
                if content.len() > limit_bytes {
                    break Some(Cut::TooLarge);
                }
                if !room(data.len()) {
                    break Some(Cut::NoRoom);
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok().map(Box::new),
        }
    };
    let content = content.freeze();
    let (whole, rest) = match cut {
        None => (Ok(content.clone()), None),
        Some(cut) => (Err(cut), body.rest),
    };
    Collected {
        whole,
        body: Body {
            read: content,
            trailers,
            rest,
        },
    }
}

/// A body that ends with the error that interrupted it.
struct Failed {
    error: Option<BoxError>,
}

impl HttpBody for Failed {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(self.error.take().map(Err))
    }
}
