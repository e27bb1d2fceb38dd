//! The command that plays a round again.

use oncegate_testing::{Fault, Finding};

use super::args::ProveArgs;
use super::tried::file;

/// Returns the command, quoted for a shell.
pub(super) fn command(args: &ProveArgs, seed: u64, finding: &Finding) -> String {
    let mut words = vec!["oncegate".to_owned(), "prove".to_owned()];
    let mut flag = |name: &str, value: &str| {
        words.push(name.to_owned());
        words.push(quoted(value));
    };
    if let Some(config) = file(args) {
        flag("--config", &config.display().to_string());
    }
    // The key as JSON has all that a key can have.
    let key = args
        .key
        .as_ref()
        .map(|key| serde_json::to_string(key).unwrap_or_default());
    let messages = args.batch_messages.map(|messages| messages.to_string());
    let given = [
        ("--scope", &args.scope),
        ("--handler-exec", &args.handler_exec),
        ("--handler-command", &args.handler_command),
        ("--handler", &args.handler),
        ("--content-type", &args.content_type),
        ("--batch-messages", &messages),
        ("--key", &key),
        ("--route", &args.route),
        ("--witness-command", &args.witness_command),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            flag(name, value);
        }
    }
    flag("--samples", &args.samples.display().to_string());
    if !args.volatile.is_empty() {
        flag("--volatile", &args.volatile.join(","));
    }
    if !args.faults.is_empty() {
        flag("--faults", &names(&args.faults));
    }
    if let Some(store) = &args.store {
        // Without a password, which reports must not have.
        flag("--store", &crate::stores::redacted(store));
    }
    if let Some(brokers) = &args.brokers {
        // Without properties, which may be passwords.
        flag("--brokers", brokers);
    }
    flag("--lease", &format!("{}ms", args.lease.as_millis()));
    if let Some(listen) = args.listen {
        flag("--listen", &listen.to_string());
    }
    flag("--seed", &seed.to_string());
    flag("--round", &finding.round.to_string());
    // Those that were left out on the command line are not among those of the round any more.
    let left_out = [args.leave_out.as_slice(), &finding.left_out].concat();
    if !left_out.is_empty() {
        flag("--leave-out", &names(&left_out));
    }
    if !finding.only_samples.is_empty() {
        let samples: Vec<String> = finding
            .only_samples
            .iter()
            .map(ToString::to_string)
            .collect();
        flag("--only-samples", &samples.join(","));
    }
    words.join(" ")
}

fn names(faults: &[Fault]) -> String {
    faults
        .iter()
        .map(|fault| fault.as_str())
        .collect::<Vec<_>>()
        .join(",")
}

/// The word in single quotes, if it needs any.
pub(super) fn quoted(word: &str) -> String {
    if !word.is_empty()
        && word
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c))
    {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        assert_eq!(quoted("orders.jsonl"), "orders.jsonl");
        assert_eq!(quoted("python3 worker.py"), "'python3 worker.py'");
        assert_eq!(quoted("a'b"), r"'a'\''b'");
        assert_eq!(quoted(""), "''");
    }
}
