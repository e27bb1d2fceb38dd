//! What is particular to each provider.

use super::*;

#[test]
fn a_list_of_standard_webhooks_is_read_until_one_fits() {
    let (sent, id) = genuine().remove(0);
    let good = sent.headers["webhook-signature"]
        .to_str()
        .unwrap()
        .to_owned();
    let other = format!("v1,{}", base64(&[0; 32]));
    let list = |text: &str| sent.clone().with("webhook-signature", text);
    list(&format!("{other} {good}")).is_event(&id);
    list(&format!("v1a,AAAA v2,x {good}")).is_event(&id);
    list(&format!("{good} what follows")).is_event(&id);
    for list in [
        list(&other),
        list("v1,"),
        // The signature of a version that is not asked for.
        list(&good.replace("v1,", "v2,")),
        list(&good.replace("v1,", "v1a,")),
        // No library reads on behind what is none of a list.
        list(&format!("what {good}")),
        list(&format!("v1,a,b {good}")),
        list(&format!("v1,!!!! {good}")),
        list(&vec![other.as_str(); MAX_SIGNATURES].join(" ")),
        list(&[vec![other.as_str(); MAX_SIGNATURES].join(" "), good].join(" ")),
    ] {
        assert!(!list.is_genuine(), "{:?}", list.headers);
    }
    // The id and the time are signed.
    sent.clone()
        .with("webhook-id", "msg_2")
        .is_refused("no secret fits");
    sent.clone()
        .with("webhook-timestamp", "1733027001")
        .is_refused("no secret fits");
    for time in [
        "",
        "01733027000",
        "+1733027000",
        "1733027000.0",
        "1_733_027_000",
        "1e9",
        "-1",
        "99999999999999999999",
    ] {
        assert!(
            !sent.clone().with("webhook-timestamp", time).is_genuine(),
            "{time}"
        );
    }
}

#[test]
fn a_public_key_verifies_v1a_and_nothing_else() {
    let pair = Ed25519KeyPair::from_seed_unchecked(&[7; 32]).unwrap();
    let public = format!("whpk_{}", base64(pair.public_key().as_ref()));
    let signature = pair.sign(b"msg_1.1733027000.{}");
    let sent = Sent::new(standard(), &public, "{}")
        .with("svix-id", "msg_1")
        .with("svix-timestamp", "1733027000")
        .with(
            "svix-signature",
            format!("v1a,{}", base64(signature.as_ref())),
        );
    sent.is_event(&["msg_1"]);
    let mut other = sent.clone();
    other.body.push(b' ');
    other.is_refused("no secret fits");
    // Who knows the public key could make an HMAC with it.
    let tag = mac(
        HMAC_SHA256,
        pair.public_key().as_ref(),
        &[b"msg_1.1733027000.{}"],
    );
    sent.clone()
        .with("svix-signature", format!("v1,{}", base64(tag.as_ref())))
        .is_refused("no secret fits");
    for (secret, because) in [
        ("whpk_AAAA", "32 bytes"),
        ("whsk_AAAA", "private"),
        ("whsec_", "empty"),
        ("whsec_!", "base64"),
    ] {
        let error = check_standard_secret(&Secret::new(secret)).unwrap_err();
        assert!(error.contains(because), "{error}");
    }
    assert_eq!(check_standard_secret(&Secret::new(public)), Ok(()));
}

#[test]
fn a_header_of_stripe_counts_by_its_first_time_and_any_v1() {
    let (sent, id) = genuine().remove(1);
    let good = sent.headers["stripe-signature"]
        .to_str()
        .unwrap()
        .to_owned();
    let (time, signature) = good.split_once(',').unwrap();
    let header = |text: &str| sent.clone().with("stripe-signature", text);
    header(&format!("{signature},{time}")).is_event(&id);
    header(&format!("{time},v1=00,v0=1,{signature}")).is_event(&id);
    header(&format!("{time},{signature},t=1")).is_event(&id);
    for header in [
        header(time),
        header(signature),
        header(&format!("t=1,{time},{signature}")),
        header(&format!("{time}, {signature}")),
        header(&format!("{time},v1,{signature}")),
        header(&format!("t,{time},{signature}")),
        header(&good.replace("v1=", "v0=")),
        header(&format!("{time},v1=")),
    ] {
        assert!(!header.is_genuine(), "{:?}", header.headers);
    }
}

