//! The words of `check` and of the start for a door that would not protect.

use std::process::{Command, Output};

use super::{Service, Stage};

fn check(stage: &Stage) -> Output {
    Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .args(["check", "--config"])
        .arg(stage.configuration(1))
        .output()
        .unwrap()
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table")]
fn a_door_that_would_not_protect_is_refused_in_words() {
    const RULE: &str = "{ method = \"POST\", path = \"/pay\" }";
    for (door, words) in [
        (String::new(), "rules: they are missing"),
        ("rules = []".to_owned(), "nothing would be protected"),
        (format!("rules = [{RULE}, {RULE}]"), "never counts"),
        (
            "rules = [{ path = \"/pay\" }]".to_owned(),
            "a `method` and a `path`",
        ),
        (
            "rules = [{ method = \"GET\", path = \"/pay\" }]".to_owned(),
            "changes nothing",
        ),
        (
            "rules = [{ method = \"POST\", path = \"/pay\", ways = 1 }]".to_owned(),
            "ways",
        ),
        (
            "rules = [{ method = \"POST\", path = \"/p\", key = { parameters = [\"id\"] } }]"
                .to_owned(),
            "no part {id}",
        ),
        (
            "rules = [{ method = \"POST\", path = \"/p\", keep = [\"ok\"] }]".to_owned(),
            "`keep` names statuses",
        ),
        (
            "rules = [{ method = \"POST\", path = \"/p\", ignore = [\"path\"] }]".to_owned(),
            "host, query or body",
        ),
        (
            "rules = [{ method = \"POST\", path = \"/p\", retention = \"1ms\" }]".to_owned(),
            "between the lease",
        ),
        (
            format!("rules = [{RULE}]\nheaders = [\"a b\"]"),
            "`a b` is no header",
        ),
        (
            format!("rules = [{RULE}]\nmax_request = \"65MiB\""),
            "at most 64 MiB",
        ),
        (
            format!("rules = [{RULE}]\nmax_result = \"9MiB\""),
            "up to 8MiB",
        ),
        (
            format!("rules = [{RULE}]\nmax_attempts = 0"),
            "between 1 and 254",
        ),
        (
            format!("rules = [{RULE}]\nbroker = \"refused\""),
            "a door has none",
        ),
        (
            format!("rules = [{RULE}]\npath = \"hooks\""),
            "beginning of a path",
        ),
        (
            format!("rules = [{RULE}]\n[consumer.payments]\nlease = \"1s\""),
            "the same name",
        ),
        (
            format!("rules = [{RULE}]\n[door.other]\nlisten = \"127.0.0.1:1\"\nrules = [{RULE}]"),
            "takes the same requests",
        ),
    ] {
        let stage = Stage::before("http://127.0.0.1:1", &door);
        let checked = check(&stage);
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(1), "{door}: {said}");
        assert!(said.contains(words), "{door}: {said}");
    }
    for (service, words) in [
        ("http://127.0.0.1:1/api", "it has a path"),
        ("http://other-machine", "another machine"),
        ("ftp://127.0.0.1", "must begin with"),
    ] {
        let stage = Stage::before(service, &format!("rules = [{RULE}]"));
        let said = String::from_utf8_lossy(&check(&stage).stderr).into_owned();
        assert!(said.contains(words), "{service}: {said}");
    }
    let fine = check(&Stage::before(
        "http://127.0.0.1:1",
        &format!("rules = [{RULE}]"),
    ));
    assert!(fine.status.success(), "{fine:?}");
}

#[tokio::test]
async fn a_door_does_not_open_where_it_would_not_protect() {
    let service = Service::default();
    let server = service.start().await;
    let stage = Stage::before(
        format!("http://{}", server.address()),
        super::answers::RULES,
    );
    let refused = stage.command(server.address().port()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(78), "{said}");
    assert!(said.contains("change the `listen`"), "{said}");
    let other = Stage {
        door: format!(
            "fingerprint = {{ except = [\"host\"] }}\n{}",
            super::answers::RULES
        ),
        ..stage
    };
    let refused = other.command(other.port.number()).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(78), "{said}");
}
