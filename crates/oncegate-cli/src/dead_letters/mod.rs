//! `oncegate dead-letters`: lists and shows the dead letters of a topic or queue, and redrives their messages.

use oncegate::admin::dead_letter_reader::{DeadLetterReader, StoredDeadLetter};
use oncegate::kafka::KafkaDeadLetterReader;
use oncegate::sqs::SqsDeadLetterReader;

use crate::args::pair;
use crate::exit::{Exit, Problem, not_opened};

mod filter;
mod list;
mod redrive;
mod show;

/// List and show dead letters, and send their messages back
#[derive(Debug, clap::Subcommand)]
pub(crate) enum DeadLettersCommand {
    List(list::ListArgs),
    Show(show::ShowArgs),
    Redrive(redrive::RedriveArgs),
}

pub(crate) async fn run(command: &DeadLettersCommand) -> Result<Exit, Problem> {
    match command {
        DeadLettersCommand::List(args) => list::run(args).await,
        DeadLettersCommand::Show(args) => show::run(args).await,
        DeadLettersCommand::Redrive(args) => redrive::run(args).await,
    }
}

/// Where the dead letters are.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("place").required(true).args(["topic", "queue"])))]
struct PlaceArgs {
    /// The topic of the dead letters
    #[arg(long, value_name = "NAME", requires = "brokers")]
    topic: Option<String>,

    /// Kafka's addresses, `host:port`, several with commas
    #[arg(long, value_name = "HOST:PORT", env = "ONCEGATE_BROKERS")]
    brokers: Option<String>,

    /// A property of librdkafka, such as security.protocol=SASL_SSL; may be repeated
    #[arg(long = "property", value_name = "NAME=VALUE", value_parser = pair, requires = "topic")]
    properties: Vec<(String, String)>,

    /// The queue of the dead letters: its URL, or its name where region and account are those of the environment
    #[arg(long, value_name = "QUEUE")]
    queue: Option<String>,

    /// The address of another SQS server: http://127.0.0.1:9324 [default: as the AWS SDK finds it]
    #[arg(long, value_name = "URL", requires = "queue")]
    endpoint_url: Option<String>,

    /// Accept that one receive of each message in the queue is used up, and that consumers do not see them meanwhile
    #[arg(long, requires = "queue")]
    use_up_a_receive: bool,
}

impl PlaceArgs {
    fn name(&self) -> &str {
        self.topic.as_deref().or(self.queue.as_deref()).unwrap_or_default()
    }

    /// Checks the form of positions before anything is read.
    fn check_positions<'a>(&self, positions: impl IntoIterator<Item = &'a str>) -> Result<(), Problem> {
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let is_offset = |text: &str| {
            let parts = text.rsplit_once('@').and_then(|(at, offset)| Some((at.rsplit_once('/')?, offset)));
            parts.is_some_and(|((topic, partition), offset)| {
                !topic.is_empty() && is_number(partition) && is_number(offset)
            })
        };
        let is_message =
            |text: &str| text.split_once('#').is_some_and(|(queue, id)| !queue.is_empty() && !id.is_empty());
        for position in positions {
            let (is_position, form) = match &self.topic {
                Some(topic) => (is_offset(position), format!("{topic}/0@42")),
                None => (is_message(position), "orders-dead#ID".to_owned()),
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

    /// Opens the topic or queue; `progress` names the consumer group that stores how far a redrive came in a topic.
    async fn open(&self, progress: Option<String>) -> Result<Box<dyn DeadLetterReader>, Problem> {
        let mut letters: Box<dyn DeadLetterReader> = match (&self.topic, &self.brokers, &self.queue) {
            (Some(topic), Some(brokers), _) => {
                let mut letters = KafkaDeadLetterReader::new(brokers.as_str(), topic.as_str());
                for (name, value) in &self.properties {
                    letters = letters.property(name, value);
                }
                match progress {
                    Some(group) => Box::new(letters.progress(group)),
                    None => Box::new(letters),
                }
            }
            (.., Some(queue)) => {
                if !self.use_up_a_receive {
                    let text = "looking into a queue uses up one receive of each message, which counts for the \
                                redrive policy of the queue, and hides the messages meanwhile: say \
                                --use-up-a-receive if that may be";
                    return Err(Problem::new(Exit::Usage, text));
                }
                let letters = SqsDeadLetterReader::new(queue.as_str());
                match &self.endpoint_url {
                    Some(url) => Box::new(letters.endpoint_url(url)),
                    None => Box::new(letters),
                }
            }
            _ => return Err(Problem::new(Exit::Usage, "--topic with --brokers, or --queue is missing")),
        };
        letters.open().await.map_err(|error| not_opened(&error))?;
        Ok(letters)
    }
}

/// Calls `each` for every dead letter.
async fn read(place: &PlaceArgs, mut each: impl FnMut(StoredDeadLetter) + Send) -> Result<(), Problem> {
    if place.queue.as_deref().is_some_and(|queue| queue.ends_with(".fifo")) {
        let text = "--queue: a FIFO queue shows nothing behind the first messages of a group as long as those are \
                    held, so most of it would not be seen; it can be redriven";
        return Err(Problem::new(Exit::Usage, text));
    }
    let mut letters = place.open(None).await?;
    while let Some(batch) = letters.next_batch().await? {
        batch.into_iter().for_each(&mut each);
    }
    Ok(letters.close().await?)
}
