//! Asks RabbitMQ's management plugin about a queue: AMQP 0-9-1 does not tell its limits.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::findings::Described;
use super::settings::Connection;

/// Time limit of the request.
const LIMIT: Duration = Duration::from_secs(10);
/// The largest answer that is read, in bytes.
const ANSWER_MAX_BYTES: usize = 1 << 20;
/// The plugin's port, if the URL has none.
const PORT: u16 = 15_672;
/// The characters that stay in a name of the path.
const IN_PATHS: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// Returns the warning about a queue whose limits are not known.
pub(crate) fn unknown(queue: &str, why: &str) -> String {
    format!("the management plugin did not tell the limits of the queue `{queue}`: {why}")
}

/// Returns what the plugin says about the queue. The error shows no part of a URI: it may have a
/// password.
pub(crate) async fn describe(
    connection: &Connection,
    queue: &str,
    url: &str,
) -> Result<Described, String> {
    let url: Uri = url
        .parse()
        .map_err(|_| "its URL must be http://host:15672".to_owned())?;
    let host = url.host().filter(|_| url.scheme_str() == Some("http"));
    let host = host.ok_or("its URL must be http://host:15672; it is asked without TLS")?;
    let port = url.port_u16().unwrap_or(PORT);
    let broker = connection
        .uri_with_password()
        .map_err(|error| error.to_string())?;
    let login = &broker.authority.userinfo;
    let credentials = STANDARD.encode(format!("{}:{}", login.username, login.password));
    let vhost = utf8_percent_encode(&broker.vhost, IN_PATHS);
    let queue = utf8_percent_encode(queue, IN_PATHS);
    let base = url.path().trim_end_matches('/');
    let request = Request::get(format!("{base}/api/queues/{vhost}/{queue}"))
        .header(HOST, format!("{host}:{port}"))
        .header(AUTHORIZATION, format!("Basic {credentials}"))
        .body(Empty::<Bytes>::new())
        .map_err(|error| error.to_string())?;
    let answered = timeout(LIMIT, ask(host, port, request)).await;
    let (status, body) = answered.map_err(|_| format!("no answer within {LIMIT:?}"))??;
    if status != StatusCode::OK {
        return Err(format!(
            "{status}; the user needs the tag `monitoring` or `management`"
        ));
    }
    serde_json::from_slice(&body).map_err(|error| error.to_string())
}

async fn ask(
    host: &str,
    port: u16,
    request: Request<Empty<Bytes>>,
) -> Result<(StatusCode, Bytes), String> {
    let stream = TcpStream::connect((host, port))
        .await
        .map_err(|error| error.to_string())?;
    let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = connected.map_err(|error| error.to_string())?;
    let answer = async {
        let answer = sender
            .send_request(request)
            .await
            .map_err(|error| error.to_string())?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_MAX_BYTES)
            .collect()
            .await;
        Ok((status, body.map_err(|error| error.to_string())?.to_bytes()))
    };
    tokio::pin!(connection, answer);
    tokio::select! {
        answer = &mut answer => answer,
        // The connection may end once the answer is there.
        _ = &mut connection => answer.await,
    }
}
