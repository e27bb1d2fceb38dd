//! A Kafka broker that lets clients in by TLS, with passwords and rights.

use std::fs;
use std::ops::Deref;

use crate::acls::{self, On, Right};
use crate::broker::{KafkaBroker, Ports};
use crate::certificates::Certificates;
use crate::place::Port;
use crate::token_server::TokenServer;

/// The users, all with the same password.
const USERS: [&str; 2] = [SecuredKafka::USER, SecuredKafka::STRANGER];

/// A broker with listeners for TLS and for SASL over TLS, beside a plain one for the test itself.
///
/// Only [`SecuredKafka::USER`] and clients of the plain listener have rights.
#[derive(Debug)]
pub struct SecuredKafka {
    broker: KafkaBroker,
    tls: Port,
    sasl: Port,
    oauth: Port,
}

impl SecuredKafka {
    /// The user that may do everything.
    pub const USER: &str = "billing";

    /// A user that may do nothing.
    pub const STRANGER: &str = "stranger";

    /// The password of both.
    pub const PASSWORD: &str = "open-sesame";

    /// Starts it with the certificate of these, which must name `127.0.0.1`.
    ///
    /// # Panics
    /// As [`KafkaBroker::start`].
    pub async fn start(certificates: &Certificates) -> Self {
        Self::start_with(certificates, &[], &[]).await
    }

    /// The same with further users for SCRAM, who have the same password and no rights yet, and
    /// with further lines for the broker's configuration.
    ///
    /// # Panics
    /// As [`KafkaBroker::start`].
    pub async fn start_with(certificates: &Certificates, more: &[&str], lines: &[&str]) -> Self {
        Self::start_as(certificates, more, lines, None).await
    }

    /// The same with a listener for tokens of this server. Connections must log in again every two
    /// seconds.
    ///
    /// # Panics
    /// As [`KafkaBroker::start`].
    pub async fn start_with_tokens(certificates: &Certificates, tokens: &TokenServer) -> Self {
        let oauth = "listener.name.oauth.oauthbearer";
        let security = "org.apache.kafka.common.security.oauthbearer";
        let keys = format!("sasl.oauthbearer.jwks.endpoint.url={}", tokens.keys_url());
        let lines = [
            "listener.name.oauth.sasl.enabled.mechanisms=OAUTHBEARER".to_owned(),
            format!("{oauth}.sasl.jaas.config={security}.OAuthBearerLoginModule required;"),
            format!(
                "{oauth}.sasl.server.callback.handler.class={security}.OAuthBearerValidatorCallbackHandler"
            ),
            format!("{oauth}.connections.max.reauth.ms=2000"),
            // The default of Kafka 4.1 verifies neither a token's signature nor its end nor its
            // audience. This is not read from the settings of a listener.
            format!("sasl.oauthbearer.jwt.validator.class={security}.BrokerJwtValidator"),
            format!("{oauth}.{keys}"),
            keys,
            format!(
                "sasl.oauthbearer.expected.audience={}",
                TokenServer::AUDIENCE
            ),
        ];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        Self::start_as(certificates, &[], &lines, Some(tokens)).await
    }

    async fn start_as(
        certificates: &Certificates,
        more: &[&str],
        lines: &[&str],
        tokens: Option<&TokenServer>,
    ) -> Self {
        let tls = Port::reserve();
        let sasl = Port::reserve();
        let oauth = Port::reserve();
        let ports = Ports::reserve();
        let plain = ports.broker.address();
        let controller = ports.controller_address();
        let mut advertised = format!(
            "PLAINTEXT://{plain},SSL://{},SASL_SSL://{}",
            tls.address(),
            sasl.address()
        );
        if tokens.is_some() {
            advertised = format!("{advertised},OAUTH://{}", oauth.address());
        }
        let settings = settings(certificates, &advertised, &controller);
        let settings: Vec<&str> = settings
            .iter()
            .map(String::as_str)
            .chain(lines.iter().copied())
            .collect();
        let mut broker = KafkaBroker::prepare_alone(ports, &settings);
        if let Some(tokens) = tokens {
            let allowed = "org.apache.kafka.sasl.oauthbearer.allowed.urls";
            broker = broker.with_option(format!("-D{allowed}={}", tokens.keys_url()));
        }
        let scram = |mechanism: &str, user: &str| {
            format!(
                "{mechanism}=[name={user},iterations=4096,password={}]",
                Self::PASSWORD
            )
        };
        let users: Vec<String> = USERS
            .iter()
            .chain(more)
            .flat_map(|user| ["SCRAM-SHA-256", "SCRAM-SHA-512"].map(|one| scram(one, user)))
            .collect();
        broker.start_first_with(&users).await;
        Self {
            broker,
            tls,
            sasl,
            oauth,
        }
    }

