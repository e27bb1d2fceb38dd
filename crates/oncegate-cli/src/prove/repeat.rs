//! The command that plays a round again.

use super::ProveArgs;

/// Returns the command, quoted for a shell.
pub(super) fn command(args: &ProveArgs, seed: u64, round: u64) -> String {
    let mut words = vec!["oncegate".to_owned(), "prove".to_owned()];
    let mut flag = |name: &str, value: &str| {
        words.push(name.to_owned());
        words.push(quoted(value));
    };
    let workers = [
        ("--handler-exec", &args.handler_exec),
        ("--handler-command", &args.handler_command),
        ("--handler", &args.handler),
    ];
    for (name, value) in workers {
        if let Some(value) = value {
            flag(name, value);
        }
    }
    if args.handler.is_some() {
        flag("--content-type", &args.content_type);
    }
    // The key as JSON has all that a key can have.
    flag("--key", &serde_json::to_string(&args.key).unwrap_or_default());
    flag("--samples", &args.samples.display().to_string());
    if !args.volatile.is_empty() {
        flag("--volatile", &args.volatile.join(","));
    }
    if !args.faults.is_empty() {
        let names: Vec<&str> = args.faults.iter().map(|fault| fault.as_str()).collect();
        flag("--faults", &names.join(","));
    }
    flag("--lease", &format!("{}ms", args.lease.as_millis()));
    if let Some(listen) = args.listen {
        flag("--listen", &listen.to_string());
    }
    flag("--seed", &seed.to_string());
    flag("--round", &round.to_string());
    words.join(" ")
}

/// The word in single quotes, if it needs any.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
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
