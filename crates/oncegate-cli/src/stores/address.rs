//! The texts of `--store` and `store.url`: which kind they name, and what people may see of them.

use super::{KINDS, StoreKind, file_of};
use crate::exit::Problem;

/// The address of a store.
pub(super) struct Address {
    pub(super) kind: &'static dyn StoreKind,
    /// The URL, or the path of a file.
    pub(super) location: String,
}

/// Checks that it is the URL of a store that this build knows.
///
/// # Errors
/// With the known ones.
pub(crate) fn check(url: &str) -> Result<(), Problem> {
    known(url).map(drop)
}

pub(super) fn known(url: &str) -> Result<Address, Problem> {
    understood(url).map_err(|why| {
        let forms: Vec<&str> = KINDS.iter().map(|kind| kind.forms()).collect();
        Problem::configuration(format!("--store: {why}; known are {}", forms.join(", ")))
    })
}

pub(super) fn understood(url: &str) -> Result<Address, String> {
    if url.trim() != url {
        return Err("it begins or ends with a blank".to_owned());
    }
    // A single letter is a drive of Windows.
    let scheme = url.split_once(':').map(|(scheme, _)| scheme);
    let scheme = scheme.filter(|scheme| is_scheme(scheme));
    let [.., of_files] = KINDS;
    if let Some(scheme) = scheme
        && let Some(kind) = KINDS.into_iter().find(|kind| kind.has_scheme(scheme))
    {
        let location = kind.location(url)?;
        return Ok(Address { kind, location });
    }
    // A file of that name would be a store of each host's own.
    if is_like_address(url) {
        return Err(
            "it looks like the address of a server: begin it with redis:// or postgres://"
                .to_owned(),
        );
    }
    match scheme {
        Some(scheme) => Err(format!(
            "`{scheme}` is not a kind of store that this build knows"
        )),
        None if url.is_empty() => Err("it is empty".to_owned()),
        None => Ok(Address {
            kind: of_files,
            location: url.to_owned(),
        }),
    }
}

/// Returns whether this text without a known scheme names a server: by a login, or by the port of
/// one of its hosts. Paths that begin with `/` or `.` name files, whatever follows.
fn is_like_address(text: &str) -> bool {
    if text.starts_with(['/', '.']) {
        return false;
    }
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    // What another scheme than ours says is told by its name.
    if !scheme.is_empty() && is_scheme(scheme) {
        return false;
    }
    !scheme.is_empty() || rest.contains('@') || rest.split(',').any(has_port)
}

fn has_port(host: &str) -> bool {
    let host = host.split(['/', '?', '#']).next().unwrap_or_default();
    host.rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok())
}

fn is_scheme(text: &str) -> bool {
    text.len() > 1
        && text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.'))
}

/// The URL with a password in it, percent-encoded so that no character of the password ends it
/// early.
pub(super) fn with_password(url: &str, password: Option<&str>) -> String {
    let (Some(password), Some((scheme, rest))) = (password, url.split_once("://")) else {
        return url.to_owned();
    };
    let (user, rest) = rest
        .rsplit_once('@')
        .map_or(("", rest), |(user, rest)| (user, rest));
    let user = user.split(':').next().unwrap_or_default();
    let spelt: String = password
        .bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
                char::from(byte).to_string()
            } else {
                format!("%{byte:02X}")
            }
        })
        .collect();
    format!("{scheme}://{user}:{spelt}@{rest}")
}

/// The store for people: a file by its absolute path, a URL without user, password and parameters.
pub(crate) fn named(url: &str) -> String {
    let file = file_of(url).and_then(|path| std::path::absolute(path).ok());
    file.map_or_else(
        || redacted(url),
        |path| format!("sqlite:{}", path.display()),
    )
}

/// For people: without user, password and parameters.
pub(crate) fn redacted(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        // Only the path of a file has no scheme; before an `@` in anything else may be a password.
        return match url.rsplit_once('@') {
            Some((_, rest)) if !url.starts_with(['/', '.']) && !url.starts_with("sqlite:") => {
                format!("***@{rest}")
            }
            _ => url.to_owned(),
        };
    };
    let (rest, parameters) = rest
        .split_once('?')
        .map_or((rest, ""), |(rest, _)| (rest, "?***"));
    // The last `@` ends the password, whatever the password contains.
    let (user, rest) = rest
        .rsplit_once('@')
        .map_or(("", rest), |(_, rest)| ("***@", rest));
    format!("{scheme}://{user}{rest}{parameters}")
}
