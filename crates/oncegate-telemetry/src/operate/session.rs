//! Sessions that begin with the token, and the checks of each request.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri, header};
use parking_lot::Mutex;

/// The most sessions at a time; a further one ends the oldest.
const SESSIONS_MOST: usize = 64;
/// The time after which a person must sign in again.
const SESSION_LASTS: Duration = Duration::from_secs(12 * 3_600);
/// The longest name of a person, in bytes.
const NAME_MAX_BYTES: usize = 64;

/// The sessions of people who have signed in. They end with the process.
#[derive(Debug, Default)]
pub(super) struct Sessions(Mutex<VecDeque<Session>>);

/// A person who has signed in.
#[derive(Clone, Debug)]
pub(super) struct Session {
    /// The hash of what the cookie holds. Hashes are compared in constant time.
    id: blake3::Hash,
    /// The hash of the token that it began with.
    token: blake3::Hash,
    /// The secret of its forms, which no other site can know.
    pub(super) secret: String,
    /// The person's name, as given.
    pub(super) name: String,
    until: Instant,
}

impl Sessions {
    /// Begins a session, and returns what its cookie holds.
    pub(super) fn begin(&self, name: &str, token: blake3::Hash) -> String {
        let cookie = random();
        let mut sessions = self.0.lock();
        let surplus = (sessions.len() + 1).saturating_sub(SESSIONS_MOST);
        sessions.drain(..surplus);
        sessions.push_back(Session {
            id: blake3::hash(cookie.as_bytes()),
            token,
            secret: random(),
            name: name.to_owned(),
            until: Instant::now() + SESSION_LASTS,
        });
        cookie
    }

    /// Returns the session of a request, if it has one that has begun with this token.
    pub(super) fn find(&self, headers: &HeaderMap, token: blake3::Hash) -> Option<Session> {
        let wanted = cookie_name(headers);
        let now = Instant::now();
        let mut sessions = self.0.lock();
        sessions.retain(|session| session.until > now && session.token == token);
        let ids: Vec<blake3::Hash> = cookies(headers)
            .filter(|(name, _)| *name == wanted)
            .map(|(_, value)| blake3::hash(value.as_bytes()))
            .collect();
        sessions
            .iter()
            .find(|session| ids.contains(&session.id))
            .cloned()
    }

    /// Ends a session.
    pub(super) fn end(&self, ended: &Session) {
        self.0.lock().retain(|session| session.id != ended.id);
    }
}

impl Session {
    /// Returns whether the form is one that this session was given.
    pub(super) fn has_given(&self, secret: &str) -> bool {
        blake3::hash(secret.as_bytes()) == blake3::hash(self.secret.as_bytes())
    }
}

/// Returns 256 random bits as text.
fn random() -> String {
    let bits: [u8; 32] = rand::random();
    blake3::Hash::from_bytes(bits).to_hex().to_string()
}

/// Returns the name of the cookie at the port of this page: several processes of one machine share
/// their cookies.
pub(super) fn cookie_name(headers: &HeaderMap) -> String {
    let port = host(headers).and_then(|host| host.port_u16());
    format!("oncegate-{}", port.unwrap_or_default())
}

fn cookies(headers: &HeaderMap) -> impl Iterator<Item = (&str, &str)> {
    headers
        .get_all(header::COOKIE)
        .iter()
        .filter_map(|header| header.to_str().ok())
        .flat_map(|header| header.split(';'))
        .filter_map(|cookie| cookie.trim().split_once('='))
}

fn host(headers: &HeaderMap) -> Option<Authority> {
    Authority::try_from(headers.get(header::HOST)?.as_bytes()).ok()
}

/// Returns whether a form was sent by a page of this server. Browsers say where a form comes from;
/// a request that does not say it is refused.
pub(super) fn is_from_here(headers: &HeaderMap) -> bool {
    let mut origins = headers.get_all(header::ORIGIN).iter();
    let origin = origins
        .next()
        .filter(|_| origins.next().is_none())
        .and_then(|origin| Uri::try_from(origin.as_bytes()).ok());
    let (Some(origin), Some(host)) = (origin, host(headers)) else {
        return false;
    };
    let is_ours = origin
        .authority()
        .is_some_and(|authority| authority.as_str().eq_ignore_ascii_case(host.as_str()));
    let site = headers.get("sec-fetch-site");
    is_ours && site.is_none_or(|site| site == "same-origin" || site == "none")
}

