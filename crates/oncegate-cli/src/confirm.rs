//! Confirmation of a change.

use std::io::{BufRead, IsTerminal};

use crate::exit::{Exit, Problem};

/// Asks on a terminal; elsewhere `--yes` is required, so that a pipe never waits for input.
pub(crate) async fn confirm(question: &str, what: &str, yes: bool) -> Result<(), Problem> {
    if yes {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() {
        let text = format!("it would {what}: add --yes to do it, or --dry-run to only see it");
        return Err(Problem::new(Exit::Usage, text));
    }
    eprint!("oncegate: {question} [y/N] ");
    let asked = tokio::task::spawn_blocking(|| {
        let mut answer = String::new();
        std::io::stdin()
            .lock()
            .read_line(&mut answer)
            .map(|_| answer)
    });
    match asked.await {
        Ok(Ok(answer)) if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
        _ => Err(Problem::new(Exit::No, "nothing was changed")),
    }
}