#[test]
fn an_event_of_stripe_may_be_known_by_its_object_and_type() {
    let mut settings = StripeSettings::new(no_files());
    settings.id = StripeId::ObjectAndType;
    let id = |body: &str| {
        let signature = hex_of("s", &["1733027000.", body]);
        let mut sent = Sent::new(stripe(), "s", body)
            .with("stripe-signature", format!("t=1733027000,v1={signature}"));
        let by_event = sent.verify();
        sent.preset = Preset::Stripe(settings.clone());
        (by_event, sent.verify())
    };
    let event = |parts: &[&str]| {
        Ok(Genuine::Event(
            parts.iter().map(ToString::to_string).collect(),
        ))
    };
    let body = r#"{"id":"evt_1","type":"charge.succeeded","data":{"object":{"id":"ch_1"}}}"#;
    assert_eq!(
        id(body),
        (event(&["evt_1"]), event(&["ch_1", "charge.succeeded"]))
    );
    let body = r#"{"id":"evt_1","type":"balance.available","data":{"object":{}}}"#;
    assert_eq!(id(body).1, event(&["evt_1"]));
    for body in [
        "",
        "{}",
        r#"{"id":""}"#,
        r#"{"id":7}"#,
        r#"{"id":"a","id":"b"}"#,
        "[]",
        "{",
    ] {
        let (by_event, by_object) = id(body);
        assert!(
            matches!(by_event, Err(Refusal::NoId(_))),
            "{body} {by_event:?}"
        );
        assert!(
            matches!(by_object, Err(Refusal::NoId(_))),
            "{body} {by_object:?}"
        );
    }
}

#[test]
fn slack_is_told_its_challenge_and_only_in_a_genuine_request() {
    let body = r#"{"token":"t","challenge":"3eZbrw","type":"url_verification"}"#;
    let signature = format!("v0={}", hex_of("s", &["v0:1733027000:", body]));
    let sent = Sent::new(slack(), "s", body)
        .with("x-slack-request-timestamp", "1733027000")
        .with("x-slack-signature", &signature);
    assert_eq!(sent.verify(), Ok(Genuine::Challenge("3eZbrw".to_owned())));
    let mut forged = sent.clone();
    forged.secrets = vec![Secret::new("other")];
    forged.is_refused("no secret fits");
    // The time is signed: an old request does not get a new one.
    sent.with("x-slack-request-timestamp", "1733027001")
        .is_refused("no secret fits");
}

#[test]
fn an_event_of_shopify_is_that_of_a_shop_and_a_topic() {
    let (sent, _) = genuine().remove(3);
    let mut ids: Vec<_> = [
        sent.clone(),
        sent.clone().with("x-shopify-topic", "orders/create"),
        sent.clone()
            .with("x-shopify-shop-domain", "b.myshopify.com"),
        sent.clone().with("x-shopify-event-id", "e-2"),
    ]
    .iter()
    .map(|sent| sent.verify().unwrap())
    .collect();
    ids.dedup();
    assert_eq!(ids.len(), 4, "{ids:?}");
    // Another subscription to the same topic, or a repetition: the same event.
    assert_eq!(
        sent.clone().with("x-shopify-webhook-id", "w-2").verify(),
        sent.verify()
    );
    for name in [
        "x-shopify-topic",
        "x-shopify-shop-domain",
        "x-shopify-webhook-id",
    ] {
        let mut less = sent.clone();
        less.headers.remove(name);
        less.is_refused("missing");
    }
    let mut less = sent.clone();
    less.headers.remove("x-shopify-event-id");
    less.has_no_id();
    sent.also("x-shopify-event-id", "e-2").has_no_id();
}

