//! The files of a client's TLS.

use std::path::PathBuf;

#[cfg(feature = "config")]
use schemars::JsonSchema;
#[cfg(feature = "config")]
use serde::{Deserialize, Serialize};

use super::Finding;

/// The files that say whom a client trusts, and who it is, on connections with TLS.
///
/// Stores, brokers and workers share these settings. All files are in PEM, and are read again when
/// they change, so that certificates can be rotated while a consumer runs.
///
/// Settings of a store that are read from a file do not have them: they stand beside those
/// settings, as `tls_root`, `tls_certificate` and `tls_key` in a structure that flattens this one
/// (`#[serde(flatten)]`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    feature = "config",
    derive(Deserialize, Serialize, JsonSchema),
    serde(default)
)]
pub struct TlsFiles {
    /// The authority that has signed the server's certificate, a file in PEM, for connections with
    /// TLS. Without it, the authorities of this machine. It is read again when it changes.
    #[cfg_attr(feature = "config", serde(rename = "tls_root"))]
    pub root: Option<PathBuf>,
    /// The certificate that the server requires of its clients, a file in PEM, for connections with
    /// TLS. It belongs to `tls_key`; both are read again when they change.
    #[cfg_attr(feature = "config", serde(rename = "tls_certificate"))]
    pub certificate: Option<PathBuf>,
    /// The key of `tls_certificate`, a file in PEM.
    #[cfg_attr(feature = "config", serde(rename = "tls_key"))]
    pub key: Option<PathBuf>,
}

impl TlsFiles {
    /// No files: the authorities of this machine are trusted, and no certificate is shown.
    pub const NONE: Self = Self {
        root: None,
        certificate: None,
        key: None,
    };

    /// The authority alone.
    pub fn trusting(root: impl Into<PathBuf>) -> Self {
        Self {
            root: Some(root.into()),
            ..Self::NONE
        }
    }

    /// Returns the files with the client's certificate and its key.
    pub fn client(&self) -> Option<(PathBuf, PathBuf)> {
        self.certificate.clone().zip(self.key.clone())
    }

    /// Returns the settings by their names in a file, and whether each is given.
    pub fn given(&self) -> [(&'static str, bool); 3] {
        [
            ("tls_root", self.root.is_some()),
            ("tls_certificate", self.certificate.is_some()),
            ("tls_key", self.key.is_some()),
        ]
    }

    /// Returns what is wrong: a certificate without its key, or a key without its certificate.
    pub fn check(&self) -> Option<Finding> {
        let [_, certificate, key] = self.given();
        Finding::of_pair([certificate, key])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_and_its_key_belong_together() {
        let certificate = TlsFiles {
            certificate: Some("client.pem".into()),
            ..TlsFiles::trusting("ca.pem")
        };
        let key = TlsFiles {
            key: Some("client.key".into()),
            ..TlsFiles::NONE
        };
        for (lone, setting) in [(&certificate, "tls_certificate"), (&key, "tls_key")] {
            let found = lone.check().unwrap();
            assert_eq!(found.setting, setting);
            assert!(found.what.contains("give both"), "{}", found.what);
            assert_eq!(lone.client(), None);
        }
        let both = TlsFiles {
            key: key.key,
            ..certificate
        };
        assert_eq!(both.check(), None);
        let files = ("client.pem".into(), "client.key".into());
        assert_eq!(both.client(), Some(files));
        assert_eq!(TlsFiles::NONE.check(), None);
    }

    #[cfg(feature = "config")]
    #[test]
    fn a_structure_that_flattens_them_has_their_names() {
        #[derive(Debug, Deserialize)]
        struct Store {
            url: String,
            #[serde(flatten)]
            files: TlsFiles,
        }
        let read = r#"{"url": "rediss://cache", "tls_root": "ca.pem"}"#;
        let store: Store = serde_json::from_str(read).unwrap();
        assert_eq!(store.url, "rediss://cache");
        assert_eq!(store.files, TlsFiles::trusting("ca.pem"));
    }
}
