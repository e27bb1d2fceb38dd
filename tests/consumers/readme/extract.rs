//! What the tutorial for Rust names: the program of a first consumer, and its dependencies.

use std::collections::BTreeMap;
use std::path::Path;

/// The tutorial, and an order to cargo to build again when it or the README changes. What the
/// README shows of the program is compared with it.
pub(crate) fn tutorial() -> String {
    let folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let root = folders
        .into_iter()
        .find(|folder| folder.join("docs/GUIDE.md").exists())
        .expect("the repository");
    let [tutorial, readme] = ["docs/tutorials/rust.md", "README.md"].map(|name| {
        let path = root.join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        std::fs::read_to_string(path).expect("the document")
    });
    let shown = code_block(&readme, "rust,ignore").expect("the README shows a handler");
    for part in shown.split("// …\n") {
        assert!(
            program(&tutorial).contains(part),
            "not in the program of the tutorial:\n{part}"
        );
    }
    tutorial
}

/// The program.
pub(crate) fn program(tutorial: &str) -> &str {
    code_block(tutorial, "rust,no_run").expect("the tutorial has a program")
}

fn code_block<'a>(document: &'a str, language: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(&format!("```{language}\n"))?;
    rest.split("```").next()
}

/// The dependencies of its `cargo add` lines, each with its features.
#[allow(dead_code, reason = "only one of two build scripts needs them")]
pub(crate) fn dependencies(tutorial: &str) -> BTreeMap<String, Vec<String>> {
    let mut dependencies = BTreeMap::new();
    for line in tutorial
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
