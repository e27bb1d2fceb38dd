//! Waits for the signal to stop.

/// Resolves at the first SIGTERM or SIGINT (Ctrl-C), as sent by a container's supervisor or from a terminal.
///
/// For [`Consumer::run_until`](crate::Consumer::run_until). When the signals cannot be watched, it logs an error
/// and never resolves; a signal then ends the process at once.
pub async fn shutdown_signal() {
    if let Err(error) = asked_to_stop().await {
        tracing::error!(%error, "signals cannot be watched: this process will not stop gracefully");
        std::future::pending::<()>().await;
    }
}

#[cfg(unix)]
async fn asked_to_stop() -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};

    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted,
    }
}

#[cfg(not(unix))]
async fn asked_to_stop() -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}
