//! A bucket of an S3 server, read over plain HTTP without oncegate.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::unique;

/// Has the form of a signature; the server does not check it.
const SIGNED: &str = "AWS4-HMAC-SHA256 Credential=anybody/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0";

/// A bucket on a server that checks no credentials.
#[derive(Debug)]
pub struct Bucket {
    address: String,
    name: String,
}

impl Bucket {
    /// Makes one on the server at `endpoint`.
    ///
    /// # Panics
    /// When the server does not make it.
    pub async fn create(endpoint: &str) -> Self {
        let address = endpoint
            .strip_prefix("http://")
            .expect("the endpoint is plain HTTP")
            .to_owned();
        let bucket = Self {
            address,
            name: unique("bucket"),
        };
        bucket.ask("PUT", "", b"").await;
        bucket
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The names of its objects, in order; at most 1,000.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn objects(&self) -> Vec<String> {
        let listing = self.ask("GET", "?list-type=2", b"").await;
        let listing = String::from_utf8(listing).expect("a listing is text");
        let keys = listing.split("<Key>").skip(1);
        keys.filter_map(|rest| Some(rest.split_once("</Key>")?.0.to_owned()))
            .collect()
    }

    /// What is in an object.
    ///
    /// # Panics
    /// When it is not there.
    pub async fn read(&self, object: &str) -> Vec<u8> {
        self.ask("GET", &format!("/{object}"), b"").await
    }

    /// Puts something else in its place.
    ///
    /// # Panics
    /// When the server does not take it.
    pub async fn write(&self, object: &str, bytes: &[u8]) {
        self.ask("PUT", &format!("/{object}"), bytes).await;
    }

    async fn ask(&self, method: &str, path: &str, body: &[u8]) -> Vec<u8> {
        let Self { address, name } = self;
        let asked = format!("{method} /{name}{path} HTTP/1.0\r\nHost: {address}\r\n");
        let head = format!(
            "{asked}Authorization: {SIGNED}\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let exchange = async {
            let mut connection = TcpStream::connect(address).await?;
            connection
                .write_all(&[head.as_bytes(), body].concat())
                .await?;
            let mut reply = Vec::new();
            connection.read_to_end(&mut reply).await?;
            Ok::<_, std::io::Error>(reply)
        };
        let reply = exchange
            .await
            .unwrap_or_else(|error| panic!("{asked}: {error}"));
        let end = reply
            .windows(4)
            .position(|four| four == b"\r\n\r\n")
            .expect("a reply has a head");
        let (head, body) = reply.split_at(end);
        let status = String::from_utf8_lossy(head);
        assert!(status.split(' ').nth(1) == Some("200"), "{asked}{status}");
        body.get(4..).unwrap_or_default().to_vec()
    }
}
