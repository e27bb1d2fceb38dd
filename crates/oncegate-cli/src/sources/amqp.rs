//! A queue of RabbitMQ.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::amqp::{
    AmqpDeadLetterReader, AmqpDeadLetters, AmqpLogin, AmqpSettings, AmqpSource, QueuePlan,
};
use oncegate::core::settings::{Finding, TlsFiles};
use oncegate::dead_letters;
use oncegate::source::{Source, SourceError, Terms};
use oncegate::{ConsumerSettings, Ordering};
use schemars::JsonSchema;
use serde::Deserialize;

use super::topology::{Kind, NamedTopic, Role, State, Topology, Wanted};
use super::{
    ChattyLibrary, ConfiguredSource, DeadLetters, LetterPlace, LetterQueue, QueueFlags,
    SourceFinding, SourceSettings, Template, next, quoted,
};
use crate::config::values::Secret;
use crate::exit::{Exit, Problem, not_opened};

/// The name of the table.
pub(super) const TABLE: &str = "amqp";
/// The reason that messages of another source cannot have dead letters in a queue of RabbitMQ.
pub(super) const LETTERS_NEED_BROKER: &str =
    "only an AMQP source can have dead letters in RabbitMQ, because the source names the broker";
/// The same, the other way round.
const LETTERS_STAY: &str = "messages of RabbitMQ have their dead letters in a queue of the same broker: { amqp = \"orders.dead\" }";

/// The client logs every error that it also returns, and messages that come back with their
/// payloads.
pub(super) const CHATTY: ChattyLibrary = ChattyLibrary {
    target: "lapin",
    never: &["lapin::returned_messages=off"],
};

/// What `init` has to know of RabbitMQ.
#[derive(Debug, clap::Args)]
pub(super) struct InitAmqp {
    /// The address of RabbitMQ, without the password
    #[arg(
        long,
        value_name = "URL",
        default_value = "amqp://guest@localhost:5672/%2f"
    )]
    amqp_url: String,
}

impl InitAmqp {
    /// Returns what `init` writes.
    pub(super) fn template(&self, queues: &QueueFlags) -> Template {
        let url = quoted(&self.amqp_url);
        let queue = quoted(&queues.queue);
        let password = r#"{ env = "RABBITMQ_PASSWORD" }"#;
        Template {
            source: format!(
                "{{ amqp = {{ url = {url}, password = {password}, queue = {queue} }} }}"
            ),
            dead_letters: format!("{{ amqp = {} }}", quoted(&queues.dead_letter_queue)),
            about: "`oncegate topics create` makes the queues; a consumer makes none.",
            store: "redis://localhost:6379",
            next: [
                "export RABBITMQ_PASSWORD=…",
                next::CHECK,
                next::CREATE_TOPICS,
                next::RUN,
            ]
            .map(str::to_owned)
            .into(),
        }
    }
}

/// The broker of a queue of RabbitMQ that is looked into.
#[derive(Debug, clap::Args)]
pub(super) struct AmqpFlags {
    /// The queue is one of RabbitMQ: amqp://user:password@host:5672/vhost, or amqps:// with TLS. In
    /// the variable, other users of the machine do not see the password
    #[arg(long, value_name = "URL", env = "ONCEGATE_AMQP_URL", hide_env_values = true, conflicts_with_all = ["endpoint_url", "sns"])]
    amqp_url: Option<String>,
}

impl AmqpFlags {
    /// Returns the source if the flags or the configuration name a broker.
    ///
    /// # Errors
    /// When a consumer cannot hold as many messages, or a secret cannot be read.
    pub(super) fn source(
        &self,
        queue: &str,
        most: u32,
        configured: Option<&Amqp>,
    ) -> Result<Option<Box<dyn Source>>, Problem> {
        // The login of a configuration belongs to its own broker.
        let settings = match (&self.amqp_url, configured) {
            (Some(url), _) => Amqp {
                url: Some(url.clone()),
                ..Amqp::default()
            },
            (None, Some(configured)) => configured.clone(),
            (None, None) => return Ok(None),
        };
        let most = u16::try_from(most).map_err(|_| {
            Problem::new(
                Exit::Usage,
                "--most: a consumer of RabbitMQ can hold at most 65,535 messages",
            )
        })?;
        let settings = Amqp {
            queue: Some(queue.to_owned()),
            ..settings
        };
        let source = settings.configured().map_err(Problem::configuration)?;
        let source = source.prefetch(most).looking().routes_from_headers();
        Ok(Some(Box::new(source)))
    }
}

