//! The workers that are measured, and what is wanted of each.

/// A worker and its targets.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// Messages per second.
    pub(super) rate_at_least: Limit,
    /// Processor time of the command per message.
    pub(super) oncegate_micros_at_most: Limit,
    /// Processor time of the worker's processes per message.
    pub(super) worker_micros_at_most: Limit,
}

/// The limit of a target, if there is one.
pub(super) type Limit = Option<f64>;

/// How a worker is called.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// On standard streams, with the library for Python.
    Python {
        /// A script of `benches/workers`, with its arguments.
        script: &'static str,
        arguments: &'static str,
        processes: &'static str,
        /// The messages of a batch, for a script that takes batches.
        batch: Option<&'static str>,
    },
    /// Behind HTTP.
    Go,
    Node,
}

/// Two cores are shared by the broker, the store, the command and the worker, so the targets hold
/// for such a machine.
pub(super) const ROWS: [Row; 8] = [
    Row {
        rate_at_least: Some(8_000.0),
        oncegate_micros_at_most: Some(60.0),
        worker_micros_at_most: Some(80.0),
        // `oncegate init` writes two processes.
        ..row("function", python("function.py", "1 16", "2"))
    },
    row("function, none ahead", python("function.py", "1 0", "2")),
    row("function, 4 processes", python("function.py", "1 16", "4")),
    row("16 threads", python("function.py", "16 0", "2")),
    Row {
        oncegate_micros_at_most: Some(30.0),
        ..row("coroutine", python("coroutine.py", "64", "2"))
    },
    Row {
        oncegate_micros_at_most: Some(25.0),
        ..row(
            "batches of 100",
            Kind::Python {
                script: "batch.py",
                arguments: "",
                processes: "2",
                batch: Some("100"),
            },
        )
    },
    Row {
        oncegate_micros_at_most: Some(45.0),
        ..row("HTTP, Go", Kind::Go)
    },
    Row {
        oncegate_micros_at_most: Some(45.0),
        ..row("HTTP, Node", Kind::Node)
    },
];

/// A worker of single messages.
const fn python(script: &'static str, arguments: &'static str, processes: &'static str) -> Kind {
    Kind::Python {
        script,
        arguments,
        processes,
        batch: None,
    }
}

/// A row without targets.
const fn row(name: &'static str, kind: Kind) -> Row {
    Row {
        name,
        kind,
        rate_at_least: None,
        oncegate_micros_at_most: None,
        worker_micros_at_most: None,
    }
}
