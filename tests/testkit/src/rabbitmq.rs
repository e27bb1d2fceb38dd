//! RabbitMQ as its clients see it, and the shared server.

use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tokio::sync::OnceCell;

use crate::rabbitmq_queue::{QueueKind, RabbitQueue};
use crate::rabbitmq_server::RabbitMqServer;
use crate::until::until;
use crate::web::{HttpAnswer, HttpClient, Sent};

/// Names the RabbitMQ of the run, by its addresses for AMQP and for its management plugin, with the
/// user `guest`: `127.0.0.1:5672,127.0.0.1:15672`.
pub const VARIABLE: &str = "ONCEGATE_TEST_RABBITMQ";

/// The longest wait for the plugin to list a connection.
const LISTED_LIMIT: Duration = Duration::from_secs(120);

/// The user of a new server, and its password.
const GUEST: &str = "guest";

/// A RabbitMQ that answers, as its clients see it.
#[derive(Clone, Debug)]
pub struct RabbitMq {
    pub(crate) amqp: String,
    pub(crate) management: SocketAddr,
}

impl RabbitMq {
    /// The server of this run: the one that [`VARIABLE`] names, or else one that this process
    /// starts on first use. Other tests use it at the same time: keep to queues and users of
    /// [`unique`](crate::unique) names.
    ///
    /// # Panics
    /// When it cannot be reached or started.
    pub async fn shared() -> Self {
        static NAMED: OnceCell<RabbitMq> = OnceCell::const_new();
        static OWN: OnceCell<RabbitMqServer> = OnceCell::const_new();
        match std::env::var(VARIABLE) {
            Ok(addresses) => NAMED.get_or_init(|| Self::reached(addresses)).await.clone(),
            Err(_) => (**OWN.get_or_init(RabbitMqServer::start).await).clone(),
        }
    }

    async fn reached(addresses: String) -> Self {
        Self::at(&addresses).await
    }

    /// The server at these addresses, in the form of [`VARIABLE`].
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn at(addresses: &str) -> Self {
        let parts = addresses
            .split_once(',')
            .and_then(|(amqp, http)| Some((amqp, http.parse().ok()?)));
        let (amqp, management) =
            parts.unwrap_or_else(|| panic!("{addresses} is not HOST:PORT,ADDRESS:PORT"));
        let server = Self {
            amqp: amqp.to_owned(),
            management,
        };
        if let Err(error) = server.answers().await {
            panic!("RabbitMQ at {addresses} does not answer: {error}");
        }
        server
    }

    /// The URI of the user `guest`, who may do everything.
    #[must_use]
    pub fn uri(&self) -> String {
        self.uri_as(GUEST)
    }

    /// The URI of a user from [`new_user`](Self::new_user).
    #[must_use]
    pub fn uri_as(&self, user: &str) -> String {
        format!("amqp://{user}:{GUEST}@{}/%2f", self.amqp)
    }

