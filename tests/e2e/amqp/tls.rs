//! TLS to the broker.

use std::path::{Path, PathBuf};

use oncegate::amqp::{AmqpLogin, AmqpSource};
use oncegate::core::settings::TlsFiles;
use oncegate_testkit::{Certificates, LoopbackPort, QueueKind, RabbitMqServer};

use crate::stage::{Clerk, Stage};

/// The files of the broker and of the client `billing`.
const FILES: [&str; 5] = [
    "ca.pem",
    "server.pem",
    "server.key",
    "billing.pem",
    "billing.key",
];

fn certificates() -> Certificates {
    let certificates = Certificates::for_names("DNS:localhost");
    certificates.for_client("billing");
    certificates
}

/// What makes the broker ask for a client's certificate on this port, and use the files of FILES
/// in this folder.
fn listener(port: &LoopbackPort, folder: &Path) -> String {
    let file = |name: &str| folder.join(name).display().to_string();
    format!(
        "listeners.ssl.1 = {}\nssl_options.cacertfile = {}\nssl_options.certfile = {}\nssl_options.keyfile = {}\n\
         ssl_options.verify = verify_peer\nssl_options.fail_if_no_peer_cert = true",
        port.address(),
        file("ca.pem"),
        file("server.pem"),
        file("server.key")
    )
}

/// Trusts this authority, and shows the certificate of `billing`.
fn files(root: PathBuf, folder: &Path) -> TlsFiles {
    TlsFiles {
        certificate: Some(folder.join("billing.pem")),
        key: Some(folder.join("billing.key")),
        ..TlsFiles::trusting(root)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_reached_by_tls_and_verified() {
    let certificates = certificates();
    let authority = certificates.file("ca.pem");
    let folder = authority.parent().unwrap();
    let strange = Certificates::for_names("DNS:localhost");
    let port = LoopbackPort::reserve();
    let server = RabbitMqServer::start_with(&listener(&port, folder)).await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;
    let source = |host: &str, root: &Path| {
        let uri = format!("amqps://guest:guest@{host}:{}/%2f", port.number());
        let login = AmqpLogin::default().tls(files(root.to_owned(), folder));
        AmqpSource::new(uri, stage.queue.name()).login(login)
    };

    let clerk = Clerk::new();
    let running = stage
        .start_with(source("localhost", &authority), clerk.clone(), |consumer| {
            consumer
        })
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

    let untrusted = source("localhost", &strange.file("ca.pem"));
    for refused in [untrusted, source("127.0.0.1", &authority)] {
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

/// Another authority, other certificates and another password: the next connection has them.
// invariant: rotation-under-load
#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_a_password_are_read_for_each_connection() {
    let folder = tempfile::tempdir().unwrap();
    let place = |made: &Certificates| {
        for name in FILES {
            std::fs::copy(made.file(name), folder.path().join(name)).unwrap();
        }
    };
    place(&certificates());
    let port = LoopbackPort::reserve();
    let mut server = RabbitMqServer::start_with(&listener(&port, folder.path())).await;
    let user = server.new_user(".*", ".*", ".*").await;
    server.set_password(&user, "first").await;
    let stage = Stage::on(&server, QueueKind::Quorum).await;

    let password = folder.path().join("password");
    std::fs::write(&password, "first").unwrap();
    let read = password.clone();
    let login = AmqpLogin::default()
        .password_by(move || std::fs::read_to_string(&read).map_err(|error| error.to_string()))
        .tls(files(folder.path().join("ca.pem"), folder.path()));
    let uri = format!("amqps://{user}@localhost:{}/%2f", port.number());
    let source = AmqpSource::new(uri, stage.queue.name()).login(login);
    let clerk = Clerk::new();
    let running = stage
        .start_with(source, clerk.clone(), |consumer| consumer)
        .await;
    stage.send([0]).await;
    running.watched.until("acks", 1).await;

    server.set_password(&user, "second").await;
    std::fs::write(&password, "second").unwrap();
    place(&certificates());
    server.write_down().await;
    server.kill();
    server.start_again().await;
    stage.send([1]).await;
    clerk.book.until_charged(2).await;
    running.stop().await;
    clerk.book.charged_once(2);
    stage.queue.until_ready(0).await;
}
