//! A worker process for the runs under fire. Its one argument is its settings, in JSON.

use oncegate::BoxError;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), BoxError> {
    let settings = std::env::args().nth(1).ok_or("fire_worker SETTINGS")?;
    oncegate_testkit::fire::work(serde_json::from_str(&settings)?).await
}
