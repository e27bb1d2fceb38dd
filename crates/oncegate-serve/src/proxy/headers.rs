//! The headers that a proxy takes out and puts in.

use http::header::{self, HeaderName};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Uri};

use crate::Peer;

/// Headers of one connection (RFC 9110, section 7.6.1).
const OF_ONE_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Headers with this prefix are the proxy's: no client sends them to the service.
const OURS: &str = "oncegate-";

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");

/// The host that a service is called by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostNames {
    /// The one that the client has named.
    OfClient,
    /// The one of the service: over TLS and HTTP/2, it may refuse another.
    OfService,
}

/// Headers that are never about one connection, whatever a client says: services trust them.
const OF_ALL_HOPS: [HeaderName; 10] = [
    header::HOST,
    header::AUTHORIZATION,
    header::COOKIE,
    header::CONTENT_TYPE,
    header::CONTENT_ENCODING,
    header::FORWARDED,
    FORWARDED_FOR,
    FORWARDED_HOST,
    HeaderName::from_static("x-forwarded-proto"),
    HeaderName::from_static("idempotency-key"),
];

/// Removes what is about one connection, also what `Connection` names.
pub(super) fn remove_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| !OF_ALL_HOPS.contains(name))
        .collect();
    for name in named.iter().chain(&OF_ONE_HOP) {
        headers.remove(name);
    }
}

/// Makes the headers of a client's request those for the service. The length of the body is
/// computed anew from the body itself, so that the two can never differ.
pub(super) fn for_service(
    headers: &mut HeaderMap,
    uri: &Uri,
    peer: Option<Peer>,
    names: HostNames,
) {
    let takes_trailers = headers
        .get(header::TE)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|value| value.split(',').any(|word| word.trim() == "trailers"));
    remove_hop(headers);
    headers.remove(header::CONTENT_LENGTH);
    // The listener has answered that.
    headers.remove(header::EXPECT);
    let ours: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with(OURS))
        .cloned()
        .collect();
    for name in ours {
        headers.remove(name);
    }
    if takes_trailers {
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
    }
    // The host that an address names counts, and that of the header does not (RFC 9112, 3.2.2).
    if let Some(authority) = uri.authority()
        && let Ok(host) = HeaderValue::from_str(without_login(authority.as_str()))
    {
        headers.insert(header::HOST, host);
    }
    if names == HostNames::OfService
        && let Some(host) = headers.remove(header::HOST)
    {
        headers.insert(FORWARDED_HOST, host);
    }
    if let Some(Peer(peer)) = peer {
        let earlier: Vec<&str> = headers
            .get_all(FORWARDED_FOR)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .collect();
        let all = earlier
            .into_iter()
            .map(str::to_owned)
            .chain([peer.to_string()])
            .collect::<Vec<_>>()
            .join(", ");
        if let Ok(all) = HeaderValue::try_from(all) {
            headers.insert(FORWARDED_FOR, all);
        }
    }
}

fn without_login(authority: &str) -> &str {
    authority
        .rsplit_once('@')
        .map_or(authority, |(_, host)| host)
}

/// The address of a request at the service: the path and query that the client has sent, byte by
/// byte.
pub(super) fn uri_at(service: &Uri, sent: &Uri) -> Option<Uri> {
    let mut parts = service.clone().into_parts();
    parts.path_and_query = Some(
        sent.path_and_query()
            .cloned()
            .unwrap_or_else(|| PathAndQuery::from_static("/")),
    );
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    #[test]
    fn a_service_gets_nothing_of_the_clients_connection() {
        let mut given = headers(&[
            ("host", "ignored"),
            ("connection", "close, X-Hop"),
            ("connection", "x-other"),
            ("x-hop", "1"),
            ("x-other", "1"),
            ("keep-alive", "5"),
            ("te", "trailers, deflate"),
            ("transfer-encoding", "chunked"),
            ("content-length", "7"),
            ("expect", "100-continue"),
            ("proxy-authorization", "Basic x"),
            ("oncegate-attempt", "7; recovered"),
            ("x-forwarded-for", "1.1.1.1"),
            ("x-kept", "1"),
        ]);
        let uri = Uri::from_static("http://user:pw@shop.example:81/pay");
        let peer = Some(Peer([2, 2, 2, 2].into()));
        for_service(&mut given, &uri, peer, HostNames::OfClient);
        let expected = headers(&[
            ("host", "shop.example:81"),
            ("te", "trailers"),
            ("x-forwarded-for", "1.1.1.1, 2.2.2.2"),
            ("x-kept", "1"),
        ]);
        assert_eq!(given, expected);
        for_service(&mut given, &uri, None, HostNames::OfService);
        assert_eq!(given.get("x-forwarded-host").unwrap(), "shop.example:81");
        assert!(!given.contains_key("host"));
    }

    #[test]
    fn the_path_reaches_the_service_as_it_was_sent() {
        let service = Uri::from_static("http://127.0.0.1:3000/");
        for sent in ["/a%2Fb//c/../d?x=%20&y", "/", "//host/x", "/?"] {
            let there = uri_at(&service, &sent.parse().unwrap()).unwrap();
            assert_eq!(there.path_and_query().unwrap().as_str(), sent);
            assert_eq!(there.authority(), service.authority());
        }
        let absolute = Uri::from_static("http://elsewhere/a?b");
        assert_eq!(
            uri_at(&service, &absolute).unwrap(),
            "http://127.0.0.1:3000/a?b"
        );
    }
}
