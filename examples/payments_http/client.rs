//! The service as a child process, and a client that repeats requests.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, Request, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as Connections;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use oncegate::BoxError;

/// The longest wait for anything.
const LIMIT: Duration = Duration::from_secs(30);

/// The service in a child process. Dropping this value ends it: gracefully if possible, by SIGKILL
/// otherwise.
pub(crate) struct Service {
    process: Child,
    pub(crate) client: Client,
}

impl Service {
    pub(crate) fn start(folder: &Path) -> Result<Self, BoxError> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .arg("--serve")
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let mut address = String::new();
        let output = process.stdout.take().ok_or("the service has no output")?;
        BufReader::new(output).read_line(&mut address)?;
        let client = Client::of(&format!("http://{}/payments", address.trim()));
        Ok(Self { process, client })
    }

    /// SIGKILL: it runs no cleanup.
    pub(crate) fn kill(mut self) -> Result<(), BoxError> {
        self.process.kill()?;
        self.process.wait()?;
        Ok(())
    }

    /// Stops it gracefully. Returns whether it ended well.
    pub(crate) fn stop(mut self) -> Result<bool, BoxError> {
        drop(self.process.stdin.take());
        Ok(self.process.wait()?.success())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // Both fail for a process that has ended already, and then there is nothing to do.
        _ = self.process.kill();
        _ = self.process.wait();
    }
}

#[derive(Clone)]
pub(crate) struct Client {
    connections: Connections<HttpConnector, Full<axum::body::Bytes>>,
    uri: String,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn is_replayed(&self) -> bool {
        self.headers.contains_key("idempotent-replayed")
    }
}

impl Client {
    fn of(uri: &str) -> Self {
        Self {
            connections: Connections::builder(TokioExecutor::new()).build_http(),
            uri: uri.to_owned(),
        }
    }

    /// Sends a payment once.
    pub(crate) async fn pay(
        &self,
        key: &str,
        order: &str,
        amount: u64,
    ) -> Result<Answer, BoxError> {
        let body = format!(r#"{{"order":"{order}","amount":{amount}}}"#);
        let request = Request::post(&self.uri)
            .header("idempotency-key", format!("\"{key}\""))
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))?;
        let (head, body) = self.connections.request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body: String::from_utf8(body.into())?,
        })
    }

    /// Sends it until the service returns a final answer: again after each `Retry-After`.
    pub(crate) async fn pay_surely(
        &self,
        key: &str,
        order: &str,
        amount: u64,
    ) -> Result<Answer, BoxError> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let answer = self.pay(key, order, amount).await?;
            let Some(after) = answer.headers.get(header::RETRY_AFTER) else {
                return Ok(answer);
            };
            if Instant::now() > deadline {
                return Err(format!("no outcome within {LIMIT:?}: {answer:?}").into());
            }
            let seconds: u64 = after.to_str()?.parse()?;
            tokio::time::sleep(Duration::from_secs(seconds)).await;
        }
    }
}
