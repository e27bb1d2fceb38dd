//! Where dead letters are: a topic or a queue, by flags or by a configuration.

use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::kafka::KafkaDeadLetterReader;
use oncegate::sqs::SqsDeadLetterReader;

use crate::config::{Loaded, shape};
use crate::configured::{ConfigArgs, choose, missing};
use crate::doctor::configured_topics;
use crate::exit::{Exit, Problem, not_opened};
use crate::parse::pair;

/// Where the dead letters are.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("place").args(["topic", "queue"])))]
pub(super) struct PlaceArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// The topic of the dead letters [default: that of --config]
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,

    /// Kafka's addresses, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    brokers: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair, conflicts_with = "queue")]
    properties: Vec<(String, String)>,

    /// The queue of the dead letters: its URL, or its name where region and account are those of the environment
    /// [default: that of --config]
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The address of another SQS server: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL", conflicts_with = "topic")]
    endpoint_url: Option<String>,

    /// Accept that one receive of each message in the queue is used up, and that consumers do not see them meanwhile
    #[arg(long, conflicts_with = "topic")]
    use_up_a_receive: bool,
}

/// A topic or queue of dead letters.
#[derive(Debug)]
pub(super) enum Place {
    Topic {
        name: String,
        brokers: String,
        properties: Vec<(String, String)>,
    },
    Queue {
        name: String,
        region: Option<String>,
        endpoint_url: Option<String>,
        /// Whether receives may be used up.
        may_receive: bool,
    },
}

impl PlaceArgs {
    /// Reads the configuration, if there is one.
    pub(super) fn load(&self, has_settings: bool) -> Result<Option<Loaded>, Problem> {
        let is_named = self.topic.is_some() || self.queue.is_some() || self.brokers.is_some();
        self.config.load(has_settings || is_named)
    }

    /// Returns the place that the flags name, or else that of the consumer.
    ///
    /// # Errors
    /// When neither names one, or the consumer cannot be chosen.
    pub(super) fn find(&self, loaded: Option<&Loaded>, scope: Option<&str>) -> Result<Place, Problem> {
        let Some(loaded) = loaded else { return self.by_flags() };
        let (name, consumer) = choose(loaded, scope)?;
        let refuse = |why: String| Problem::new(Exit::Configuration, why).of(name);
        let letters = consumer.dead_letters.clone().unwrap_or_default();
        let topic = self.topic.clone().or(letters.kafka).filter(|_| self.queue.is_none());
        if let Some(topic) = topic {
            return self.of_cluster(topic, name, &consumer);
        }
        let queue = self.queue.clone().or(letters.sqs);
        let queue = queue.ok_or_else(|| {
            refuse(match letters.file {
                Some(file) => format!("its dead letters are lines of the file {}", file.display()),
                None => "it has no dead letters: give --topic or --queue".to_owned(),
            })
        })?;
        let sqs = consumer.source.and_then(|source| source.sqs).unwrap_or_default();
        Ok(Place::Queue {
            name: queue,
            region: sqs.region,
            endpoint_url: self.endpoint_url.clone().or(sqs.endpoint_url),
            may_receive: self.use_up_a_receive,
        })
    }

    /// The topic, in the cluster of the flags or of the consumer `scope`.
    fn of_cluster(&self, topic: String, scope: &str, consumer: &shape::Consumer) -> Result<Place, Problem> {
        let refuse = |why: String| Problem::new(Exit::Configuration, why).of(scope);
        let kafka = consumer.source.as_ref().and_then(|source| source.kafka.clone()).unwrap_or_default();
        let cluster = configured_topics(scope, &kafka, consumer).map_err(refuse)?;
        let brokers = self.brokers.clone().unwrap_or(cluster.brokers);
        if brokers.is_empty() {
            return Err(refuse("it does not read topics of Kafka: give --brokers".to_owned()));
        }
        let properties =
            if self.properties.is_empty() { cluster.properties } else { self.properties.clone() };
        Ok(Place::Topic { name: topic, brokers, properties })
    }

