//! A worker that answers whatever bytes a test wants, and remembers what it was asked.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use oncegate_testkit::Certificates;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// A request as it came.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) path: String,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Asked {
    pub(crate) fn attempt(&self) -> u32 {
        self.headers["oncegate-attempt"].parse().unwrap()
    }

    pub(crate) fn recovered(&self) -> bool {
        self.headers["oncegate-recovered"] == "?1"
    }
}

/// What to answer. The connection is closed behind it.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    Bytes(String),
    /// Nothing, and the connection stays.
    Silence,
}

impl Answer {
    /// A whole response.
    pub(crate) fn status(status: u16, headers: &str, body: &str) -> Self {
        Self::Bytes(format!(
            "HTTP/1.1 {status} X\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        ))
    }
}

/// A listener that ends with this value.
pub(crate) struct RawWorker {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    _accepting: JoinSet<()>,
}

impl RawWorker {
    pub(crate) async fn start(answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0", answer).await
    }

    pub(crate) async fn start_at(
        at: &str,
        answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::listen(at, || None, answer).await
    }

    /// Over TLS; each connection is shown the certificate that `shown` gives at its time.
    pub(crate) async fn start_tls(
        shown: impl Fn() -> Arc<Certificates> + Send + 'static,
        answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::listen(
            "127.0.0.1:0",
            move || Some(acceptor(&shown(), None)),
            answer,
        )
        .await
    }

    /// Over TLS, for clients with a certificate that this authority has signed.
    pub(crate) async fn start_mutual_tls(
        shown: Arc<Certificates>,
        answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static,
    ) -> Self {
        Self::listen(
            "127.0.0.1:0",
            move || Some(acceptor(&shown, Some(&shown))),
            answer,
        )
        .await
    }

    async fn listen(
        at: &str,
        tls: impl Fn() -> Option<TlsAcceptor> + Send + 'static,
        answer: impl Fn(&Asked) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(at).await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::default();
        let answer = Arc::new(answer);
        let mut accepting = JoinSet::new();
        let noted = Arc::clone(&asked);
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let answer = Arc::clone(&answer);
                let asked = Arc::clone(&noted);
                let tls = tls();
                connections.spawn(async move {
                    let Some(tls) = tls else {
                        return serve(stream, &*answer, &asked).await;
                    };
                    // A client that rejects the certificate closes the connection.
                    if let Ok(stream) = tls.accept(stream).await {
                        serve(stream, &*answer, &asked).await;
                    }
                });
            }
        });
        Self {
            address,
            asked,
            _accepting: accepting,
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/handle", self.address)
    }

    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

/// Shows the certificate, and lets in clients whose certificate the authority of `clients` has
/// signed; all, without.
fn acceptor(certificates: &Certificates, clients: Option<&Certificates>) -> TlsAcceptor {
    let cryptography = Arc::new(rustls::crypto::ring::default_provider());
    let clients = clients.map(|clients| {
        let mut roots = RootCertStore::empty();
        let authority = CertificateDer::from_pem_slice(&clients.authority()).unwrap();
        roots.add(authority).unwrap();
        WebPkiClientVerifier::builder_with_provider(roots.into(), Arc::clone(&cryptography))
            .build()
            .unwrap()
    });
    let clients = clients.unwrap_or_else(WebPkiClientVerifier::no_client_auth);
    let chain = CertificateDer::pem_file_iter(certificates.file("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(certificates.file("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(cryptography)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients)
        .with_single_cert(chain.map(Result::unwrap).collect(), key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: &(dyn Fn(&Asked) -> Answer + Send + Sync),
    noted: &Mutex<Vec<Asked>>,
) {
    let Some(asked) = read(&mut stream).await else {
        return;
    };
    let answer = answer(&asked);
    noted.lock().unwrap().push(asked);
    match answer {
        Answer::Bytes(bytes) => {
            drop(stream.write_all(bytes.as_bytes()).await);
            drop(stream.shutdown().await);
        }
        // Until the other side goes away.
        Answer::Silence => drop(stream.read(&mut [0]).await),
    }
}

/// Reads a request. `None`: the client connected only to check that the port listens.
async fn read(stream: &mut (impl AsyncRead + Unpin)) -> Option<Asked> {
    let mut bytes = Vec::new();
    let head_end = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..head_end].to_vec()).unwrap();
    let mut lines = head.lines();
    let path = lines.next().unwrap().split(' ').nth(1).unwrap().to_owned();
    let header = |line: &str| {
        line.split_once(": ")
            .map(|(name, value)| (name.to_lowercase(), value.to_owned()))
    };
    let headers: BTreeMap<String, String> = lines.filter_map(header).collect();
    let length: usize = headers
        .get("content-length")
        .map_or(0, |length| length.parse().unwrap());
    while bytes.len() < head_end + 4 + length {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    let body = String::from_utf8(bytes[head_end + 4..].to_vec()).unwrap();
    Some(Asked {
        path,
        headers,
        body,
    })
}
