//! A service that takes all events at one path.

use std::task::{Context, Poll};

use http::uri::PathAndQuery;
use http::{Request, Uri};
use tower_service::Service;

/// A service whose requests all go to one path, whatever path the provider sends to.
#[derive(Clone, Debug)]
pub struct AtPath<S> {
    inner: S,
    path: Option<PathAndQuery>,
}

impl<S> AtPath<S> {
    /// Sends the requests to this path, with its query; `None` keeps the ones that they have.
    pub fn new(inner: S, path: Option<PathAndQuery>) -> Self {
        Self { inner, path }
    }
}

impl<S: Service<Request<B>>, B> Service<Request<B>> for AtPath<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> S::Future {
        if let Some(path) = &self.path {
            *request.uri_mut() = Uri::from(path.clone());
        }
        self.inner.call(request)
    }
}
