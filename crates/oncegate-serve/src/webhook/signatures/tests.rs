//! The examples that the providers publish, one request for each preset that a wrong
//! implementation takes, and requests of an attacker.

use std::path::PathBuf;

use fastrand::Rng;
use http::{HeaderName, HeaderValue};
use oncegate_core::key::Key;
use ring::hmac::{HMAC_SHA1_FOR_LEGACY_USE_ONLY, HMAC_SHA256};
use ring::signature::{Ed25519KeyPair, KeyPair as _};

use super::*;
use crate::webhook::settings::{
    EventId, HmacEncoding, HmacSettings, PlainSettings, SignedTimestamp, StripeId, StripeSettings,
    TimedSettings, TwilioSettings, UnsignedSettings,
};

/// The time of all requests that are signed here: 2024-12-01 04:23:20 UTC.
const NOW: u64 = 1_733_027_000;
const URL: &str = "https://example.com/hooks/twilio";

fn no_files() -> [PathBuf; 0] {
    []
}

fn standard() -> Preset {
    Preset::Standard(TimedSettings::new(no_files()))
}

fn stripe() -> Preset {
    Preset::Stripe(StripeSettings::new(no_files()))
}

fn github() -> Preset {
    Preset::Github(PlainSettings::new(no_files()))
}

fn shopify() -> Preset {
    Preset::Shopify(PlainSettings::new(no_files()))
}

fn slack() -> Preset {
    Preset::Slack(TimedSettings::new(no_files()))
}

fn twilio() -> Preset {
    Preset::Twilio(TwilioSettings {
        secrets: Vec::new(),
        url: URL.to_owned(),
    })
}

fn hmac_of_body() -> Preset {
    let settings = HmacSettings::new(no_files(), "x-signature", Key::header("x-event-id"));
    Preset::Hmac(settings)
}

fn unsigned() -> Preset {
    Preset::None(UnsignedSettings {
        id: EventId(Key::json(["id"])),
    })
}

/// A request that a test changes.
#[derive(Clone)]
struct Sent {
    preset: Preset,
    secrets: Vec<Secret>,
    headers: HeaderMap,
    body: Vec<u8>,
    url: String,
    now_unix_s: u64,
}

impl Sent {
    fn new(preset: Preset, secret: &str, body: &str) -> Self {
        Self {
            preset,
            secrets: vec![Secret::new(secret)],
            headers: HeaderMap::new(),
            body: body.as_bytes().to_vec(),
            url: URL.to_owned(),
            now_unix_s: NOW,
        }
    }

    fn with(mut self, name: &'static str, value: impl AsRef<str>) -> Self {
        self.headers
            .insert(name, HeaderValue::from_str(value.as_ref()).unwrap());
        self
    }

    fn also(mut self, name: &'static str, value: impl AsRef<str>) -> Self {
        self.headers
            .append(name, HeaderValue::from_str(value.as_ref()).unwrap());
        self
    }

    fn at(mut self, now_unix_s: u64) -> Self {
        self.now_unix_s = now_unix_s;
        self
    }

    fn verify(&self) -> Result<Genuine, Refusal> {
        let delivery = Delivery {
            headers: &self.headers,
            body: &self.body,
            url: &self.url,
            now_unix_ms: self.now_unix_s * 1_000,
        };
        verify(&self.preset, &self.secrets, &delivery)
    }

    fn is_genuine(&self) -> bool {
        !matches!(self.verify(), Err(Refusal::NotGenuine(_)))
    }

    #[track_caller]
    fn is_event(&self, id: &[&str]) {
        let id = id.iter().map(ToString::to_string).collect();
        assert_eq!(self.verify(), Ok(Genuine::Event(id)));
    }

