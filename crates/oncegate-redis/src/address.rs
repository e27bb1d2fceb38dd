//! Parses a URL: one server, a cluster, or sentinels that know the primary.

use std::net::IpAddr;

use oncegate_core::store::StoreError;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo as _};

/// The forms of URL that are accepted. No error repeats a URL, which may contain a password.
const KNOWN: &str = "redis://[user[:password]@]host[:port][/database], \
                     redis+cluster://[user[:password]@]host[:port],host[:port]…, or \
                     redis+sentinel://[user[:password]@]host[:port],host[:port]…/name[/database] are expected; \
                     with rediss instead of redis for TLS, and with ?compact=N at the end for N keys in buckets";

/// Default port of a sentinel.
const SENTINEL_PORT: u16 = 26_379;

/// The parameter for [`RedisBuilder::compact`](super::RedisBuilder::compact).
const COMPACT: &str = "compact=";

/// The most hosts that a URL may name.
const MAX_HOSTS: usize = 64;

/// The servers to connect to.
#[derive(Clone, Debug)]
pub(super) enum Address {
    Server(ConnectionInfo),
    /// Some nodes of a cluster; they know the others.
    Cluster(Vec<ConnectionInfo>),
    Sentinels {
        sentinels: Vec<ConnectionInfo>,
        /// The name of the primary at the sentinels.
        name: String,
        /// The connection settings of the primary; its host and port come from the sentinels.
        primary: ConnectionInfo,
    },
}

/// Parses a URL. Returns the address and the number of keys of `compact`, if it is set.
///
/// # Errors
/// When the URL has no known form, or asks for TLS that is not built in or that does not check the
/// host name.
pub(super) fn parse(url: &str) -> Result<(Address, Option<u64>), StoreError> {
    let Some((place, parameters)) = url.split_once('?') else {
        return Ok((address(url)?, None));
    };
    let (compact, others): (Vec<&str>, Vec<&str>) = parameters
        .split('&')
        .partition(|parameter| parameter.starts_with(COMPACT));
    let expected_keys = match compact.as_slice() {
        [] => None,
        [one] => match one.trim_start_matches(COMPACT).parse() {
            Ok(0) | Err(_) => {
                return Err(StoreError::refused(format!(
                    "the URL's {one} is not a number of keys"
                )));
            }
            Ok(expected_keys) => Some(expected_keys),
        },
        _ => return Err(StoreError::refused("the URL sets compact= more than once")),
    };
    let others = if others.is_empty() {
        String::new()
    } else {
        format!("?{}", others.join("&"))
    };
    Ok((address(&format!("{place}{others}"))?, expected_keys))
}

fn address(url: &str) -> Result<Address, StoreError> {
    let (scheme, rest) = url.split_once("://").ok_or_else(invalid)?;
    let (security, kind) = match scheme.split_once('+') {
        Some((security @ ("redis" | "rediss"), kind)) => (security, Some(kind)),
        Some(_) => return Err(invalid()),
        None => (scheme, None),
    };
    let Some(kind) = kind else {
        return server(url).map(Address::Server);
    };
    // The last `@` ends the password, which may contain others.
    let (login, rest) = rest
        .rsplit_once('@')
        .map_or(("", rest), |(login, rest)| (login, rest));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts: Vec<&str> = hosts.split(',').collect();
    if hosts.iter().any(|host| host.is_empty())
        || hosts.len() > MAX_HOSTS
        || rest.contains(['?', '#'])
    {
        return Err(invalid());
    }
    let at = if login.is_empty() { "" } else { "@" };
    match (kind, path.split_once('/').unwrap_or((path, ""))) {
        ("cluster", ("", "")) => hosts
            .into_iter()
            .map(|host| server(&format!("{security}://{login}{at}{host}")))
            .collect::<Result<_, _>>()
            .map(Address::Cluster),
        ("sentinel", (name, database)) if !name.is_empty() => {
            // The login in the URL is for the primary: sentinels have their own.
            let primary = server(&format!("{security}://{login}{at}localhost/{database}"))?;
            let sentinels = hosts
                .into_iter()
                .map(|host| server(&format!("{security}://{}", with_port(host))))
                .collect::<Result<_, _>>()?;
            Ok(Address::Sentinels {
                sentinels,
                name: name.to_owned(),
                primary,
            })
        }
        _ => Err(invalid()),
    }
}

fn server(url: &str) -> Result<ConnectionInfo, StoreError> {
    let tls = url.starts_with("rediss://");
    if tls && !cfg!(feature = "tls") {
        return Err(StoreError::refused(
            "this build has no TLS for Redis: enable the feature `redis-tls`",
        ));
    }
    let info = url.into_connection_info().map_err(|_| invalid())?;
    match info.addr() {
        ConnectionAddr::TcpTls { insecure: true, .. } => Err(StoreError::refused(
            "the URL asks for TLS without checking who answers (#insecure): name the certificate's authority with \
             the store's `tls_root` instead",
        )),
        _ => Ok(info),
    }
}

fn with_port(host: &str) -> String {
    // The colons of an IPv6 address are within brackets.
    let after = host.rsplit_once(']').map_or(host, |(_, after)| after);
    if after.contains(':') {
        host.to_owned()
    } else {
        format!("{host}:{SENTINEL_PORT}")
    }
}

