//! What is written about metrics, compared with the metrics that there are.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use oncegate::observe::{CATALOGUE, Kind, Metric};

/// The tests of the alert rules, for promtool.
const RULES_TESTS: [&str; 2] = ["rules_test.yml", "rules_late_test.yml"];

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The row of a metric in the table of `docs/OBSERVABILITY.md`.
fn row(metric: &Metric) -> String {
    let kind = match metric.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        _ => "histogram",
    };
    let mut labels: Vec<_> = metric
        .labels
        .iter()
        .map(|label| format!("`{label}`"))
        .collect();
    if let Some(last) = labels.last_mut().filter(|_| !metric.values.is_empty()) {
        let values: Vec<_> = metric
            .values
            .iter()
            .map(|value| format!("`{value}`"))
            .collect();
        last.push_str(&format!(": {}", values.join(", ")));
    }
    format!(
        "| `{}` | {kind} | {} | {} |",
        metric.full_name(),
        labels.join("; "),
        metric.help
    )
}

// invariant: metrics-documented
#[test]
fn the_documented_metrics_are_those_of_the_code() {
    let page = read("docs/OBSERVABILITY.md");
    let documented: Vec<_> = page
        .lines()
        .filter(|line| line.starts_with("| `oncegate_"))
        .collect();
    let coded: Vec<_> = CATALOGUE.iter().map(row).collect();
    assert_eq!(
        documented,
        coded,
        "the table should be:\n{}\n",
        coded.join("\n")
    );
}

// invariant: alert-cannot-fire
#[test]
fn the_documented_alerts_are_those_of_the_rules() {
    let rules = read("monitoring/prometheus/rules.yml");
    let page = read("docs/OBSERVABILITY.md");
    let alerts: BTreeSet<_> = rules
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    let named = page.lines().filter_map(|line| {
        line.strip_prefix("| `Oncegate")
            .and_then(|row| row.split_once('`'))
    });
    let documented: BTreeSet<_> = named.map(|(name, _)| format!("Oncegate{name}")).collect();
    assert_eq!(
        documented
            .iter()
            .map(String::as_str)
            .collect::<BTreeSet<_>>(),
        alerts
    );
    let tested = RULES_TESTS
        .map(|name| read(&format!("monitoring/prometheus/{name}")))
        .concat();
    for alert in alerts {
        let named = format!("alertname: {alert}\n");
        let mut fires = tested.split(&named).skip(1);
        assert!(
            fires.any(|test| test.trim_start().starts_with("exp_alerts:\n")),
            "no test has {alert} fire"
        );
    }
}

/// Each metric that a text of queries names, with the labels that stand in braces behind it.
fn queried(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("oncegate_") {
        let rest = &text[at..];
        // oncegate does not publish what a recording rule makes.
        if text[..at].ends_with("scope:") {
            continue;
        }
        let end = rest
            .find(|c: char| !c.is_ascii_lowercase() && !c.is_ascii_digit() && c != '_')
            .unwrap_or(rest.len());
        let (name, behind) = rest.split_at(end);
        let labels = behind
            .strip_prefix('{')
            .and_then(|behind| behind.split_once('}'))
            .map_or("", |(labels, _)| labels);
        let labels = labels
            .split(',')
            .filter_map(|label| label.split_once(['=', '!']))
            .map(|(label, _)| label.trim());
        found.push((name, labels.collect()));
    }
    found
}

/// Whether a query may name a metric so, with these labels; otherwise why not.
fn exists(name: &str, labels: &[&str]) -> Result<(), String> {
    let known = CATALOGUE.iter().find(|metric| match metric.kind {
        Kind::Counter | Kind::Gauge => metric.full_name() == name,
        _ => ["_bucket", "_count", "_sum"]
            .iter()
            .any(|suffix| format!("{}{suffix}", metric.full_name()) == name),
    });
    let Some(metric) = known else {
        return Err(format!("there is no metric {name}"));
    };
    // Prometheus adds these two.
    let strange = labels
        .iter()
        .find(|label| !metric.labels.contains(label) && !["le", "instance"].contains(label));
    strange.map_or(Ok(()), |label| Err(format!("{name} has no label {label}")))
}

// invariant: metrics-documented
#[test]
fn rules_and_dashboard_query_only_metrics_that_exist() {
    let mut asked = BTreeSet::new();
    for path in [
        "monitoring/prometheus/rules.yml",
        "monitoring/prometheus/rules_test.yml",
        "monitoring/prometheus/rules_late_test.yml",
        "monitoring/grafana/dashboards/oncegate.json",
    ] {
        // In JSON, the quotes of a query's labels are escaped.
        let text = read(path).replace("\\\"", "\"");
        let queried = queried(&text);
        assert!(queried.len() > 10, "{path} asks for something");
        for (name, labels) in queried {
            exists(name, &labels).unwrap_or_else(|error| panic!("{path}: {error}"));
            asked.insert(name.to_owned());
        }
    }
    assert!(asked.len() > 25, "the check reads names: {asked:?}");
    assert!(
        exists("oncegate_claims_total", &["topic"]).is_err()
            && exists("oncegate_claims", &[]).is_err()
    );
}

#[test]
fn dashboard_panels_use_the_chosen_source_and_do_not_overlap() {
    let dashboard: serde_json::Value =
        serde_json::from_str(&read("monitoring/grafana/dashboards/oncegate.json")).unwrap();
    let mut places = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let place = &panel["gridPos"];
        assert!(
            places.insert((place["y"].as_u64(), place["x"].as_u64())),
            "{panel}"
        );
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{target}");
            assert_eq!(
                panel["description"].as_str().map(str::is_empty),
                Some(false),
                "{panel}"
            );
        }
    }
}

fn promtool(arguments: &[&str]) {
    let folder = file("monitoring/prometheus");
    let ended = Command::new("promtool")
        .args(arguments)
        .current_dir(folder)
        .output();
    let ended = ended.expect("promtool is there: scripts/fetch-servers installs it");
    let said = [ended.stdout, ended.stderr]
        .map(|said| String::from_utf8_lossy(&said).into_owned())
        .concat();
    assert!(ended.status.success(), "promtool {arguments:?}: {said}");
}

// invariant: alert-cannot-fire
#[test]
fn the_alert_rules_are_valid_and_fire_when_they_should() {
    promtool(&["check", "rules", "rules.yml"]);
    promtool(&["check", "config", "prometheus.yml"]);
    promtool(&[&["test", "rules"][..], &RULES_TESTS].concat());
}
