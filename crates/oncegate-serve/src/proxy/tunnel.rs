//! Connections that change their protocol, such as WebSockets: bytes go through in both directions.

use http::header::{CONNECTION, UPGRADE};
use http::{HeaderMap, HeaderValue, Request, Version};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

/// The tunnels that are open.
#[derive(Clone, Debug, Default)]
pub(super) struct Tunnels {
    open: TaskTracker,
    closed: CancellationToken,
}

impl Tunnels {
    /// Copies bytes between both sides until one of them ends, or all tunnels are closed.
    pub(super) fn open(&self, client: OnUpgrade, service: OnUpgrade) {
        let closed = self.closed.clone();
        self.open.spawn(async move {
            let copying = async {
                let client = client.await?;
                let service = service.await?;
                let mut client = TokioIo::new(client);
                let mut service = TokioIo::new(service);
                let copied = tokio::io::copy_bidirectional(&mut client, &mut service).await;
                Ok::<_, hyper::Error>(copied)
            };
            tokio::select! {
                copied = copying => debug!(?copied, "a tunnel has ended"),
                () = closed.cancelled() => {}
            }
        });
    }

    pub(super) fn close(&self) {
        self.closed.cancel();
    }
}

/// Returns the protocol that a client asks for instead of HTTP/1.1; `None` if it asks for none.
pub(super) fn wanted<B>(request: &Request<B>) -> Option<HeaderValue> {
    if request.version() != Version::HTTP_11 || !names_upgrade(request.headers()) {
        return None;
    }
    // HTTP/2 without TLS would let the client talk to the service past the proxy.
    // Of several, the service would choose.
    let mut lines = request.headers().get_all(UPGRADE).iter();
    let (Some(protocol), None) = (lines.next(), lines.next()) else {
        return None;
    };
    let is_http = protocol.as_bytes().to_ascii_lowercase().starts_with(b"h2c");
    let is_one = !protocol.as_bytes().contains(&b',');
    (is_one && !is_http).then(|| protocol.clone())
}

fn names_upgrade(headers: &HeaderMap) -> bool {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|word| word.trim().eq_ignore_ascii_case("upgrade"))
}

/// Asks the other side for the protocol, or tells it that it has it.
pub(super) fn put(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, protocol);
}
