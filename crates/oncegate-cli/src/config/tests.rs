//! Tests of what is found in a configuration, and where it is shown.

mod checks;

use std::time::Duration;

use oncegate::consumer::BadKeys;

use super::*;

/// A configuration without errors.
const FINE: &str = r#"version = 1
[store]
url = "redis://cache:6379"
password = { file = "/run/secrets/redis" }
durability = { replicas = 1, timeout = "200ms" }

[defaults]
lease = "30s"
retention = "7d"
max_attempts = 10
ordering = "key"
concurrency = 64
on_store_loss = "halt"

[consumer.billing]
source = { kafka = { brokers = ["b:9092"], topics = ["orders"], properties = { "security.protocol" = "SSL" } } }
key = { json = ["order_id", { path = "amount", as = "decimal" }] }
fingerprint = { except = ["sent_at"] }
strictness = "refuse"
handler = { http = "http://127.0.0.1:8080/handle" }
dead_letters = { kafka = "orders.dead" }
"#;

fn loaded(text: &str, variables: &[(&str, &str)], flags: Vec<Setting>, secrets: Secrets) -> Loaded {
    let variables = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let text = Text {
        name: "oncegate.toml".to_owned(),
        text: text.to_owned(),
        folder: None,
    };
    Loaded::of(text, variables, |_| flags, secrets)
}

fn of(text: &str) -> Loaded {
    loaded(text, &[], Vec::new(), Secrets::MayBeLiteral)
}

/// Returns [`FINE`] with one line replaced.
fn changed(line: &str, other: &str) -> String {
    assert!(FINE.contains(line), "{line}");
    FINE.replacen(line, other, 1)
}

#[track_caller]
fn says(text: &str, line: Option<usize>, words: &str) {
    let loaded = of(text);
    let found = loaded
        .findings
        .all
        .iter()
        .any(|finding| finding.line == line && finding.message.contains(words));
    assert!(
        found,
        "{words:?} in line {line:?} is missing in:\n{}",
        loaded.render()
    );
}

#[test]
fn the_documented_shape_is_fine() {
    let loaded = of(FINE);
    assert!(loaded.findings.all.is_empty(), "{}", loaded.render());
    let (name, billing) = loaded.consumers().next().unwrap();
    assert_eq!(name, "billing");
    assert_eq!(
        (billing.runtime.max_attempts, billing.gate.lease),
        (10, Duration::from_secs(30)),
        "inherited"
    );
    assert_eq!(billing.runtime.bad_keys, BadKeys::Refuse);
}

#[test]
fn settings_of_the_library_stand_among_those_of_the_command() {
    let text = changed(
        "topics = [\"orders\"]",
        "topics = [\"orders\"], keep_positions_of_recreated_topics = true",
    );
    let loaded = of(&text);
    assert!(loaded.findings.all.is_empty(), "{}", loaded.render());
    let (_, billing) = loaded.consumers().next().unwrap();
    let source = billing.source.as_ref().unwrap();
    let kafka = source.kafka.as_ref().unwrap();
    assert!(kafka.settings.keep_positions_of_recreated_topics);
    assert_eq!(kafka.settings.commit_interval, Duration::from_secs(1));
}

#[test]
fn what_the_library_refuses_is_found_at_its_setting() {
    says(
        &changed(
            "topics = [\"orders\"]",
            "topics = [\"orders\"], commit_interval = \"1ms\"",
        ),
        Some(16),
        "commit_interval is 1ms",
    );
    let inherited = changed("lease = \"30s\"", "max_large_result = \"2GiB\"");
    says(&inherited, Some(8), "at most 1 GiB");
    let several = changed(
        "concurrency = 64",
        "concurrency = 0\nbreaker = { keys = 1 }",
    );
    says(&several, Some(12), "between 1 and 100,000");
    says(&several, Some(13), "between 2 and 1,000");
}

