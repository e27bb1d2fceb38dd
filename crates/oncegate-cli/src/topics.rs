//! `oncegate topics create`: makes the topics of Kafka and the queues of RabbitMQ that a configuration names.

use std::path::PathBuf;

use clap::Subcommand;
use oncegate::amqp::{AmqpSource, QueuePlan};
use oncegate::kafka::{self, TopicCreation, TopicFacts, TopicPlan};
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::config::{self, Secrets, shape};
use crate::confirm::confirm;
use crate::doctor::{LETTER_BYTES, Topics, configured_topics};
use crate::exit::{Exit, Problem, not_opened};
use crate::output::{self, plain};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.topics/1";

/// Make the topics and queues of a configuration
#[derive(Debug, Subcommand)]
pub(crate) enum TopicsCommand {
    Create(CreateArgs),
}

/// Create the topics of Kafka and the queues of RabbitMQ that a configuration names and that do not exist: its sources, retry
/// topics and dead letters
///
/// Those that exist are not changed. Queues are quorum queues, those of dead letters without a delivery limit. Exit code 1 with
/// --dry-run: there is something to create; 69: no broker answers; 78: a topic was refused, for example because there are
/// fewer brokers than --replication-factor.
#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    /// The configuration; `--config FILE` is the same
    #[arg(value_name = "FILE", required_unless_present = "named", conflicts_with = "named")]
    config: Option<PathBuf>,

    /// The configuration
    #[arg(long = "config", id = "named", value_name = "FILE", hide = true)]
    named: Option<PathBuf>,

    /// How many partitions a new topic gets [default: `num.partitions` of the brokers]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    partitions: Option<u16>,

    /// How many replicas each partition gets [default: `default.replication.factor` of the brokers]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    replication_factor: Option<u16>,

    /// Create only those of retries and dead letters: those that are consumed belong to their producers
    #[arg(long)]
    except_sources: bool,

    /// Only show what would be done. Exit code 1: there is something to do
    #[arg(long)]
    dry_run: bool,

    /// Do it without confirmation; required where there is no terminal
    #[arg(long)]
    yes: bool,

    #[command(flatten)]
    answer: AnswerArgs,
}

/// What a topic is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    Source,
    Retry,
    DeadLetters,
}

/// Whether a topic exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Exists,
    Missing,
    Created,
    Refused,
}

/// What has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Topic,
    Queue,
}

/// A topic or queue of the configuration.
#[derive(Debug, Serialize)]
struct NamedTopic {
    topic: String,
    kind: Kind,
    consumer: String,
    role: Role,
    state: State,
    /// Of an existing topic, or as asked for; `null` stands for the brokers' default, and of a queue.
    partitions: Option<usize>,
    replicas: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

/// The topics of one consumer, and how its cluster is reached.
struct Cluster {
    brokers: String,
    properties: Vec<(String, String)>,
    /// The topics whose messages may come into the others.
    consumed: Vec<String>,
    named: Vec<NamedTopic>,
}

/// The queues of one consumer, and the source by which their broker is reached.
struct Queues {
    source: AmqpSource,
    broker: String,
    named: Vec<NamedTopic>,
}

/// Where the topics or queues of one consumer are.
enum Place {
    Kafka(Cluster),
    RabbitMq(Queues),
}

/// The answer of `--json`.
#[derive(Serialize)]
struct TopicsDocument<'a> {
    schema: &'static str,
    topics: Vec<&'a NamedTopic>,
}

pub(crate) async fn run(command: &TopicsCommand) -> Result<Exit, Problem> {
    match command {
        TopicsCommand::Create(args) => args.create().await,
    }
}