    fn by_flags(&self) -> Result<Place, Problem> {
        if let Some(queue) = &self.queue {
            return Ok(Place::Queue {
                name: queue.clone(),
                region: None,
                endpoint_url: self.endpoint_url.clone(),
                may_receive: self.use_up_a_receive,
            });
        }
        let topic = self.topic.clone().ok_or_else(|| missing("--topic with --brokers, or --queue"))?;
        let brokers = self.brokers.clone().ok_or_else(|| missing("--brokers"))?;
        Ok(Place::Topic { name: topic, brokers, properties: self.properties.clone() })
    }
}

impl Place {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Topic { name, .. } | Self::Queue { name, .. } => name,
        }
    }

    pub(super) fn is_topic(&self) -> bool {
        matches!(self, Self::Topic { .. })
    }

    /// Checks the form of positions before anything is read.
    pub(super) fn check_positions<'a>(
        &self,
        positions: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), Problem> {
        for position in positions {
            let (is_position, form) = match self {
                Self::Topic { name, .. } => (is_offset(position), format!("{name}/0@42")),
                Self::Queue { .. } => (is_message(position), "orders-dead#ID".to_owned()),
            };
            if !is_position {
                let text = format!(
                    "{position:?} is not a position of a dead letter: write it as `list` shows it, such as {form}"
                );
                return Err(Problem::new(Exit::Usage, text));
            }
        }
        Ok(())
    }

    /// Refuses a queue of which only a part would be seen.
    pub(super) fn check_readable(&self) -> Result<(), Problem> {
        match self {
            Self::Queue { name, .. } if name.ends_with(".fifo") => {
                let text = "--queue: a FIFO queue shows nothing behind the first messages of a group as long as those are \
                            held, so most of it would not be seen; it can be redriven";
                Err(Problem::new(Exit::Usage, text))
            }
            _ => Ok(()),
        }
    }

    /// Opens the topic or queue; `progress` names the consumer group that stores how far a redrive came in a topic.
    pub(super) async fn open(&self, progress: Option<String>) -> Result<Box<dyn DeadLetterReader>, Problem> {
        let mut letters: Box<dyn DeadLetterReader> = match self {
            Self::Topic { name, brokers, properties } => {
                let mut letters = KafkaDeadLetterReader::new(brokers.as_str(), name.as_str());
                for (name, value) in properties {
                    letters = letters.property(name, value);
                }
                match progress {
                    Some(group) => Box::new(letters.progress(group)),
                    None => Box::new(letters),
                }
            }
            Self::Queue { may_receive: false, .. } => {
                let text = "looking into a queue uses up one receive of each message, which counts for the \
                            redrive policy of the queue, and hides the messages meanwhile: say \
                            --use-up-a-receive if that may be";
                return Err(Problem::new(Exit::Usage, text));
            }
            Self::Queue { name, region, endpoint_url, .. } => {
                let mut letters = SqsDeadLetterReader::new(name.as_str());
                if let Some(region) = region {
                    letters = letters.region(region);
                }
                if let Some(url) = endpoint_url {
                    letters = letters.endpoint_url(url);
                }
                Box::new(letters)
            }
        };
        letters.open().await.map_err(|error| not_opened(&error))?;
        Ok(letters)
    }
}

/// Whether the text has the form `orders.dead/0@42`.
fn is_offset(text: &str) -> bool {
    let parts = text.rsplit_once('@').and_then(|(at, offset)| Some((at.rsplit_once('/')?, offset)));
    parts.is_some_and(|((topic, partition), offset)| {
        !topic.is_empty() && is_number(partition) && is_number(offset)
    })
}

/// Whether the text has the form `orders-dead#ID`.
fn is_message(text: &str) -> bool {
    text.split_once('#').is_some_and(|(queue, id)| !queue.is_empty() && !id.is_empty())
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}