#[test]
fn all_mistakes_are_found_at_once_by_line_with_a_caret() {
    let text = FINE
        .replace("lease = \"30s\"", "leese = \"30s\"")
        .replace("max_attempts = 10", "max_attempts = \"ten\"")
        .replace("retention = \"7d\"", "retention = 7")
        .replace("as = \"decimal\"", "as = \"decmal\"")
        .replace("strictness = \"refuse\"", "strictness = \"refuze\"");
    let loaded = of(&text);
    let lines: Vec<_> = loaded
        .findings
        .all
        .iter()
        .map(|finding| finding.line)
        .collect();
    assert_eq!(lines, [8, 9, 10, 17, 19].map(Some), "{}", loaded.render());
    let shown = loaded.render();
    let expected = "oncegate.toml:8:1: error: defaults.leese: `leese` is no setting; did you mean `lease`?\n\
                    \x20 |\n8 | leese = \"***\"\n  | ^^^^^";
    assert!(shown.starts_with(expected), "{shown}");
    assert!(
        shown.contains("9 | retention = 7\n  |             ^"),
        "{shown}"
    );
    assert!(shown.contains("with its unit, as \"30s\""), "{shown}");
    assert!(shown.contains("`decmal` is no normaliser"), "{shown}");
    assert!(shown.contains("did you mean `refuse`?"), "{shown}");
}

#[test]
fn a_secret_in_the_wrong_place_is_not_shown() {
    for (line, other) in [
        (
            "password = { file = \"/run/secrets/redis\" }",
            "pasword = \"hunter2\"",
        ),
        (
            "password = { file = \"/run/secrets/redis\" }",
            "password = \"hunter2",
        ),
        (
            "durability = { replicas = 1, timeout = \"200ms\" }",
            "durability = \"redis://:hunter2@cache\"",
        ),
        ("\"redis://cache:6379\"", "\" redis://user:hunter2@cache\""),
        ("\"redis://cache:6379\"", "\"user:hunter2@cache:6379\""),
        ("\"b:9092\"", "\"billing:hunter2@b:9092\""),
    ] {
        let shown = of(&changed(line, other));
        assert!(shown.findings.has_errors(), "{other}");
        assert!(!shown.render().contains("hunter2"), "{}", shown.render());
        assert!(
            !format!("{:?}", shown.explain()).contains("hunter2"),
            "{other}"
        );
    }
}

#[test]
fn what_is_no_toml_is_said_with_its_place() {
    let loaded = of("version = 1\n[store\nurl = 1\n");
    assert_eq!(loaded.findings.all.len(), 1);
    assert_eq!(loaded.findings.all[0].line, Some(2));
}

#[test]
fn what_must_be_there_is_missed_unless_it_was_there_and_wrong() {
    let loaded = of("[consumer.billing]\nkey = 7\n");
    let missing: Vec<&str> = loaded
        .findings
        .all
        .iter()
        .map(|finding| finding.path.as_str())
        .collect();
    assert!(
        missing.contains(&"store.url") && missing.contains(&"consumer.billing.source"),
        "{missing:?}"
    );
    assert_eq!(
        missing.iter().filter(|path| path.ends_with(".key")).count(),
        1,
        "{}",
        loaded.render()
    );
}

#[test]
fn environment_and_flags_override_the_file_and_errors_name_them() {
    let variables = [
        ("ONCEGATE_CONSUMER__BILLING__LEASE", "60s"),
        ("ONCEGATE_CONSUMER__BILLING__CONCURRENCY", "8"),
        (
            "ONCEGATE_CONSUMER__BILLING__SOURCE__KAFKA__PROPERTIES__SASL_PASSWORD",
            "hunter2",
        ),
        ("ONCEGATE_STORE", "not a setting: it has no two underscores"),
    ];
    let flag = Setting {
        flag: "--concurrency".to_owned(),
        path: ["consumer", "billing", "concurrency"]
            .map(str::to_owned)
            .into(),
        value: "4".to_owned(),
    };
    let loaded = loaded(FINE, &variables, vec![flag], Secrets::MayBeLiteral);
    let (_, billing) = loaded.consumers().next().unwrap();
    assert_eq!(billing.gate.lease, Duration::from_secs(60));
    assert_eq!(billing.runtime.concurrency, 4);
    assert!(!loaded.findings.has_errors(), "{}", loaded.render());
    let explained = loaded.explain();
    let origin = |path: &str| {
        let one = explained
            .iter()
            .find(|one| one.path == path)
            .unwrap_or_else(|| panic!("{path}: {explained:#?}"));
        (one.value.as_str(), one.origin.as_str())
    };
    assert_eq!(
        origin("consumer.billing.lease"),
        ("\"60s\"", "ONCEGATE_CONSUMER__BILLING__LEASE")
    );
    assert_eq!(
        origin("consumer.billing.concurrency"),
        ("4", "--concurrency")
    );
    assert_eq!(
        origin("consumer.billing.retention"),
        ("\"7d\"", "oncegate.toml:9")
    );
    assert_eq!(origin("consumer.billing.max_run"), ("15m", "default"));
    assert_eq!(origin("consumer.billing.breaker.share"), ("0.5", "default"));
    assert!(!format!("{explained:?}").contains("hunter2"));

    let wrong = super::tests::loaded(
        FINE,
        &[("ONCEGATE_CONSUMER__BILLING__LEESE", "1s")],
        Vec::new(),
        Secrets::MayBeLiteral,
    );
    let shown = wrong.render();
    assert!(
        shown.starts_with("ONCEGATE_CONSUMER__BILLING__LEESE: error: ")
            && shown.contains("`lease`"),
        "{shown}"
    );
}