/// Checks the name of a person, for the journal.
///
/// # Errors
/// Says what it must be.
pub(super) fn check_name(name: &str) -> Result<(), &'static str> {
    let is_name =
        !name.is_empty() && name.len() <= NAME_MAX_BYTES && !name.chars().any(char::is_control);
    is_name
        .then_some(())
        .ok_or("a name of up to 64 bytes is needed, for the journal")
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn headers(given: &[(&'static str, &str)]) -> HeaderMap {
        given
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_str(value).unwrap(),
                )
            })
            .collect()
    }

    #[test]
    fn only_forms_of_this_page_are_from_here() {
        let from = |origin: &str| {
            is_from_here(&headers(&[("host", "127.0.0.1:9464"), ("origin", origin)]))
        };
        assert!(from("http://127.0.0.1:9464") && from("https://127.0.0.1:9464"));
        for other in [
            "null",
            "",
            "http://127.0.0.1",
            "http://127.0.0.1:9465",
            "http://evil.example",
            "http://127.0.0.1:9464.evil.example",
            "http://evil.example/127.0.0.1:9464",
            "http://127.0.0.1:9464@evil.example",
        ] {
            assert!(!from(other), "{other}");
        }
        assert!(!is_from_here(&headers(&[("host", "127.0.0.1:9464")])));
        assert!(!is_from_here(&headers(&[("origin", "http://a")])));
        let mut two = headers(&[("host", "a"), ("origin", "http://a")]);
        assert!(is_from_here(&two));
        two.append(header::ORIGIN, HeaderValue::from_static("http://b"));
        assert!(!is_from_here(&two));
        let other_site = [
            ("host", "a"),
            ("origin", "http://a"),
            ("sec-fetch-site", "cross-site"),
        ];
        assert!(!is_from_here(&headers(&other_site)));
    }

    #[test]
    fn a_session_ends_with_its_token_and_when_there_are_too_many() {
        let sessions = Sessions::default();
        let token = blake3::hash(b"first");
        let cookie = sessions.begin("ada", token);
        let with = |cookie: &str| {
            headers(&[
                ("host", "a:9464"),
                ("cookie", &format!("x=1; oncegate-9464={cookie}")),
            ])
        };
        let found = sessions.find(&with(&cookie), token).unwrap();
        assert_eq!(found.name, "ada");
        assert!(
            found.has_given(&found.secret) && !found.has_given("") && !found.has_given(&cookie)
        );
        assert!(sessions.find(&with(""), token).is_none());
        let other_port = headers(&[
            ("host", "a:9465"),
            ("cookie", &format!("oncegate-9464={cookie}")),
        ]);
        assert!(sessions.find(&other_port, token).is_none());

        for _ in 1..SESSIONS_MOST {
            sessions.begin("bob", token);
        }
        assert!(sessions.find(&with(&cookie), token).is_some());
        let last = sessions.begin("bob", token);
        assert!(
            sessions.find(&with(&cookie), token).is_none(),
            "the oldest ended"
        );
        let last_found = sessions.find(&with(&last), token).unwrap();
        sessions.end(&last_found);
        assert!(sessions.find(&with(&last), token).is_none());

        let cookie = sessions.begin("ada", token);
        let changed = blake3::hash(b"second");
        assert!(sessions.find(&with(&cookie), changed).is_none());
        assert!(
            sessions.find(&with(&cookie), token).is_none(),
            "it does not come back with the token"
        );
    }

    #[test]
    fn names_are_short_and_on_one_line() {
        assert!(check_name("ada.l@example.org").is_ok());
        let long = "x".repeat(NAME_MAX_BYTES + 1);
        for bad in ["", "a\nb", long.as_str()] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
    }
}
