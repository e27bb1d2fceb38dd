//! moto: AWS's services in one Python process, a second opinion about DynamoDB.

use std::time::Duration;

use oncegate_core::testing::conformance::conformance;
use oncegate_servers::{Port, Process, place, process};
use tokio::net::TcpStream;

use super::rules::OnTable;

/// The Python of moto, under `target/test-servers`.
const PYTHON: &str = "moto-5.2.5/bin/python3";

/// A second on an idle machine.
const START_LIMIT: Duration = Duration::from_secs(180);

// invariant: store-equals-rules
#[tokio::test(flavor = "multi_thread")]
async fn the_store_conforms_on_moto() {
    let port = Port::reserve();
    let dir = place::server_dir("moto");
    let mut command = process::bound_to_parent(place::test_servers().join(PYTHON), "KILL");
    // It keeps no lock over an item between a condition and its write: one call at a time.
    let server = "import sys, threading\nfrom moto.server import main\nfrom moto.dynamodb.responses import \
                  DynamoHandler as H\nlock = threading.Lock()\ncall = H.call_action\ndef one(self):\n    with lock:\n        \
                  return call(self)\nH.call_action = one\nmain(sys.argv[1:])";
    command
        .args(["-c", server, "-H", "127.0.0.1", "-p"])
        .arg(port.number().to_string());
    let mut moto = Process::spawn_logged("moto", command, &dir.path().join("server.log"));
    let hint = "`scripts/fetch-servers` installs moto";
    let address = port.address();
    moto.ready(START_LIMIT, hint, || async {
        let connected = TcpStream::connect(&address).await;
        connected.map(drop).map_err(|error| error.to_string())
    })
    .await;
    conformance(&OnTable::at(&format!("http://{address}")).await).await;
}
