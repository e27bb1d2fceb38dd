//! TLS: verification of certificates and names.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use oncegate::redis::{RedisBuilder, RedisStore};
use oncegate_core::key::Scope;
use oncegate_core::rules::{Reply, Verdict};
use oncegate_core::store::Store;
use oncegate_testkit::{
    Certificates, LoopbackPort, RedisCluster, RedisSentinels, RedisServer, until,
};

use crate::faults::until_answered;
use crate::hand::{apply, claim, complete, key, scope, token};

/// Nothing here takes this long.
const LIMIT: Duration = Duration::from_secs(60);

async fn server(certificates: &Certificates, port: &LoopbackPort) -> RedisServer {
    server_with(certificates, port, &[]).await
}

async fn server_with(
    certificates: &Certificates,
    port: &LoopbackPort,
    more: &[&str],
) -> RedisServer {
    let arguments = certificates.redis_arguments(&port.number().to_string());
    let arguments: Vec<&str> = arguments
        .iter()
        .map(String::as_str)
        .chain(more.iter().copied())
        .collect();
    RedisServer::start_with(&arguments).await
}

// invariant: server-not-trusted
#[tokio::test]
async fn a_servers_certificate_needs_its_name_and_a_known_authority() {
    let certificates = Certificates::for_names("DNS:localhost");
    let port = LoopbackPort::reserve();
    let _server = server(&certificates, &port).await;
    let at = |host: &str| format!("rediss://{host}:{}", port.number());
    // Handshakes take their time on a busy machine.
    let builder = |url: &str| RedisStore::builder(url).connect_timeout(Duration::from_secs(60));
    let known = |url: &str| builder(url).tls_root(certificates.authority()).connect();
    let store = known(&at("localhost")).await.unwrap();
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    apply(&store, &key, claim(owner)).await.unwrap();
    assert_eq!(
        apply(&store, &key, complete(owner, b"")).await.unwrap(),
        Reply::Applied { recreated: false }
    );
    assert!(
        !store
            .check()
            .await
            .unwrap()
            .warnings
            .iter()
            .any(|warning| warning.contains("plain text"))
    );

    // The same server by a name that its certificate does not have.
    let misnamed = known(&at("127.0.0.1")).await.unwrap_err();
    assert!(
        misnamed.class() == "refused" && misnamed.to_string().contains("certificate"),
        "{misnamed}"
    );
    // The same name from an authority that is not configured.
    let stranger = builder(&at("localhost")).connect().await.unwrap_err();
    assert!(
        stranger.class() == "refused" && stranger.to_string().contains("certificate"),
        "{stranger}"
    );
    let garbage = builder(&at("localhost"))
        .tls_root("no certificate")
        .connect()
        .await
        .unwrap_err();
    assert!(
        garbage.class() == "refused" && garbage.to_string().contains("tls_root"),
        "{garbage}"
    );
    // Without TLS, nothing is understood.
    let plain = RedisStore::connect(&at("localhost").replace("rediss", "redis"))
        .await
        .unwrap_err();
    assert_eq!(plain.class(), "unavailable", "{plain}");
}

// invariant: server-not-trusted
#[tokio::test]
async fn an_expired_certificate_is_named_as_the_reason() {
    let certificates = by_address();
    let port = LoopbackPort::reserve();
    certificates.let_expire();
    let _server = server(&certificates, &port).await;
    let url = format!("rediss://127.0.0.1:{}", port.number());
    let error = builder(&url, &certificates).connect().await.unwrap_err();
    assert!(
        error.class() == "refused" && error.to_string().contains("Expired"),
        "{error}"
    );
}

