//! A worker whose handlers are slow, before a topic with far more than it may hold. Prints how much
//! memory it took at the most, in KiB, beyond what it had at its start.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use oncegate::kafka::KafkaSource;
use oncegate::{Attempt, BoxError, Consumer, Failure, Gate, Key, MemoryStore, Message};
use tokio::sync::Notify;

/// How long each handler takes: slow enough for every queue before it to fill.
const HANDLER: Duration = Duration::from_millis(5);

/// Arguments: brokers, topic, group, how many messages to handle, and `default` or `small` for the
/// bounds.
#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let [brokers, topic, group, messages, bounds] = *arguments.as_slice() else {
        return Err("backlog BROKERS TOPIC GROUP MESSAGES default|small".into());
    };
    let messages: usize = messages.parse()?;
    let before: u64 = kib("VmRSS")?;
    let handled = Arc::new(AtomicUsize::new(0));
    let enough = Arc::new(Notify::new());
    let done = Arc::clone(&enough);
    let handler = move |_: Message, _: Attempt| {
        let handled = Arc::clone(&handled);
        let enough = Arc::clone(&enough);
        async move {
            tokio::time::sleep(HANDLER).await;
            if handled.fetch_add(1, Ordering::Relaxed) + 1 >= messages {
                enough.notify_one();
            }
            Ok::<(), Failure>(())
        }
    };
    let source = KafkaSource::new(brokers, group, [topic]);
    let gate = Gate::new("backlog", Key::message_key(), MemoryStore::new());
    if bounds == "small" {
        let source = source
            .buffered_messages(1_000)
            .buffered_bytes(4 << 20)
            .property("queued.max.messages.kbytes", "4096")
            .property("fetch.max.bytes", "4194304");
        Consumer::new(source, gate, handler)
            .in_flight(1_000, 8 << 20)
            .run_until(done.notified())
            .await?;
    } else {
        Consumer::new(source, gate, handler)
            .run_until(done.notified())
            .await?;
    }
    println!("{}", kib("VmHWM")?.saturating_sub(before));
    Ok(())
}

/// A figure about this process's memory, as the kernel has it.
fn kib(name: &str) -> Result<u64, BoxError> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let figure = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(figure.ok_or("the kernel does not report it")?.parse()?)
}
