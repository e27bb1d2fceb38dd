//! Bodies of requests and responses, read up to a limit or streamed.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use tokio::time::{Instant, timeout_at};

use crate::failure::BoxError;

/// A body that the layer passes on: bytes that it has read, or a stream that it has not.
pub struct Body {
    /// The bytes before the stream.
    read: VecDeque<Frame<Bytes>>,
    rest: Option<UnsyncBoxBody<Bytes, BoxError>>,
}

impl Body {
    /// An empty body.
    pub fn empty() -> Self {
        Self { read: VecDeque::new(), rest: None }
    }

    pub(super) fn stream<B>(body: B) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        Self { read: VecDeque::new(), rest: Some(body.map_err(Into::into).boxed_unsync()) }
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Self {
        let read = if bytes.is_empty() { VecDeque::new() } else { VecDeque::from([Frame::data(bytes)]) };
        Self { read, rest: None }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(frame) = self.read.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match &mut self.rest {
            Some(rest) => Pin::new(rest).poll_frame(context),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && self.rest.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let read: usize = self.read.iter().filter_map(Frame::data_ref).map(Bytes::len).sum();
        let read = u64::try_from(read).unwrap_or(u64::MAX);
        let rest = self.rest.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint);
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
        f.debug_struct("Body").field("size", &HttpBody::size_hint(self)).finish_non_exhaustive()
    }
}

/// The result of reading a body.
#[derive(Debug)]
pub(super) struct Collected {
    /// The whole content, or why reading ended before the body did.
    pub(super) whole: Result<Bytes, Cut>,
    /// The complete body, including the part that was read.
    pub(super) body: Body,
}

/// Why reading ended before the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    TooLarge,
    TooSlow,
    Broken,
}

/// Reads up to `limit_bytes` for up to `patience`. Trailers stay in the body, and are not part of the content.
pub(super) async fn collect(mut body: Body, limit_bytes: usize, patience: Duration) -> Collected {
    let announced = HttpBody::size_hint(&body).lower();
    if usize::try_from(announced).map_or(true, |announced| announced > limit_bytes) {
        return Collected { whole: Err(Cut::TooLarge), body };
    }
    let deadline = Instant::now() + patience;
    let mut read = VecDeque::new();
    let mut size = 0;
    let cut = loop {
        match timeout_at(deadline, body.frame()).await {
            Ok(None) => break None,
            Ok(Some(Ok(frame))) => {
                size += frame.data_ref().map_or(0, Bytes::len);
                read.push_back(frame);
                if size > limit_bytes {
                    break Some(Cut::TooLarge);
                }
            }
            Ok(Some(Err(error))) => {
                body = Body::stream(Failed { error: Some(error) });
                break Some(Cut::Broken);
            }
            Err(_elapsed) => break Some(Cut::TooSlow),
        }
    };
    match cut {
        None => Collected { whole: Ok(join(&read, size)), body: Body { read, rest: None } },
        Some(cut) => Collected { whole: Err(cut), body: Body { read, rest: body.rest } },
    }
}

/// Joins the pieces. A single piece is returned without a copy.
fn join(read: &VecDeque<Frame<Bytes>>, size: usize) -> Bytes {
    let mut pieces = read.iter().filter_map(Frame::data_ref);
    match (pieces.next(), pieces.next()) {
        (None, _) => Bytes::new(),
        (Some(only), None) => only.clone(),
        (Some(first), Some(second)) => {
            let mut whole = BytesMut::with_capacity(size);
            [first, second].into_iter().chain(pieces).for_each(|piece| whole.extend_from_slice(piece));
            whole.freeze()
        }
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