fn invalid() -> StoreError {
    StoreError::refused(format!("the URL is invalid: {KNOWN}"))
}

/// Returns the same server settings with another address.
pub(super) fn moved_to(info: &ConnectionInfo, host: &str, port: u16) -> ConnectionInfo {
    let host = host.to_owned();
    let addr = match info.addr() {
        ConnectionAddr::TcpTls {
            insecure,
            tls_params,
            ..
        } => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: *insecure,
            tls_params: tls_params.clone(),
        },
        _ => ConnectionAddr::Tcp(host, port),
    };
    info.clone().set_addr(addr)
}

/// Returns whether a password would be sent to another machine in plain text.
pub(super) fn shows_password(info: &ConnectionInfo) -> bool {
    let ConnectionAddr::Tcp(host, _) = info.addr() else {
        return false;
    };
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let is_local = host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback());
    info.redis_settings().password().is_some() && !is_local
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address_of(url: &str) -> Address {
        parse(url).unwrap().0
    }

    fn addresses(infos: &[ConnectionInfo]) -> Vec<String> {
        infos.iter().map(|info| info.addr().to_string()).collect()
    }

    #[test]
    fn servers_clusters_and_sentinels_are_told_apart() {
        let Address::Server(info) = address_of("redis://user:pw@cache/2") else {
            panic!()
        };
        assert_eq!(info.addr().to_string(), "cache:6379");
        let Address::Cluster(seeds) = address_of("redis+cluster://u:p%40ss@a,b:7001,[::1]:7002")
        else {
            panic!()
        };
        assert_eq!(addresses(&seeds), ["a:6379", "b:7001", "::1:7002"]);
        assert!(
            seeds
                .iter()
                .all(|seed| seed.redis_settings().password() == Some("p@ss"))
        );
        let Address::Sentinels {
            sentinels,
            name,
            primary,
        } = address_of("redis+sentinel://:pw@a,b:7001/mymaster/3")
        else {
            panic!()
        };
        assert_eq!(
            (addresses(&sentinels), name.as_str()),
            (vec!["a:26379".into(), "b:7001".into()], "mymaster")
        );
        assert!(
            sentinels
                .iter()
                .all(|sentinel| sentinel.redis_settings().password().is_none())
        );
        assert_eq!(
            (
                primary.redis_settings().db(),
                primary.redis_settings().password()
            ),
            (3, Some("pw"))
        );
    }

    #[test]
    fn what_is_none_of_them_is_refused_without_its_password() {
        for url in [
            "",
            "cache:6379",
            "http://:canary@cache",
            "redis+other://:canary@cache",
            "redis+cluster://:canary@a,,b",
            "redis+cluster://:canary@a/2",
            "redis+cluster://:canary@a:notaport",
            "redis+sentinel://:canary@a",
            "redis+sentinel://:canary@a/mymaster/notanumber",
            "rediss://:canary@cache#insecure",
            "redis+cluster://:canary@a?db=2",
            "redis://:canary@cache?compact=",
            "redis://:canary@cache?compact=0",
            "redis://:canary@cache?compact=1000&compact=2000",
        ] {
            let error = parse(url).unwrap_err();
            assert_eq!(error.class(), "refused", "{url}");
            assert!(!error.to_string().contains("canary"), "{error}");
        }
    }

    #[test]
    fn every_kind_of_address_may_be_compact() {
        for (url, hosts) in [
            ("redis://:pw@cache/2?compact=1000", vec!["cache:6379"]),
            (
                "redis://cache?protocol=resp3&compact=1000",
                vec!["cache:6379"],
            ),
            (
                "redis+cluster://:pw@a,b:7001?compact=1000",
                vec!["a:6379", "b:7001"],
            ),
            (
                "redis+sentinel://:pw@a/mymaster?compact=1000",
                vec!["a:26379"],
            ),
        ] {
            let (address, expected_keys) = parse(url).expect(url);
            assert_eq!(expected_keys, Some(1_000), "{url}");
            let infos = match address {
                Address::Server(info) => vec![info],
                Address::Cluster(infos)
                | Address::Sentinels {
                    sentinels: infos, ..
                } => infos,
            };
            assert_eq!(addresses(&infos), hosts, "{url}");
        }
        assert_eq!(parse("redis://cache").unwrap().1, None);
    }

    fn shows(url: &str) -> bool {
        let Address::Server(info) = address_of(url) else {
            panic!()
        };
        shows_password(&info)
    }

    #[test]
    fn a_password_is_shown_only_to_other_machines_and_without_tls() {
        assert!(shows("redis://:pw@cache"));
        assert!(shows("redis://:pw@10.0.0.1"));
        for url in [
            "redis://cache",
            "redis://:pw@localhost",
            "redis://:pw@127.0.0.1",
            "redis://:pw@[::1]",
        ] {
            assert!(!shows(url), "{url}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn tls_goes_with_every_kind_of_address() {
        let Address::Cluster(seeds) = address_of("rediss+cluster://a,b") else {
            panic!()
        };
        let moved = moved_to(&seeds[0], "c", 7_000);
        assert!(
            matches!(moved.addr(), ConnectionAddr::TcpTls { host, port: 7_000, .. } if host == "c")
        );
        let Address::Server(info) = address_of("rediss://:pw@cache") else {
            panic!()
        };
        assert!(!shows_password(&info));
    }
}