impl CreateArgs {
    async fn create(&self) -> Result<Exit, Problem> {
        let mut places = self.places()?;
        for place in &mut places {
            within(self.answer.timeout, place.look()).await?;
        }
        let pending = named(&places).any(NamedTopic::is_missing);
        if !self.answer.json {
            output::answer(&text(&places))?;
        }
        if pending && !self.dry_run {
            confirm("create what is missing?", "create what is missing above", self.yes).await?;
            for place in &mut places {
                within(self.answer.timeout, place.create(self)).await?;
            }
            if !self.answer.json {
                output::answer(&done(&places))?;
            }
        }
        if self.answer.json {
            output::answer_json(&TopicsDocument { schema: SCHEMA, topics: named(&places).collect() })?;
        }
        match (pending, self.dry_run) {
            (true, true) => Ok(Exit::No),
            (true, false) if named(&places).any(|topic| topic.state == State::Refused) => {
                Err(Problem::new(Exit::Configuration, "not all topics and queues were created"))
            }
            _ => Ok(Exit::Yes),
        }
    }

    /// The topics and queues that the configuration names, each once.
    fn places(&self) -> Result<Vec<Place>, Problem> {
        let file = self.config.as_ref().or(self.named.as_ref());
        let loaded = config::load(file.map(PathBuf::as_path), |_| Vec::new(), Secrets::MayBeLiteral)?;
        if loaded.findings.has_errors() {
            eprintln!("{}", loaded.render());
            return Err(Problem::new(Exit::Configuration, "the configuration has errors"));
        }
        let (mut clusters, mut queues): (Vec<Cluster>, Vec<Queues>) = (Vec::new(), Vec::new());
        for (name, consumer) in loaded.consumers() {
            if let Some(mut of_consumer) = self.queues(name, &consumer)? {
                let same = queues.iter().filter(|known| known.broker == of_consumer.broker);
                let known: Vec<&str> =
                    same.flat_map(|known| &known.named).map(|queue| queue.topic.as_str()).collect();
                of_consumer.named.retain(|queue| !known.contains(&queue.topic.as_str()));
                queues.push(of_consumer);
            }
            let Some(cluster) = self.cluster(name, &consumer)? else { continue };
            let known = |topic: &NamedTopic| {
                let same = clusters.iter().filter(|known| known.brokers == cluster.brokers);
                same.flat_map(|known| &known.named).any(|known| known.topic == topic.topic)
            };
            let named = cluster.named.into_iter().filter(|topic| !known(topic)).collect();
            clusters.push(Cluster { named, ..cluster });
        }
        // Several consumers may have one dead-letter topic.
        let consumed: Vec<(String, String)> = clusters
            .iter()
            .flat_map(|cluster| cluster.consumed.iter().map(|topic| (cluster.brokers.clone(), topic.clone())))
            .collect();
        for cluster in &mut clusters {
            let here = consumed.iter().filter(|(brokers, _)| *brokers == cluster.brokers);
            cluster.consumed = here.map(|(_, topic)| topic.clone()).collect();
        }
        if clusters.is_empty() && queues.is_empty() {
            let file = file.map(|file| file.display().to_string()).unwrap_or_default();
            let text = format!("{file} names no topic of Kafka and no queue of RabbitMQ");
            return Err(Problem::new(Exit::Configuration, text));
        }
        let clusters = clusters.into_iter().map(Place::Kafka);
        Ok(clusters.chain(queues.into_iter().map(Place::RabbitMq)).collect())
    }

    /// `None` when the consumer does not read a queue of RabbitMQ.
    fn queues(&self, name: &str, consumer: &shape::Consumer) -> Result<Option<Queues>, Problem> {
        let Some(amqp) = consumer.source.as_ref().and_then(|source| source.amqp.as_ref()) else {
            return Ok(None);
        };
        let source = amqp.configured().map_err(|why| Problem::new(Exit::Configuration, why).of(name))?;
        let consumed = amqp.queue.clone().filter(|_| !self.except_sources).map(|queue| (queue, Role::Source));
        let letters = consumer.dead_letters.as_ref().and_then(|letters| letters.amqp.clone());
        let letters = letters.map(|queue| (queue, Role::DeadLetters));
        let named = consumed.into_iter().chain(letters).map(|(queue, role)| NamedTopic {
            topic: queue,
            kind: Kind::Queue,
            consumer: name.to_owned(),
            role,
            state: State::Missing,
            partitions: None,
            replicas: None,
            reason: None,
        });
        Ok(Some(Queues { source, broker: amqp.url.clone().unwrap_or_default(), named: named.collect() }))
    }

