//! `oncegate topics create`: makes the topics and queues that a configuration names.

use clap::Subcommand;
use serde::Serialize;

use crate::args::{AnswerArgs, within};
use crate::configured::{self, ConfigArgs};
use crate::confirm::confirm;
use crate::exit::{Exit, Problem};
use crate::output;
use crate::sources::topology::{NamedTopic, State, Topology, Wanted};

/// The format of the `--json` document.
const SCHEMA: &str = "oncegate.topics/1";

/// Make the topics and queues of a configuration
#[derive(Debug, Subcommand)]
pub(crate) enum TopicsCommand {
    Create(CreateArgs),
}

/// Create the topics of Kafka and the queues of RabbitMQ that a configuration names and that do not
/// exist: its sources, retry topics and dead letters
///
/// Those that exist are not changed. Queues are quorum queues, those of dead letters without a
/// delivery limit. Exit code 1 with --dry-run: there is something to create; 69: no broker answers;
/// 78: a topic was refused, for example because there are fewer brokers than --replication-factor.
#[derive(Debug, clap::Args)]
pub(crate) struct CreateArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// How many partitions a new topic gets [default: `num.partitions` of the brokers]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    partitions: Option<u16>,

    /// How many replicas each partition gets [default: `default.replication.factor` of the brokers]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    replication_factor: Option<u16>,

    /// Create only those of retries and dead letters: those that are consumed belong to their
    /// producers
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

/// The answer of `--json`.
#[derive(Serialize)]
struct TopicsDocument<'a> {
    schema: &'static str,
    topics: Vec<&'a NamedTopic>,
}

/// The topics or queues of each consumer.
type Places = Vec<Box<dyn Topology>>;

pub(crate) async fn run(command: &TopicsCommand) -> Result<Exit, Problem> {
    match command {
        TopicsCommand::Create(args) => args.create().await,
    }
}

impl CreateArgs {
    async fn create(&self) -> Result<Exit, Problem> {
        let wanted = Wanted {
            partitions: self.partitions,
            replication_factor: self.replication_factor,
            except_sources: self.except_sources,
        };
        let mut places = self.places(&wanted)?;
        for place in &mut places {
            within(self.answer.timeout, place.look()).await?;
        }
        let pending = named(&places).any(NamedTopic::is_missing);
        // The JSON document comes at the end, with what was done.
        if !self.answer.json {
            output::answer(
                &named(&places)
                    .map(NamedTopic::found)
                    .collect::<Vec<_>>()
                    .join("\n"),
            )?;
        }
        if pending && !self.dry_run {
            confirm(
                "create what is missing?",
                "create what is missing above",
                self.yes,
            )
            .await?;
            let consumed: Vec<Vec<String>> = places
                .iter()
                .map(|place| consumed(&places, place.broker()))
                .collect();
            for (place, consumed) in places.iter_mut().zip(&consumed) {
                within(self.answer.timeout, place.create(&wanted, consumed)).await?;
            }
            if !self.answer.json {
                output::answer(
                    &named(&places)
                        .filter_map(NamedTopic::done)
                        .collect::<Vec<_>>()
                        .join("\n"),
                )?;
            }
        }
        if self.answer.json {
            output::answer_json(&TopicsDocument {
                schema: SCHEMA,
                topics: named(&places).collect(),
            })?;
        }
        match (pending, self.dry_run) {
            (true, true) => Ok(Exit::No),
            (true, false) if named(&places).any(|topic| topic.state == State::Refused) => Err(
                Problem::configuration("not all topics and queues were created"),
            ),
            _ => Ok(Exit::Yes),
        }
    }

    /// Returns the topics and queues that the configuration names, each once.
    fn places(&self, wanted: &Wanted) -> Result<Places, Problem> {
        let file = self.config.required()?;
        let loaded = configured::load(file)?;
        let mut places = Places::new();
        for (name, consumer) in loaded.consumers() {
            let settings = consumer
                .source
                .as_ref()
                .and_then(|source| source.settings().ok());
            let letters = consumer.dead_letters.clone().unwrap_or_default();
            let Some(place) =
                settings.and_then(|settings| settings.topology(name, &letters, wanted))
            else {
                continue;
            };
            let mut place = place.map_err(|why| Problem::configuration(why).of(name))?;
            // Several consumers may have one dead-letter topic.
            let same = places
                .iter()
                .filter(|known| known.broker() == place.broker());
            let known: Vec<String> = same
                .flat_map(|known| known.named())
                .map(|topic| topic.topic.clone())
                .collect();
            place.retain(&|topic| !known.contains(&topic.topic));
            places.push(place);
        }
        if places.is_empty() {
            let text = format!(
                "{} names no topic and no queue that can be created",
                file.display()
            );
            return Err(Problem::configuration(text));
        }
        Ok(places)
    }
}

fn named(places: &[Box<dyn Topology>]) -> impl Iterator<Item = &NamedTopic> {
    places.iter().flat_map(|place| place.named())
}

/// Returns the topics of this broker that any consumer reads.
fn consumed(places: &[Box<dyn Topology>], broker: &str) -> Vec<String> {
    let here = places.iter().filter(|place| place.broker() == broker);
    here.flat_map(|place| place.consumed()).cloned().collect()
}
