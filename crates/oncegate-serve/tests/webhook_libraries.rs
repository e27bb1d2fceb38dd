//! What the providers' own libraries sign and refuse, the presets take and refuse.
//!
//! The libraries for Python sign new requests in each run. Those of GitHub and Shopify are for
//! Node; `webhooks/signed.jsonl` has what they said, and `webhooks/sign.mjs` asks them again.

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on has failed"
)]

use std::path::Path;
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};
use oncegate_serve::webhook::signatures::{Delivery, Genuine, Refusal, Secret, verify};
use oncegate_serve::webhook::{
    PlainSettings, Preset, StripeSettings, TimedSettings, TwilioSettings,
};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// The environment that `scripts/fetch-servers` makes; the version is the one of
/// `scripts/webhooks-requirements.txt`.
const PYTHON: &str = "../../target/test-servers/webhooks-16.1.0/bin/python3";

#[derive(Debug, Deserialize)]
struct Request {
    preset: String,
    damage: String,
    secrets: Vec<String>,
    headers: BTreeMap<String, String>,
    body: String,
    url: String,
    now_unix_s: u64,
    id: Vec<String>,
    accepted: bool,
}

impl Request {
    fn preset(&self) -> Preset {
        let no_files = || Vec::new();
        match self.preset.as_str() {
            "standard" => Preset::Standard(TimedSettings::new(no_files())),
            "stripe" => Preset::Stripe(StripeSettings::new(no_files())),
            "github" => Preset::Github(PlainSettings::new(no_files())),
            "shopify" => Preset::Shopify(PlainSettings::new(no_files())),
            "slack" => Preset::Slack(TimedSettings::new(no_files())),
            "twilio" => Preset::Twilio(TwilioSettings {
                secrets: Vec::new(),
                url: self.url.clone(),
            }),
            other => panic!("no preset {other}"),
        }
    }

    /// The answer of the preset.
    fn verify(&self) -> Result<Genuine, Refusal> {
        let mut headers = HeaderMap::new();
        for (name, value) in &self.headers {
            headers.insert(
                name.parse::<HeaderName>().unwrap(),
                HeaderValue::from_str(value).unwrap(),
            );
        }
        let secrets: Vec<Secret> = self.secrets.iter().map(Secret::new).collect();
        let delivery = Delivery {
            headers: &headers,
            body: &STANDARD.decode(&self.body).unwrap(),
            url: &self.url,
            now_unix_ms: self.now_unix_s * 1_000,
        };
        verify(&self.preset(), &secrets, &delivery)
    }

    #[track_caller]
    fn check(&self) {
        let verified = self.verify();
        match (self.accepted, &verified) {
            (false, Err(Refusal::NotGenuine(_))) => {}
            // Python's decoder skips what is no base64, and no provider sends it.
            (true, Err(Refusal::NotGenuine(reason)))
                if self.preset == "standard" && reason.contains("malformed") => {}
            (true, Ok(Genuine::Event(id))) => assert_eq!(*id, self.id, "{self:?}"),
            _ => panic!("{verified:?}\n{self:?}"),
        }
    }
}

/// Checks each line, and that each preset had requests of both kinds.
fn check_all(lines: &str, presets: &[&str]) {
    let mut seen = BTreeSet::new();
    for line in lines.lines() {
        let request: Request = serde_json::from_str(line).unwrap();
        request.check();
        if request.damage == "none" {
            assert!(request.accepted, "{request:?}");
        }
        seen.insert((request.preset, request.accepted));
    }
    let wanted: BTreeSet<_> = presets
        .iter()
        .flat_map(|preset| [(preset.to_string(), true), (preset.to_string(), false)])
        .collect();
    assert_eq!(seen, wanted);
}

// invariant: signature-that-its-library-refuses
#[test]
fn what_the_libraries_for_python_sign_and_refuse() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = here.join(PYTHON);
    assert!(
        python.exists(),
        "no {}: `scripts/fetch-servers` installs it",
        python.display()
    );
    let seed = fastrand::u32(..).to_string();
    println!("seed {seed}");
    let output = Command::new(python)
        .arg(here.join("tests/webhooks/sign.py"))
        .args([&seed, "20"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let lines = String::from_utf8(output.stdout).unwrap();
    check_all(&lines, &["slack", "standard", "stripe", "twilio"]);
}

// invariant: signature-that-its-library-refuses
#[test]
fn what_the_libraries_for_node_have_signed_and_refused() {
    let lines = include_str!("webhooks/signed.jsonl");
    check_all(lines, &["github", "shopify", "standard"]);
}
