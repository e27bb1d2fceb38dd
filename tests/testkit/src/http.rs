//! As much of HTTP/1.1 as a proxy of tests needs: whole requests and whole replies.

use std::io;

use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};

/// The largest body that is passed on.
const BODY_BYTES_MAX: usize = 4 << 20;

/// A request or a reply: its first line, its headers and its body.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    first: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Frame {
    /// Reads the next one; `None` when the other side has closed the connection.
    ///
    /// Its body is as long as its header declares, or everything until the end.
    pub(crate) async fn read(
        from: &mut (impl AsyncBufRead + Unpin + Send),
    ) -> io::Result<Option<Self>> {
        let Some(first) = line(from).await? else {
            return Ok(None);
        };
        let mut headers = Vec::new();
        while let Some(header) = line(from).await?.filter(|line| !line.is_empty()) {
            let (name, value) = header
                .split_once(':')
                .ok_or_else(|| invalid("a header without a colon"))?;
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut frame = Self {
            first,
            headers,
            body: Vec::new(),
        };
        match frame.header("content-length").map(str::parse) {
            Some(Ok(length @ ..=BODY_BYTES_MAX)) => {
                frame.body.resize(length, 0);
                from.read_exact(&mut frame.body).await?;
            }
            Some(_) => return Err(invalid("a body of an impossible size")),
            None if frame.header("transfer-encoding").is_some() => {
                return Err(invalid("a body in chunks"));
            }
            None if frame.first.starts_with("HTTP/") => {
                from.take(BODY_BYTES_MAX as u64)
                    .read_to_end(&mut frame.body)
                    .await?;
            }
            None => {}
        }
        Ok(Some(frame))
    }

    /// A reply with a JSON body.
    pub(crate) fn reply(status: &str, body: Vec<u8>) -> Self {
        let json = (
            "content-type".to_owned(),
            "application/x-amz-json-1.0".to_owned(),
        );
        Self {
            first: format!("HTTP/1.1 {status}"),
            headers: vec![json],
            body,
        }
    }

    /// The header of this lower-case name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    pub(crate) fn set_header(&mut self, name: &str, value: impl Into<String>) {
        self.headers.retain(|(known, _)| known != name);
        self.headers.push((name.to_owned(), value.into()));
    }

    pub(crate) fn body(&self) -> &[u8] {
        &self.body
    }

    pub(crate) fn set_body(&mut self, body: Vec<u8>) {
        self.body = body;
    }

    /// What goes over the wire.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut head = format!("{}\r\n", self.first);
        let others = self
            .headers
            .iter()
            .filter(|(name, _)| name != "content-length");
        others.for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
        head.push_str(&format!("content-length: {}\r\n\r\n", self.body.len()));
        [head.as_bytes(), &self.body].concat()
    }
}

/// A line without its end; `None` at the end of the stream.
async fn line(from: &mut (impl AsyncBufRead + Unpin + Send)) -> io::Result<Option<String>> {
    const LINE_BYTES_MAX: u64 = 64 << 10;
    let mut line = String::new();
    from.take(LINE_BYTES_MAX).read_line(&mut line).await?;
    Ok(line.ends_with('\n').then(|| line.trim_end().to_owned()))
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