    /// `None` when the consumer does not read topics.
    fn cluster(&self, name: &str, consumer: &shape::Consumer) -> Result<Option<Cluster>, Problem> {
        let Some(kafka) = consumer.source.as_ref().and_then(|source| source.kafka.as_ref()) else {
            return Ok(None);
        };
        let topics = configured_topics(name, kafka, consumer);
        let topics = topics.map_err(|why| Problem::new(Exit::Configuration, why).of(name))?;
        let Topics { brokers, properties, consumed, retries, dead_letters, .. } = topics;
        let all = consumed.clone();
        let sources =
            consumed.into_iter().filter(|_| !self.except_sources).map(|topic| (topic, Role::Source));
        let retries = retries.into_iter().map(|(topic, _)| (topic, Role::Retry));
        let letters = dead_letters.into_iter().map(|topic| (topic, Role::DeadLetters));
        let named = sources.chain(retries).chain(letters).map(|(topic, role)| NamedTopic {
            topic,
            kind: Kind::Topic,
            consumer: name.to_owned(),
            role,
            state: State::Missing,
            partitions: self.partitions.map(usize::from),
            replicas: self.replication_factor.map(usize::from),
            reason: None,
        });
        Ok(Some(Cluster { brokers, properties, consumed: all, named: named.collect() }))
    }

    fn plan(&self, topic: &NamedTopic, max_message_bytes: Option<u64>) -> TopicPlan {
        let plan = TopicPlan::new(&topic.topic);
        let plan = self.partitions.into_iter().fold(plan, TopicPlan::partitions);
        let plan = self.replication_factor.into_iter().fold(plan, TopicPlan::replication_factor);
        max_message_bytes.into_iter().fold(plan, TopicPlan::max_message_bytes)
    }
}

impl Place {
    /// Asks which of them exist.
    async fn look(&mut self) -> Result<(), Problem> {
        match self {
            Self::Kafka(cluster) => cluster.look().await,
            Self::RabbitMq(queues) => queues.look().await,
        }
    }

    async fn create(&mut self, args: &CreateArgs) -> Result<(), Problem> {
        match self {
            Self::Kafka(cluster) => cluster.create(args).await,
            Self::RabbitMq(queues) => queues.create().await,
        }
    }
}

impl Queues {
    async fn look(&mut self) -> Result<(), Problem> {
        let names: Vec<&str> = self.named.iter().map(|queue| queue.topic.as_str()).collect();
        let found = self.source.find_queues(&names).await.map_err(|error| not_opened(&error))?;
        for (queue, _) in self.named.iter_mut().zip(found).filter(|(_, is_there)| *is_there) {
            queue.state = State::Exists;
        }
        Ok(())
    }

    async fn create(&mut self) -> Result<(), Problem> {
        for queue in self.named.iter_mut().filter(|queue| queue.is_missing()) {
            let plan = QueuePlan::new(&queue.topic);
            // Each look at dead letters returns them.
            let plan = if queue.role == Role::DeadLetters { plan.delivery_limit(NO_LIMIT) } else { plan };
            match self.source.create_queue(&plan).await {
                Ok(()) => queue.state = State::Created,
                Err(error) if error.is_away() => return Err(not_opened(&error)),
                Err(error) => {
                    queue.state = State::Refused;
                    queue.reason = Some(Problem::caused(Exit::Configuration, &error).to_string());
                }
            }
        }
        Ok(())
    }
}

/// The delivery limit that is none.
const NO_LIMIT: i32 = -1;

impl Cluster {
    /// Asks which topics exist.
    async fn look(&mut self) -> Result<(), Problem> {
        let names: Vec<String> = self.named.iter().map(|topic| topic.topic.clone()).collect();
        let facts = kafka::describe_topics(&self.brokers, &names, &self.properties).await;
        let facts = facts.map_err(|error| not_opened(&error))?;
        for (topic, fact) in self.named.iter_mut().zip(&facts) {
            topic.note(fact, State::Exists);
        }
        Ok(())
    }

