//! `oncegate key`.

use super::oncegate;

const ORDER: &[u8] = br#"{"order_id":"A-7","amount":10,"card":"visa-of-alice"}"#;

#[tokio::test]
async fn a_key_is_explained_as_the_published_vectors_have_it() {
    let arguments = [
        "key", "--key", "order_id", "--scope", "billing", "--route", "orders",
    ];
    let answer = oncegate(&arguments, ORDER).await;
    answer.ended(0);
    assert_eq!(answer.line("scope"), "scope billing");
    assert_eq!(answer.line("field"), r#"field order_id = "A-7""#);
    assert_eq!(answer.line("digest"), "digest UPt7KTwTETF9dZLHdE-MbA");
    assert_eq!(
        answer.line("store key"),
        "store key billing:UPt7KTwTETF9dZLHdE-MbA"
    );
    assert_eq!(answer.err, "");
    assert!(
        !answer.out.contains("visa-of-alice"),
        "only what the key is made of is shown"
    );
}

#[tokio::test]
async fn the_same_as_a_document() {
    let arguments = [
        "key", "--key", "order_id", "--scope", "billing", "--route", "orders", "--json",
    ];
    let document = oncegate(&arguments, ORDER).await.ended(0).json();
    assert_eq!(document["schema"], "oncegate.key/1");
    assert_eq!(document["store_key"], "billing:UPt7KTwTETF9dZLHdE-MbA");
    assert!(
        document["canonical_hex"]
            .as_str()
            .unwrap()
            .starts_with("014b0000000762696c6c696e67")
    );
}

#[tokio::test]
async fn a_payload_may_come_from_a_file_and_the_key_from_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("order.json");
    std::fs::write(&path, ORDER).unwrap();
    let arguments = ["key", "--key", "amount:decimal", path.to_str().unwrap()];
    let answer = oncegate(&arguments, b"").await;
    assert_eq!(answer.ended(0).line("field"), "field amount = 1e1");
    answer.says("without --scope").says("without --route");

    let header = oncegate(
        &["key", "--key", "header:x-id", "--header", "x-id=7=8"],
        b"",
    )
    .await;
    assert_eq!(header.ended(0).line("header"), r#"header x-id = b"7=8""#);
    let message_key = oncegate(&["key", "--key", "message-key", "--message-key", "A"], b"").await;
    assert_eq!(
        message_key.ended(0).line("message key"),
        r#"message key b"A""#
    );
}

#[tokio::test]
async fn a_payload_without_a_key_is_bad_input_and_is_not_repeated() {
    for (payload, says) in [
        (
            &b"{\"card\":\"visa-of-alice\"}"[..],
            "key field `order_id` is missing",
        ),
        (b"{\"card\":\"visa-of-alice\",\"order_id\":null}", "is null"),
        (b"{\"card\":\"visa-of-alice\"", "not valid JSON"),
        (b"\xffvisa-of-alice", "payload is not"),
        (b"", "payload is not"),
    ] {
        let answer = oncegate(&["key", "--key", "order_id"], payload).await;
        answer.ended(65).says(says);
        assert_eq!(answer.out, "");
        assert!(!answer.err.contains("visa-of-alice"));
    }
    oncegate(&["key", "--key", "order_id", "/no/such/file"], b"")
        .await
        .ended(65)
        .says("/no/such/file");
}

#[tokio::test]
async fn arguments_that_make_no_sense_are_usage() {
    oncegate(&["key", "--key", "a,,b"], ORDER)
        .await
        .ended(2)
        .says("empty part");
    oncegate(&["key", "--key", "a:upper"], ORDER)
        .await
        .ended(2)
        .says("`upper` is no normaliser");
    oncegate(&["key", "--key", "a", "--scope", "a b"], ORDER)
        .await
        .ended(2)
        .says("not allowed");
    oncegate(&["key"], ORDER).await.ended(2).says("--key");
    oncegate(&[], b"").await.ended(2);
    assert!(
        oncegate(&["--help"], b"")
            .await
            .ended(0)
            .out
            .contains("Exit codes")
    );
}

/// The forms that the help and the documentation show.
#[tokio::test]
async fn a_key_may_be_json_with_a_tenant_and_with_normalisers() {
    let payload =
        br#"{"order_id":"A-7","taken_at":"2026-11-23T04:00:00.5+01:00","email":" Ada@x ","sent_at":1}"#;
    let key = |spec: &'static str| {
        let common = [
            "key",
            "--scope",
            "billing",
            "--route",
            "orders",
            "--json",
            "--header",
            "x-tenant=acme",
        ];
        async move {
            oncegate(&[&common[..], &["--key", spec]].concat(), payload)
                .await
                .ended(0)
                .json()
        }
    };
    let words = key("email:trim:lowercase,taken_at:timestamp-seconds").await;
    let json = r#"{"json":[{"path":"email","as":["trim","lowercase"]},{"path":"taken_at","as":"timestamp-seconds"}]}"#;
    assert_eq!(words["store_key"], key(json).await["store_key"]);
    let canonical = words["canonical"].to_string();
    assert!(
        canonical.contains("instant 1795402800s") && canonical.contains("ada@x"),
        "{canonical}"
    );

    let by_header = key(r#"{"json":["order_id"],"tenant":{"header":"x-tenant"}}"#).await;
    assert!(
        by_header["canonical"].to_string().contains("acme"),
        "{by_header}"
    );
    let by_field = key(r#"{"json":["order_id"],"tenant":{"json":"email"}}"#).await;
    let without = key("order_id").await;
    let keys = [by_header, by_field, without].map(|document| document["store_key"].to_string());
    assert_eq!(
        keys.iter().collect::<std::collections::BTreeSet<_>>().len(),
        3,
        "a tenant is a part of the key"
    );

    for command in [
        "key", "run", "replay", "estimate", "inspect", "reset", "prove",
    ] {
        let help = oncegate(&[command, "--help"], b"").await;
        for form in ["timestamp-seconds", r#""tenant":{"header":"x-tenant"}"#] {
            assert!(help.ended(0).out.contains(form), "{command}: {}", help.out);
        }
    }
}

#[tokio::test]
async fn this_build_makes_the_published_keys() {
    let answer = oncegate(&["key", "--vectors"], b"").await;
    assert!(answer.ended(0).line("This build").contains("vectors"));
    let document = oncegate(&["key", "--vectors", "--json"], b"")
        .await
        .ended(0)
        .json();
    assert_eq!(document["passed"], true);
    assert!(document["vectors"].as_u64().unwrap() > 10);
}
