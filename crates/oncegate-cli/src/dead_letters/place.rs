//! The place of dead letters: a topic or a queue, by flags or by a configuration.

use crate::config::{Loaded, shape};
use crate::configured::{ConfigArgs, choose, missing};
use crate::exit::Problem;
use crate::parse::pair;
use crate::sources::LetterPlace;
use crate::sources::kafka::KafkaLetters;
use crate::sources::sqs::SqsLetters;

/// Where the dead letters are.
#[derive(Debug, Default, clap::Args)]
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

    /// The queue of the dead letters: its URL, or its name where region and account are those of
    /// the environment [default: that of --config]
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The address of another SQS server: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL", conflicts_with = "topic")]
    endpoint_url: Option<String>,

    /// Accept that one receive of each message in the queue is used up, and that consumers do not
    /// see them meanwhile
    #[arg(long, conflicts_with = "topic")]
    use_up_a_receive: bool,
}

/// Returns the place of a configured consumer's dead letters, where reading may use up a receive of
/// each message in a queue.
///
/// # Errors
/// When it has none that can be read.
pub(crate) fn of_consumer(loaded: &Loaded, scope: &str) -> Result<Box<dyn LetterPlace>, Problem> {
    let args = PlaceArgs {
        use_up_a_receive: true,
        ..PlaceArgs::default()
    };
    args.find(Some(loaded), Some(scope))
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
    pub(super) fn find(
        &self,
        loaded: Option<&Loaded>,
        scope: Option<&str>,
    ) -> Result<Box<dyn LetterPlace>, Problem> {
        let Some(loaded) = loaded else {
            return self.by_flags();
        };
        let (name, consumer) = choose(loaded, scope)?;
        let letters = consumer.dead_letters.clone().unwrap_or_default();
        let has_flags = self.topic.is_some() || self.queue.is_some();
        let settings = consumer
            .source
            .as_ref()
            .and_then(|source| source.settings().ok());
        if let (false, Some(place)) = (
            has_flags,
            settings.and_then(|settings| settings.letters(&letters)),
        ) {
            return place.map_err(|why| Problem::configuration(why).of(name));
        }
        let topic = self
            .topic
            .clone()
            .or(letters.kafka)
            .filter(|_| self.queue.is_none());
        if let Some(topic) = topic {
            return self.of_cluster(topic, name, consumer);
        }
        let queue = self.queue.clone().or(letters.sqs);
        let queue = queue.ok_or_else(|| {
            let why = match letters.file {
                Some(file) => format!("its dead letters are lines of the file {}", file.display()),
                None => "it has no dead letters: give --topic or --queue".to_owned(),
            };
            Problem::configuration(why).of(name)
        })?;
        let sqs = consumer
            .source
            .clone()
            .and_then(|source| source.sqs)
            .unwrap_or_default();
        Ok(Box::new(SqsLetters {
            queue,
            region: sqs.region,
            endpoint_url: self.endpoint_url.clone().or(sqs.endpoint_url),
            may_receive: self.use_up_a_receive,
        }))
    }

    /// The topic, in the cluster of the flags or of the consumer `scope`.
    fn of_cluster(
        &self,
        topic: String,
        scope: &str,
        consumer: &shape::Consumer,
    ) -> Result<Box<dyn LetterPlace>, Problem> {
        let kafka = consumer
            .source
            .as_ref()
            .and_then(|source| source.kafka.clone())
            .unwrap_or_default();
        let cluster = kafka
            .cluster(scope, consumer.dead_letters.as_ref())
            .map_err(|why| Problem::configuration(why).of(scope))?;
        let brokers = self.brokers.clone().unwrap_or(cluster.brokers);
        if brokers.is_empty() {
            let why = "it does not read topics of Kafka: give --brokers";
            return Err(Problem::configuration(why).of(scope));
        }
        let properties = if self.properties.is_empty() {
            cluster.properties
        } else {
            self.properties.clone()
        };
        Ok(Box::new(KafkaLetters {
            topic,
            brokers,
            properties,
        }))
    }

    fn by_flags(&self) -> Result<Box<dyn LetterPlace>, Problem> {
        if let Some(queue) = &self.queue {
            return Ok(Box::new(SqsLetters {
                queue: queue.clone(),
                region: None,
                endpoint_url: self.endpoint_url.clone(),
                may_receive: self.use_up_a_receive,
            }));
        }
        let topic = self
            .topic
            .clone()
            .ok_or_else(|| missing("--topic with --brokers, or --queue"))?;
        let brokers = self.brokers.clone().ok_or_else(|| missing("--brokers"))?;
        Ok(Box::new(KafkaLetters {
            topic,
            brokers,
            properties: self.properties.clone(),
        }))
    }
}
