//! Settings for the connection to a broker and for consuming a queue.

use std::fmt;
use std::sync::Arc;

use lapin::uri::{AMQPScheme, AMQPUri, SASLMechanism};

use super::error::AmqpError;
use super::headers::short;
use super::login::AmqpLogin;
use super::source_settings::AmqpSettings;
use oncegate_core::settings::Finding;

/// The way to a broker.
#[derive(Clone)]
pub(crate) struct Connection {
    uri: String,
    pub(crate) login: AmqpLogin,
}

/// The settings of a source.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) connection: Connection,
    pub(crate) queue: String,
    pub(crate) source: AmqpSettings,
    /// The queue is looked into: its messages keep their places, and are held until the end.
    pub(crate) looks: bool,
}

/// The prefetch of an order: a message that comes back is the next one again, whatever happens to
/// the consumer or the broker, because no other one was delivered.
const ORDERED_PREFETCH: u16 = 1;

/// The heartbeat in seconds, if the URI has none: a connection that is silent for twice as long is
/// given up.
const HEARTBEAT: u16 = 10;
/// The time limit of a TCP connection in milliseconds, if the URI has none.
const CONNECT_MILLIS: u64 = 5_000;

impl Connection {
    pub(crate) fn new(uri: String) -> Self {
        Self {
            uri,
            login: AmqpLogin::default(),
        }
    }

    /// Returns the parsed URI with the defaults of this crate. No error shows any part of it: it
    /// has a password.
    pub(crate) fn uri(&self) -> Result<AMQPUri, AmqpError> {
        const FORM: &str = "amqp://user:password@host:5672/vhost, or amqps:// with TLS";
        check_uri(&self.uri)?;
        let parsed: Result<AMQPUri, String> = self.uri.parse();
        let mut uri =
            parsed.map_err(|_| AmqpError::new(format!("the URI of the broker must be {FORM}")))?;
        if self.uri.contains('[') {
            // The client would connect to `localhost`.
            return Err(AmqpError::new(
                "the URI of the broker has an IPv6 address: use a name",
            ));
        }
        if uri.scheme == AMQPScheme::AMQPS && !cfg!(feature = "tls") {
            return Err(AmqpError::new(
                "the URI of the broker is amqps://, which needs the feature `amqp-tls`",
            ));
        }
        if uri.vhost.is_empty() {
            "/".clone_into(&mut uri.vhost);
        }
        if short(&uri.vhost).is_none() {
            return Err(AmqpError::new(
                "the virtual host in the broker's URI has more than 255 bytes",
            ));
        }
        uri.query.heartbeat.get_or_insert(HEARTBEAT);
        uri.query.connection_timeout.get_or_insert(CONNECT_MILLIS);
        Ok(uri)
    }

    /// Returns the user that logs in, unless a certificate names it.
    pub(crate) fn user(&self) -> Option<Arc<str>> {
        let uri = self.uri().ok()?;
        let is_named = matches!(
            uri.query.auth_mechanism,
            None | Some(SASLMechanism::Plain | SASLMechanism::AMQPlain)
        );
        is_named.then(|| uri.authority.userinfo.username.into())
    }

    /// Returns the URI with the password that the next connection logs in with.
    pub(crate) fn uri_with_password(&self) -> Result<AMQPUri, AmqpError> {
        let mut uri = self.uri()?;
        if let Some(password) = self.login.read_password()? {
            uri.authority.userinfo.password = password;
        }
        Ok(uri)
    }
}

impl Settings {
    pub(crate) fn new(connection: Connection, queue: String) -> Self {
        Self {
            connection,
            queue,
            source: AmqpSettings::DEFAULT,
            looks: false,
        }
    }

    /// Returns how many messages the broker delivers ahead.
    pub(crate) fn prefetch(&self) -> u16 {
        if self.source.in_order && !self.looks {
            ORDERED_PREFETCH
        } else {
            self.source.prefetch
        }
    }

    /// Runs every check that needs no broker.
    pub(crate) fn check(&self) -> Result<(), AmqpError> {
        self.connection.uri()?;
        check_name("queue", &self.queue)?;
        match self.source.check().into_iter().next() {
            Some(Finding { what, .. }) => Err(AmqpError::new(what)),
            None => Ok(()),
        }
    }
}