    #[track_caller]
    fn is_refused(&self, because: &str) {
        match self.verify() {
            Err(Refusal::NotGenuine(reason)) => assert!(reason.contains(because), "{reason}"),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn has_no_id(&self) {
        assert!(
            matches!(self.verify(), Err(Refusal::NoId(_))),
            "{:?}",
            self.verify()
        );
    }
}

fn hex_of(key: &str, parts: &[&str]) -> String {
    let parts: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
    hex(mac(HMAC_SHA256, key.as_bytes(), &parts).as_ref())
}

/// Requests that are right, each with the id of its event.
fn genuine() -> Vec<(Sent, Vec<&'static str>)> {
    const STRIPE: &str =
        r#"{"id":"evt_1","type":"charge.succeeded","data":{"object":{"id":"ch_1"}}}"#;
    const SLACK: &str = r#"{"type":"event_callback","event_id":"Ev1"}"#;
    let key = b"a key of a test, of 32 bytes ....".as_slice();
    let secret = format!("whsec_{}", base64(key));
    let tag = mac(HMAC_SHA256, key, &[b"msg_1.1733027000.{\"a\":1}"]);
    let form = "MessageSid=SM1&MessageStatus=sent&Body=a+b%26c";
    let signed = format!("{URL}Bodya b&cMessageSidSM1MessageStatussent");
    let sms = mac(HMAC_SHA1_FOR_LEGACY_USE_ONLY, b"s", &[signed.as_bytes()]);
    vec![
        (
            Sent::new(standard(), &secret, r#"{"a":1}"#)
                .with("webhook-id", "msg_1")
                .with("webhook-timestamp", "1733027000")
                .with("webhook-signature", format!("v1,{}", base64(tag.as_ref()))),
            vec!["msg_1"],
        ),
        (
            Sent::new(stripe(), "whsec_s", STRIPE).with(
                "stripe-signature",
                format!(
                    "t=1733027000,v1={}",
                    hex_of("whsec_s", &["1733027000.", STRIPE])
                ),
            ),
            vec!["evt_1"],
        ),
        (
            Sent::new(github(), "s", "{}")
                .with(
                    "x-hub-signature-256",
                    format!("sha256={}", hex_of("s", &["{}"])),
                )
                .with("x-github-delivery", "guid-1"),
            vec!["guid-1"],
        ),
        (
            Sent::new(shopify(), "s", "{}")
                .with(
                    "x-shopify-hmac-sha256",
                    base64(mac(HMAC_SHA256, b"s", &[b"{}"]).as_ref()),
                )
                .with("x-shopify-topic", "orders/paid")
                .with("x-shopify-shop-domain", "a.myshopify.com")
                .with("x-shopify-api-version", "2026-10")
                .with("x-shopify-webhook-id", "w-1")
                .with("x-shopify-event-id", "e-1"),
            vec!["a.myshopify.com", "orders/paid", "e-1"],
        ),
        (
            Sent::new(slack(), "s", SLACK)
                .with("x-slack-request-timestamp", "1733027000")
                .with(
                    "x-slack-signature",
                    format!("v0={}", hex_of("s", &["v0:1733027000:", SLACK])),
                ),
            vec!["Ev1"],
        ),
        (
            Sent::new(twilio(), "s", form)
                .with("content-type", "application/x-www-form-urlencoded")
                .with("x-twilio-signature", base64(sms.as_ref())),
            vec!["message", "SM1", "sent"],
        ),
    ]
}

#[test]
fn the_examples_that_providers_publish_are_genuine() {
    let standard = Sent::new(
        standard(),
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        r#"{"test": 2432232314}"#,
    )
    .at(1_614_265_330);
    for prefix in ["webhook", "svix"] {
        let name = |rest: &str| HeaderName::try_from(format!("{prefix}-{rest}")).unwrap();
        let mut sent = standard.clone();
        for (rest, value) in [
            ("id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
            ("timestamp", "1614265330"),
            (
                "signature",
                "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
            ),
        ] {
            sent.headers
                .insert(name(rest), HeaderValue::from_static(value));
        }
        sent.is_event(&["msg_p5jXN8AQM9LWM0D4loKWxJek"]);
    }

    let octocat = Sent::new(
        github(),
        concat!("It's a Secret to Every", "body"),
        "Hello, World!",
    )
    .with(
        "x-hub-signature-256",
        "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17",
    );
    octocat.has_no_id();
    octocat.with("x-github-delivery", "1").is_event(&["1"]);

    // A command: it is genuine, and no event.
    Sent::new(
        slack(),
        "8f742231b10e8888abcd99yyyzzz85a5",
        "token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text=&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c",
    )
    .at(1_531_420_618)
    .with("x-slack-request-timestamp", "1531420618")
    .with(
        "x-slack-signature",
        "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
    )
    .has_no_id();

    let mut call = Sent::new(
        twilio(),
        "12345",
        "CallSid=CA1234567890ABCDE&Caller=%2B14158675309&Digits=1234&From=%2B14158675309&To=%2B18005551212",
    )
    .with("content-type", "application/x-www-form-urlencoded; charset=UTF-8")
    .with("x-twilio-signature", "RSOYDt4T1cUTdK1PDd93/VVr8B8=");
    call.url = "https://mycompany.com/myapp.php?foo=1&bar=2".to_owned();
    call.has_no_id();
    call.with("i-twilio-idempotency-token", "a-1")
        .is_event(&["token", "a-1"]);

    let mut json = Sent::new(
        twilio(),
        "12345",
        r#"{"property": "value", "boolean": true}"#,
    )
    .with("content-type", "application/json")
    .with("x-twilio-signature", "a9nBmqA0ju/hNViExpshrM61xv4=");
    json.url = "https://mycompany.com/myapp.php?foo=1&bar=2&bodySHA256=0a1ff7634d9ab3b95db5c9a2dfe9416e41502b283a80c7cf19632632f96e6620".to_owned();
    json.has_no_id();
    json.body.push(b' ');
    json.is_refused("bodySHA256");
}

#[test]
fn an_event_is_known_by_its_id_under_every_valid_secret() {
    for (sent, id) in genuine() {
        sent.is_event(&id);
        let mut rotated = sent.clone();
        rotated.secrets.insert(0, Secret::new("whsec_b3RoZXI="));
        rotated.secrets.push(Secret::new("whsec_bGFzdA=="));
        rotated.is_event(&id);
        let mut foreign = sent.clone();
        foreign.secrets = vec![Secret::new("whsec_b3RoZXI=")];
        foreign.is_refused("no secret fits");
        foreign.secrets.clear();
        foreign.is_refused("no secret fits");
    }
}

#[test]
fn a_signed_time_is_near_in_both_directions() {
    for (sent, id) in genuine() {
        if !matches!(
            sent.preset,
            Preset::Standard(_) | Preset::Stripe(_) | Preset::Slack(_)
        ) {
            continue;
        }
        sent.clone().at(NOW + 300).is_event(&id);
        sent.clone().at(NOW - 300).is_event(&id);
        sent.clone().at(NOW + 301).is_refused("too long ago");
        sent.clone().at(NOW - 301).is_refused("in the future");
        sent.clone().at(0).is_refused("in the future");
    }
}

#[test]
fn a_body_that_only_means_the_same_is_another_one() {
    // An implementation that parses and writes JSON again takes these.
    for (mut sent, _) in genuine() {
        let body = String::from_utf8(sent.body).unwrap();
        sent.body = match body.as_str() {
            "{}" => b"{ }".to_vec(),
            json if json.starts_with('{') => json.replace(':', ": ").into_bytes(),
            form => form.replace("a+b", "a++b").into_bytes(),
        };
        sent.is_refused("no secret fits");
    }
}

#[test]
fn nothing_but_the_whole_signature_fits() {
    for (sent, _) in genuine() {
        let name = sent
            .headers
            .keys()
            .find(|name| name.as_str().contains("signature") || name.as_str().contains("hmac"))
            .unwrap()
            .clone();
        let whole = sent.headers[&name].to_str().unwrap().to_owned();
        // A comparison of what both have takes a prefix, an empty one above all.
        for end in 0..whole.len() {
            let mut cut = sent.clone();
            let text = whole.get(..end).unwrap();
            cut.headers
                .insert(&name, HeaderValue::from_str(text).unwrap());
            assert!(!cut.is_genuine(), "{text:?}");
        }
        let mut twice = sent.clone();
        twice
            .headers
            .append(&name, HeaderValue::from_str(&whole).unwrap());
        twice.is_refused("more than once");
        let mut none = sent.clone();
        none.headers.remove(&name);
        none.is_refused("missing");
    }
}

#[test]
fn hexadecimal_digits_are_lower_case_as_the_libraries_want_them() {
    for (sent, _) in genuine() {
        for name in [
            "stripe-signature",
            "x-hub-signature-256",
            "x-slack-signature",
        ] {
            let Some(value) = sent.headers.get(name) else {
                continue;
            };
            let (head, digits) = value.to_str().unwrap().rsplit_once('=').unwrap();
            let upper = format!("{head}={}", digits.to_ascii_uppercase());
            sent.clone().with(name, upper).is_refused("no secret fits");
        }
    }
}

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

impl Sent {
    #[track_caller]
    fn is_genuine_event(&self) {
        assert!(
            matches!(self.verify(), Ok(Genuine::Event(_))),
            "{:?}",
            self.verify()
        );
    }
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

/// A value that often is nearly right.
fn hostile(rng: &mut Rng, right: &str) -> Vec<u8> {
    const PIECES: [&str; 20] = [
        "v1,",
        "v1=",
        "v0=",
        "t=",
        "sha256=",
        ",",
        "=",
        " ",
        ".",
        "&",
        "%",
        "%zz",
        "+",
        "0",
        "1733027000",
        "AAAA",
        "\u{e9}",
        "whsec_",
        "\"",
        "algorithm=HMAC_SHA256",
    ];
    match rng.u8(0..4) {
        0 => {
            let mut bytes = right.as_bytes().to_vec();
            if !bytes.is_empty() {
                let place = rng.usize(..bytes.len());
                bytes[place] = rng.u8(..);
            }
            bytes
        }
        1 => right.as_bytes()[..rng.usize(..=right.len())].to_vec(),
        2 => (0..rng.usize(..12))
            .flat_map(|_| rng.choice(PIECES).unwrap_or_default().bytes())
            .collect(),
        _ => (0..rng.usize(..60)).map(|_| rng.u8(..)).collect(),
    }
}

#[test]
fn hostile_requests_cause_no_panic_and_are_not_genuine() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let mut all: Vec<Sent> = genuine().into_iter().map(|(sent, _)| sent).collect();
    let mut timed = HmacSettings::new(no_files(), "x-signature", Key::json(["id"]));
    timed.timestamp = Some(SignedTimestamp::new("x-time"));
    for preset in [hmac_of_body(), Preset::Hmac(timed)] {
        let sent = Sent::new(preset, "s", r#"{"id":1}"#)
            .with("x-signature", hex_of("s", &["{}"]))
            .with("x-event-id", "e-1")
            .with("x-time", "1733027000");
        all.push(sent);
    }
    for right in &all {
        for _ in 0..20_000 {
            let mut sent = right.clone();
            let names: Vec<HeaderName> = sent.headers.keys().cloned().collect();
            for _ in 0..rng.usize(1..4) {
                let Some(name) = rng.choice(&names) else {
                    continue;
                };
                let value = right.headers[name].to_str().unwrap_or_default();
                if let Ok(value) = HeaderValue::from_bytes(&hostile(&mut rng, value)) {
                    if rng.u8(..) < 16 {
                        sent.headers.append(name, value);
                    } else {
                        sent.headers.insert(name, value);
                    }
                }
            }
            if rng.bool() {
                let body = String::from_utf8_lossy(&right.body).into_owned();
                sent.body = hostile(&mut rng, &body);
            }
            if rng.u8(..) < 64 {
                sent.url = String::from_utf8_lossy(&hostile(&mut rng, URL)).into_owned();
            }
            sent.now_unix_s = *rng.choice(&[NOW, NOW, 0, u64::MAX / 1_000]).unwrap_or(&NOW);
            if sent.is_genuine() {
                let is_unchanged = is_unchanged(&sent, right);
                assert!(
                    is_unchanged,
                    "{:?} {:?} {}",
                    sent.headers, sent.body, sent.url
                );
            }
        }
    }
    // Without a signature, only the id can be wrong.
    for _ in 0..20_000 {
        let mut sent = Sent::new(unsigned(), "", "");
        sent.body = hostile(&mut rng, r#"{"id":1,"a":{"b":[]}}"#);
        assert!(sent.is_genuine());
    }
}

/// Returns whether what is signed is as it was. Of a form only the meaning is signed, so its
/// signature must be.
fn is_unchanged(sent: &Sent, right: &Sent) -> bool {
    let same = |names: &[&str]| {
        names.iter().all(|name| {
            sent.headers
                .get_all(*name)
                .iter()
                .eq(right.headers.get_all(*name))
        })
    };
    let body = sent.body == right.body;
    let time = sent.now_unix_s == NOW;
    match sent.preset {
        Preset::Standard(_) => body && time && same(&["webhook-id", "webhook-timestamp"]),
        Preset::Stripe(_) => body && time,
        Preset::Github(_) => body && same(&["x-hub-signature-256"]),
        Preset::Shopify(_) => body && same(&["x-shopify-hmac-sha256"]),
        Preset::Slack(_) => {
            body && time && same(&["x-slack-request-timestamp", "x-slack-signature"])
        }
        Preset::Twilio(_) => same(&["x-twilio-signature"]),
        // None of these has a signature that fits.
        _ => false,
    }
}
