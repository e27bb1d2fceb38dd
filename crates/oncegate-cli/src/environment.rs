//! The variables of the environment that stand for flags, and those that only look like one.

use std::collections::BTreeSet;

use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command};

/// The prefix of all variables of oncegate.
const PREFIX: &str = "ONCEGATE_";
/// The separator between the parts of a setting's path in a variable.
const SEPARATOR: &str = "__";
/// The variables that stand for no flag: those that this program reads by itself, and those that it
/// gives to workers.
const WITHOUT_FLAG: [&str; 3] = ["ONCEGATE_LOG", "ONCEGATE_DOWNSTREAM", "ONCEGATE_TRIAL_DIR"];
/// The tables whose settings may be variables.
const TABLES: [&str; 5] = ["STORE", "DEFAULTS", "CONSUMER", "OUTBOX", "STATUS"];
/// The parts of names that Kubernetes sets for a service whose name begins with `oncegate`.
const OF_SERVICES: [&str; 2] = ["_SERVICE_", "_PORT"];
/// The most letters in which a misspelled variable differs from a known one.
const MISSPELT_LETTERS: usize = 2;

/// Returns the command with no value for the flags whose variable is empty: shells and containers
/// have such variables for those that are not set.
pub(crate) fn without_empty(command: Command) -> Command {
    let command = command.mut_args(|arg| {
        let value = arg.get_env().and_then(std::env::var_os);
        if value.is_some_and(|value| value.is_empty()) {
            arg.env(None::<&'static str>)
        } else {
            arg
        }
    });
    command.mut_subcommands(without_empty)
}

/// Returns which variables have the values that an error is about, in words; `None` if they were
/// given as flags.
pub(crate) fn origin(error: &clap::Error, command: &Command) -> Option<String> {
    let about = [ContextKind::InvalidArg, ContextKind::PriorArg];
    let mut named: Vec<&str> = Vec::new();
    for value in about.into_iter().filter_map(|kind| error.get(kind)) {
        match value {
            ContextValue::String(one) => named.push(one),
            ContextValue::Strings(several) => named.extend(several.iter().map(String::as_str)),
            _ => {}
        }
    }
    let given: Vec<String> = std::env::args().collect();
    let variables: BTreeSet<String> = named
        .into_iter()
        .filter_map(|name| {
            let flag = name.split_whitespace().next()?.split('=').next()?;
            let is_given = given
                .iter()
                .any(|arg| arg == flag || arg.starts_with(&format!("{flag}=")));
            let variable = variable_of(command, flag.strip_prefix("--")?)?;
            (!is_given && std::env::var_os(&variable).is_some())
                .then(|| format!("{flag} is from the variable {variable}"))
        })
        .collect();
    (!variables.is_empty()).then(|| {
        let variables: Vec<String> = variables.into_iter().collect();
        variables.join(", ")
    })
}

/// Returns the variable of this flag in the command, or in one below it.
fn variable_of(command: &Command, flag: &str) -> Option<String> {
    let own = command
        .get_arguments()
        .find(|arg| arg.get_long() == Some(flag))
        .and_then(Arg::get_env)
        .and_then(|name| name.to_str().map(str::to_owned));
    own.or_else(|| {
        command
            .get_subcommands()
            .find_map(|below| variable_of(below, flag))
    })
}

/// Returns the variables of this process that are none of oncegate's and look like one, each with
/// what it may have meant.
pub(crate) fn misspelt(command: &Command) -> Vec<(String, String)> {
    let mut known: BTreeSet<String> = WITHOUT_FLAG.map(str::to_owned).into();
    collect(command, &mut known);
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    names
        .filter_map(|name| Some((name.clone(), nearest(&name, &known)?)))
        .collect()
}

fn collect(command: &Command, known: &mut BTreeSet<String>) {
    let own = command.get_arguments().filter_map(Arg::get_env);
    known.extend(own.filter_map(|name| name.to_str().map(str::to_owned)));
    for below in command.get_subcommands() {
        collect(below, known);
    }
}

/// Returns what an unknown variable may have meant; `None` if it is known, or like none.
fn nearest(name: &str, known: &BTreeSet<String>) -> Option<String> {
    let rest = name.strip_prefix(PREFIX)?;
    // Those with two underscores are settings, and read as such.
    if known.contains(name) || rest.contains(SEPARATOR) {
        return None;
    }
    let near = known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(name, known), known))
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= MISSPELT_LETTERS);
    if let Some((_, near)) = near {
        return Some(near.clone());
    }
    let table = TABLES.iter().find(|table| {
        rest.strip_prefix(**table)
            .is_some_and(|rest| rest.starts_with('_'))
    })?;
    let is_of_service = OF_SERVICES.iter().any(|part| name.contains(part));
    (!is_of_service).then(|| {
        format!("{PREFIX}{table}{SEPARATOR}…, with two underscores after each part of a path")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_looks_like_a_known_one_is_misspelt() {
        let known = ["ONCEGATE_STORE", "ONCEGATE_STATUS_URL"].map(str::to_owned);
        let known = BTreeSet::from(known);
        for (name, expected) in [
            ("ONCEGATE_STROE", Some("ONCEGATE_STORE")),
            ("ONCEGATE_STORES", Some("ONCEGATE_STORE")),
            ("ONCEGATE_STATUS_URL", None),
            ("ONCEGATE_STORE_URL", Some("ONCEGATE_STORE__…")),
            (
                "ONCEGATE_CONSUMER_BILLING_LEASE",
                Some("ONCEGATE_CONSUMER__…"),
            ),
            ("ONCEGATE_CONSUMER__BILLING__LEASE", None),
            ("ONCEGATE_REDIS_PASSWORD", None),
            ("ONCEGATE_STORE_SERVICE_HOST", None),
            ("ONCEGATE_STORE_PORT_6379_TCP", None),
            ("STORE", None),
        ] {
            let found = nearest(name, &known);
            match expected {
                Some(expected) => assert!(
                    found
                        .as_deref()
                        .is_some_and(|found| found.starts_with(expected)),
                    "{name}: {found:?}"
                ),
                None => assert_eq!(found, None, "{name}"),
            }
        }
    }
}
