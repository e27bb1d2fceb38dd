//! TLS, as libpq's parameters ask for it, against a server that demands it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use oncegate::postgres::PostgresStore;
use oncegate_core::key::Scope;
use oncegate_core::store::{Store as _, StoreError};
use oncegate_testkit::{Certificates, PostgresServer, until};

use crate::hand::{apply, claim, complete, completed_with, key, scope, token};

/// A server whose certificate names `localhost` only, with a role `secured` that has a password.
async fn server(certificates: &Certificates) -> PostgresServer {
    let file = |name: &str| certificates.file(name);
    let server =
        PostgresServer::start_tls(&file("server.pem"), &file("server.key"), &file("ca.pem")).await;
    let admin = server.connection().await;
    let roles = "CREATE ROLE secured LOGIN PASSWORD 'open sesame'; CREATE ROLE server LOGIN";
    admin.batch_execute(roles).await.unwrap();
    let store = PostgresStore::connect(server.url()).await.unwrap();
    store.create_schema().await.unwrap();
    let tables =
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO secured, server";
    admin.batch_execute(tables).await.unwrap();
    server
}

/// The URL for a role at the server, which is reached as `host`.
fn url(server: &PostgresServer, role: &str, host: &str, parameters: &str) -> String {
    format!(
        "{}?{parameters}",
        server.url_as(role).replace("127.0.0.1", host)
    )
}

async fn connect(url: &str) -> Result<PostgresStore, StoreError> {
    PostgresStore::builder(url)
        .connect_timeout(LIMIT)
        .response_timeout(LIMIT)
        .connect()
        .await
}

async fn refusal(url: &str) -> String {
    let error = connect(url).await.expect_err("it must be refused");
    assert_eq!(error.class(), "refused", "{error}");
    error.to_string()
}

fn root(path: &Path) -> String {
    format!("sslrootcert={}", path.display())
}

/// Handshakes take their time on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

const PASSWORD: &str = "secured:open%20sesame";

#[tokio::test]
async fn each_mode_checks_what_libpq_checks() {
    let certificates = Certificates::for_names("DNS:localhost");
    let server = server(&certificates).await;
    let known = root(&certificates.file("ca.pem"));
    for accepted in accepted(&server, &known) {
        connect(&accepted).await.unwrap().check().await.unwrap();
    }
    for (refused, named) in refused(&server, &certificates) {
        let error = refusal(&refused).await;
        assert!(error.contains(named), "{refused}: {error}");
        assert!(!error.contains("sesame"), "{error}");
    }
}

/// The URLs that lead to a connection.
fn accepted(server: &PostgresServer, known: &str) -> [String; 8] {
    let at = |host: &str, parameters: &str| url(server, PASSWORD, host, parameters);
    [
        at("localhost", &format!("sslmode=verify-full&{known}")),
        // The certificate does not have this name, and only `verify-full` looks at names.
        at("127.0.0.1", &format!("sslmode=verify-ca&{known}")),
        at("127.0.0.1", "sslmode=require"),
        at("127.0.0.1", "sslmode=prefer"),
        // With authorities they check the certificate, and still no name.
        at("127.0.0.1", &format!("sslmode=require&{known}")),
        at("127.0.0.1", &format!("sslmode=prefer&{known}")),
        // The certificate is compared with `host`, while the connection goes to `hostaddr`.
        at(
            "localhost",
            &format!("sslmode=verify-full&hostaddr=127.0.0.1&{known}"),
        ),
        at("localhost", known),
    ]
}