    /// `host:port` for AMQP.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.amqp
    }

    /// The URL of the management plugin.
    #[must_use]
    pub fn management_url(&self) -> String {
        format!("http://{}", self.management)
    }

    /// The addresses as [`VARIABLE`] has them.
    #[must_use]
    pub fn addresses(&self) -> String {
        format!("{},{}", self.amqp, self.management)
    }

    /// Makes a durable queue of a new name that starts with `prefix`.
    ///
    /// # Panics
    /// When the server refuses it.
    pub async fn new_queue(&self, prefix: &str, kind: QueueKind) -> RabbitQueue {
        self.new_queue_with(prefix, kind, &[]).await
    }

    /// The same with further arguments, which are numbers or texts.
    ///
    /// # Panics
    /// As [`RabbitMq::new_queue`].
    pub async fn new_queue_with(
        &self,
        prefix: &str,
        kind: QueueKind,
        arguments: &[(&str, Value)],
    ) -> RabbitQueue {
        let name = crate::unique(prefix);
        let mut all = serde_json::Map::new();
        all.insert("x-queue-type".to_owned(), kind.name().into());
        all.extend(
            arguments
                .iter()
                .map(|(name, value)| ((*name).to_owned(), value.clone())),
        );
        let body = serde_json::json!({ "durable": true, "arguments": all }).to_string();
        self.manage("PUT", &format!("/api/queues/%2F/{name}"), &body)
            .await;
        RabbitQueue::of(self.uri(), name)
    }

    /// Deletes a queue with its messages.
    ///
    /// # Panics
    /// When the server does not.
    pub async fn delete_queue(&self, queue: &RabbitQueue) {
        self.manage("DELETE", &format!("/api/queues/%2F/{}", queue.name()), "")
            .await;
    }

    /// Makes a user of a new name with these rights, as regular expressions: what it may configure,
    /// write and read.
    ///
    /// # Panics
    /// When the server refuses it.
    pub async fn new_user(&self, configure: &str, write: &str, read: &str) -> String {
        let user = crate::unique("user");
        self.set_password(&user, GUEST).await;
        let rights = serde_json::json!({ "configure": configure, "write": write, "read": read });
        self.manage(
            "PUT",
            &format!("/api/permissions/%2F/{user}"),
            &rights.to_string(),
        )
        .await;
        user
    }

    /// Gives a user another password.
    ///
    /// # Panics
    /// When the server refuses it.
    pub async fn set_password(&self, user: &str, password: &str) {
        let body = serde_json::json!({ "password": password, "tags": "" }).to_string();
        self.manage("PUT", &format!("/api/users/{user}"), &body)
            .await;
    }

    /// Closes the connection whose given name contains `part`, as an operator does.
    ///
    /// # Panics
    /// When there is none for two minutes.
    pub async fn close_connection(&self, part: &str) {
        until("its connection is listed", LISTED_LIMIT, async || {
            // The plugin knows a connection after some seconds.
            let listed = self.read("/api/connections").await;
            let wanted = listed.as_array().into_iter().flatten().find(|connection| {
                let given = connection
                    .pointer("/client_properties/connection_name")
                    .and_then(Value::as_str);
                given.is_some_and(|given| given.contains(part))
            });
            let name = wanted.and_then(|connection| connection.get("name")?.as_str());
            let name = name.ok_or_else(|| format!("none has `{part}` in its name"))?;
            let name = name.replace(' ', "%20").replace('>', "%3E");
            // It may have ended by itself, and is listed for some seconds more.
            let answer = self
                .ask("DELETE", &format!("/api/connections/{name}"), "")
                .await?;
            if answer.status.is_success() {
                Ok(())
            } else {
                Err(format!("{} for {name}", answer.status))
            }
        })
        .await;
    }

    /// How many messages of the queue are not acknowledged, also those that a consumer has. The
    /// server counts them twice a second.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn left(&self, queue: &RabbitQueue) -> u64 {
        let described = self
            .read(&format!("/api/queues/%2F/{}", queue.name()))
            .await;
        // Until it has counted once, there may be messages.
        described
            .get("messages")
            .and_then(Value::as_u64)
            .unwrap_or(u64::MAX)
    }

    /// How many consumers the queue has, those included that wait for the single active one. The
    /// server knows it some seconds late.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn consumers(&self, queue: &RabbitQueue) -> usize {
        let described = self
            .read(&format!("/api/queues/%2F/{}", queue.name()))
            .await;
        described
            .get("consumer_details")
            .and_then(Value::as_array)
            .map_or(0, Vec::len)
    }

    /// What the management plugin answers to this question.
    async fn read(&self, path: &str) -> Value {
        until("the plugin's answer", LISTED_LIMIT, async || {
            let answer = self.ask("GET", path, "").await?;
            // It stumbles over connections that end while it lists them.
            if answer.status.is_server_error() {
                return Err(format!("{path}: {}", answer.status));
            }
            assert!(answer.status.is_success(), "{path}: {}", answer.status);
            Ok(serde_json::from_slice(&answer.body).expect("it is JSON"))
        })
        .await
    }

    /// Calls the management plugin.
    ///
    /// # Panics
    /// When it refuses.
    pub async fn manage(&self, method: &str, path: &str, body: &str) -> HttpAnswer {
        let answer = self.ask(method, path, body).await;
        let answer = answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        assert!(
            answer.status.is_success(),
            "{method} {path}: {} {:?}",
            answer.status,
            answer.body
        );
        answer
    }

    async fn ask(&self, method: &str, path: &str, body: &str) -> Result<HttpAnswer, String> {
        let credentials = format!("Basic {}", STANDARD.encode(format!("{GUEST}:{GUEST}")));
        let headers = [
            ("authorization", credentials.as_str()),
            ("content-type", "application/json"),
        ];
        let sent = Sent::post(path, "", body)
            .unkeyed()
            .method(method)
            .headers(&headers);
        HttpClient::http1(self.management).try_send(sent).await
    }

    /// Whether it takes clients, and its plugin answers.
    pub(crate) async fn answers(&self) -> Result<(), String> {
        let answer = self.ask("GET", "/api/overview", "").await?;
        if !answer.status.is_success() {
            return Err(format!("its management plugin answers {}", answer.status));
        }
        let listener = tokio::net::TcpStream::connect(&self.amqp).await;
        listener.map(drop).map_err(|error| error.to_string())
    }
}
