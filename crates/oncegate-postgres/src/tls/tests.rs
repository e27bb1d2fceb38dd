use std::path::Path;

use super::*;

#[test]
fn the_parameters_about_tls_are_taken_out_of_the_url() {
    let url = "postgres://u:p%40@db:5432/shop?sslmode=verify-ca&application_name=a%20b&sslrootcert=%2Fetc%2Fca.pem";
    let (rest, parameters) = Parameters::split(url).expect("it is right");
    assert_eq!(
        rest,
        "postgres://u:p%40@db:5432/shop?application_name=a%20b"
    );
    let file = Some(Root::File("/etc/ca.pem".into()));
    assert_eq!(
        (parameters.mode, parameters.root),
        (Some(Mode::VerifyCa), file)
    );
    let (rest, parameters) =
        Parameters::split("postgres://db/shop?sslrootcert=system").expect("it is right");
    let system = Parameters {
        root: Some(Root::System),
        ..Parameters::default()
    };
    assert_eq!(
        (rest.as_str(), &parameters),
        ("postgres://db/shop", &system)
    );
    assert_eq!(
        parameters.or_files(TlsFiles::trusting("/etc/ca.pem")),
        system,
        "the URL decides"
    );
}

#[test]
fn an_error_names_the_parameter() {
    for (query, named) in [("sslmode=allow", "sslmode"), ("sslcert=a.pem", "sslkey")] {
        let refused =
            Parameters::split(&format!("postgres://db/shop?{query}")).expect_err("it is wrong");
        assert!(refused.to_string().contains(named), "{refused}");
    }
}

/// The mode towards the server of a URL, with the authorities of this file.
fn mode_at(url: &str, root: Option<&Path>) -> Result<Mode, StoreError> {
    let (rest, parameters) = Parameters::split(url)?;
    let mut config: Config = rest.parse().expect("it is right");
    let parameters = parameters.or_files(root.map_or(TlsFiles::NONE, TlsFiles::trusting));
    let mode = parameters.mode_to(&config);
    Tls::new(parameters, &mut config)?;
    Ok(mode)
}

#[test]
fn other_machines_are_verified_unless_the_url_says_otherwise() {
    for (url, expected) in [
        ("postgres://db.example.org/shop", Mode::VerifyFull),
        ("postgres://127.0.0.1,db.example.org/shop", Mode::VerifyFull),
        ("postgres://127.0.0.1/shop", Mode::Disable),
        // The address is what is connected to, whatever the host is called.
        (
            "postgres://localhost/shop?hostaddr=10.0.0.5",
            Mode::VerifyFull,
        ),
        (
            "postgres://localhost,localhost/shop?hostaddr=127.0.0.1,10.0.0.5",
            Mode::VerifyFull,
        ),
        ("postgres:///shop?hostaddr=10.0.0.5", Mode::VerifyFull),
        (
            "postgres://db.example.org/shop?hostaddr=127.0.0.1",
            Mode::Disable,
        ),
        ("postgres:///shop?hostaddr=%3A%3A1", Mode::Disable),
        ("postgres://localhost/shop?sslmode=require", Mode::Require),
        (
            "postgres://localhost/shop?sslrootcert=system",
            Mode::VerifyFull,
        ),
        (
            "postgres://db.example.org/shop?sslmode=disable",
            Mode::Disable,
        ),
    ] {
        assert_eq!(
            mode_at(url, None).expect("the machine has authorities"),
            expected,
            "{url}"
        );
    }
}

#[test]
fn authorities_that_prove_nothing_are_refused() {
    for weak in ["disable", "prefer", "require", "verify-ca"] {
        let url = format!("postgres://db/shop?sslrootcert=system&sslmode={weak}");
        let refused = mode_at(&url, None).expect_err(weak).to_string();
        assert!(refused.contains("sslmode=verify-full"), "{weak}: {refused}");
    }
    let refused =
        mode_at("postgres://db/shop?sslmode=verify-ca", None).expect_err("no authorities");
    assert!(
        refused.to_string().contains("needs sslrootcert"),
        "{refused}"
    );
}

#[test]
fn named_authorities_are_read_in_every_mode_with_tls() {
    for mode in ["prefer", "require", "verify-ca", "verify-full"] {
        let url = format!("postgres://localhost/shop?sslmode={mode}");
        let refused = mode_at(&url, Some(Path::new("/no/such.pem")))
            .expect_err(mode)
            .to_string();
        assert!(refused.contains("/no/such.pem"), "{mode}: {refused}");
    }
    let refused =
        mode_at("postgres://localhost/shop", Some(Path::new("/no/such.pem"))).expect_err("TLS");
    assert!(refused.to_string().contains("/no/such.pem"), "{refused}");
}
