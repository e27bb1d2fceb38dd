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

mod hostile;
mod providers;
