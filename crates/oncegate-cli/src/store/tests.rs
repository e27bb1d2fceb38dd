use super::*;

fn known(url: &str) -> Address {
    address(url).unwrap()
}

#[test]
fn stores_are_known_by_their_scheme_and_files_by_their_path() {
    for url in [
        "redis://cache:6379/2",
        "rediss://cache:6379",
        "redis+cluster://a:7000,b:7000",
        "rediss+sentinel://a,b,c/primary",
    ] {
        assert_eq!(known(url), Address::Redis(url.to_owned()));
    }
    for url in ["postgres://db/once", "postgresql://db/once"] {
        assert_eq!(known(url), Address::Postgres(url.to_owned()));
    }
    for file in [
        "sqlite:/var/once.db",
        "sqlite:///var/once.db",
        "/var/once.db",
    ] {
        assert_eq!(known(file), Address::Sqlite("/var/once.db".into()));
    }
    assert_eq!(known("once.db"), Address::Sqlite("once.db".into()));
    assert_eq!(known(r"C:\once.db"), Address::Sqlite(r"C:\once.db".into()));
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
        let text = address(url).unwrap_err().to_string();
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
        let text = address(url).unwrap_err().to_string();
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
        assert!(
            !matches!(address(file), Ok(Address::Redis(_) | Address::Postgres(_))),
            "{file}"
        );
    }
    assert_eq!(
        address("sqlite:cache:6379").unwrap(),
        Address::Sqlite("cache:6379".into())
    );
    assert_eq!(
        address("./cache:6379").unwrap(),
        Address::Sqlite("./cache:6379".into())
    );
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
    assert!(
        !address("mysql://user:secret@db")
            .unwrap_err()
            .to_string()
            .contains("secret")
    );
}
