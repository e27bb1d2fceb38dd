//! Makes the program `readme` from the tutorial for Rust: servers and topics come from the
//! environment.

use std::path::Path;

#[path = "../consumers/readme/extract.rs"]
mod extract;

fn main() {
    let tutorial = extract::tutorial();
    let mut program = extract::program(&tutorial).to_owned();
    for (literal, name) in [
        ("\"redis://localhost:6379\"", "README_REDIS"),
        ("\"localhost:9092\"", "README_KAFKA"),
        ("\"orders\"", "README_TOPIC"),
        ("\"orders.dead\"", "README_DEAD_LETTERS"),
    ] {
        assert_eq!(
            program.matches(literal).count(),
            1,
            "the tutorial's program contains {literal} once"
        );
        let variable = match name {
            "README_REDIS" => format!("&std::env::var({name:?})?"),
            _ => format!("std::env::var({name:?})?"),
        };
        program = program.replace(literal, &variable);
    }
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("readme.rs"), program).expect("written");
}
