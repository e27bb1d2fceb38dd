//! The packages for Python and Node: their own tests, and what must agree with the command.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::libraries::repository;

/// They start about thirty processes: seconds on an idle machine.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs the tests of a package, which have a time limit.
async fn passes(mut command: Command) {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(LIMIT, command.output())
        .await
        .expect("they take too long")
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    let told = text(&output.stdout) + &text(&output.stderr);
    assert!(
        !told.contains("Ran 0 tests") && !told.contains("# tests 0"),
        "there were none:\n{told}"
    );
}

// invariant: worker-library
#[tokio::test]
async fn the_library_for_python_passes_its_tests() {
    let mut command = Command::new("python3");
    command.args([
        "-W",
        "error",
        "-m",
        "unittest",
        "discover",
        "--start-directory",
        "tests",
    ]);
    command.current_dir(repository("packages/python"));
    command
        .env("PYTHONPATH", "src")
        .env("PYTHONDONTWRITEBYTECODE", "1");
    passes(command).await;
}

// invariant: worker-library
#[tokio::test]
async fn the_library_for_node_passes_its_tests() {
    let mut command = Command::new("node");
    command
        .args(["--test", "tests/worker.test.js"])
        .current_dir(repository("packages/node"));
    passes(command).await;
}

#[test]
fn the_packages_have_the_version_of_the_command() {
    let version = env!("CARGO_PKG_VERSION");
    let read = |path| std::fs::read_to_string(repository(path)).unwrap();
    assert!(
        read("packages/python/pyproject.toml").contains(&format!("\nversion = \"{version}\"\n"))
    );
    let node: serde_json::Value =
        serde_json::from_str(&read("packages/node/package.json")).unwrap();
    assert_eq!(node["version"], version);
    let platforms = node["optionalDependencies"].as_object().unwrap();
    assert!(
        platforms.values().all(|platform| platform == version),
        "{platforms:?}"
    );
    let chart = read("deploy/helm/oncegate/Chart.yaml");
    assert!(
        chart.contains(&format!(
            "\nversion: {version}\nappVersion: \"{version}\"\n"
        )),
        "{chart}"
    );
    assert!(read("docker-compose.yml").contains(&format!("\n    image: oncegate:{version}\n")));
}
