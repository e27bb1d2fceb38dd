//! The signals that ask this program to stop. They are watched from its start until its end, so
//! that none of them ends it in the middle of an effect, and none is missed between two places that
//! wait for one.

use std::sync::LazyLock;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::time::Instant;
use tracing::info;

/// Signals that come closer together are one request: `timeout`, a shell with its job, and systemd
/// with `SendSIGHUP` send two for one stop.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// The signals so far.
#[derive(Default)]
struct Asked {
    /// The time of the first signal.
    first: Option<Instant>,
    /// Another one came later.
    again: bool,
}

static ASKED: LazyLock<watch::Sender<Asked>> = LazyLock::new(watch::Sender::default);

/// Begins to watch. The tasks end with the runtime.
pub(crate) fn watch(runtime: &Runtime) {
    let mut signal = Box::pin(oncegate::shutdown_signal());
    // The first poll installs the handlers.
    if runtime
        .block_on(async { futures_util::poll!(&mut signal) })
        .is_ready()
    {
        note();
    }
    runtime.spawn(async move {
        loop {
            signal.await;
            note();
            signal = Box::pin(oncegate::shutdown_signal());
        }
    });
    #[cfg(unix)]
    runtime.block_on(async { ignore_user_signals() });
}

/// Signals without a meaning here would end the process.
#[cfg(unix)]
fn ignore_user_signals() {
    use tokio::signal::unix::{SignalKind, signal};

    for (name, kind) in [
        ("SIGUSR1", SignalKind::user_defined1()),
        ("SIGUSR2", SignalKind::user_defined2()),
    ] {
        let Ok(mut signals) = signal(kind) else {
            continue;
        };
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                info!("{name} has no meaning here, and is ignored");
            }
        });
    }
}

fn note() {
    ASKED.send_modify(|asked| match asked.first {
        None => asked.first = Some(Instant::now()),
        Some(first) => asked.again |= first.elapsed() >= ONE_REQUEST,
    });
}

/// Resolves when the program was asked to stop, also before this was called.
pub(crate) async fn stop() {
    // The sender is a static, so this cannot fail.
    drop(
        ASKED
            .subscribe()
            .wait_for(|asked| asked.first.is_some())
            .await,
    );
}

/// Resolves when the program was asked again, a second or more after the first time.
pub(crate) async fn at_once() {
    drop(ASKED.subscribe().wait_for(|asked| asked.again).await);
}
