//! What the README names: the program of a first consumer, and its dependencies.

use std::collections::BTreeMap;
use std::path::Path;

/// The README, and an order to cargo to build again when it changes.
pub(crate) fn readme() -> String {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = folders
        .into_iter()
        .find(|folder| folder.join("docs/GUIDE.md").exists())
        .expect("the repository");
    let readme = root.join("README.md");
    println!("cargo::rerun-if-changed={}", readme.display());
    std::fs::read_to_string(readme).expect("the README")
}

/// The program.
pub(crate) fn program(readme: &str) -> &str {
    let program = readme
        .split("```rust,no_run\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next());
    program.expect("the README has a program")
}

/// The dependencies of its `cargo add` lines, each with its features.
#[allow(dead_code, reason = "only one of two build scripts needs them")]
pub(crate) fn dependencies(readme: &str) -> BTreeMap<String, Vec<String>> {
    let mut dependencies = BTreeMap::new();
    for line in readme
        .lines()
        .filter_map(|line| line.strip_prefix("cargo add "))
    {
        let mut words = line.split_whitespace();
        let (mut names, mut features) = (Vec::new(), Vec::new());
        while let Some(word) = words.next() {
            match word {
                "--features" => {
                    features.extend(
                        words
                            .next()
                            .unwrap_or_default()
                            .split(',')
                            .map(str::to_owned),
                    );
                }
                "--path" => drop(words.next()),
                name => names.push(name.to_owned()),
            }
        }
        dependencies.extend(names.into_iter().map(|name| (name, features.clone())));
    }
    dependencies
}