#[test]
fn a_variable_means_the_consumer_whatever_its_case_and_dashes() {
    let text = FINE.replace("[consumer.billing]", "[consumer.Billing-EU]");
    let loaded = loaded(
        &text,
        &[("ONCEGATE_CONSUMER__BILLING_EU__LEASE", "2m")],
        Vec::new(),
        Secrets::MayBeLiteral,
    );
    let consumers: Vec<_> = loaded.consumers().collect();
    assert_eq!(consumers.len(), 1);
    assert_eq!(consumers[0].1.gate.lease, Duration::from_secs(120));
}

#[test]
fn a_secret_in_the_file_is_reported_and_never_shown() {
    let text = changed("{ file = \"/run/secrets/redis\" }", "\"hunter2\"");
    for (secrets, severity) in [
        (Secrets::MayBeLiteral, Severity::Warning),
        (Secrets::MustBeElsewhere, Severity::Error),
    ] {
        let loaded = loaded(&text, &[], Vec::new(), secrets);
        let [finding] = loaded.findings.all.as_slice() else {
            panic!("{}", loaded.render())
        };
        assert_eq!((finding.severity, finding.line), (severity, Some(4)));
        assert!(!loaded.render().contains("hunter2"), "{}", loaded.render());
        assert!(!format!("{:?}", loaded.config).contains("hunter2"));
    }
    let in_url = changed("redis://cache", "redis://me:hunter2@cache");
    let loaded = of(&in_url);
    assert!(
        loaded.render().contains("take it out") && !loaded.render().contains("hunter2"),
        "{}",
        loaded.render()
    );
}

#[test]
fn a_password_in_the_address_of_a_registry_is_reported() {
    let line = "strictness = \"refuse\"";
    let format = "format = { registry = \"http://me:hunter2@registry:8081\" }";
    let text = changed(line, &format!("{line}\n{format}"));
    for (secrets, severity) in [
        (Secrets::MayBeLiteral, Severity::Warning),
        (Secrets::MustBeElsewhere, Severity::Error),
    ] {
        let loaded = loaded(&text, &[], Vec::new(), secrets);
        let [finding] = loaded.findings.all.as_slice() else {
            panic!("{}", loaded.render())
        };
        assert_eq!(finding.severity, severity);
        assert!(loaded.render().contains("an address contains a password"));
        assert!(!loaded.render().contains("hunter2"), "{}", loaded.render());
        assert!(!format!("{:?}", loaded.config).contains("hunter2"));
    }
}

#[test]
fn every_setting_is_in_the_table_with_a_meaning() {
    let table = table::markdown();
    for row in table.lines().skip(2) {
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        assert!(!cells[2].is_empty() && !cells[4].is_empty(), "{row}");
    }
    assert!(
        table.contains("| `consumer.NAME.lease` | time | `30s` |"),
        "{table}"
    );
    assert!(
        table.contains("| `consumer.NAME.source.kafka.topics` | names |"),
        "{table}"
    );
}