#[test]
fn twilio_signs_with_and_without_a_port() {
    let (sent, id) = genuine().remove(5);
    let signed = |url: &str| {
        let text = format!("{url}Bodya b&cMessageSidSM1MessageStatussent");
        let tag = mac(HMAC_SHA1_FOR_LEGACY_USE_ONLY, b"s", &[text.as_bytes()]);
        sent.clone()
            .with("x-twilio-signature", base64(tag.as_ref()))
    };
    for (url, at) in [
        ("https://example.com:443/hooks/twilio", URL),
        ("https://example.com/a", "https://example.com:8443/a"),
        ("https://example.com:8443/a", "https://example.com:8443/a"),
        ("http://example.com:80/a?b=1", "http://example.com/a?b=1"),
        ("https://u:p@example.com:443/a", "https://u:p@example.com/a"),
        ("https://[::1]:443/a", "https://[::1]/a"),
        ("https://example.com/a", "https://example.com/a?"),
    ] {
        let mut sent = signed(url);
        sent.url = at.to_owned();
        sent.is_event(&id);
    }
    let mut elsewhere = signed("https://example.com/a");
    elsewhere.url = "https://example.com/b".to_owned();
    elsewhere.is_refused("no secret fits");
    for none in ["", "example.com/a", "https://", "https:///a"] {
        elsewhere.url = none.to_owned();
        elsewhere.is_refused("address");
    }
    // A body of another type is not covered by the signature of the address.
    let mut json = signed(URL);
    json.headers.remove("content-type");
    json.is_refused("bodySHA256");
    let settings = "x-twilio-webhooks-signature-settings";
    sent.clone().with(settings, "key=k").is_event(&id);
    sent.clone()
        .with(settings, "key=k, algorithm=hmac_sha1")
        .is_event(&id);
    sent.clone()
        .with(settings, "algorithm=HMAC_SHA256")
        .is_refused("no secret fits");
    sent.clone()
        .with(settings, "algorithm=none")
        .is_refused("not known");
    let mut call = sent.clone();
    call.body = b"CallSid=CA1&CallStatus=ringing".to_vec();
    let tag = mac(
        HMAC_SHA1_FOR_LEGACY_USE_ONLY,
        b"s",
        &[URL.as_bytes(), b"CallSidCA1CallStatusringing"],
    );
    // A call asks many times in one state, so its id and state name no request.
    call.with("x-twilio-signature", base64(tag.as_ref()))
        .has_no_id();
}

#[test]
fn a_signature_of_your_own_is_read_as_it_is_set() {
    let sent = |change: &dyn Fn(&mut HmacSettings)| {
        let mut settings = HmacSettings::new(no_files(), "x-signature", Key::header("x-event-id"));
        change(&mut settings);
        Sent::new(Preset::Hmac(settings), "s", "body").with("x-event-id", "e-1")
    };
    let plain = sent(&|_| {});
    let good = hex_of("s", &["body"]);
    plain.clone().with("x-signature", &good).is_genuine_event();
    plain
        .clone()
        .with("x-signature", good.to_ascii_uppercase())
        .is_genuine_event();
    for bad in ["", "zz", &good[1..], &good[2..], &format!("sha256={good}")] {
        assert!(
            !plain.clone().with("x-signature", bad).is_genuine(),
            "{bad}"
        );
    }
    plain
        .clone()
        .with("x-signature", &good)
        .also("x-signature", &good)
        .is_refused("more than once");
    let mut no_id = plain.clone().with("x-signature", &good);
    no_id.headers.remove("x-event-id");
    no_id.has_no_id();

    let prefixed = sent(&|it| {
        it.prefix = "sha1=".to_owned();
        it.hash = crate::webhook::settings::HmacHash::Sha1;
        it.encoding = HmacEncoding::Base64;
    });
    let tag = mac(HMAC_SHA1_FOR_LEGACY_USE_ONLY, b"s", &[b"body"]);
    let good = base64(tag.as_ref());
    prefixed
        .clone()
        .with("x-signature", format!("sha1={good}"))
        .is_genuine_event();
    prefixed.with("x-signature", &good).is_refused("prefix");

    let timed = sent(&|it| it.timestamp = Some(SignedTimestamp::new("x-time")));
    let good = hex_of("s", &["1733027000.body"]);
    let timed = timed
        .with("x-signature", &good)
        .with("x-time", "1733027000");
    timed.is_genuine_event();
    timed.clone().at(NOW + 301).is_refused("too long ago");
    // A time beside the signature proves nothing if it is not in it.
    timed
        .clone()
        .with("x-time", "1733027001")
        .is_refused("no secret fits");
    timed
        .with("x-signature", hex_of("s", &["body"]))
        .is_refused("no secret fits");
}

#[test]
fn an_id_of_fields_counts_their_values_alone() {
    let id = |body: &str| Sent::new(unsigned(), "", body).verify();
    assert_eq!(
        id(r#"{"id":9007199254740993,"n":1}"#),
        id(r#"{ "n":2, "id":9007199254740993 }"#)
    );
    assert_ne!(
        id(r#"{"id":9007199254740993}"#),
        id(r#"{"id":9007199254740992}"#)
    );
    for body in [
        "",
        "{}",
        r#"{"id":null}"#,
        r#"{"id":" "}"#,
        r#"{"id":1,"id":2}"#,
    ] {
        assert!(matches!(id(body), Err(Refusal::NoId(_))), "{body}");
    }
}
