use super::address::with_password;
use super::*;

/// The kind of a URL, and what it is opened with.
fn known(url: &str) -> (&'static str, String) {
    let address = address::known(url)
        .map_err(|problem| problem.to_string())
        .unwrap();
    (address.kind.name(), address.location)
}

fn refused(url: &str) -> String {
    address::known(url).map(drop).unwrap_err().to_string()
}

#[test]
fn stores_are_known_by_their_scheme_and_files_by_their_path() {
    for url in [
        "redis://cache:6379/2",
        "rediss://cache:6379",
        "redis+cluster://a:7000,b:7000",
        "rediss+sentinel://a,b,c/primary",
    ] {
        assert_eq!(known(url), ("Redis", url.to_owned()));
    }
    for url in ["postgres://db/once", "postgresql://db/once"] {
        assert_eq!(known(url), ("PostgreSQL", url.to_owned()));
    }
    for file in [
        "sqlite:/var/once.db",
        "sqlite:///var/once.db",
        "/var/once.db",
    ] {
        assert_eq!(known(file), ("SQLite", "/var/once.db".to_owned()));
    }
    assert_eq!(known("once.db"), ("SQLite", "once.db".to_owned()));
    assert_eq!(known(r"C:\once.db"), ("SQLite", r"C:\once.db".to_owned()));
}

#[test]
fn a_password_goes_into_the_url_whatever_is_in_it() {
    for (url, expected) in [
        (
            "redis://cache:6379/2",
            "redis://:p%40ss%3A%2Fw%25@cache:6379/2",
        ),
        (
            "redis+cluster://me@a:1,b:2",
            "redis+cluster://me:p%40ss%3A%2Fw%25@a:1,b:2",
        ),
        ("once.db", "once.db"),
    ] {
        assert_eq!(with_password(url, Some("p@ss:/w%")), expected);
    }
}

#[test]
fn others_are_refused_with_the_known_ones() {
    for (url, says) in [
        ("mysql:once", "`mysql`"),
        ("sqlite:", "no file"),
        ("", "empty"),
    ] {
        let text = refused(url);
        assert!(
            text.contains(says) && text.contains("known are redis://"),
            "{url}: {text}"
        );
    }
}

#[test]
fn what_looks_like_a_server_is_no_file() {
    for url in [
        "127.0.0.1:6379",
        "cache:6379",
        "my_cache:6379/2",
        "[::1]:6379",
        "@cache:6379",
        ":hunter2@cache",
        "user:hunter2@cache:6379",
        "us_er:hunter2@cache",
        "a:7000,b:7000",
        " redis://user:hunter2@cache",
        "redis_cluster://user:hunter2@cache",
    ] {
        let text = refused(url);
        assert!(
            text.contains("known are redis://") && !text.contains("hunter2"),
            "{url}: {text}"
        );
        assert!(!redacted(url).contains("hunter2"), "{url}");
    }
    for file in [
        "./cache:6379",
        "/var/a@b.db",
        "sqlite:cache:6379",
        "sqlite:a@b.db",
        "once.db",
    ] {
        assert_eq!(known(file).0, "SQLite", "{file}");
    }
    assert_eq!(known("sqlite:cache:6379").1, "cache:6379");
    assert_eq!(known("./cache:6379").1, "./cache:6379");
}

#[test]
fn a_password_is_never_shown() {
    assert_eq!(
        redacted("redis://user:p@ss@cache:6379/2"),
        "redis://***@cache:6379/2"
    );
    assert_eq!(
        redacted("redis://:secret@cache?pass=secret"),
        "redis://***@cache?***"
    );
    assert_eq!(
        redacted("redis+cluster://u:p@a:1,b:2"),
        "redis+cluster://***@a:1,b:2"
    );
    assert_eq!(redacted("redis://cache:6379"), "redis://cache:6379");
    assert_eq!(redacted("/var/once.db"), "/var/once.db");
    assert_eq!(
        redacted("postgres://user:p@ss@db/once?password=x"),
        "postgres://***@db/once?***"
    );
    assert!(!refused("mysql://user:secret@db").contains("secret"));
}
