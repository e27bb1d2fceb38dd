//! Payloads in S3, where Amazon's extended client for Python has put them. moto has both services.

use std::path::Path;
use std::time::Duration;

use aws_config::SdkConfig;
use aws_sdk_sqs::config::{Credentials, Region, SharedCredentialsProvider};
use oncegate::admin::dead_letter_reader::DeadLetterReader as _;
use oncegate::admin::{Redrive, Wanted};
use oncegate::consumer::Monitor;
use oncegate::health::{Health, Reason};
use oncegate::sqs::{S3Payloads, SqsDeadLetterReader};
use oncegate::{Attempt, Consumer, Failure, Message};
use oncegate_testkit::{Bucket, Moto, Proxy, ProxyMode as Mode, aws_python, until};

use crate::stage::{Book, Clerk, Stage, body, id, receives};

/// The longest wait for a judgement about health.
const LIMIT: Duration = Duration::from_secs(240);

/// A queue, and a bucket for its payloads.
struct Place {
    stage: Stage,
    bucket: Bucket,
    endpoint: String,
}

impl Place {
    async fn new() -> Self {
        let moto = Moto::shared().await;
        Self::of(Stage::on(moto.sqs()).await, &moto).await
    }

    async fn of(stage: Stage, moto: &Moto) -> Self {
        let endpoint = moto.endpoint().to_owned();
        Self {
            stage,
            bucket: Bucket::create(&endpoint).await,
            endpoint,
        }
    }

    /// Sends these bodies by way of S3.
    async fn send(&self, more: &[&str], bodies: &[String]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("sqs/extended_client.py");
        let sent = tokio::process::Command::new(aws_python())
            .arg(script)
            .args([&self.endpoint, self.stage.queue.url(), self.bucket.name()])
            .args(bodies)
            .args(more)
            .output();
        let sent = sent.await.unwrap();
        assert!(
            sent.status.success(),
            "{}",
            String::from_utf8_lossy(&sent.stderr)
        );
    }

