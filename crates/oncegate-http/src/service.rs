//! The tower side: a layer around any service over HTTP.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use ::http::{Request, Response};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http_body::Body as HttpBody;
use tower_layer::Layer;
use tower_service::Service;

use super::IdempotencyLayer;
use super::body::Body;
use super::door::serve;
use super::run::Handle;
use oncegate_runtime::failure::BoxError;

/// A service behind an [`IdempotencyLayer`].
#[derive(Clone)]
pub struct Idempotency<S> {
    inner: S,
    layer: Arc<IdempotencyLayer>,
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = Idempotency<S>;

    fn layer(&self, inner: S) -> Idempotency<S> {
        Idempotency {
            inner,
            layer: Arc::new(self.clone()),
        }
    }
}

impl<S, In, Out> Service<Request<In>> for Idempotency<S>
where
    S: Service<Request<Body>, Response = Response<Out>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    In: HttpBody<Data = Bytes> + Send + 'static,
    In::Error: Into<BoxError>,
    Out: HttpBody<Data = Bytes> + Send + 'static,
    Out::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    /// Always ready. Readiness of the inner service may hold a permit of a limit, so it is awaited
    /// after the grant: a stalled upload and a duplicate hold none.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<In>) -> Self::Future {
        let mut inner = self.inner.clone();
        let handle: Handle<S::Error> = Box::new(move |request| {
            Box::pin(async move {
                poll_fn(|context| inner.poll_ready(context)).await?;
                Ok(inner.call(request).await?.map(Body::stream))
            })
        });
        Box::pin(serve(
            Arc::clone(&self.layer),
            request.map(Body::stream),
            handle,
        ))
    }
}

impl<S: fmt::Debug> fmt::Debug for Idempotency<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency")
            .field("inner", &self.inner)
            .field("layer", &self.layer)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::future::{Ready, ready};

    use ::http::StatusCode;

    use super::*;
    use crate::request_gate;
    use crate::{Attempt, Principal};
    use oncegate_runtime::MemoryStore;

    /// Fails at its first attempt without a response.
    #[derive(Clone)]
    struct Flaky;

    impl Service<Request<Body>> for Flaky {
        type Response = Response<Body>;
        type Error = &'static str;
        type Future = Ready<Result<Response<Body>, &'static str>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), &'static str>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Request<Body>) -> Self::Future {
            let first = request
                .extensions()
                .get::<Attempt>()
                .is_some_and(|attempt| attempt.number() == 1);
            ready(if first {
                Err("told to")
            } else {
                Ok(Response::new(Body::empty()))
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_inner_error_is_a_failed_attempt_and_passes_through() {
        let layer = IdempotencyLayer::new(
            request_gate("payments", MemoryStore::new()),
            Principal::single_tenant(),
        );
        let mut service = layer.layer(Flaky);
        fn request() -> Request<Body> {
            Request::post("/")
                .header("idempotency-key", "k")
                .body(Body::empty())
                .unwrap()
        }
        assert_eq!(service.call(request()).await.unwrap_err(), "told to");
        let response = service.call(request()).await.unwrap();
        assert_eq!(
            (
                response.status(),
                response.headers().contains_key("idempotent-replayed")
            ),
            (StatusCode::OK, false)
        );
        let response = service.call(request()).await.unwrap();
        assert!(response.headers().contains_key("idempotent-replayed"));
    }
}
