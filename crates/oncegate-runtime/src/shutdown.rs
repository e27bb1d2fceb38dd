//! Waits for the signal to stop.

/// Resolves at the first SIGTERM, SIGINT (Ctrl-C), SIGHUP or SIGQUIT, as sent by a supervisor or
/// from a terminal.
///
/// For [`Consumer::run_until`](crate::Consumer::run_until). A SIGHUP that the process was started
/// to ignore, as by `nohup`, stays ignored (on Linux). When the signals cannot be watched, it logs
/// an error and never resolves; a signal then ends the process at once.
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
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut quit = signal(SignalKind::quit())?;
    let mut hang_up = if is_hang_up_ignored() {
        None
    } else {
        Some(signal(SignalKind::hangup())?)
    };
    let hung_up = async {
        match &mut hang_up {
            Some(hang_up) => hang_up.recv().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = quit.recv() => {}
        _ = hung_up => {}
    }
    Ok(())
}

/// Returns whether the process was started to ignore SIGHUP. Watching the signal would end that.
#[cfg(unix)]
fn is_hang_up_ignored() -> bool {
    const HANG_UP_BIT: u64 = 1;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.unwrap_or_default() & HANG_UP_BIT != 0
}

#[cfg(not(unix))]
async fn asked_to_stop() -> std::io::Result<()> {
    tokio::signal::ctrl_c().await
}