    /// Reads from its bucket, through the server at this address.
    fn payloads(&self, endpoint: &str) -> S3Payloads {
        let login = Credentials::new("anybody", "canary-secret", None, None, "a test");
        let config = SdkConfig::builder()
            .credentials_provider(SharedCredentialsProvider::new(login))
            .region(Region::from_static("us-east-1"))
            .build();
        S3Payloads::new([self.bucket.name()])
            .config(config)
            .endpoint_url(endpoint)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payload_in_s3_is_charged_once_and_its_letter_points_there() {
    let place = Place::new().await;
    // Duplicates: each send has an object, and so a pointer, of its own. One comes without S3.
    place.send(&[], &[body(1), body(2), body(1), body(3)]).await;
    place.stage.send([2]).await;
    assert_eq!(place.bucket.objects().await.len(), 4);
    let book = Book::new();
    let lines = book.clone();
    let handler = move |message: Message, _: Attempt| {
        let lines = lines.clone();
        async move {
            let id = id(&message)?;
            assert_eq!(message.payload(), body(id).as_bytes());
            lines.write(format!("charge {id}"));
            if id == 3 {
                return Err(Failure::permanent("closed"));
            }
            Ok(())
        }
    };
    let source = || {
        place
            .stage
            .source()
            .s3_payloads(place.payloads(&place.endpoint))
    };
    let running = place
        .stage
        .start_with(source(), handler, |consumer| consumer)
        .await;
    running.watched.until("acks", 5).await;
    running.stop().await;
    let mut charges = book.lines();
    charges.sort_unstable();
    assert_eq!(charges, ["charge 1", "charge 2", "charge 3"]);

    // The letter is as small as its message, and has its way back.
    let sqs = Moto::shared().await.sqs().clone();
    let mut letters =
        SqsDeadLetterReader::from_client(sqs.client().clone(), place.stage.dead.url());
    letters.open().await.unwrap();
    let redrive = Redrive::new(std::sync::Arc::new(place.stage.store().await));
    let redriven = redrive
        .run(&mut letters, |_| Wanted::Yes, |_| {})
        .await
        .unwrap();
    letters.close().await.unwrap();
    assert_eq!(redriven.sent, 1);
    let clerk = Clerk::new();
    let running = place
        .stage
        .start_with(source(), clerk.clone(), |consumer| consumer)
        .await;
    running.watched.until("acks", 1).await;
    running.stop().await;
    assert_eq!(clerk.book.lines(), ["charge 3"]);
    assert_eq!(place.bucket.objects().await.len(), 4, "nothing was deleted");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_read_is_buried_as_it_came() {
    let place = Place::new().await;
    let bucket = place.bucket.name();
    let pointer = |class: &str, bucket: &str, key: &str| {
        format!(
            r#"["software.amazon.payloadoffloading.{class}",{{"s3BucketName":"{bucket}","s3Key":"{key}"}}]"#
        )
    };
    place.bucket.write("large", &[b' '; 1_001]).await;
    place
        .bucket
        .write("fits", format!("{:1000}", body(1)).as_bytes())
        .await;
    let bad = [
        (
            pointer("PayloadS3Pointer", bucket, "missing"),
            "that exists",
        ),
        (
            pointer("PayloadS3Pointer", "others", "fits"),
            "a bucket that the source's `s3_payloads` name",
        ),
        (
            pointer("PayloadS3Pointer", bucket, "large"),
            "not larger than the source's `s3_payloads` allow",
        ),
        (
            pointer("PayloadS3Pointer", bucket, "../fits"),
            "a pointer with `s3BucketName` and `s3Key`",
        ),
        (
            pointer("PayloadS3Pointer", bucket, "fits").replace("s3Key", "key"),
            "a pointer with",
        ),
        // No pointer at all: the payload is JSON without the fields of the key.
        (pointer("Another", bucket, "fits"), ""),
    ];
    let good = pointer("PayloadS3Pointer", bucket, "fits");
    place
        .stage
        .queue
        .send(bad.iter().map(|(body, _)| body.clone()).chain([good]))
        .await;
    let clerk = Clerk::new();
    let source = place
        .stage
        .source()
        .s3_payloads(place.payloads(&place.endpoint).max_bytes(1_000));
    let running = place
        .stage
        .start_with(source, clerk.clone(), |consumer| consumer)
        .await;
    running.watched.until("acks", bad.len() as u64 + 1).await;
    let watched = running.stop().await;
    assert_eq!(clerk.book.lines(), ["charge 1"]);
    assert_eq!(watched.get("dead_letters", "bad_key"), bad.len() as u64);
    let letters = place.stage.dead.take_all().await;
    assert_eq!(letters.len(), bad.len());
    for letter in letters {
        let body = letter.body.unwrap();
        let (_, why) = bad
            .iter()
            .find(|(bad, _)| *bad == body)
            .unwrap_or_else(|| panic!("changed: {body}"));
        let attributes = letter.message_attributes.unwrap();
        let reason = attributes["oncegate-reason"].string_value().unwrap();
        assert!(reason.contains(why), "{body}: {reason}");
    }
}

async fn until_health(monitor: &Monitor, what: &str, so: impl Fn(&Health) -> bool + Send + Sync) {
    until(what, LIMIT, async || {
        let health = Health::of(&monitor.status());
        if so(&health) {
            Ok(())
        } else {
            Err(health.to_string())
        }
    })
    .await;
}

fn waits_for_payload(health: &Health) -> bool {
    health.reasons().iter().any(
        |reason| matches!(reason, Reason::SourceFails { operation, .. } if operation == "payload"),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_wait_while_s3_is_away_and_others_go_on() {
    let place = Place::new().await;
    let proxy = Proxy::before_address(place.endpoint.trim_start_matches("http://")).await;
    let source = || {
        let endpoint = format!("http://{}", proxy.address());
        place.stage.source().s3_payloads(place.payloads(&endpoint))
    };
    proxy.set(Mode::Refuse);
    place.send(&[], &[body(1)]).await;
    let clerk = Clerk::new();
    let mut monitor = None;
    let watch = |consumer: Consumer| {
        monitor = Some(consumer.monitor());
        consumer
    };
    let running = place.stage.start_with(source(), clerk.clone(), watch).await;
    let monitor = monitor.unwrap();
    until_health(&monitor, "unready", |health| {
        waits_for_payload(health) && !health.is_ready()
    })
    .await;
    // One that needs nothing from S3.
    place.stage.send([2]).await;
    running.watched.until("acks", 1).await;
    // A stop does not wait for S3: the message goes back to the queue.
    let watched = running.stop().await;
    assert_eq!(clerk.book.lines(), ["charge 2"]);
    assert_eq!(watched.total("dead_letters"), 0);
    place
        .stage
        .queue
        .until("returned", |depth| depth.visible == 1)
        .await;

    let book = Book::new();
    let mut monitor = None;
    let lines = book.clone();
    let handler = move |message: Message, _: Attempt| {
        let lines = lines.clone();
        async move {
            assert!(receives(&message) >= 2, "it was not returned");
            lines.write(format!("charge {}", id(&message)?));
            Ok::<(), Failure>(())
        }
    };
    let watch = |consumer: Consumer| {
        monitor = Some(consumer.monitor());
        consumer
    };
    let running = place.stage.start_with(source(), handler, watch).await;
    let monitor = monitor.unwrap();
    until_health(&monitor, "unready again", |health| {
        waits_for_payload(health) && !health.is_ready()
    })
    .await;
    proxy.set(Mode::Pass);
    running.watched.until("acks", 1).await;
    until_health(&monitor, "ready", Health::is_ready).await;
    running.stop().await;
    assert_eq!(book.lines(), ["charge 1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_keeps_its_order_whether_payloads_are_in_s3_or_not() {
    let moto = Moto::shared().await;
    let place = Place::of(Stage::fifo_on(moto.sqs()).await, &moto).await;
    place.send(&["--group", "g"], &[body(1), body(2)]).await;
    place.stage.queue.send_to_group("g", [body(3)]).await;
    place.send(&["--group", "g2"], &[body(4)]).await;
    let clerk = Clerk::new();
    let source = place
        .stage
        .source()
        .s3_payloads(place.payloads(&place.endpoint));
    // One at a time: moto gives one group to two receives at once, which SQS never does.
    let running = place
        .stage
        .start_with(source, clerk.clone(), |consumer| consumer.concurrency(1))
        .await;
    running.watched.until("acks", 4).await;
    running.stop().await;
    let of_group: Vec<_> = clerk
        .book
        .lines()
        .into_iter()
        .filter(|line| line != "charge 4")
        .collect();
    assert_eq!(of_group, ["charge 1", "charge 2", "charge 3"]);
}
