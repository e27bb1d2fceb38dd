use super::*;

/// The part that no configuration can be made of, and the reason.
fn refused(client: &TlsClient) -> (Part, String) {
    let Unusable { part, why } = client.config().expect_err("it is unusable");
    (part, why)
}

fn text(text: &str) -> Pem {
    Pem::Text(text.as_bytes().to_vec())
}

#[test]
fn errors_name_the_part_and_its_file_and_nothing_of_a_text() {
    let missing = Pem::File("/no/such.pem".into());
    for (authorities, named) in [
        (Authorities::Pem(missing.clone()), "/no/such.pem"),
        (Authorities::Pem(text("secret")), "no certificate"),
        (Authorities::Folder("/no/such".into()), "/no/such"),
    ] {
        for proof in [Proof::Host, Proof::Authority] {
            let (part, why) = refused(&TlsClient {
                authorities: authorities.clone(),
                proof,
                identity: None,
            });
            assert_eq!(part, Part::Authorities);
            assert!(why.contains(named) && !why.contains("secret"), "{why}");
        }
    }
    let client = TlsClient {
        authorities: Authorities::None,
        proof: Proof::Host,
        identity: Some((missing, text("secret"))),
    };
    assert_eq!(refused(&client).0, Part::Certificate);
    assert!(!format!("{client:?}").contains("secret"));
}

#[test]
fn authorities_are_not_read_when_any_certificate_is_accepted() {
    let client = TlsClient {
        authorities: Authorities::Pem(Pem::File("/no/such.pem".into())),
        proof: Proof::Nothing,
        identity: None,
    };
    assert!(client.config().is_ok());
}

#[test]
fn a_file_that_becomes_unusable_leaves_the_former_configuration() {
    let folder = tempfile::tempdir().expect("there is room");
    let file = folder.path().join("ca.pem");
    let client = TlsClient {
        authorities: Authorities::Pem(Pem::File(file.clone())),
        ..TlsClient::default()
    };
    assert!(Rotated::new(client.clone()).is_err());
    std::fs::write(&file, AUTHORITY).expect("there is room");
    let rotated = Rotated::new(client).expect("it is right");
    rotated.config(|unusable| panic!("{unusable:?}"));
    std::fs::remove_file(&file).expect("it is there");
    let mut reported = None;
    rotated.config(|unusable| reported = Some(unusable.part));
    assert_eq!(reported, Some(Part::Authorities));
}

#[test]
fn a_file_that_changes_and_keeps_its_time_is_read_again() {
    let folder = tempfile::tempdir().expect("there is room");
    let file = folder.path().join("ca.pem");
    std::fs::write(&file, AUTHORITY).expect("there is room");
    let time = std::fs::metadata(&file)
        .and_then(|file| file.modified())
        .expect("it has a time");
    let client = TlsClient {
        authorities: Authorities::Pem(Pem::File(file.clone())),
        ..TlsClient::default()
    };
    let rotated = Rotated::new(client).expect("it is right");
    std::fs::write(&file, "no certificate").expect("there is room");
    std::fs::File::options()
        .write(true)
        .open(&file)
        .and_then(|file| file.set_modified(time))
        .expect("its time can be set");
    let mut reported = None;
    rotated.config(|unusable| reported = Some(unusable.part));
    assert_eq!(reported, Some(Part::Authorities), "it was read again");
}

/// A certificate of an authority, valid until 2126. Its key is nowhere.
const AUTHORITY: &str = "\
-----BEGIN CERTIFICATE-----
MIIBiDCCAS2gAwIBAgIUKlkYodhoRPKZnVrNvixfojWUsmowCgYIKoZIzj0EAwIw
GDEWMBQGA1UEAwwNb25jZWdhdGUtdGVzdDAgFw0yNjExMjcxMzQzMTlaGA8yMTI2
MTEwMzEzNDMxOVowGDEWMBQGA1UEAwwNb25jZWdhdGUtdGVzdDBZMBMGByqGSM49
AgEGCCqGSM49AwEHA0IABODyvJUi598nViZmJy++U+ES5LylbhVosMwWOLuTzu6P
1ho0InPjWanfuAEpi6QZBs4nkUPShoNP+z77sNT7x6OjUzBRMB0GA1UdDgQWBBSI
Q5YDYtB4ZfVnDzodPl/L8vKgmTAfBgNVHSMEGDAWgBSIQ5YDYtB4ZfVnDzodPl/L
8vKgmTAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0kAMEYCIQDbY0Ky1hGn
9SxFOoFRFqFh+eNanRnllF+B/rveY2+/tgIhAJBcV/E2TEJftMd6dbuohrYQNQHq
mDMH/+dB7LZYd2Q3
-----END CERTIFICATE-----
";
