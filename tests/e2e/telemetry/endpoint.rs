//! `/metrics`, `/healthz` and `/readyz` of a running consumer.

use std::collections::BTreeSet;

use oncegate::observe::{CATALOGUE, Kind, Metric};
use oncegate::telemetry::Telemetry;
use oncegate::{Attempt, Failure, Message};
use oncegate_testkit::{HttpClient, HttpServer, Redis, RedisServer, Sent};

use crate::stage::{Stage, id, order};

/// Returns the metrics of Prometheus' text, from its `# TYPE` lines.
fn types(text: &str) -> BTreeSet<(String, String)> {
    let typed = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    typed
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect()
}

/// The series after the messages below, and their values.
const EXPECTED: [(&str, f64); 17] = [
    (
        r#"oncegate_handler_runs_total{scope="SCOPE",outcome="succeeded"}"#,
        9.0,
    ),
    (
        r#"oncegate_handler_runs_total{scope="SCOPE",outcome="failed"}"#,
        1.0,
    ),
    (
        r#"oncegate_handler_runs_total{scope="SCOPE",outcome="gave_up"}"#,
        1.0,
    ),
    (r#"oncegate_retries_total{scope="SCOPE"}"#, 1.0),
    (
        r#"oncegate_dead_letters_total{scope="SCOPE",cause="permanent"}"#,
        1.0,
    ),
    (r#"oncegate_acks_total{scope="SCOPE"}"#, 15.0),
    (r#"oncegate_handler_seconds_count{scope="SCOPE"}"#, 11.0),
    (r#"oncegate_message_age_seconds_count{scope="SCOPE"}"#, 9.0),
    (r#"oncegate_completions_total{scope="SCOPE"}"#, 9.0),
    (r#"oncegate_result_bytes_count{scope="SCOPE"}"#, 9.0),
    (
        r#"oncegate_result_bytes_bucket{scope="SCOPE",le="64"}"#,
        9.0,
    ),
    (
        r#"oncegate_record_retention_seconds{scope="SCOPE"}"#,
        604_800.0,
    ),
    (r#"oncegate_lease_remaining_seconds{scope="SCOPE"}"#, 30.0),
    // What has not happened is zero, not absent: an alert would miss the first time.
    (
        r#"oncegate_extra_runs_total{scope="SCOPE",cause="lease_lost"}"#,
        0.0,
    ),
    (r#"oncegate_store_losses_total{scope="SCOPE"}"#, 0.0),
    (r#"oncegate_store_up{scope="SCOPE"}"#, 1.0),
    (r#"oncegate_live{consumer="SCOPE"}"#, 1.0),
];

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_is_counted_by_scope_and_kind() {
    let stage = Stage::new("metrics").await;
    let redis = Redis::shared().await;
    let handler = async |message: Message, attempt: Attempt| match id(&message) {
        1 if attempt.number() == 1 => Err(Failure::retry("not yet")),
        2 => Err(Failure::permanent("never")),
        _ => Ok(()),
    };
    stage
        .produce((0..10).chain(0..5).map(order).collect())
        .await;
    let running = stage.start(redis.url(), handler, |consumer| consumer).await;
    stage.acked(15).await;

    let scope = &stage.scope;
    for (series, expected) in EXPECTED {
        let series = series.replace("SCOPE", scope.as_str());
        assert_eq!(
            running.metric(&series).await,
            Some(expected),
            "{series}\n{}",
            running.get("/metrics").await.1
        );
    }
    let buckets = format!("oncegate_message_age_seconds_bucket{{scope=\"{scope}\",le=\"60\"}}");
    assert!(
        running.metric(&buckets).await.is_some(),
        "the alert rules count this bucket"
    );
    running.stop().await;
}

// invariant: metrics-documented
#[tokio::test(flavor = "multi_thread")]
async fn every_published_metric_is_in_the_catalogue_with_its_kind() {
    let stage = Stage::new("catalogue").await;
    let redis = Redis::shared().await;
    stage.produce((0..3).map(order).collect()).await;
    let running = stage
        .start(
            redis.url(),
            async |_: Message, _: Attempt| Ok(()),
            |consumer| consumer,
        )
        .await;
    stage.acked(3).await;
    let (status, text) = running.get("/metrics").await;
    assert_eq!(status, 200);
    let kind = |metric: &Metric| match metric.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        _ => "histogram",
    };
    let catalogued: BTreeSet<_> = CATALOGUE
        .iter()
        .map(|metric| (metric.full_name(), kind(metric).to_owned()))
        .collect();
    let published = types(&text);
    assert!(
        published.is_subset(&catalogued),
        "{:?}",
        published.difference(&catalogued)
    );
    // Gauges and histograms are published once they have a value, and no relay publishes here. Of
    // the counters, `answers` and `source_events` have labels that are not listed.
    let missing = catalogued
        .difference(&published)
        .filter(|(_, kind)| kind != "gauge");
    let missing: Vec<_> = missing.map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        missing,
        [
            "oncegate_answers_total",
            "oncegate_outbox_age_seconds",
            "oncegate_source_events_total"
        ]
    );
    for (name, _) in &published {
        let help = text
            .lines()
            .find(|line| line.starts_with(&format!("# HELP {name} ")));
        assert!(
            help.is_some_and(|help| help.len() > name.len() + 10),
            "{name} has no description"
        );
    }
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_outage_makes_it_unready_with_a_reason_yet_alive() {
    let stage = Stage::new("probes").await;
    let mut redis = RedisServer::synced().await;
    let running = stage
        .start(
            redis.url(),
            async |_: Message, _: Attempt| Ok(()),
            |consumer| consumer,
        )
        .await;
    assert_eq!(running.probed(200).await, r#"{"ok":true,"reasons":[]}"#);
    redis.kill();
    stage.produce(vec![order(1)]).await;
    let said: serde_json::Value = serde_json::from_str(&running.probed(503).await).unwrap();
    assert_eq!(said["reasons"][0]["reason"], "store_away", "{said}");
    assert_eq!(said["reasons"][0]["consumer"], stage.scope);
    let words = said["reasons"][0]["words"].as_str().unwrap();
    assert!(
        words.contains("store") && words.contains(&stage.scope),
        "{words}"
    );
    let (live, why) = running.get("/healthz").await;
    assert_eq!(live, 200, "no restart would help: {why}");
    let scope = &stage.scope;
    assert_eq!(
        running
            .metric(&format!("oncegate_store_up{{scope=\"{scope}\"}}"))
            .await,
        Some(0.0)
    );
    let paused = format!("oncegate_paused{{consumer=\"{scope}\",cause=\"store_away\"}}");
    assert_eq!(running.metric(&paused).await, Some(1.0));
    redis.start_again().await;
    stage.acked(1).await;
    running.probed(200).await;
    assert_eq!(running.metric(&paused).await, Some(0.0), "it is over");
    running.stop().await;
}

/// A page of another site, under a name that it lets resolve to this address, must read nothing
/// here.
#[tokio::test(flavor = "multi_thread")]
async fn the_page_answers_only_under_known_names_and_probes_under_any() {
    let telemetry = Telemetry::prometheus().unwrap();
    let server = HttpServer::start(telemetry.router_for(["status.internal"])).await;
    let client = HttpClient::http1(server.address());
    let page = ["/", "/status.json"];
    let probes = ["/metrics", "/healthz", "/readyz"];
    for (host, of_page) in [
        ("127.0.0.1:9464", 200),
        ("localhost", 200),
        ("status.internal", 200),
        ("evil.example", 421),
    ] {
        for (paths, code) in [(&page[..], of_page), (&probes, 200)] {
            for path in paths {
                let headers = [("host", host)];
                let sent = Sent::post(path, "", "")
                    .method("GET")
                    .unkeyed()
                    .headers(&headers);
                assert_eq!(
                    client.send(sent).await.status.as_u16(),
                    code,
                    "{path} of {host}"
                );
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_programs_own_recorder_gets_the_metrics_and_no_endpoint() {
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let rendered = recorder.handle();
    let telemetry = Telemetry::with_recorder(recorder);
    let observer: &dyn oncegate::Observer = &telemetry;
    observer.observe(oncegate::Event::CompleteLost { scope: "billing" });
    assert!(
        rendered
            .render()
            .contains("oncegate_complete_lost_total{scope=\"billing\"} 1"),
        "{}",
        rendered.render()
    );
    let server = HttpServer::start(telemetry.router()).await;
    let client = HttpClient::http1(server.address());
    let metrics = client
        .send(Sent::post("/metrics", "", "").method("GET").unkeyed())
        .await;
    assert_eq!(metrics.status.as_u16(), 404, "the program serves its own");
}
