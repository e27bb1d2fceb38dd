//! The principal: the caller that a request comes from.

use std::fmt;
use std::sync::Arc;

use ::http::request::Parts;

type Function = dyn Fn(&Parts) -> Option<String> + Send + Sync;

/// Identifies the caller of a request. The caller is part of every key, so no caller gets another's
/// responses.
///
/// The principal is read from the request after authentication, so the layer belongs inside of
/// that. A request without a principal gets 401; callers never share a default. The principal does
/// not appear in the store or in logs: only the key's digest contains it.
#[derive(Clone)]
pub struct Principal {
    of: Arc<Function>,
    /// `true` when all requests come from one caller.
    is_one: bool,
}

impl Principal {
    /// Takes the text of a request extension that authentication has added, such as a user's or
    /// tenant's id. Two callers must never have the same text.
    ///
    /// ```
    /// use oncegate::http::Principal;
    ///
    /// #[derive(Clone)]
    /// struct UserId(u64);
    ///
    /// impl std::fmt::Display for UserId {
    ///     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
    ///         write!(f, "{}", self.0)
    ///     }
    /// }
    ///
    /// let principal = Principal::extension::<UserId>();
    /// # let _ = principal;
    /// ```
    pub fn extension<T: fmt::Display + Send + Sync + 'static>() -> Self {
        Self::from_fn(|request| request.extensions.get::<T>().map(ToString::to_string))
    }

    /// Takes the text that `of` returns for a request; `None` and blank texts are answered with
    /// 401.
    pub fn from_fn(of: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            of: Arc::new(move |request| {
                of(request)
                    .filter(|text| !text.trim().is_empty())
                    .map(named)
            }),
            is_one: false,
        }
    }

    /// Takes all requests as those of one caller. Any client that knows or guesses a key gets its
    /// response, so use this only for services with a single client.
    pub fn single_tenant() -> Self {
        Self {
            of: Arc::new(|_| Some("single tenant".to_owned())),
            is_one: true,
        }
    }

    pub(super) fn is_one(&self) -> bool {
        self.is_one
    }

    pub(super) fn of(&self, request: &Parts) -> Option<String> {
        (self.of)(request)
    }
}

/// Adds a prefix, so that no caller's text can equal that of the single tenant.
fn named(text: String) -> String {
    format!("named {text}")
}

impl fmt::Debug for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Principal").finish_non_exhaustive()
    }
}
