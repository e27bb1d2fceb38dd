use super::{FINE, Severity, changed, of, says};

fn with_properties(properties: &str) -> String {
    changed(r#""security.protocol" = "SSL""#, properties)
}

fn with_queue(settings: &str, consumer: &str) -> String {
    let source = format!(
        "source = {{ sqs = {{ queue = \"orders\", region = \"eu-west-1\"{settings} }} }}\n{consumer}"
    );
    let kafka = "source = { kafka = { brokers = [\"b:9092\"], topics = [\"orders\"], properties = { \"security.protocol\" = \"SSL\" } } }\n";
    changed(kafka, &source).replace("{ kafka = \"orders.dead\" }", "{ sqs = \"orders-dead\" }")
}

fn with_store(address: &str, more: &str) -> String {
    changed(
        "url = \"redis://cache:6379\"",
        &format!("url = \"{address}\"\n{more}"),
    )
}

#[test]
fn properties_that_would_fail_later_are_found_here() {
    says(
        &with_properties("security.protocol = \"SSL\""),
        Some(16),
        "quotes: \"security.protocol\"",
    );
    says(
        &with_properties("ssl.ca.location = \"/ca.pem\""),
        Some(16),
        "quotes: \"ssl.ca.location\"",
    );
    says(
        &with_properties("\"sasl.jaas.config\" = \"x\""),
        Some(16),
        "sasl.username and sasl.password",
    );
    says(
        &with_properties("\"max.poll.records\" = 500"),
        Some(16),
        "in_flight_messages",
    );
    says(
        &with_properties("\"compression.type\" = \"gzip\""),
        Some(16),
        "no effect",
    );
    says(
        &with_properties("\"group.instance.id\" = \"billing-0\""),
        Some(16),
        "static_member",
    );
    let fine = changed(
        "topics = [\"orders\"]",
        "topics = [\"orders\"], static_member = \"billing-0\"",
    );
    assert!(of(&fine).findings.all.is_empty(), "{}", of(&fine).render());
}

#[test]
fn what_does_not_fit_together_is_found_where_it_stands() {
    for (line, other, at, words) in [
        (
            "\"7d\"",
            "\"1d\"\nreplay_horizon = \"3d\"",
            10,
            "longer than `retention`",
        ),
        (
            "\"orders.dead\"",
            "\"orders\"",
            21,
            "every letter would come back",
        ),
        (
            "\"security.protocol\" = \"SSL\"",
            "\"enable.auto.commit\" = true",
            16,
            "enable.auto.commit",
        ),
        (
            "lease = \"30s\"",
            "lease = \"10ms\"",
            8,
            "between 100 ms and a day",
        ),
        ("concurrency = 64", "concurrency = 0", 12, "between 1 and"),
        ("[\"orders\"]", "[\"or ders\"]", 16, "is no topic"),
        ("127.0.0.1:8080", "worker:8080", 20, "allow_remote"),
        ("version = 1", "version = 2", 1, "version 1, not 2"),
        ("redis://cache:6379", "mysql://cache", 3, "`mysql`"),
        ("\"order_id\", {", "\"amount\", {", 17, "given twice"),
        ("[consumer.billing]", "[consumer.\"bil ling\"]", 15, "scope"),
        (
            "handler = {",
            "handler = { exec = \"./w\",",
            20,
            "one of `http`, `exec` and `command`",
        ),
        (
            "url = \"redis",
            "response_timeout = \"20s\"\nurl = \"redis",
            3,
            "three times",
        ),
    ] {
        says(&changed(line, other), Some(at), words);
    }
    let second = FINE
        .split_once("[consumer.billing]")
        .unwrap()
        .1
        .replace("[\"orders\"]", "[\"refunds\"]");
    let second = second.replace("topics", "group = \"billing\", topics");
    says(
        &format!("{FINE}\n[consumer.refunds]{second}"),
        Some(24),
        "give it a `group` of its own",
    );
}

#[test]
fn a_journal_in_redis_is_refused_and_one_elsewhere_is_not() {
    let with_journal =
        |url: &str| changed("redis://cache", url).replace("[store]", "[store]\njournal = true");
    let found = of(&with_journal("redis://cache"));
    let journal = found
        .findings
        .all
        .iter()
        .find(|finding| finding.path == "store.journal")
        .expect("a finding");
    assert_eq!(journal.severity, Severity::Error);
    let found = of(&with_journal("postgres://cache"));
    assert!(
        found
            .findings
            .all
            .iter()
            .all(|finding| finding.path != "store.journal"),
        "{}",
        found.render()
    );
}

#[test]
fn times_that_do_not_fit_a_queue_are_found() {
    let fine = of(&with_queue("", "max_run = \"12h\"\n"));
    assert!(fine.findings.all.is_empty(), "{}", fine.render());
    says(
        &with_queue(", visibility = \"10s\"", ""),
        Some(16),
        "shorter than the lease (30s)",
    );
    says(
        &with_queue("", "max_run = \"13h\"\n"),
        Some(17),
        "12 hours after its receive",
    );
    // What is inherited counts, and a topic has no such limits.
    let inherited =
        with_queue("", "").replace("lease = \"30s\"", "lease = \"2m\"\nmax_run = \"13h\"");
    says(&inherited, Some(17), "60s is shorter than the lease (120s)");
    says(&inherited, Some(9), "12 hours after its receive");
    let topic = FINE.replace("lease = \"30s\"", "lease = \"2m\"\nmax_run = \"13h\"");
    assert!(
        of(&topic).findings.all.is_empty(),
        "{}",
        of(&topic).render()
    );
}

#[test]
fn standard_input_has_one_consumer_and_dead_letters_in_a_file() {
    let stdin = FINE
        .replace(
            "source = { kafka = { brokers = [\"b:9092\"], topics = [\"orders\"], properties = { \"security.protocol\" = \"SSL\" } } }",
            "source = { stdin = {} }",
        )
        .replace("dead_letters = { kafka = \"orders.dead\" }", "dead_letters = { file = \"dead.jsonl\" }");
    let loaded = of(&stdin);
    assert!(loaded.findings.all.is_empty(), "{}", loaded.render());
    says(
        &stdin.replace("{ stdin = {} }", "{ stdin = { route = \"\" } }"),
        Some(16),
        "the route of the lines",
    );
    says(
        &stdin.replace("{ file = \"dead.jsonl\" }", "{ kafka = \"dead\" }"),
        Some(21),
        "in a file",
    );
    says(
        &FINE.replace("{ kafka = \"orders.dead\" }", "{ file = \"dead.jsonl\" }"),
        Some(21),
        "only messages of standard input",
    );
    let own = stdin.split_once("[consumer.billing]").unwrap().1;
    says(
        &format!("{stdin}[consumer.refunds]{own}"),
        Some(23),
        "`billing` reads standard input already",
    );
}

#[test]
fn unsupported_or_plain_text_logins_are_found_without_a_server() {
    for (properties, words) in [
        (
            r#""security.protocol" = "SASL_SSL", "sasl.mechanism" = "GSSAPI""#,
            "gssapi",
        ),
        (
            r#""security.protocol" = "SASL_SSL", "sasl.mechanism" = "OAUTHBEARER""#,
            "sasl.oauthbearer.method",
        ),
        (
            r#""sasl.mechanism" = "OAUTHBEARER", "sasl.oauthbearer.method" = "oidc", "sasl.oauthbearer.client.id" = "me""#,
            "sasl.oauthbearer.token.endpoint.url is missing",
        ),
        (
            r#""security.protocol" = "SASL_PLAINTEXT", "sasl.mechanism" = "PLAIN", "sasl.password" = { file = "/none" }"#,
            "plain text",
        ),
    ] {
        says(&with_properties(properties), Some(16), words);
    }
    let token = r#""security.protocol" = "SASL_SSL", "sasl.mechanism" = "OAUTHBEARER", "sasl.oauthbearer.method" = "aws_msk_iam""#;
    let loaded = of(&with_properties(token));
    assert!(loaded.findings.all.is_empty(), "{}", loaded.render());
}

#[test]
fn a_certificate_needs_its_key() {
    let store = changed(
        "[defaults]",
        "tls_certificate = \"/run/secrets/client.pem\"\n[defaults]",
    );
    says(&store, Some(7), "belong together");
    let handler =
        r#"handler = { http = "https://worker/handle", tls_key = "/run/secrets/client.key" }"#;
    let text = changed(
        r#"handler = { http = "http://127.0.0.1:8080/handle" }"#,
        handler,
    );
    says(&text, Some(20), "belong together");
    let program = r#"handler = { exec = "./work", tls_key = "a", tls_certificate = "b" }"#;
    says(
        &changed(
            r#"handler = { http = "http://127.0.0.1:8080/handle" }"#,
            program,
        ),
        Some(20),
        "belongs to `http`",
    );
}

#[test]
fn what_only_a_redis_uses_is_refused_elsewhere() {
    let sentinels = "rediss+sentinel://a,b,c/primary";
    let login =
        "sentinel_user = \"watcher\"\nsentinel_password = { file = \"/run/secrets/sentinel\" }";
    let fine = of(&with_store(
        sentinels,
        &format!("{login}\ndurable_service = true"),
    ));
    assert!(fine.findings.all.is_empty(), "{}", fine.render());
    says(
        &with_store("redis://cache:6379", login),
        Some(4),
        "only a store at redis+sentinel:// has sentinels",
    );
    says(
        &with_store(sentinels, "sentinel_user = \"watcher\""),
        Some(4),
        "it needs `sentinel_password`",
    );
    says(
        &with_store(sentinels, "sentinel_password = \"hunter2\""),
        Some(4),
        "the secret itself",
    );
    says(
        &with_store("postgres://db/once", "durable_service = true"),
        Some(4),
        "only a Redis",
    );
}
