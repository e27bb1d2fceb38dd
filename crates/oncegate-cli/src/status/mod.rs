//! `oncegate status`: what a running process says of its consumers. `page` reads the data of its
//! status page, `probe` its readiness probe.

mod page;
mod probe;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use axum::http::{StatusCode, Uri};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::args::within;
use crate::config::shape::Status;
use crate::config::{self, Secrets};
use crate::configured::ConfigArgs;
use crate::exit::{Exit, Problem};
use crate::parse::duration;
use crate::run::status::OFF;
use crate::stores::redacted;

/// The longest answer that is read, in bytes.
const ANSWER_MAX_BYTES: usize = 4 * 1024 * 1024;

/// Show what a running process says of its consumers: what they do, and what is wrong
///
/// It requests the data of the status page once. With --probe it requests /readyz alone, for the
/// health checks of containers and for scripts. Exit code 0: every consumer takes and handles
/// messages; 1: one does not; 69: there is no answer.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    config: ConfigArgs,

    /// The address of the status page [default: `status.listen` of the configuration, or
    /// http://127.0.0.1:9464]
    #[arg(long, value_name = "URL", env = "ONCEGATE_STATUS_URL")]
    url: Option<Uri>,

    /// Only ask whether all is ready, and print the answer with its reasons
    #[arg(long)]
    probe: bool,

    /// Print one JSON document
    #[arg(long)]
    json: bool,

    /// Give up after this time: 500ms, 30s, 5m
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "5s")]
    timeout: Duration,
}

pub(crate) async fn run(args: &StatusArgs) -> Result<Exit, Problem> {
    let address = args.address()?;
    let path = if args.probe { probe::PATH } else { page::PATH };
    let url = format!("{address}{path}");
    let answered = within(Some(args.timeout), ask(&url)).await?;
    if args.probe {
        probe::tell(answered, args.json)
    } else {
        page::tell(&redacted(&url), &answered, args.json)
    }
}

impl StatusArgs {
    /// Returns the URL of the page, without a slash at its end.
    fn address(&self) -> Result<String, Problem> {
        let Some(url) = &self.url else {
            return self.configured();
        };
        match (url.scheme_str(), url.authority()) {
            (Some("http"), Some(authority)) => {
                let path = url.path().trim_end_matches('/');
                Ok(format!("http://{authority}{path}"))
            }
            _ => Err(Problem::new(
                Exit::Usage,
                "--url must be http://host:port; there is no TLS here",
            )),
        }
    }

    /// Returns where the configuration lets the page listen. Its errors are those of the process
    /// that runs, and no reason against asking it.
    fn configured(&self) -> Result<String, Problem> {
        let file = self.config.file(false);
        if let Some(words) = self.config.unnamed().filter(|_| file.is_some()) {
            eprintln!("oncegate: {words}");
        }
        let loaded = config::load(file, |_| Vec::new(), Secrets::MayBeLiteral)?;
        let listen = loaded.config.status.and_then(|status| status.listen);
        match listen.as_deref().unwrap_or(Status::LISTEN) {
            OFF => Err(Problem::configuration(
                "there is no status page: `status.listen` is \"off\"",
            )),
            listen => Ok(format!("http://{}", reachable(listen))),
        }
    }
}

/// Returns the address at which this machine reaches a page: one that listens at all of its
/// addresses does so at loopback, too.
fn reachable(listen: &str) -> String {
    let Ok(mut address) = listen.parse::<SocketAddr>() else {
        return listen.to_owned();
    };
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address.to_string()
}

/// Returns the answer to one request.
async fn ask(url: &str) -> Result<(StatusCode, String), Problem> {
    let uri: Uri = url.parse().map_err(|error| {
        let shown = redacted(url);
        Problem::configuration(format!("{shown} is no address: {error}"))
    })?;
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let response = client.get(uri).await.map_err(|error| silent(url, &error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MAX_BYTES)
        .collect()
        .await;
    let body = body.map_err(|error| silent(url, &*error))?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}

fn silent(url: &str, error: &dyn std::error::Error) -> Problem {
    let why = Problem::caused(Exit::Unreachable, error);
    let shown = redacted(url);
    Problem::new(Exit::Unreachable, format!("no answer from {shown}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_at_all_addresses_is_asked_at_loopback() {
        for (listen, asked) in [
            ("0.0.0.0:9464", "127.0.0.1:9464"),
            ("[::]:80", "[::1]:80"),
            ("10.0.0.7:9464", "10.0.0.7:9464"),
            ("localhost:9464", "localhost:9464"),
        ] {
            assert_eq!(reachable(listen), asked);
        }
    }
}