// invariant: rotation-under-load
#[tokio::test(flavor = "multi_thread")]
async fn the_file_with_the_authority_is_read_for_each_connection() {
    let first = by_address();
    let second = by_address();
    let port = LoopbackPort::reserve();
    let server = server(&first, &port).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, first.authority()).unwrap();
    let url = format!("rediss://127.0.0.1:{}", port.number());
    let builder = RedisStore::builder(&url)
        .connect_timeout(LIMIT)
        .tls_root_file(&file);
    let store = builder.clone().connect().await.unwrap();
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    until_answered(&store, &key, &claim(owner)).await;

    // The server gets a certificate of another authority, and every connection ends.
    let hand = crate::hand::Hand::on(&server).await;
    let new = |name: &str| second.file(name).display().to_string();
    let certificate = new("server.pem");
    let secret = new("server.key");
    let authority = new("ca.pem");
    let files = [
        "tls-cert-file",
        &certificate,
        "tls-key-file",
        &secret,
        "tls-ca-cert-file",
        &authority,
    ];
    let () = hand.ask(&[&["CONFIG", "SET"][..], &files].concat()).await;
    let ended: u32 = hand
        .ask(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"])
        .await;
    assert!(ended > 0, "the store has connections");
    let refused = async || match store.check().await {
        Err(error) if error.to_string().contains("`tls_root`") => Ok(()),
        other => Err(format!("{other:?}")),
    };
    until(
        "the former authority to be believed no more",
        LIMIT,
        refused,
    )
    .await;
    std::fs::write(file.with_extension("next"), second.authority()).unwrap();
    std::fs::rename(file.with_extension("next"), &file).unwrap();
    let complete = async || {
        apply(&store, &key, complete(owner, b""))
            .await
            .map_err(|error| error.to_string())
    };
    let reply = until("the new authority to be believed", LIMIT, complete).await;
    assert_eq!(
        reply,
        Reply::Applied { recreated: false },
        "the claim of before"
    );

    std::fs::remove_file(&file).unwrap();
    let error = builder.connect().await.unwrap_err().to_string();
    assert!(
        error.contains("`tls_root`") && error.contains("ca.pem"),
        "{error}"
    );
}

/// Nodes and sentinels name each other by address, so that is what their certificates must have.
fn by_address() -> Certificates {
    Certificates::for_names("IP:127.0.0.1")
}

fn builder(url: &str, certificates: &Certificates) -> RedisBuilder {
    let builder = RedisStore::builder(url).connect_timeout(Duration::from_secs(60));
    builder.tls_root(certificates.authority())
}

// invariant: server-not-trusted
#[tokio::test]
async fn a_cluster_and_every_node_it_names_are_reached_by_tls() {
    let certificates = by_address();
    let cluster = RedisCluster::start_tls(&certificates).await;
    // The others are known from its answer alone.
    let url = cluster.tls_url().split(',').next().unwrap().to_owned();
    let store = builder(&url, &certificates).connect().await.unwrap();
    let scope = scope();
    let owner = token();
    for number in 0..60 {
        let key = key(&scope, number);
        until_answered(&store, &key, &claim(owner)).await;
        assert_eq!(
            until_answered(&store, &key, &complete(owner, b"")).await,
            Reply::Applied { recreated: false }
        );
    }
    assert!(store.check().await.unwrap().store.contains("3 primaries"));
    let stranger = RedisStore::builder(&url)
        .connect_timeout(Duration::from_secs(60))
        .connect()
        .await
        .unwrap_err();
    assert!(
        stranger.class() == "refused" && stranger.to_string().contains("certificate"),
        "{stranger}"
    );
}

#[tokio::test]
async fn sentinels_and_each_primary_they_name_are_reached_by_tls() {
    let certificates = by_address();
    let watched = RedisSentinels::start_tls(&certificates).await;
    let store = builder(&watched.tls_url(), &certificates)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    until_answered(&store, &key, &claim(owner)).await;
    watched.fail_over().await;
    assert_eq!(
        until_answered(&store, &key, &complete(owner, b"")).await,
        Reply::Applied { recreated: false }
    );
    let plain = watched.tls_url().replace("rediss+", "redis+");
    assert!(
        RedisStore::connect(&plain).await.is_err(),
        "without TLS, nothing is understood"
    );
}

#[tokio::test]
async fn a_password_in_plain_text_to_another_machine_is_warned_about() {
    let server = RedisServer::start_with(&["--requirepass", ""]).await;
    let hand = crate::hand::Hand::on(&server).await;
    let () = hand
        .ask(&["ACL", "SETUSER", "billing", "on", ">right", "~*", "+@all"])
        .await;
    // A spelling of 127.0.0.1 that does not look like it.
    let url = format!("redis://billing:right@127.1:{}", server.port());
    let store = RedisStore::connect(&url).await.unwrap();
    let warnings = store.check().await.unwrap().warnings;
    assert!(
        warnings
            .iter()
            .any(|warning| warning.contains("plain text")),
        "{warnings:?}"
    );
    let local = RedisStore::connect(&url.replace("127.1:", "127.0.0.1:"))
        .await
        .unwrap();
    let warnings = local.check().await.unwrap().warnings;
    assert!(
        !warnings
            .iter()
            .any(|warning| warning.contains("plain text")),
        "{warnings:?}"
    );
}

