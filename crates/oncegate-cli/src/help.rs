//! The help of `oncegate` itself, which shows the commands in groups.

use std::fmt::Write as _;

use clap::Command;

/// The groups of the commands, in the order of the help.
const GROUPS: [(&str, &[&str]); 5] = [
    (
        "Try",
        &["init", "check", "worker-test", "prove", "estimate"],
    ),
    ("Run", &["run", "serve", "outbox"]),
    (
        "Look",
        &["status", "inspect", "key", "replay", "audit", "doctor"],
    ),
    (
        "Repair",
        &["reset", "complete", "give-up", "dead-letters", "accept"],
    ),
    (
        "Operate",
        &["pause", "resume", "topics", "migrate", "sweep", "generate"],
    ),
];

/// Returns the command with a help that shows its subcommands in groups.
pub(crate) fn grouped(command: Command) -> Command {
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{}Options:\n{{options}}{{after-help}}",
        groups(&command)
    );
    command.help_template(template)
}

/// Returns the subcommands by group, one a line with the first line of its own help.
fn groups(command: &Command) -> String {
    let names = command.get_subcommands().map(Command::get_name);
    let width = names.map(str::len).max().unwrap_or(0);
    let mut text = String::new();
    for (title, names) in GROUPS {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{title}:");
        for name in names {
            let about = command
                .find_subcommand(name)
                .and_then(Command::get_about)
                .map(ToString::to_string)
                .unwrap_or_default();
            let _ = writeln!(text, "  {name:width$}  {about}");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::*;
    use crate::Cli;

    #[test]
    fn every_command_is_in_one_group() {
        let command = Cli::command();
        let mut known: BTreeSet<&str> = command.get_subcommands().map(Command::get_name).collect();
        for name in GROUPS.iter().flat_map(|(_, names)| names.iter()) {
            assert!(
                known.remove(name),
                "{name} is no command, or is there twice"
            );
        }
        assert!(known.is_empty(), "in no group: {known:?}");
    }

    #[test]
    fn the_help_shows_each_command_in_a_line() {
        let help = grouped(Cli::command()).render_help().to_string();
        for command in Cli::command().get_subcommands() {
            let about = command.get_about().map(ToString::to_string);
            let about = about.unwrap_or_default();
            assert!(!about.is_empty(), "{}", command.get_name());
            let is_shown = help.lines().any(|line| {
                line.trim_start().starts_with(command.get_name()) && line.ends_with(&about)
            });
            assert!(is_shown, "{}:\n{help}", command.get_name());
        }
        for line in groups(&Cli::command()).lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}