/// The parameters of a URI, and whether each is a number.
const PARAMETERS: [(&str, bool); 5] = [
    ("heartbeat", true),
    ("connection_timeout", true),
    ("channel_max", true),
    ("frame_max", true),
    ("auth_mechanism", false),
];

/// Checks what the client refuses without a word about it, or ignores. The error shows no value.
fn check_uri(uri: &str) -> Result<(), AmqpError> {
    let (address, query) = uri.split_once('?').unwrap_or((uri, ""));
    let authority = address.split_once("://").map_or(address, |(_, rest)| rest);
    let hosts = authority.split('/').next().unwrap_or_default();
    let hosts = hosts.rsplit_once('@').map_or(hosts, |(_, hosts)| hosts);
    if hosts.contains(',') {
        return Err(AmqpError::new(
            "the URI of the broker has several hosts: use one name, of a load balancer or in the DNS",
        ));
    }
    let parameters = query.split('&').filter(|parameter| !parameter.is_empty());
    for parameter in parameters {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        match PARAMETERS.iter().find(|(known, _)| *known == name) {
            Some((_, true)) if value.parse::<u32>().is_err() => {
                return Err(AmqpError::new(format!(
                    "`{name}` in the URI of the broker must be a number without a unit: seconds for `heartbeat`, \
                     milliseconds for `connection_timeout`"
                )));
            }
            Some(_) => {}
            None => {
                return Err(AmqpError::new(format!(
                    "the URI of the broker has the parameter `{name}`, which would be ignored: certificates are set by \
                     `tls_root`, `tls_certificate` and `tls_key`, and always verified"
                )));
            }
        }
    }
    Ok(())
}

/// Checks the name of a queue or exchange.
pub(crate) fn check_name(what: &str, name: &str) -> Result<(), AmqpError> {
    match short(name) {
        Some(_) if !name.is_empty() => Ok(()),
        _ => Err(AmqpError::new(format!(
            "the name of the {what} must have from 1 to 255 bytes"
        ))),
    }
}

impl fmt::Debug for Connection {
    /// Shows the host alone, because the URI has a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = self
            .uri()
            .map(|uri| format!("{}:{}", uri.authority.host, uri.authority.port));
        f.debug_struct("Connection")
            .field("host", &host.unwrap_or_default())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_or_debug_shows_the_password() {
        for uri in [
            "amqp://u:secret@host:99999/x",
            "http://u:secret@host",
            "u:secret@host",
            "amqp://u:secret@[::1]/",
        ] {
            let connection = Connection::new(uri.to_owned());
            let error = connection.uri().unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
        let connection = Connection::new("amqp://u:secret@host/".to_owned());
        assert!(!format!("{connection:?}").contains("secret"));
    }

    #[test]
    fn what_the_client_ignores_in_a_uri_is_refused_by_its_name() {
        for (uri, word) in [
            ("amqp://u:secret@a:5672,b:5672/", "several hosts"),
            ("amqp://u:secret@a/?heartbeat=30s", "`heartbeat`"),
            (
                "amqps://u:secret@a/?cacertfile=/x&verify=verify_none",
                "`cacertfile`",
            ),
        ] {
            let error = Connection::new(uri.to_owned())
                .uri()
                .unwrap_err()
                .to_string();
            assert!(error.contains(word) && !error.contains("secret"), "{error}");
        }
        let fine = "amqp://a,b:c,d@host/shop?heartbeat=3&auth_mechanism=external";
        assert!(Connection::new(fine.to_owned()).uri().is_ok());
    }

    #[test]
    fn a_uri_gets_the_defaults_of_this_crate() {
        fn uri(text: &str) -> AMQPUri {
            Connection::new(text.to_owned()).uri().unwrap()
        }
        assert_eq!(uri("amqp://localhost").vhost, "/");
        assert_eq!(uri("amqp://localhost/").vhost, "/");
        assert_eq!(
            uri("amqp://localhost/shop?heartbeat=3").query.heartbeat,
            Some(3)
        );
        assert_eq!(
            uri("amqp://localhost/shop").query.heartbeat,
            Some(HEARTBEAT)
        );
    }
}
