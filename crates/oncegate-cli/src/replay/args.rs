//! The arguments of `oncegate replay`, of each of its three uses.

use std::path::PathBuf;

use oncegate::admin::dry_run::{ReplayReport, RunAgain};

use crate::args::AnswerArgs;
use crate::change::ChangeArgs;
use crate::examined::ExaminedArgs;
use crate::exit::{Exit, Problem};
use crate::output::counted;
use crate::parse;
use crate::sources::QueueBrokerFlags;

/// Show what a replay of topics or of a queue would run, or run what is missing
///
/// It claims and changes nothing, unless --run says so. It reads each topic, or a window of it, to
/// the end it had at the start, derives the key of every message, and reads all records in the
/// store. It joins no consumer group, and may run beside the consumers.
///
/// Exit code 0: a replay would change nothing. No handler would run, none is running, and no
/// message would become a dead letter. A message without a derivable key counts as a dead letter,
/// so that a wrong --key does not look like a success. With --allow-dead-letters, dead letters are
/// reported and do not change the exit code.
///
/// With --run, the messages that the consumer group has acknowledged and that have no record go
/// through the gate and the handler of --config, after a confirmation. SIGTERM lets running work
/// end. Exit code 0: all of it is handled; 1: some became dead letters, or --limit left some; 130:
/// stopped before the end, and the same command continues.
///
/// With --queue, the messages that are in a queue of SQS or RabbitMQ now are examined: above all
/// dead letters before a redrive. It receives the messages, holds them meanwhile and returns them
/// to the queue at the end. So it uses up one receive of every message, which counts for a redrive
/// policy or the delivery limit of a quorum queue, and consumers do not see the messages while it
/// runs; therefore it requires --use-up-a-receive. It refuses FIFO queues, which deliver nothing
/// behind the first messages of a group while those are held. Exit code 0 also says that all
/// messages were seen.
#[derive(Debug, clap::Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    pub(super) examined: ExaminedArgs,

    /// Exit with 0 although messages would go to the dead letters, as long as no handler would run
    #[arg(long)]
    pub(super) allow_dead_letters: bool,

    #[command(flatten)]
    pub(super) answer: AnswerArgs,

    #[command(flatten)]
    pub(super) queue: QueueArgs,

    #[command(flatten)]
    pub(super) repair: RepairArgs,
}

/// The queue that is examined in the place of topics.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "A queue in the place of topics")]
pub(super) struct QueueArgs {
    /// Examine the messages in this queue: its name, or the URL of one of SQS where region and
    /// account are not those of the environment
    #[arg(long = "queue", id = "queue", value_name = "QUEUE", conflicts_with_all = [
        "topics", "properties", "routes_from_headers", "partitions", "from_offset", "to_offset", "since", "until", "run",
    ])]
    pub(super) name: Option<String>,

    #[command(flatten)]
    pub(super) broker: QueueBrokerFlags,

    /// Accept that one receive of each message in the queue is used up, and that consumers do not
    /// see them meanwhile
    #[arg(long, requires = "queue")]
    pub(super) use_up_a_receive: bool,

    /// Read at most this many messages
    #[arg(long, value_name = "N", requires = "queue", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(super) most: u32,
}

/// The arguments of `--run`, besides those of a dry run.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Running what is missing")]
pub(super) struct RepairArgs {
    /// Run the messages without a record through the handler of the configuration, after a dry run
    /// and a confirmation
    #[arg(long, requires = "why")]
    pub(super) run: bool,

    /// Also run messages whose attempt ended without an outcome, and those whose retry is due:
    /// their effects may have happened
    #[arg(long, requires = "run")]
    pub(super) overdue: bool,

    /// Run at most this many messages
    #[arg(long, value_name = "COUNT", requires = "run", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) limit: Option<u64>,

    /// Run at most this many messages a second [default: no limit]
    #[arg(long, value_name = "N", requires = "run", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) rate: Option<u32>,

    /// Do it without confirmation; required where there is no terminal
    #[arg(long, requires = "run")]
    pub(super) yes: bool,

    /// Why it is done, for the journal
    #[arg(long, value_name = "TEXT", requires = "run", value_parser = parse::reason)]
    pub(super) why: Option<String>,

    /// The journal, one JSON object per line: when, who, why and what [default:
    /// oncegate/journal.jsonl in $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "FILE", env = "ONCEGATE_JOURNAL")]
    pub(super) journal: Option<PathBuf>,

    /// Who does it, for the journal [default: the user's name, or number]
    #[arg(long, value_name = "NAME", env = "ONCEGATE_OPERATOR")]
    pub(super) by: Option<String>,
}

impl ReplayArgs {
    /// Returns whether it runs messages, and stops cleanly at a signal.
    pub(crate) fn runs(&self) -> bool {
        self.repair.run
    }

    pub(super) fn passed(&self, report: &ReplayReport) -> bool {
        let settled = report.handler_runs() + report.unreadable == 0;
        report.changes_nothing() || (self.allow_dead_letters && settled)
    }
}

impl QueueArgs {
    pub(super) fn check(&self, queue: &str) -> Result<(), Problem> {
        if queue.ends_with(".fifo") {
            return Err(Problem::new(
                Exit::Usage,
                "--queue: a FIFO queue shows nothing behind the first messages of a group as long as those are held, \
                 so most of it would not be seen",
            ));
        }
        if !self.use_up_a_receive {
            return Err(Problem::new(
                Exit::Usage,
                "looking into a queue uses up one receive of each message, which counts for the redrive policy or the \
                 delivery limit of the queue, and hides the messages from consumers meanwhile: say --use-up-a-receive if that may be",
            ));
        }
        Ok(())
    }
}

impl RepairArgs {
    pub(super) fn which(&self) -> RunAgain {
        if self.overdue {
            RunAgain::Overdue
        } else {
            RunAgain::WithoutRecord
        }
    }

    pub(super) fn missing(&self, report: &ReplayReport) -> u64 {
        if self.overdue {
            report.would_run_again
        } else {
            report.without_record
        }
    }

    /// Returns the hint about messages that a run without --overdue leaves alone, such as those of
    /// a replay that was killed.
    pub(super) fn overdue_hint(&self, report: &ReplayReport) -> String {
        match report.would_run_again.saturating_sub(report.without_record) {
            0 => String::new(),
            _ if self.overdue => String::new(),
            overdue => format!(
                "; overdue, because an attempt ended without an outcome: {}; add --overdue to run them",
                counted(overdue, "message")
            ),
        }
    }

    pub(super) fn change(&self) -> ChangeArgs {
        let journal = self.journal.clone();
        let by = self.by.clone();
        ChangeArgs {
            dry_run: false,
            yes: self.yes,
            why: self.why.clone(),
            journal,
            by,
        }
    }
}
