//! What is refused at start-up, and what is logged.

use std::io;
use std::sync::{Arc, Mutex};

use oncegate::Counters;
use oncegate::source::{Source as _, Terms};
use oncegate::sqs::SqsSource;
use oncegate_testkit::{Moto, Queue, Sqs};

use crate::stage::{Clerk, Stage};

async fn a_queue_that_does_not_exist_is_refused(sqs: &Sqs) {
    let stage = Stage::on(sqs).await;
    for missing in [
        "no-such-queue".to_owned(),
        format!("{}-not", stage.queue.url()),
    ] {
        let source = SqsSource::from_client(sqs.client().clone(), missing.as_str());
        let error = stage
            .start_with(source, Clerk::new(), |consumer| consumer)
            .await
            .fails()
            .await;
        let text = chain(&error);
        assert!(
            text.contains(&missing) && text.contains("does not exist"),
            "{text}"
        );
        let dead = stage.source().dead_letters(missing.as_str());
        let error = stage
            .start_with(stage.source(), Clerk::new(), |consumer| {
                consumer.dead_letters(dead)
            })
            .await;
        let text = chain(&error.fails().await);
        assert!(
            text.contains(&missing) && text.contains("does not exist"),
            "{text}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_does_not_exist_is_refused_on_elasticmq() {
    a_queue_that_does_not_exist_is_refused(&Sqs::shared().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_does_not_exist_is_refused_on_moto() {
    a_queue_that_does_not_exist_is_refused(Moto::shared().await.sqs()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_that_would_come_back_are_refused() {
    let stage = Stage::on(&Sqs::shared().await).await;
    let own = stage.source().dead_letters(stage.queue.url());
    let running = stage
        .start_with(stage.source(), Clerk::new(), |consumer| {
            consumer.dead_letters(own)
        })
        .await;
    let text = chain(&running.fails().await);
    assert!(
        text.contains("every dead letter would come back as a message"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_found_by_its_name_and_by_its_url() {
    let sqs = Sqs::shared().await;
    for name in [Queue::name, Queue::url] {
        let stage = Stage::on(&sqs).await;
        stage.send([7]).await;
        let source = SqsSource::from_client(sqs.client().clone(), name(&stage.queue));
        assert_eq!(source.queue(), stage.queue.name());
        let running = stage
            .start_with(
                source.wait(std::time::Duration::from_secs(1)),
                Clerk::new(),
                |c| c,
            )
            .await;
        running.watched.until("acks", 1).await;
        running.stop().await;
    }
}

/// Returns the log of this thread while a source is opened.
async fn said_at_start(source: &SqsSource, terms: Terms) -> String {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    source.agree(&terms);
    source.open(Arc::new(Counters::default())).await.unwrap();
    drop(guard);
    source
        .close(std::time::Duration::from_secs(5))
        .await
        .unwrap();
    String::from_utf8(log.0.lock().unwrap().clone()).unwrap()
}

#[tokio::test]
async fn a_redrive_policy_before_the_last_attempt_is_warned_of() {
    let stage = Stage::on(&Sqs::shared().await).await;
    let terms = Terms {
        max_attempts: 4,
        ..Terms::default()
    };
    stage.queue.redrive_to(&stage.dead, 4).await;
    let text = said_at_start(&stage.source(), terms).await;
    assert!(
        text.contains("WARN") && text.contains("Set `maxReceiveCount` above 4"),
        "{text}"
    );

    stage.queue.redrive_to(&stage.dead, 5).await;
    let text = said_at_start(&stage.source(), terms).await;
    assert!(
        !text.contains("maxReceiveCount") && text.contains("the queue is open"),
        "{text}"
    );
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
