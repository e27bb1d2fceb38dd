//! TLS to the broker.

use oncegate::amqp::AmqpSource;
use oncegate_testkit::{Certificates, LoopbackPort, QueueKind, RabbitMqServer};

use crate::stage::{Clerk, Stage};

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_reached_by_tls_and_verified() {
    let certificates = Certificates::for_names("DNS:localhost");
    certificates.for_client("billing");
    let strange = Certificates::for_names("DNS:localhost");
    let port = LoopbackPort::reserve();
    let file = |name: &str| certificates.file(name).display().to_string();
    let lines = format!(
        "listeners.ssl.1 = {}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\nssl_options.keyfile = {}\n\
         ssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true",
        port.address(),
        file("ca.pem"),
        file("server.pem"),
        file("server.key")
    );
    let server = RabbitMqServer::start_with(&lines).await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    let uri = |host: &str| format!("amqps://guest:guest@{host}:{}/%2f", port.number());
    let authority = String::from_utf8(certificates.authority()).unwrap();
    let source = |uri: String| {
        let client = |name: &str| std::fs::read(certificates.file(name)).unwrap();
        let source = AmqpSource::new(uri, stage.queue.name()).tls_root(authority.as_str());
        source.tls_client(client("billing.pem"), client("billing.key"))
    };

    let clerk = Clerk::new();
    let running = stage
        .start_with(source(uri("localhost")), clerk.clone(), |consumer| consumer)
        .await;
    stage
        .queue
        .send([r#"{"id":1}"#.to_owned(), "no json".to_owned()])
        .await;
    running.watched.until("acks", 2).await;
    running.stop().await;
    clerk.book.charged_once(1);
    assert_eq!(
        stage.dead.ready().await,
        1,
        "dead letters take the same way"
    );

    let untrusted =
        source(uri("localhost")).tls_root(String::from_utf8(strange.authority()).unwrap());
    for refused in [untrusted, source(uri("127.0.0.1"))] {
        let error = stage
            .start_with(refused, Clerk::new(), |consumer| consumer)
            .await
            .fails()
            .await;
        assert!(
            error.contains("TLS to the broker failed") && error.contains("tls_root"),
            "{error}"
        );
    }
}
