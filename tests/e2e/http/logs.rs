//! What never gets into logs and answers.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate::MemoryStore;
use oncegate_core::testing::fault::{FaultStore, Faults};
use oncegate_testkit::Sent;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::world::World;

const CANARY: &str = "canary7f3a";

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

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

// invariant: secrets-in-http
#[tokio::test]
async fn nothing_of_key_caller_or_body_gets_into_logs_or_problems() {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(log.clone())
        .with_ansi(false);
    let subscriber = subscriber
        .with_env_filter(EnvFilter::new("oncegate=trace"))
        .finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();

    let store = Arc::new(MemoryStore::new());
    let faulty = Arc::new(FaultStore::new(
        Arc::clone(&store) as _,
        Faults::default(),
        1,
    ));
    let world = World::over(
        store,
        Arc::clone(&faulty),
        |gate| gate,
        |layer| {
            layer
                .max_attempts(2)
                .claim_timeout(Duration::from_millis(200))
                .response_patience(Duration::ZERO)
        },
    )
    .await;
    let client = world.http1();
    let body = format!(r#"{{"order":"{CANARY}"}}"#);
    let other = format!(r#"{{"order":"{CANARY}","more":1}}"#);
    let send = async |key: &str, what: &str, body: &str| {
        let headers = [
            ("content-type", "application/json"),
            ("x-user", CANARY),
            ("x-do", what),
        ];
        let path = format!("/charges?q={CANARY}");
        let answer = client
            .try_send(Sent::post(&path, key, body).headers(&headers))
            .await;
        assert!(
            !String::from_utf8_lossy(&answer.unwrap().body).contains(CANARY),
            "{key} {what}"
        );
    };
    for what in [
        "charge", "500", "429", "panic", "retry", "fail", "big", "drip",
    ] {
        let key = format!("{CANARY}-{what}");
        world.work.open();
        for body in [&body, &body, &other] {
            send(&key, what, body).await;
            send(&key, what, body).await;
        }
    }
    send(&format!("{CANARY} with a blank"), "charge", &body).await;
    send(&format!("{CANARY},{CANARY}"), "charge", &body).await;
    faulty.begin_outage();
    send(CANARY, "charge", &body).await;
    faulty.end_outage();

    let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    for said in [
        "a handler has panicked",
        "a request will not run again",
        "the store did not answer",
        "key=payments:",
    ] {
        assert!(log.contains(said), "{said:?} is not in the log:\n{log}");
    }
    assert!(!log.contains(CANARY), "{log}");
    assert!(!format!("{:?}", world.layer).contains(CANARY));
}
