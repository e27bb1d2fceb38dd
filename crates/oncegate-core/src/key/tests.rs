use super::vectors;

/// `ONCEGATE_BLESS_VECTORS=1` writes the file anew, after the format itself has changed.
#[test]
fn published_vectors_hold() {
    if std::env::var_os("ONCEGATE_BLESS_VECTORS").is_some() {
        bless();
    } else {
        let count = vectors::check().unwrap_or_else(|wrong| panic!("{}", wrong.join("\n")));
        assert!(count > 200, "{count}");
    }
}

fn bless() {
    let mut file: vectors::File = serde_json::from_str(vectors::JSON).unwrap();
    for vector in &mut file.vectors {
        vector.expected = vector.answer();
    }
    let lines: Vec<String> =
        file.vectors.iter().map(|vector| serde_json::to_string(vector).unwrap()).collect();
    let about = serde_json::to_string(&file.about).unwrap();
    let text = format!(
        "{{\"about\":{about},\n\"format\":{},\n\"vectors\":[\n{}\n]}}\n",
        file.format,
        lines.join(",\n")
    );
    std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/vectors/keys.json"), text).unwrap();
}
