//! Several doors at one address, by the beginning of the path.

use std::fmt;
use std::future::ready;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use http::{Request, Response};
use percent_encoding::percent_decode_str;

use crate::answers::Answer;
use crate::{Body, Door};

/// The doors of one address. The one with the longest path that a request is at, or below, takes
/// it.
#[derive(Clone, Default)]
pub struct Doors(Vec<(Vec<String>, Arc<dyn Door>)>);

impl Doors {
    /// Adds a door for this path and all below it; for every other path if it is `None`.
    pub fn add(&mut self, path: Option<&str>, door: Arc<dyn Door>) {
        self.0
            .push((parts_of(path.unwrap_or_default(), false), door));
        // The longest first.
        self.0.sort_by_key(|(own, _)| std::cmp::Reverse(own.len()));
    }

    /// Services differ in how they read a path. A request that one of them may take for one below a
    /// door's path belongs to that door, which may be the one that checks signatures.
    fn of(&self, path: &str) -> Option<&Arc<dyn Door>> {
        let readings = [parts_of(path, false), parts_of(path, true)];
        let mut doors = self.0.iter();
        let found = doors.find(|(own, _)| readings.iter().any(|parts| parts.starts_with(own)));
        found.map(|(_, door)| door)
    }
}

/// Returns the parts of a path: decoded, in lower case, without empty ones and without parameters.
fn parts_of(path: &str, resolves_dots: bool) -> Vec<String> {
    let path = percent_decode_str(path).decode_utf8_lossy();
    let mut parts = Vec::new();
    for part in path.split(['/', '\\']) {
        match part.split(';').next().unwrap_or_default() {
            "" | "." => {}
            ".." if resolves_dots => drop(parts.pop()),
            part => parts.push(part.to_ascii_lowercase()),
        }
    }
    parts
}

impl Door for Doors {
    fn answer(&self, request: Request<Body>) -> BoxFuture<'static, Response<Body>> {
        match self.of(request.uri().path()) {
            Some(door) => door.answer(request),
            None => Box::pin(ready(Answer::NoDoor.response())),
        }
    }
}

impl fmt::Debug for Doors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths: Vec<String> = self.0.iter().map(|(own, _)| own.join("/")).collect();
        f.debug_tuple("Doors").field(&paths).finish()
    }
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::*;

    struct Named(u16);

    impl Door for Named {
        fn answer(&self, _: Request<Body>) -> BoxFuture<'static, Response<Body>> {
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::from_u16(self.0).unwrap();
            Box::pin(ready(response))
        }
    }

    #[tokio::test]
    async fn the_longest_path_takes_the_request() {
        let mut doors = Doors::default();
        doors.add(Some("/hooks"), Arc::new(Named(201)));
        doors.add(Some("/hooks/stripe/"), Arc::new(Named(202)));
        let status = |doors: &Doors, path: &str| {
            let request = Request::post(path).body(Body::empty()).unwrap();
            let answered = doors.answer(request);
            async move { answered.await.status().as_u16() }
        };
        for (path, expected) in [
            ("/hooks", 201),
            ("/hooks/", 201),
            ("/hooks/stripes", 201),
            ("/hooks/stripe", 202),
            ("/hooks/stripe/x?y=/", 202),
            // Services read these as the same path, so none goes past the door that has it.
            ("/hooks/%73tripe", 202),
            ("//hooks/./stripe", 202),
            ("/x/../hooks/stripe", 202),
            ("/Hooks/Stripe", 202),
            ("/hooks%2Fstripe", 202),
            ("/hooks/stripe;x=1", 202),
            ("/hooks/stripe/../y", 202),
            ("/hooksy", 404),
            ("/", 404),
        ] {
            assert_eq!(status(&doors, path).await, expected, "{path}");
        }
        doors.add(None, Arc::new(Named(203)));
        assert_eq!(status(&doors, "/hooksy").await, 203);
        assert_eq!(status(&doors, "/hooks/stripe").await, 202);
    }
}