    /// Creates first what is consumed, because dead letters and retries are a little larger than its largest messages.
    async fn create(&mut self, args: &CreateArgs) -> Result<(), Problem> {
        self.create_those(args, |role| role == Role::Source, None).await?;
        if !self.named.iter().any(|topic| topic.is_missing() && topic.role != Role::Source) {
            return Ok(());
        }
        let facts = kafka::describe_topics(&self.brokers, &self.consumed, &self.properties).await;
        let facts = facts.map_err(|error| not_opened(&error))?;
        let largest = facts.iter().filter_map(|fact| fact.max_message_bytes).max();
        let most = largest.map(|bytes| bytes + LETTER_BYTES);
        self.create_those(args, |role| role != Role::Source, most).await
    }

    async fn create_those(
        &mut self,
        args: &CreateArgs,
        has_role: fn(Role) -> bool,
        max_message_bytes: Option<u64>,
    ) -> Result<(), Problem> {
        let missing = self.named.iter_mut().filter(|topic| topic.is_missing() && has_role(topic.role));
        let missing: Vec<&mut NamedTopic> = missing.collect();
        if missing.is_empty() {
            return Ok(());
        }
        let plans: Vec<TopicPlan> = missing.iter().map(|topic| args.plan(topic, max_message_bytes)).collect();
        let created = kafka::create_topics(&self.brokers, &plans, &self.properties).await;
        let created = created.map_err(|error| not_opened(&error))?;
        for (topic, creation) in missing.into_iter().zip(created) {
            match creation {
                TopicCreation::Refused(error) => {
                    topic.state = State::Refused;
                    topic.reason = Some(Problem::caused(Exit::Configuration, &error).to_string());
                }
                // Another process may have been faster.
                TopicCreation::Existed => topic.state = State::Exists,
                _ => topic.state = State::Created,
            }
        }
        Ok(())
    }
}

impl NamedTopic {
    fn is_missing(&self) -> bool {
        self.state == State::Missing
    }

    fn note(&mut self, fact: &TopicFacts, state: State) {
        if fact.partitions > 0 {
            (self.state, self.partitions, self.replicas) =
                (state, Some(fact.partitions), Some(fact.replicas));
        }
    }

    fn purpose(&self) -> String {
        let consumer = plain(&self.consumer);
        match self.role {
            Role::Source => format!("consumed by {consumer}"),
            Role::Retry => format!("retries of {consumer}"),
            Role::DeadLetters => format!("dead letters of {consumer}"),
        }
    }

    fn size(&self) -> String {
        if self.kind == Kind::Queue {
            return "a quorum queue".to_owned();
        }
        let counted = |count: Option<usize>, what: &str| match count {
            Some(1) => format!("1 {what}"),
            Some(count) => format!("{count} {what}s"),
            None => format!("the brokers' number of {what}s"),
        };
        format!("{}, {}", counted(self.partitions, "partition"), counted(self.replicas, "replica"))
    }
}

fn named(places: &[Place]) -> impl Iterator<Item = &NamedTopic> {
    places.iter().flat_map(|place| match place {
        Place::Kafka(cluster) => &cluster.named,
        Place::RabbitMq(queues) => &queues.named,
    })
}

/// What exists and what is missing, a line each.
fn text(places: &[Place]) -> String {
    let line = |topic: &NamedTopic| match (topic.state == State::Missing, topic.kind) {
        (true, _) => format!("{}: to create, {} ({})", plain(&topic.topic), topic.size(), topic.purpose()),
        // The broker does not say what an existing queue is.
        (false, Kind::Queue) => format!("{}: exists ({})", plain(&topic.topic), topic.purpose()),
        (false, Kind::Topic) => {
            format!("{}: exists, {} ({})", plain(&topic.topic), topic.size(), topic.purpose())
        }
    };
    named(places).map(line).collect::<Vec<_>>().join("\n")
}

/// What was done about the missing ones.
fn done(places: &[Place]) -> String {
    let line = |topic: &NamedTopic| match (&topic.state, &topic.reason) {
        (State::Created, _) => Some(format!("created {}", plain(&topic.topic))),
        (State::Refused, Some(reason)) => Some(reason.lines().map(plain).collect::<Vec<_>>().join("\n")),
        _ => None,
    };
    named(places).filter_map(line).collect::<Vec<_>>().join("\n")
}
