use super::*;

fn parsed<T: serde::de::DeserializeOwned>(value: &str) -> Result<T, String> {
    #[derive(Deserialize)]
    struct Holder<T> {
        x: T,
    }
    let holder: Result<Holder<T>, _> = toml::from_str(&format!("x = {value}"));
    holder
        .map(|holder| holder.x)
        .map_err(|error| error.message().to_owned())
}

#[test]
fn a_key_has_the_forms_of_files_and_of_the_command_line() {
    let key: Key = "order_id,amount:decimal".parse().unwrap();
    assert_eq!(
        parsed(r#"{ json = ["order_id", { path = "amount", as = "decimal" }] }"#),
        Ok(KeySetting(key.clone()))
    );
    assert_eq!(parsed(r#""order_id,amount:decimal""#), Ok(KeySetting(key)));
    assert!(
        parsed::<KeySetting>(r#"{ json = ["a", "a"] }"#)
            .unwrap_err()
            .contains("given twice")
    );
    assert!(
        parsed::<KeySetting>(r#"{ jsn = ["a"] }"#)
            .unwrap_err()
            .contains("did you mean `json`?")
    );
}

#[test]
fn secrets_are_elsewhere_and_are_never_shown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("password");
    std::fs::write(&path, "hunter2\n").unwrap();
    let secret: Secret = parsed(&format!("{{ file = {path:?} }}")).unwrap();
    assert_eq!(secret.resolve(), Ok("hunter2".to_owned()));
    assert_eq!(
        format!("{:?}", Secret::Literal("hunter2".to_owned())),
        "***"
    );
    let unset = Secret::Env("ONCEGATE_NO_SUCH_VARIABLE".to_owned()).resolve();
    assert!(unset.unwrap_err().contains("ONCEGATE_NO_SUCH_VARIABLE"));
    assert!(
        parsed::<Secret>("{ path = \"x\" }")
            .unwrap_err()
            .contains("{ env =")
    );
}