/// A queue of RabbitMQ.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Amqp {
    /// The broker: `amqp://user@host:5672/vhost`, or `amqps://` with TLS.
    pub(crate) url: Option<String>,
    /// The password, if the URL has none.
    pub(crate) password: Option<Secret>,
    /// The queue's name.
    pub(crate) queue: Option<String>,
    #[serde(default, rename = "*tls")]
    #[schemars(flatten)]
    pub(crate) tls: TlsFiles,
    #[serde(default, rename = "*settings")]
    #[schemars(flatten)]
    pub(crate) settings: AmqpSettings,
}

impl Amqp {
    /// Returns the login of the settings.
    ///
    /// # Errors
    /// The password or a file cannot be read now.
    fn login(&self) -> Result<AmqpLogin, String> {
        let mut login = AmqpLogin::default().tls(self.tls.clone());
        if let Some(password) = self.password.clone() {
            login = login.password_by(move || password.resolve());
        }
        login.check().map_err(|error| error.to_string())?;
        Ok(login)
    }

    /// Returns the source with its login.
    ///
    /// # Errors
    /// When a file of the settings cannot be read.
    pub(crate) fn configured(&self) -> Result<AmqpSource, String> {
        Ok(self.source(self.login()?))
    }

    fn source(&self, login: AmqpLogin) -> AmqpSource {
        let url = self.url.clone().unwrap_or_default();
        AmqpSource::new(url, self.queue.clone().unwrap_or_default())
            .settings(self.settings.clone())
            .login(login)
    }
}

impl SourceSettings for Amqp {
    fn table(&self) -> &'static str {
        TABLE
    }

    fn findings(&self) -> Vec<SourceFinding<'_>> {
        let mut findings = Vec::new();
        if self.url.as_deref().is_none_or(str::is_empty) {
            findings.push(SourceFinding::Missing(
                "url",
                "such as \"amqp://shop@localhost:5672/shop\"",
            ));
        }
        if self.queue.as_deref().is_none_or(str::is_empty) {
            findings.push(SourceFinding::Missing("queue", "the queue's name"));
        }
        let login = self
            .url
            .as_deref()
            .and_then(|url| url.split_once("://")?.1.rsplit_once('@'));
        let in_url = login.is_some_and(|(login, _)| login.contains(':'));
        match &self.password {
            Some(_) if in_url => {
                findings.push(SourceFinding::Error(
                    "password",
                    "the URL contains a password as well",
                ));
            }
            Some(password) => findings.push(SourceFinding::Secret(vec!["password"], password)),
            None if in_url => findings.push(SourceFinding::SecretInUrl("url")),
            None => {}
        }
        let wrong = self.settings.check().into_iter().chain(self.tls.check());
        findings.extend(wrong.map(SourceFinding::Wrong));
        findings
    }

    fn findings_of_order(&self, ordering: Ordering) -> Option<Finding> {
        self.settings.check_ordering(ordering)
    }

    fn refuse_letters(&self, letters: &DeadLetters) -> Option<(&'static str, String)> {
        if letters.file.is_some() {
            return letters.refused_for(TABLE);
        }
        let Some(queue) = &letters.amqp else {
            return Some(("", LETTERS_STAY.to_owned()));
        };
        (self.queue.as_ref() == Some(queue)).then(|| {
            (
                "amqp",
                format!("the queue {queue} is consumed: every letter would come back"),
            )
        })
    }

    fn queue(&self) -> Option<&str> {
        self.queue.as_deref()
    }

    fn topology(
        &self,
        name: &str,
        letters: &DeadLetters,
        wanted: &Wanted,
    ) -> Option<Result<Box<dyn Topology>, String>> {
        let consumed = self.queue.clone().filter(|_| !wanted.except_sources);
        let consumed =
            consumed.map(|queue| NamedTopic::new(queue, Kind::Queue, name, Role::Source));
        let letters = letters.amqp.clone();
        let letters =
            letters.map(|queue| NamedTopic::new(queue, Kind::Queue, name, Role::DeadLetters));
        let named = consumed.into_iter().chain(letters).collect();
        let broker = self.url.clone().unwrap_or_default();
        Some(self.configured().map(|source| {
            Box::new(Queues {
                source,
                broker,
                named,
            }) as _
        }))
    }

    fn routes(&self) -> Vec<String> {
        self.queue.clone().into_iter().collect()
    }

    fn is_complete(&self) -> bool {
        self.url.is_some() && self.queue.is_some()
    }

    fn letters(&self, letters: &DeadLetters) -> Option<Result<Box<dyn LetterPlace>, String>> {
        let queue = letters.amqp.clone()?;
        let url = self.url.clone().unwrap_or_default();
        Some(
            self.login()
                .map(|login| Box::new(AmqpLetters { url, queue, login }) as Box<dyn LetterPlace>),
        )
    }

    fn open(&self, _: &str, _: Duration) -> Result<Box<dyn ConfiguredSource>, String> {
        Ok(Box::new(self.configured()?))
    }

    fn open_without_secrets(&self, _: &str) -> Result<Box<dyn ConfiguredSource>, String> {
        Ok(Box::new(self.source(AmqpLogin::default())))
    }
}