#[tokio::test]
async fn a_server_that_demands_a_certificate_of_its_clients_gets_one() {
    let certificates = by_address();
    let port = LoopbackPort::reserve();
    let _server = server_with(&certificates, &port, &["--tls-auth-clients", "yes"]).await;
    let url = format!("rediss://127.0.0.1:{}", port.number());
    let with = |of: &Certificates| {
        builder(&url, &certificates).tls_client(of.file("server.pem"), of.file("server.key"))
    };
    let store = with(&certificates).connect().await.unwrap();
    let scope = scope();
    let owner = token();
    apply(&store, &key(&scope, 1), claim(owner)).await.unwrap();

    let stranger = Certificates::for_names("IP:127.0.0.1");
    for refused in [builder(&url, &certificates), with(&stranger)] {
        let error = refused.connect().await.unwrap_err();
        assert!(error.to_string().contains("tls_client"), "{error}");
    }
    let garbage =
        builder(&url, &certificates).tls_client(certificates.file("ca.pem"), "missing.key");
    let error = garbage.connect().await.unwrap_err().to_string();
    assert!(
        error.contains("tls_client") && error.contains("missing.key"),
        "{error}"
    );
}

/// Completes one key after another until it is over. Returns their number.
async fn load(store: &RedisStore, scope: &Scope, done: &AtomicU32, over: &AtomicBool) -> u128 {
    let mut number = 0;
    while !over.load(Ordering::Relaxed) {
        let key = key(scope, number);
        let owner = token();
        for operation in [claim(owner), complete(owner, b"done")] {
            until("an answer", LIMIT, async || {
                apply(store, &key, operation.clone())
                    .await
                    .map(drop)
                    .map_err(|error| error.to_string())
            })
            .await;
        }
        number += 1;
        done.fetch_add(1, Ordering::Relaxed);
    }
    number
}

/// Waits until ten more keys are done.
async fn ten_more(done: &AtomicU32) {
    let target = done.load(Ordering::Relaxed) + 10;
    until("more records", LIMIT, async || {
        match done.load(Ordering::Relaxed) {
            done if done >= target => Ok(()),
            done => Err(format!("{done} of {target}")),
        }
    })
    .await;
}

// invariant: rotation-under-load
#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_changes_under_load_loses_nothing() {
    let server = RedisServer::start().await;
    let hand = crate::hand::Hand::on(&server).await;
    let () = hand
        .ask(&["ACL", "SETUSER", "billing", "on", ">first", "~*", "+@all"])
        .await;
    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "first\n").unwrap();
    let url = format!("redis://billing@127.0.0.1:{}", server.port());
    let connect = || RedisStore::builder(&url).password_file(&password).connect();
    let store = connect().await.unwrap();
    let scope = scope();
    let over = AtomicBool::new(false);
    let done = AtomicU32::new(0);
    let rotate = async {
        ten_more(&done).await;
        for next in ["second", "third"] {
            let () = hand
                .ask(&[
                    "ACL",
                    "SETUSER",
                    "billing",
                    "resetpass",
                    &format!(">{next}"),
                ])
                .await;
            // Every connection ends, so each one that follows needs the password of that time.
            let ended: u32 = hand.ask(&["CLIENT", "KILL", "USER", "billing"]).await;
            assert!(ended > 0, "the store has connections");
            let refused = async || match connect().await {
                Err(error) if error.to_string().contains("the store's `password`") => Ok(()),
                other => Err(format!("{other:?}")),
            };
            until("the former password to be refused", LIMIT, refused).await;
            std::fs::write(password.with_extension("next"), next).unwrap();
            std::fs::rename(password.with_extension("next"), &password).unwrap();
            ten_more(&done).await;
        }
        over.store(true, Ordering::Relaxed);
    };
    let (count, ()) = tokio::join!(load(&store, &scope, &done, &over), rotate);
    for number in 0..count {
        let reply = apply(&store, &key(&scope, number), claim(token()))
            .await
            .unwrap();
        let completed = Verdict::Completed {
            result: b"done".as_slice().into(),
        };
        assert_eq!(
            reply,
            Reply::Verdict {
                verdict: completed,
                uncompared: false
            },
            "{number}"
        );
    }
}