/// The URLs that are refused, each with a word of its error.
fn refused(server: &PostgresServer, certificates: &Certificates) -> [(String, &'static str); 14] {
    let at = |host: &str, parameters: &str| url(server, PASSWORD, host, parameters);
    let known = root(&certificates.file("ca.pem"));
    let secret = root(&certificates.file("server.key"));
    let stranger = Certificates::for_names("DNS:localhost");
    let unknown = root(&stranger.file("ca.pem"));
    // An address alone has no name that a certificate could have.
    let (port, database) = server
        .url()
        .rsplit_once(':')
        .unwrap()
        .1
        .split_once('/')
        .unwrap();
    let address = format!("postgres://{PASSWORD}@/{database}?hostaddr=127.0.0.1&port={port}");
    let nameless = format!("{address}&sslmode=verify-full&{known}");

    let modes = ["verify-full", "verify-ca", "require", "prefer"];
    let [full, ca, require, prefer] =
        modes.map(|mode| at("localhost", &format!("sslmode={mode}&{unknown}")));
    [
        (
            at("127.0.0.1", &format!("sslmode=verify-full&{known}")),
            "does not name the host",
        ),
        (full, "sslrootcert"),
        (ca, "sslrootcert"),
        (require, "sslrootcert"),
        (prefer, "sslrootcert"),
        (at("127.0.0.1", &known), "does not name the host"),
        (at("localhost", "sslmode=verify-full"), "sslrootcert"),
        (at("localhost", "sslrootcert=system"), "sslrootcert"),
        (
            at("localhost", "sslmode=require&sslrootcert=system"),
            "needs sslmode=verify-full",
        ),
        (at("localhost", "sslmode=verify-ca"), "needs sslrootcert"),
        (nameless, "give host in the URL"),
        (
            at("localhost", &format!("sslmode=verify-full&{secret}")),
            "sslrootcert",
        ),
        (at("127.0.0.1", "sslmode=disable"), "no encryption"),
        (
            url(server, "secured:wrong", "localhost", "sslmode=require"),
            "password",
        ),
    ]
}

#[tokio::test]
async fn an_expired_certificate_is_named_as_the_reason() {
    let certificates = Certificates::for_names("DNS:localhost");
    certificates.let_expire();
    let server = server(&certificates).await;
    let known = root(&certificates.file("ca.pem"));
    for mode in ["verify-full", "verify-ca", "require"] {
        let error = refusal(&url(
            &server,
            PASSWORD,
            "localhost",
            &format!("sslmode={mode}&{known}"),
        ))
        .await;
        assert!(error.contains("Expired"), "{mode}: {error}");
    }
}

#[tokio::test]
async fn a_client_is_known_by_its_certificate() {
    let certificates = Certificates::for_names("DNS:localhost");
    let stranger = Certificates::for_names("DNS:localhost");
    let server = server(&certificates).await;
    let with = |of: &Certificates| {
        let certificate = of.file("server.pem");
        let key = of.file("server.key");
        let files = format!("sslcert={}&sslkey={}", certificate.display(), key.display());
        url(
            &server,
            "server",
            "localhost",
            &format!(
                "sslmode=verify-full&{}&{files}",
                root(&certificates.file("ca.pem"))
            ),
        )
    };
    connect(&with(&certificates))
        .await
        .unwrap()
        .check()
        .await
        .unwrap();
    // The same files outside of the URL.
    let bare = format!("sslmode=verify-full&{}", root(&certificates.file("ca.pem")));
    let builder = PostgresStore::builder(&url(&server, "server", "localhost", &bare));
    let builder = builder.tls_client(
        certificates.file("server.pem"),
        certificates.file("server.key"),
    );
    builder
        .connect_timeout(Duration::from_secs(60))
        .connect()
        .await
        .unwrap()
        .check()
        .await
        .unwrap();
    let error = refusal(&with(&stranger)).await;
    assert!(error.contains("sslcert"), "{error}");
    let none = url(
        &server,
        "server",
        "localhost",
        &format!("sslmode=verify-full&{}", root(&certificates.file("ca.pem"))),
    );
    assert!(
        refusal(&none).await.contains("certificate"),
        "the server asks for a certificate"
    );
}

#[tokio::test]
async fn a_server_without_tls_is_not_believed() {
    let server = PostgresServer::start().await;
    let error = refusal(&url(&server, "postgres", "127.0.0.1", "sslmode=require")).await;
    assert!(error.contains("sslmode"), "{error}");
    connect(&url(&server, "postgres", "127.0.0.1", "sslmode=prefer"))
        .await
        .unwrap();
}

// invariant: rotation-under-load
#[tokio::test]
async fn certificates_are_rotated_without_a_restart() {
    let first = Certificates::for_names("DNS:localhost");
    let second = Certificates::for_names("DNS:localhost");
    let mut server = server(&first).await;
    let folder = tempfile::tempdir().unwrap();
    let authority = folder.path().join("ca.pem");
    std::fs::copy(first.file("ca.pem"), &authority).unwrap();
    let parameters = format!("sslmode=verify-full&{}", root(&authority));
    let store = connect(&url(&server, PASSWORD, "localhost", &parameters))
        .await
        .unwrap();
    store.check().await.unwrap();

    // Another authority: the file is replaced, and the server is started again with its new
    // certificate.
    server.kill();
    server.install_certificate(&second.file("server.pem"), &second.file("server.key"));
    server.start_again().await;
    let old = async || match store.check().await {
        Err(error) if error.to_string().contains("sslrootcert") => Ok(()),
        other => Err(format!("{other:?}")),
    };
    until("the old authority to be believed no more", LIMIT, old).await;
    std::fs::copy(second.file("ca.pem"), &authority).unwrap();
    let new = async || {
        store
            .check()
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    };
    until("the new authority to be believed", LIMIT, new).await;
}

/// Replaces a file by another, as a secret's volume does.
fn rewrite(path: &Path, content: &str) {
    let next = path.with_extension("next");
    std::fs::write(&next, content).unwrap();
    std::fs::rename(&next, path).unwrap();
}

/// Completes one key after another until it is over. Returns their number.
async fn load(store: &PostgresStore, scope: &Scope, done: &AtomicU32, over: &AtomicBool) -> u128 {
    let mut number = 0;
    while !over.load(Ordering::Relaxed) {
        let key = key(scope, number);
        let owner = token();
        for operation in [claim(owner), complete(owner, "done")] {
            // The same token, so a lost reply does no harm.
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
    let certificates = Certificates::for_names("DNS:localhost");
    let server = server(&certificates).await;
    let admin = server.connection().await;
    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "open sesame\n").unwrap();
    let store = PostgresStore::builder(&url(&server, "secured", "localhost", "sslmode=require"))
        .password_file(&password)
        .connect_timeout(LIMIT)
        .response_timeout(LIMIT)
        .connect()
        .await
        .unwrap();
    let scope = scope();
    let over = AtomicBool::new(false);
    let done = AtomicU32::new(0);
    let rotate = async {
        ten_more(&done).await;
        for next in ["second", "third"] {
            // Every connection ends, so each one that follows needs the password of that time.
            let change = format!("ALTER ROLE secured PASSWORD '{next}'");
            admin.batch_execute(&change).await.unwrap();
            rewrite(&password, next);
            let end =
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'secured'";
            let ended = admin.query(end, &[]).await.unwrap().len();
            assert!(ended > 0, "the store has connections");
            ten_more(&done).await;
        }
        over.store(true, Ordering::Relaxed);
    };
    let (count, ()) = tokio::join!(load(&store, &scope, &done, &over), rotate);
    for number in 0..count {
        let reply = apply(&store, &key(&scope, number), claim(token()))
            .await
            .unwrap();
        assert!(completed_with(b"done", &reply), "{number}: {reply:?}");
    }
    // What is wrong is said with the file's name, and without its content.
    rewrite(&password, "wrong-password");
    let builder = |file: &Path| {
        let builder =
            PostgresStore::builder(&url(&server, "secured", "localhost", "sslmode=require"));
        builder.connect_timeout(LIMIT).password_file(file)
    };
    let error = builder(&password).connect().await.unwrap_err().to_string();
    assert!(
        error.contains("the store's `password`") && !error.contains("wrong-password"),
        "{error}"
    );
    let missing = folder.path().join("missing");
    let error = builder(&missing).connect().await.unwrap_err().to_string();
    assert!(
        error.contains("missing") && error.contains("cannot be read"),
        "{error}"
    );
}

#[tokio::test]
async fn a_password_in_plain_text_to_another_machine_is_warned_about() {
    let certificates = Certificates::for_names("DNS:localhost");
    let server = server(&certificates).await;
    let is_warned = async |role: &str, host: &str, mode: &str| {
        let store = connect(&url(&server, role, host, &format!("sslmode={mode}")))
            .await
            .unwrap();
        let warnings = store.check().await.unwrap().warnings;
        warnings
            .iter()
            .any(|warning| warning.contains("plain text") && warning.contains("sslmode"))
    };
    // A name of this machine that does not look like one.
    assert!(is_warned(PASSWORD, "LOCALHOST", "prefer").await);
    assert!(
        !is_warned(PASSWORD, "LOCALHOST", "require").await,
        "this one uses TLS"
    );
    assert!(
        !is_warned(PASSWORD, "127.0.0.1", "prefer").await,
        "this is the same machine"
    );
}
