//! Requests of an attacker.

use super::*;

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
