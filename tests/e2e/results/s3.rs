//! Results in S3: moto answers like it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use object_store::aws::AmazonS3Builder;
use oncegate::core::key::Scope;
use oncegate::results::{ObjectResults, ResultStore, Sweep};
use oncegate::{Entry, GateError};
use oncegate_testkit::{Bucket, MotoServer, unique};

use super::{answer, complete, conforms, gate, message};

/// The results of one bucket.
fn results(server: &MotoServer, bucket: &Bucket) -> ObjectResults {
    let client = AmazonS3Builder::new()
        .with_endpoint(server.endpoint())
        .with_allow_http(true)
        .with_region("us-east-1")
        .with_access_key_id("anybody")
        .with_secret_access_key("canary-secret")
        .with_bucket_name(bucket.name())
        .with_retry(object_store::RetryConfig {
            max_retries: 0,
            ..Default::default()
        })
        .build();
    ObjectResults::from_object_store(Arc::new(client.unwrap()))
}

#[tokio::test]
async fn s3_conforms() {
    let server = MotoServer::start().await;
    let bucket = Bucket::create(server.endpoint()).await;
    conforms(&results(&server, &bucket)).await;
}

#[tokio::test]
async fn results_come_back_from_s3_and_damage_is_seen() {
    let server = MotoServer::start().await;
    let bucket = Bucket::create(server.endpoint()).await;
    let scope = unique("s3");
    let gate = gate(&scope, results(&server, &bucket));
    let result = complete(&gate, 1).await;
    assert_eq!(answer(&gate, 1).await, Ok(result));
    let objects = bucket.objects().await;
    let name = objects
        .iter()
        .find(|name| !name.ends_with("/opened"))
        .unwrap();
    assert!(name.starts_with(&format!("{scope}/")), "{name}");
    let mut damaged = bucket.read(name).await;
    assert_eq!(
        damaged.len(),
        1_000_003,
        "the byte of the encoding, and a JSON string"
    );
    damaged[7] ^= 1;
    bucket.write(name, &damaged).await;
    let error = answer(&gate, 1).await.unwrap_err();
    assert!(error.contains("damaged"), "{error}");
}

// invariant: result-swept
#[tokio::test]
async fn old_objects_are_swept_and_fresh_ones_stay() {
    let server = MotoServer::start().await;
    let bucket = Bucket::create(server.endpoint()).await;
    let results = results(&server, &bucket);
    let scope = Scope::new(unique("s3")).unwrap();
    // More than one request lists or deletes.
    let put = async |n| {
        results
            .put(&format!("{scope}/ab/old.{n}"), b"old".as_slice().into())
            .await
            .unwrap();
    };
    let old = (0..1_010).map(&put);
    stream::iter(old)
        .buffer_unordered(16)
        .collect::<Vec<()>>()
        .await;
    // Its name begins like the other's.
    results
        .put(&format!("{scope}2/ab/old"), b"old".as_slice().into())
        .await
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(300);
    let age = Duration::from_secs(2);
    let fresh = async || {
        results
            .put(&format!("{scope}/ab/fresh"), b"fresh".as_slice().into())
            .await
            .unwrap();
    };
    let mut deleted = 0;
    let mut late = 0;
    // The server's clock decides, in whole seconds: ask until it finds them old.
    while deleted < 1_010 {
        assert!(
            Instant::now() < deadline,
            "only {deleted} were found to be old"
        );
        let put_at = Instant::now();
        fresh().await;
        let counted = results.sweep(&scope, age, Sweep::Count).await.unwrap().over;
        let swept = results.sweep(&scope, age, Sweep::Delete).await.unwrap();
        assert!(swept.over >= counted, "counting deletes nothing");
        deleted += swept.over;
        // On a slow machine the fresh one may have become old by then.
        late += u64::from(put_at.elapsed() + Duration::from_secs(1) >= age);
    }
    assert!(
        (1_010..=1_010 + late).contains(&deleted),
        "{deleted} were old, {late} of them perhaps"
    );
    if late > 0 {
        fresh().await;
    }
    let left = bucket.objects().await;
    assert_eq!(
        left,
        [
            format!("{scope}/ab/fresh"),
            format!("{scope}/clock"),
            format!("{scope}2/ab/old")
        ]
    );
}

#[tokio::test]
async fn an_outage_of_s3_is_no_answer_and_shows_no_secret() {
    let mut server = MotoServer::start().await;
    let bucket = Bucket::create(server.endpoint()).await;
    let scope = unique("s3");
    let gate = gate(&scope, results(&server, &bucket));
    complete(&gate, 1).await;
    server.kill();
    let error = gate.enter(&message(1)).await.unwrap_err();
    assert!(matches!(error, GateError::Results(_)), "{error:?}");
    for shown in [
        format!("{error}"),
        format!("{error:?}"),
        format!("{gate:?}"),
    ] {
        assert!(!shown.contains("canary"), "{shown}");
    }
    // It comes back without its data, as if the bucket had been emptied.
    server.start_again().await;
    let gone = gate.enter(&message(1)).await;
    let Ok(Entry::Completed(stored)) = gone else {
        panic!("the work is done: {gone:?}")
    };
    assert!(
        stored
            .decode::<String>()
            .unwrap_err()
            .to_string()
            .contains("not in the result store")
    );
}

#[test]
fn a_url_names_bucket_and_prefix() {
    let shown = format!(
        "{:?}",
        ObjectResults::s3("s3://receipts/billing/results").unwrap()
    );
    assert!(
        shown.contains("receipts") && shown.contains("billing/results"),
        "{shown}"
    );
    ObjectResults::s3("receipts").unwrap_err();
}