#[async_trait]
impl ConfiguredSource for AmqpSource {
    fn check(&self) -> Result<(), String> {
        Self::check(self).map_err(|error| error.to_string())
    }

    async fn examine(&self, terms: &Terms) -> Result<Vec<String>, SourceError> {
        self.check_queue(terms).await
    }

    fn dead_letters(&self, to: &DeadLetters) -> Option<Arc<dyn dead_letters::DeadLetters>> {
        Some(Arc::new(Self::dead_letters(self, to.amqp.clone()?)))
    }

    fn letter_queue(&self, to: &DeadLetters) -> Option<Box<dyn LetterQueue>> {
        let queue = to.amqp.clone()?;
        Some(Box::new(Self::dead_letters(self, queue)))
    }

    fn into_source(self: Box<Self>) -> Arc<dyn Source> {
        Arc::from(self as Box<dyn Source>)
    }
}

#[async_trait]
impl LetterQueue for AmqpDeadLetters {
    fn name(&self) -> &str {
        self.queue()
    }

    async fn examine(&self) -> Result<Vec<String>, SourceError> {
        self.check_queue().await
    }
}

/// The queues of one consumer, and the source by which their broker is reached.
struct Queues {
    source: AmqpSource,
    broker: String,
    named: Vec<NamedTopic>,
}

#[async_trait]
impl Topology for Queues {
    fn broker(&self) -> &str {
        &self.broker
    }

    fn named(&self) -> &[NamedTopic] {
        &self.named
    }

    fn retain(&mut self, is_wanted: &dyn Fn(&NamedTopic) -> bool) {
        self.named.retain(is_wanted);
    }

    async fn look(&mut self) -> Result<(), Problem> {
        let names: Vec<&str> = self
            .named
            .iter()
            .map(|queue| queue.topic.as_str())
            .collect();
        let found = self
            .source
            .find_queues(&names)
            .await
            .map_err(|error| not_opened(&error))?;
        for (queue, _) in self
            .named
            .iter_mut()
            .zip(found)
            .filter(|(_, is_there)| *is_there)
        {
            queue.state = State::Exists;
            let has_letters = queue.role == Role::DeadLetters;
            let attempts = ConsumerSettings::DEFAULT.max_attempts;
            let warnings = self
                .source
                .queue_warnings(&queue.topic, has_letters, attempts)
                .await
                .map_err(|error| not_opened(&error))?;
            queue.warn(&warnings);
        }
        Ok(())
    }

    async fn create(&mut self, _: &Wanted, _: &[String]) -> Result<(), Problem> {
        for queue in self.named.iter_mut().filter(|queue| queue.is_missing()) {
            let plan = QueuePlan::new(&queue.topic);
            match self.source.create_queue(&plan).await {
                Ok(()) => queue.state = State::Created,
                Err(error) if error.is_away() => return Err(not_opened(&error)),
                Err(error) => queue.refuse(&Problem::caused(Exit::Configuration, &error)),
            }
        }
        Ok(())
    }
}

/// A queue of dead letters.
struct AmqpLetters {
    url: String,
    queue: String,
    login: AmqpLogin,
}

impl std::fmt::Debug for AmqpLetters {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AmqpLetters")
            .field("queue", &self.queue)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl LetterPlace for AmqpLetters {
    fn name(&self) -> &str {
        &self.queue
    }

    fn is_position(&self, text: &str) -> bool {
        text.split_once('#')
            .is_some_and(|(queue, id)| !queue.is_empty() && !id.is_empty())
    }

    fn position_example(&self) -> String {
        format!("{}#ID", self.queue)
    }

    async fn open(&self, _: Option<String>) -> Result<Box<dyn DeadLetterReader>, Problem> {
        let letters = AmqpDeadLetterReader::new(self.url.as_str(), self.queue.as_str());
        let mut letters = letters.login(self.login.clone());
        letters.open().await.map_err(|error| not_opened(&error))?;
        Ok(Box::new(letters))
    }
}
