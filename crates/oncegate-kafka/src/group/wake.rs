//! Wakes a task of a tokio runtime from another thread, through the runtime's driver where that is
//! possible.
//!
//! A task that another thread wakes by tokio's own means (`Notify`, a channel) is put into a queue
//! of the whole runtime. The thread that takes it from there wakes one more, to look for more work,
//! which is rarely there at everyday rates. A task that a socket wakes is run by the thread that
//! waits for the sockets, and wakes none (`scripts/bench rates`, context switches).

#[cfg(unix)]
pub(crate) use self::socket::Wake;

#[cfg(not(unix))]
pub(crate) use self::notify::RemoteWake as Wake;

#[cfg(unix)]
mod socket {
    use std::io::{self, Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
    use std::time::Duration;

    use tokio::net;
    use tokio::sync::Mutex;

    /// The time that a task waits before it looks again, where the system has no room to watch
    /// another socket.
    const UNWATCHED_PAUSE: Duration = Duration::from_millis(20);

    /// A wake-up, which is kept until a task waits for it.
    #[derive(Debug)]
    pub(crate) struct Wake {
        sender: UnixStream,
        /// Tasks wait one behind the other.
        receiver: Mutex<UnixStream>,
        /// `true` while a byte is on its way.
        is_set: AtomicBool,
    }

    impl Wake {
        /// # Errors
        /// When the process has no file descriptors left.
        pub(crate) fn new() -> io::Result<Self> {
            let (sender, receiver) = UnixStream::pair()?;
            sender.set_nonblocking(true)?;
            receiver.set_nonblocking(true)?;
            Ok(Self {
                sender,
                receiver: Mutex::new(receiver),
                is_set: AtomicBool::new(false),
            })
        }

        /// Wakes a task that waits, or the next one that will.
        pub(crate) fn wake(&self) {
            if !self.is_set.swap(true, SeqCst) {
                // There is one byte at most, so there is room for it.
                let _ = (&self.sender).write(&[1]);
            }
        }

        /// Waits for a wake-up; it may come without one. What it is about is looked at afterwards.
        /// Dropping the future leaves the wake-up to the next task.
        pub(crate) async fn woken(&self) {
            let receiver = self.receiver.lock().await;
            // Watched only while a task waits: the next one may be of another runtime.
            match receiver.try_clone().and_then(net::UnixStream::from_std) {
                Ok(watched) => drop(watched.readable().await),
                Err(_) => tokio::time::sleep(UNWATCHED_PAUSE).await,
            }
            let _ = (&*receiver).read(&mut [0; 2]);
            self.is_set.store(false, SeqCst);
        }
    }
}

#[cfg(not(unix))]
mod notify {
    use std::io;

    use tokio::sync::Notify;

    /// A wake-up, which is kept until a task waits for it.
    #[derive(Debug, Default)]
    pub(crate) struct RemoteWake(Notify);

    impl RemoteWake {
        pub(crate) fn new() -> io::Result<Self> {
            Ok(Self::default())
        }

        pub(crate) fn wake(&self) {
            self.0.notify_one();
        }

        pub(crate) async fn woken(&self) {
            self.0.notified().await;
        }
    }
}
