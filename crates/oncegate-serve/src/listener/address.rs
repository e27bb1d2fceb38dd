//! The addresses of listeners.

use std::fmt;
use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use tokio::net::{UnixListener, UnixStream};

/// An address that requests come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `127.0.0.1:8080`, `localhost:8080` or `[::]:8080`.
    Tcp(String),
    /// The path of a Unix socket.
    Unix(PathBuf),
}

impl Address {
    /// Reads `host:port`, or `unix:/path/of/socket`.
    ///
    /// # Errors
    /// As text: why it is neither.
    pub fn parse(text: &str) -> Result<Self, String> {
        const FORMS: &str = "an address is host:port, as 127.0.0.1:8080, or unix:/path/of/socket";
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Self::Unix(path.into()))
            } else {
                Err(FORMS.to_owned())
            };
        }
        let Some((host, port)) = text.rsplit_once(':') else {
            return Err(FORMS.to_owned());
        };
        let is_host = !host.is_empty()
            && !host.contains(['/', ' ', '@'])
            && (!host.contains(':') || (host.starts_with('[') && host.ends_with(']')));
        if is_host && port.parse::<u16>().is_ok() {
            Ok(Self::Tcp(text.to_owned()))
        } else {
            Err(FORMS.to_owned())
        }
    }

    /// Returns whether only this machine can reach it, as far as the text shows.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Unix(_) => true,
            Self::Tcp(text) => {
                let host = text.rsplit_once(':').map_or("", |(host, _)| host);
                let host = host.trim_matches(['[', ']']);
                host == "localhost"
                    || host
                        .parse::<std::net::IpAddr>()
                        .is_ok_and(|address| address.is_loopback())
            }
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(text) => f.write_str(text),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Binds a Unix socket. The file that a killed process has left behind is removed; one that a
/// process listens at, or that is no socket, stays.
pub(super) async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let answers = UnixStream::connect(path).await;
            match answers {
                // A connection to a file that is no socket is refused, too.
                Err(refused)
                    if refused.kind() == io::ErrorKind::ConnectionRefused
                        && std::fs::symlink_metadata(path)?.file_type().is_socket() =>
                {
                    std::fs::remove_file(path)?;
                    UnixListener::bind(path)
                }
                _ => Err(error),
            }
        }
        bound => bound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_with_a_port_or_a_socket() {
        for local in [
            "127.0.0.1:80",
            "localhost:0",
            "[::1]:8080",
            "unix:/run/o.sock",
        ] {
            assert!(Address::parse(local).unwrap().is_local(), "{local}");
        }
        for open in ["0.0.0.0:80", "[::]:8080", "proxy.internal:80"] {
            assert!(!Address::parse(open).unwrap().is_local(), "{open}");
        }
        for wrong in [
            "",
            "8080",
            ":8080",
            "host",
            "host:x",
            "host:70000",
            "http://h:80",
            "unix:o.sock",
            "::1:80",
        ] {
            assert!(Address::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            Address::parse("unix:///run/o.sock").unwrap().to_string(),
            "unix:/run/o.sock"
        );
    }

    #[tokio::test]
    async fn only_the_socket_of_a_killed_process_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("o.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let bound = bind_unix(&path).await.unwrap();
        assert!(bind_unix(&path).await.is_err());
        drop(bound);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "no socket").unwrap();
        assert!(bind_unix(&path).await.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"no socket");
    }
}
