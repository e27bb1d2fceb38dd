//! Takes the program from the tutorial for Rust, and compares the dependencies that it names with
//! those of this package.

use std::collections::BTreeMap;
use std::path::Path;

mod extract;

fn main() {
    let tutorial = extract::tutorial();
    let manifest = std::fs::read_to_string("Cargo.toml").expect("the manifest");
    let dependencies = manifest.split("[dependencies]\n").nth(1).expect("dependencies");
    let own: BTreeMap<String, Vec<String>> = dependencies.lines().map(dependency).collect();
    assert_eq!(own, extract::dependencies(&tutorial), "the dependencies of this package, and those of the tutorial");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("program.rs"), extract::program(&tutorial)).expect("written");
}

/// The name and the features of a line such as `serde = { version = "1", features = ["derive"] }`.
fn dependency(line: &str) -> (String, Vec<String>) {
    let (name, value) = line.split_once(" = ").expect("a dependency on one line");
    let features = value.split_once("features = [").and_then(|(_, rest)| rest.split(']').next());
    let features = features.unwrap_or_default().split('"').skip(1).step_by(2);
    (name.to_owned(), features.map(str::to_owned).collect())
}
