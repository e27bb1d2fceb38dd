//! The store passes its conformance suite, and sqlx opens an SQLite file of its own, in one
//! program.

use sqlx::Connection as _;
use sqlx::sqlite::SqliteConnection;

mod store;

#[tokio::main]
async fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    store::conforms(folder.path()).await;

    let file = format!("sqlite://{}?mode=rwc", folder.path().join("of-sqlx.db").display());
    let mut connection = SqliteConnection::connect(&file).await.expect("a new file");
    let version: String =
        sqlx::query_scalar("SELECT sqlite_version()").fetch_one(&mut connection).await.expect("a version");
    println!("the store conforms, beside sqlx on SQLite {version}");
}
