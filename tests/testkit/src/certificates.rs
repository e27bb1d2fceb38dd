//! Certificates for the tests, made by `openssl` and signed by an authority of their own.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use crate::place;

/// The words for a new key, and what follows from it.
const NEW: &str = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";

/// An authority, and a certificate that it has signed, for servers and for servers as clients of
/// each other.
///
/// The files are removed when this value is dropped.
#[derive(Debug)]
pub struct Certificates {
    dir: TempDir,
}

impl Certificates {
    /// For a server of these names, in OpenSSL's words: `IP:127.0.0.1,DNS:localhost`.
    ///
    /// # Panics
    /// When `openssl` (the package of that name) does not make them.
    #[must_use]
    pub fn for_names(names: &str) -> Self {
        let made = Self {
            dir: place::server_dir("certificates"),
        };
        let extensions =
            format!("subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n");
        std::fs::write(made.dir.path().join("extensions"), extensions)
            .expect("the folder can be written");
        let usage = "-addext keyUsage=critical,keyCertSign -days 2";
        made.openssl(&format!(
            "{NEW} -x509 -keyout ca.key -out ca.pem -subj /CN=oncegate-testkit {usage}"
        ));
        made.request("server");
        made.sign("server", 2);
        made
    }

    /// Makes another certificate of this authority, for a client of this name: `NAME.pem` and
    /// `NAME.key`.
    ///
    /// # Panics
    /// As [`Certificates::for_names`].
    pub fn for_client(&self, name: &str) {
        self.request(name);
        self.sign(name, 2);
    }

    /// Replaces the server's certificate by one that expired yesterday. Key and authority stay.
    ///
    /// # Panics
    /// As [`Certificates::for_names`].
    pub fn let_expire(&self) {
        self.sign("server", -1);
    }

    fn request(&self, name: &str) {
        self.openssl(&format!(
            "{NEW} -keyout {name}.key -out {name}.csr -subj /CN={name}"
        ));
    }

    fn sign(&self, name: &str, days: i32) {
        let by = "-CA ca.pem -CAkey ca.key -CAcreateserial -extfile extensions";
        self.openssl(&format!(
            "x509 -req -in {name}.csr {by} -days {days} -out {name}.pem"
        ));
    }

    /// The authority's certificate, in PEM.
    ///
    /// # Panics
    /// When it cannot be read.
    #[must_use]
    pub fn authority(&self) -> Vec<u8> {
        std::fs::read(self.file("ca.pem")).expect("it was just made")
    }

    /// What makes a Redis server use them on the port `tls_port`, without asking clients for
    /// certificates.
    #[must_use]
    pub fn redis_arguments(&self, tls_port: &str) -> Vec<String> {
        let file = |name| self.file(name).display().to_string();
        let files = [
            ("--tls-cert-file", "server.pem"),
            ("--tls-key-file", "server.key"),
            ("--tls-ca-cert-file", "ca.pem"),
        ];
        let files = files
            .into_iter()
            .flat_map(|(option, name)| [option.to_owned(), file(name)]);
        let rest = ["--tls-port", tls_port, "--tls-auth-clients", "no"].map(str::to_owned);
        files.chain(rest).collect()
    }

    /// Its `ca.pem`, `server.pem` and `server.key`, and those of [clients](Self::for_client).
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn openssl(&self, arguments: &str) {
        let mut command = Command::new("openssl");
        let output = command
            .args(arguments.split(' '))
            .current_dir(self.dir.path())
            .output();
        let output =
            output.unwrap_or_else(|error| panic!("cannot run openssl: {error}; is it installed?"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "openssl {arguments}: {said}");
    }
}
