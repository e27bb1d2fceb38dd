//! The stop of a proxy.

use std::process::Stdio;

use oncegate_testkit::{HttpClient, Process, Sent, until};
use serde_json::Value;

use super::answers::RULES;
use super::{FROM_ANNE, LIMIT, Service, Stage};

/// SIGTERM lets what runs end, takes nothing new, and the exit code is 0.
#[tokio::test]
async fn a_stop_lets_requests_end_and_takes_no_others() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(format!("http://{}", server.address()), RULES);
    let mut command = stage.command(stage.port.number());
    command.arg("--json").stdout(Stdio::piped());
    command.stdin(Stdio::null());
    command.stderr(std::fs::File::create(stage.path("log")).unwrap());
    let mut process = Process::spawn("oncegate serve", command);
    let address = ([127, 0, 0, 1], stage.port.number()).into();
    until("the proxy to listen", LIMIT, async || {
        let connected = tokio::net::TcpStream::connect(address).await;
        connected.map(drop).map_err(|error| error.to_string())
    })
    .await;
    let held = tokio::spawn(async move {
        let headers = [FROM_ANNE, &[("x-hold", "1")]].concat();
        let sent = Sent::post("/pay", "k", "{}").headers(&headers);
        HttpClient::http1(address).try_send(sent).await
    });
    // A client that goes away: its request ends all the same.
    let gone = tokio::spawn(async move {
        let headers = [FROM_ANNE, &[("x-hold", "1")]].concat();
        let sent = Sent::post("/pay", "gone", "{}").headers(&headers);
        HttpClient::http1(address).try_send(sent).await
    });
    service.until_seen(2).await;
    gone.abort();
    process.signal("TERM");
    until(
        "the address to be closed",
        LIMIT,
        async || match tokio::net::TcpStream::connect(address).await {
            Ok(_) => Err("it accepts connections".to_owned()),
            Err(_) => Ok(()),
        },
    )
    .await;
    assert!(process.try_wait().is_none(), "{}", stage.log());
    service.go.cancel();
    let answer = held.await.unwrap().unwrap();
    assert_eq!((answer.status.as_u16(), answer.is_replayed()), (201, false));
    assert_eq!(process.end_within(LIMIT).await.code(), Some(0));
    let mut said = String::new();
    let out = process.child().stdout.as_mut().unwrap();
    std::io::Read::read_to_string(out, &mut said).unwrap();
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["schema"], "oncegate.serve/1");
    // The client that is gone was perhaps not missed yet.
    assert!(
        matches!(said["answers"]["handled"].as_u64(), Some(1 | 2)),
        "{said}"
    );
    assert_eq!(said["cut"], 0);
    // Both were done, and are known to the next process.
    let proxy = stage.start().await;
    for key in ["k", "gone"] {
        assert!(proxy.pay(key, "{}").await.is_replayed(), "{key}");
    }
}
