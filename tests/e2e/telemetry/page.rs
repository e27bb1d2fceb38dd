//! The status page of a running consumer, in headless Chromium (Debian's package `chromium`).

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use axum::extract::Request;
use axum::middleware::{self, Next};
use oncegate::{Attempt, Failure, Message};
use oncegate_testkit::{HttpServer, Redis};
use tokio::process::Command;
use tokio::time::timeout;

use crate::stage::{LIMIT, Stage, id, order};

/// How much of its own time the page gets: a few of its looks.
const PAGE_TIME: &str = "--virtual-time-budget=7000";

/// A screenshot is kept in the file that this variable names: `docs/status-page.png` is one.
const SCREENSHOT: &str = "ONCEGATE_SCREENSHOT";

/// The largest screenshot, in bytes: it is in the repository.
const SCREENSHOT_BYTES_MAX: u64 = 300_000;

/// What the page takes for a second passes within milliseconds here: each answer takes half of a
/// real one, so that its rates are rates.
async fn slowly(request: Request, next: Next) -> axum::response::Response {
    if request.uri().path() == "/status.json" {
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    next.run(request).await
}

/// Has Chromium open the page, and returns what it prints.
async fn chromium(server: &HttpServer, options: &[&str]) -> String {
    let profile = tempfile::tempdir().unwrap();
    let mut command = Command::new("chromium");
    command
        .args([
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ])
        .args(["--window-size=1280,1400", PAGE_TIME])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(options)
        .arg(format!("http://{}/", server.address()))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let ended = timeout(LIMIT, command.output())
        .await
        .expect("Chromium ends");
    let ended = ended.expect("Chromium is there: scripts/fetch-servers installs it");
    assert!(
        ended.status.success(),
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
    String::from_utf8(ended.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_shows_partitions_verdicts_letters_and_promise() {
    let stage = Stage::new("page").await;
    let redis = Redis::shared().await;
    let handler = async |message: Message, attempt: Attempt| {
        match id(&message) {
            7 => return Err(Failure::permanent("no such <script>customer</script>")),
            8 => attempt.cancelled().await,
            _ => {}
        }
        Ok(())
    };
    stage
        .produce(
            (0..200)
                .chain(0..40)
                .map(|n| order(n).partition((n % 3).try_into().unwrap()))
                .collect(),
        )
        .await;
    let running = stage
        .start(redis.url(), handler, |consumer| {
            consumer.stop_deadline(Duration::ZERO)
        })
        .await;
    // All but the one whose handler waits to be cancelled, and the duplicate behind it.
    stage.acked(238).await;
    let page = stage.telemetry.router().layer(middleware::from_fn(slowly));
    let server = HttpServer::start(page).await;

    let dom = chromium(&server, &["--dump-dom"]).await;
    assert!(
        dom.contains("data-shown=\"rates\""),
        "it looked more than once: {dom}"
    );
    for shown in [
        &stage.topic,
        &stage.scope,
        "<caption>Partitions</caption>",
        "<h3>handled</h3><b>198</b>",
        "<h3>duplicates</h3><b>38</b>",
        "up for ",
        "running)",
        "permanent",
        "no such &lt;script&gt;customer",
        "redis ",
        "answers",
        "moments",
    ] {
        assert!(dom.contains(shown), "the page shows {shown:?}: {dom}");
    }
    // Behind it stands the script, which may name what it avoids.
    let (shown, _) = dom.split_once("<script>").unwrap();
    for absent in ["http://", "https://", "NaN", "undefined", "[object"] {
        assert!(!shown.contains(absent), "{absent} is in the page: {shown}");
    }

    let folder = tempfile::tempdir().unwrap();
    let wanted = std::env::var_os(SCREENSHOT);
    let file = wanted.as_deref().map_or_else(
        || folder.path().join("page.png"),
        |file| Path::new(file).to_owned(),
    );
    chromium(&server, &[&format!("--screenshot={}", file.display())]).await;
    let bytes = std::fs::metadata(&file).expect("a screenshot").len();
    assert!(
        (10_000..SCREENSHOT_BYTES_MAX).contains(&bytes),
        "{bytes} bytes"
    );
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_says_that_a_store_is_away() {
    let stage = Stage::new("away").await;
    let mut redis = oncegate_testkit::RedisServer::synced().await;
    let running = stage
        .start(
            redis.url(),
            async |_: Message, _: Attempt| Ok(()),
            |consumer| consumer,
        )
        .await;
    stage.produce(vec![order(1)]).await;
    stage.acked(1).await;
    redis.kill();
    stage.produce(vec![order(2)]).await;
    running.probed(503).await;
    let dom = chromium(&running.server, &["--dump-dom"]).await;
    assert!(dom.contains(">not ready<"), "{dom}");
    assert!(dom.contains("has been failing for"), "{dom}");
    assert!(dom.contains("away for"), "{dom}");
    redis.start_again().await;
    stage.acked(2).await;
    running.stop().await;
}
