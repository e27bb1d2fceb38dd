//! The store passes its conformance suite on the oldest rusqlite.

#[path = "../../sqlx-default/src/store.rs"]
mod store;

#[tokio::main]
async fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    store::conforms(folder.path()).await;
    println!("the store conforms on SQLite {}", rusqlite::version());
}
