//! Workers that are reached by TLS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use oncegate_testkit::{Certificates, until};

use super::raw::{Answer, Asked, RawWorker};
use super::{LIMIT, Running, Stage};

fn certificates() -> Arc<Certificates> {
    Arc::new(Certificates::for_names("DNS:localhost"))
}

/// The setting that trusts their authority.
fn root(certificates: &Certificates) -> String {
    format!("handler.tls_root={}", certificates.file("ca.pem").display())
}

async fn done_by(shown: impl Fn() -> Arc<Certificates> + Send + 'static) -> RawWorker {
    RawWorker::start_tls(shown, |_| Answer::status(200, "", "")).await
}

async fn until_said(stage: &Stage, words: &str) {
    until(words, LIMIT, async || {
        if stage.log().contains(words) {
            Ok(())
        } else {
            Err(stage.log())
        }
    })
    .await;
}

/// By its name: that is what the certificate has, and its address is what it does not.
fn url(worker: &RawWorker) -> String {
    format!("https://localhost:{}/handle", worker.address.port())
}

// invariant: worker-certificate
#[tokio::test]
async fn a_workers_certificate_needs_its_name_and_a_known_authority() {
    let stage = Stage::with_orders(5).await;
    let certificates = certificates();
    let shown = Arc::clone(&certificates);
    let root = root(&certificates);
    let worker = done_by(move || Arc::clone(&shown)).await;
    stage
        .consume(&["--handler", &url(&worker), "--set", &root])
        .await;
    assert_eq!(worker.asked().len(), 5, "{}", stage.log());
    assert!(worker.asked().iter().all(|asked| asked.path == "/handle"));

    // By a name that the certificate does not have, and signed by an authority that this machine
    // does not trust.
    let address = format!("https://{}/handle", worker.address);
    for flags in [
        &["--handler", &address, "--set", &root][..],
        &["--handler", &url(&worker)],
    ] {
        let stage = Stage::with_orders(1).await;
        let running: Running = stage.start(flags);
        until_said(&stage, "not ready yet").await;
        assert!(stage.log().contains("certificate"), "{}", stage.log());
        running.stop().await;
    }
    assert_eq!(
        worker.asked().len(),
        5,
        "a worker with a rejected certificate gets no payload"
    );
}

/// A failure of the endpoint is no failure of a message: counted, it would dead-letter all of them.
// invariant: worker-certificate
#[tokio::test]
async fn an_untrusted_certificate_pauses_and_gives_up_no_message() {
    let stage = Stage::with_orders(120).await;
    let believed = certificates();
    let strange = certificates();
    let root = root(&believed);
    let wrong = Arc::new(AtomicBool::new(true));
    let is_wrong = Arc::clone(&wrong);
    let worker = done_by(move || {
        Arc::clone(if is_wrong.load(SeqCst) {
            &strange
        } else {
            &believed
        })
    })
    .await;
    // Readiness is asked elsewhere, as when a certificate expires while the worker runs.
    let ready = RawWorker::start(|_| Answer::status(200, "", "")).await;
    let set = |what: &str| format!("consumer.{}.{what}", stage.scope);
    let breaker = set("breaker.most=2s");
    let backoff = set("backoff.most=1s");
    let flags = [
        "--handler",
        &url(&worker),
        "--set",
        &root,
        "--set",
        &format!("handler.ready_url={}", ready.url()),
    ];
    let limits = [
        "--set",
        "max_attempts=2",
        "--concurrency",
        "4",
        "--set",
        &breaker,
        "--set",
        &backoff,
    ];
    let running = stage.start(&[&flags[..], &limits].concat());
    until_said(&stage, "the handler is paused").await;
    assert_eq!((stage.letters().await.len(), worker.asked().len()), (0, 0));
    wrong.store(false, SeqCst);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert_eq!(
        (stage.letters().await.len(), worker.asked().len()),
        (0, 120)
    );
}

#[tokio::test]
async fn a_worker_that_demands_a_certificate_gets_no_payload_without() {
    let stage = Stage::with_orders(3).await;
    let certificates = Arc::new(Certificates::for_names("DNS:localhost"));
    let worker =
        RawWorker::start_mutual_tls(Arc::clone(&certificates), |_| Answer::status(200, "", ""))
            .await;
    let file = |of: &Certificates, name: &str| of.file(name).to_str().unwrap().to_owned();
    let address = url(&worker);
    let root = root(&certificates);
    let flags = |certificate: &str, key: &str| {
        let own = [
            "--set",
            &format!("handler.tls_certificate={certificate}"),
            "--set",
            &format!("handler.tls_key={key}"),
        ];
        let all = ["--handler", &address, "--set", &root]
            .into_iter()
            .chain(own);
        all.map(str::to_owned).collect::<Vec<_>>()
    };
    let with = |of: &Certificates| flags(&file(of, "server.pem"), &file(of, "server.key"));

    let right = with(&certificates);
    stage
        .consume(&right.iter().map(String::as_str).collect::<Vec<_>>())
        .await;
    assert_eq!(worker.asked().len(), 3, "{}", stage.log());

    let none = ["--handler", &address, "--set", &root]
        .map(str::to_owned)
        .to_vec();
    for flags in [none, with(&Certificates::for_names("DNS:localhost"))] {
        let stage = Stage::with_orders(1).await;
        let running = stage.start(&flags.iter().map(String::as_str).collect::<Vec<_>>());
        until_said(&stage, "tls_certificate").await;
        running.stop().await;
        assert_eq!(
            stage.letters().await.len(),
            0,
            "a refusal gives up no message"
        );
    }
    assert_eq!(
        worker.asked().len(),
        3,
        "a worker that refuses the client gets no payload"
    );
}

