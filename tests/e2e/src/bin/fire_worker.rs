//! A worker process for the runs under fire. Its arguments are its settings, in JSON; before them
//! `stdio`, if it is a worker on standard streams that `oncegate run` starts.

use oncegate::BoxError;
use oncegate_testkit::fire;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["stdio", settings] => fire::serve(&serde_json::from_str(settings)?),
        [settings] => fire::work(serde_json::from_str(settings)?).await,
        _ => Err("fire_worker [stdio] SETTINGS".into()),
    }
}