    /// Gives rights to users, all at once. The broker may take a moment to heed them; it heeds them
    /// together.
    ///
    /// # Panics
    /// When the broker does not accept it.
    pub async fn grant(&self, rights: &[(&str, Right, On<'_>)]) {
        acls::grant(self.bootstrap(), rights).await;
    }

    /// Takes a right back from a user. The broker may take a moment to heed it.
    ///
    /// # Panics
    /// When the broker does not accept it, or the user does not have the right.
    pub async fn revoke(&self, right: (&str, Right, On<'_>)) {
        acls::revoke(self.bootstrap(), right).await;
    }

    /// Changes the password of [`SecuredKafka::USER`] for SCRAM-SHA-256. The former one is refused
    /// from then on.
    ///
    /// # Panics
    /// When Kafka's tool fails.
    pub async fn set_password(&self, password: &str) {
        let setting = format!("SCRAM-SHA-256=[iterations=4096,password={password}]");
        let user = [
            "--entity-type",
            "users",
            "--entity-name",
            Self::USER,
            "--alter",
            "--add-config",
            &setting,
        ];
        let arguments = [&["--bootstrap-server", self.bootstrap()], &user[..]].concat();
        self.broker
            .tool("kafka.admin.ConfigCommand", &arguments)
            .await;
    }

    /// The address of the listener for TLS.
    #[must_use]
    pub fn tls(&self) -> String {
        self.tls.address()
    }

    /// The address of the listener for tokens over TLS, if it has one.
    #[must_use]
    pub fn oauth(&self) -> String {
        self.oauth.address()
    }

    /// The address of the listener for SASL over TLS.
    #[must_use]
    pub fn sasl(&self) -> String {
        self.sasl.address()
    }
}

/// The lines of a broker's configuration about its listeners, certificates, logins and rights.
fn settings(certificates: &Certificates, advertised: &str, controller: &str) -> Vec<String> {
    let pem = |name: &str| {
        let text = fs::read_to_string(certificates.file(name)).expect("it was just made");
        text.trim_end().replace('\n', "\\n")
    };
    let users: Vec<String> = USERS
        .iter()
        .map(|user| format!("user_{user}=\"{}\"", SecuredKafka::PASSWORD))
        .collect();
    let login = "org.apache.kafka.common.security";
    let scram = format!("{login}.scram.ScramLoginModule required;");
    vec![
            format!("listeners={advertised},CONTROLLER://{controller}"),
            format!("advertised.listeners={advertised}"),
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL,OAUTH:SASL_SSL,\
             CONTROLLER:PLAINTEXT"
                .to_owned(),
            "ssl.keystore.type=PEM".to_owned(),
            format!("ssl.keystore.certificate.chain={}", pem("server.pem")),
            format!("ssl.keystore.key={}", pem("server.key")),
            "ssl.truststore.type=PEM".to_owned(),
            format!("ssl.truststore.certificates={}", pem("ca.pem")),
            "sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512".to_owned(),
            format!(
                "listener.name.sasl_ssl.plain.sasl.jaas.config={login}.plain.PlainLoginModule required {};",
                users.join(" ")
            ),
            format!("listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config={scram}"),
            format!("listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={scram}"),
            "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer".to_owned(),
            // Clients of the plain listener and of the one for TLS without a certificate are
            // anonymous.
            format!("super.users=User:ANONYMOUS;User:{}", SecuredKafka::USER),
        ]
}

impl Deref for SecuredKafka {
    type Target = KafkaBroker;

    fn deref(&self) -> &KafkaBroker {
        &self.broker
    }
}