#[tokio::test]
async fn an_expired_certificate_of_a_worker_is_named_as_the_reason() {
    let stage = Stage::with_orders(1).await;
    let certificates = certificates();
    certificates.let_expire();
    let root = root(&certificates);
    let worker = done_by(move || Arc::clone(&certificates)).await;
    let running = stage.start(&["--handler", &url(&worker), "--set", &root]);
    until_said(&stage, "not ready yet").await;
    until_said(&stage, "Expired").await;
    running.stop().await;
    assert_eq!((worker.asked().len(), stage.letters().await.len()), (0, 0));
}

// invariant: rotation-under-load
#[tokio::test]
async fn a_changed_client_certificate_is_used_without_a_restart() {
    let stage = Stage::with_orders(3).await;
    let certificates = certificates();
    let worker =
        RawWorker::start_mutual_tls(Arc::clone(&certificates), |_| Answer::status(200, "", ""))
            .await;
    let folder = tempfile::tempdir().unwrap();
    let show = |of: &Certificates| {
        for name in ["server.pem", "server.key"] {
            let file = folder.path().join(name);
            std::fs::copy(of.file(name), file.with_extension("next")).unwrap();
            std::fs::rename(file.with_extension("next"), file).unwrap();
        }
    };
    show(&Certificates::for_names("DNS:localhost"));
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let certificate = file("server.pem");
    let key = file("server.key");
    let root = root(&certificates);
    let own = [
        "--set",
        &format!("handler.tls_certificate={certificate}"),
        "--set",
        &format!("handler.tls_key={key}"),
    ];
    let running = stage.start(&[&["--handler", &url(&worker), "--set", &root][..], &own].concat());
    until_said(&stage, "tls_certificate").await;
    assert_eq!(
        worker.asked().len(),
        0,
        "the worker does not accept that certificate"
    );
    show(&certificates);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert_eq!(
        (worker.asked().len(), stage.letters().await.len()),
        (3, 0),
        "{}",
        stage.log()
    );
}

/// Consumes with a client's certificate that the worker refuses, until the handler is paused, and
/// then with one that it accepts. Counted, a refusal would dead-letter every message.
async fn a_refused_client_gives_up_no_message(
    batch: &[&str],
    attempts: impl Fn(&Asked) -> Vec<(u64, bool)>,
) {
    const ORDERS: usize = 120;
    let stage = Stage::with_orders(ORDERS).await;
    let accepted = certificates();
    let strange = certificates();
    let worker =
        RawWorker::start_mutual_tls(Arc::clone(&accepted), |_| Answer::status(200, "", "")).await;
    // Readiness is asked elsewhere, as when a certificate expires while the worker runs.
    let ready = RawWorker::start(|_| Answer::status(200, "", "")).await;
    let certificate = stage.path("client.pem");
    let key = stage.path("client.key");
    let install = |certificates: &Certificates| {
        std::fs::copy(certificates.file("server.key"), &key).unwrap();
        std::fs::copy(certificates.file("server.pem"), &certificate).unwrap();
    };
    install(&strange);
    let address = url(&worker);
    let ready = format!("handler.ready_url={}", ready.url());
    let root = root(&accepted);
    let set = |what: &str| format!("consumer.{}.{what}", stage.scope);
    let breaker = set("breaker.most=2s");
    let backoff = set("backoff.most=1s");
    let names = ["--handler", &address, "--set", &root, "--set", &ready];
    let own = [
        format!("handler.tls_certificate={}", certificate.display()),
        format!("handler.tls_key={}", key.display()),
    ];
    let own = ["--set", &own[0], "--set", &own[1]];
    let limits = [
        "--set",
        "max_attempts=2",
        "--concurrency",
        "4",
        "--set",
        &breaker,
        "--set",
        &backoff,
    ];
    let running = stage.start(&[&names[..], &own, &limits, batch].concat());
    until_said(&stage, "the handler is paused").await;
    assert!(
        stage.log().contains("(`tls_certificate`)"),
        "{}",
        stage.log()
    );
    assert_eq!((stage.letters().await.len(), worker.asked().len()), (0, 0));
    install(&accepted);
    stage.until_consumed(&running.group).await;
    running.stop().await;
    assert!(stage.letters().await.is_empty());
    let attempts: Vec<(u64, bool)> = worker.asked().iter().flat_map(attempts).collect();
    assert_eq!(
        attempts,
        [(1, false); ORDERS],
        "a refusal counted as an attempt: {}",
        stage.log()
    );
}

// invariant: worker-certificate
#[tokio::test]
async fn a_message_refused_for_its_client_certificate_has_not_run() {
    a_refused_client_gives_up_no_message(&[], |asked| {
        vec![(asked.attempt().into(), asked.recovered())]
    })
    .await;
}

// invariant: worker-certificate
#[tokio::test]
async fn a_batch_refused_for_its_client_certificate_has_not_run() {
    a_refused_client_gives_up_no_message(&["--batch-messages", "10"], |asked| {
        let messages: Vec<serde_json::Value> = serde_json::from_str(&asked.body).unwrap();
        let attempt = |message: &serde_json::Value| {
            (
                message["attempt"].as_u64().unwrap(),
                message["recovered"].as_bool().unwrap(),
            )
        };
        messages.iter().map(attempt).collect()
    })
    .await;
}
