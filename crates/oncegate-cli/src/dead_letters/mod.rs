//! `oncegate dead-letters`: lists and shows the dead letters of a topic or queue (`place`), and
//! redrives their messages.

use oncegate::admin::dead_letter_reader::StoredDeadLetter;

use crate::exit::{Exit, Problem};
use crate::sources::LetterPlace;

mod filter;
mod list;
mod place;
mod redrive;
mod show;

pub(crate) use place::of_consumer;
pub(crate) use show::lossy;

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

/// Calls `each` for every dead letter.
async fn read(
    place: &dyn LetterPlace,
    mut each: impl FnMut(StoredDeadLetter) + Send,
) -> Result<(), Problem> {
    if let Some(why) = place.unreadable() {
        return Err(Problem::new(Exit::Usage, why));
    }
    let mut letters = place.open(None).await?;
    while let Some(batch) = letters.next_batch().await? {
        batch.into_iter().for_each(&mut each);
    }
    Ok(letters.close().await?)
}
