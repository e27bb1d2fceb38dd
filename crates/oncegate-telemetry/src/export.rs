//! Publishes events and states as metrics through the `metrics` facade.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use parking_lot::RwLock;

use oncegate_runtime::observe::{CATALOGUE, Event, Kind, Metric};

const METADATA: Metadata<'static> = Metadata::new("oncegate", Level::INFO, Some(module_path!()));

/// The number of durations after which the recorder's upkeep runs.
const DURATIONS_PER_UPKEEP: u32 = 4_096;

/// The scope of metrics that belong to no gate. No real scope is empty.
const NO_SCOPE: &str = "";

/// A recorder, and a cache of its handles, so that names and labels are looked up there once.
pub(super) struct Export {
    /// The recorder; `None` for the program's own.
    recorder: Option<Box<dyn Recorder + Send + Sync>>,
    counters: Handles<Counter>,
    histograms: Handles<Histogram>,
    upkeep: Option<Box<dyn Fn() + Send + Sync>>,
    durations: AtomicU32,
}

impl Export {
    pub(super) fn global() -> Self {
        Self::new(None)
    }

    pub(super) fn to(recorder: Box<dyn Recorder + Send + Sync>) -> Self {
        Self::new(Some(recorder))
    }

    fn new(recorder: Option<Box<dyn Recorder + Send + Sync>>) -> Self {
        let export = Self {
            recorder,
            counters: Handles::default(),
            histograms: Handles::default(),
            upkeep: None,
            durations: AtomicU32::new(0),
        };
        CATALOGUE.iter().for_each(|metric| export.describe(metric));
        export.begin(NO_SCOPE);
        export
    }

    /// Sets the recorder's upkeep, which runs now and then when an event is observed: a recorder
    /// may keep each duration until it is scraped, which may never happen.
    #[cfg(feature = "status")]
    pub(super) fn with_upkeep(self, upkeep: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            upkeep: Some(Box::new(upkeep)),
            ..self
        }
    }

    fn with<T>(&self, ask: impl FnOnce(&dyn Recorder) -> T) -> T {
        match &self.recorder {
            Some(recorder) => ask(&**recorder),
            None => metrics::with_recorder(ask),
        }
    }

    fn describe(&self, metric: &Metric) {
        let name = metric.full_name().into();
        let help = metric.help.into();
        self.with(|recorder| match metric.kind {
            Kind::Counter => recorder.describe_counter(name, Some(Unit::Count), help),
            Kind::Gauge => recorder.describe_gauge(name, None, help),
            Kind::Seconds(_) => recorder.describe_histogram(name, Some(Unit::Seconds), help),
            Kind::Bytes(_) => recorder.describe_histogram(name, Some(Unit::Bytes), help),
        });
    }

    /// Registers every counter of a scope at zero. A counter that appeared with its first event
    /// would look as if it had always been at one, and no alert would detect that event.
    pub(super) fn begin(&self, scope: &str) {
        let begun = CATALOGUE
            .iter()
            .filter(|metric| metric.kind == Kind::Counter);
        for metric in begun.filter(|metric| metric.is_scoped() == (scope != NO_SCOPE)) {
            let values = if metric.labels.len() == usize::from(metric.is_scoped()) {
                &[""]
            } else {
                metric.values
            };
            values
                .iter()
                .for_each(|label| drop(self.counter(metric.name, scope, label)));
        }
    }

    fn counter(&self, name: &'static str, scope: &str, label: &'static str) -> Counter {
        self.counters.get(scope, (name, label), || {
            let key = key(name, scope, label);
            self.with(|recorder| recorder.register_counter(&key, &METADATA))
        })
    }

    fn histogram(&self, name: &'static str, scope: &str, label: &'static str) -> Histogram {
        self.histograms.get(scope, (name, label), || {
            let key = key(name, scope, label);
            self.with(|recorder| recorder.register_histogram(&key, &METADATA))
        })
    }

    pub(super) fn gauge(&self, key: &Key) -> Gauge {
        self.with(|recorder| recorder.register_gauge(key, &METADATA))
    }

    /// Counts the event, and records its duration or its size.
    pub(super) fn observe(&self, event: Event<'_>) {
        let scope = event.scope().unwrap_or(NO_SCOPE);
        let (name, label, count) = event.metric();
        self.counter(name, scope, label).increment(count);
        if let Some((name, label, took)) = event.duration() {
            self.histogram(name, scope, label)
                .record(took.as_secs_f64());
            self.keep_up();
        }
        if let Some((name, bytes)) = event.size() {
            self.histogram(name, scope, "").record(bytes as f64);
            self.keep_up();
        }
    }

    fn keep_up(&self) {
        if let Some(upkeep) = &self.upkeep
            && self.durations.fetch_add(1, Relaxed) % DURATIONS_PER_UPKEEP
                == DURATIONS_PER_UPKEEP - 1
        {
            upkeep();
        }
    }
}

/// The key of an event's series: its scope, if the metric has scopes, and its kind, if it has
/// kinds.
fn key(name: &'static str, scope: &str, label: &'static str) -> Key {
    let Some(metric) = Metric::named(name) else {
        return Key::from_name(name);
    };
    let labels = metric.labels.iter().map(|&named| match named {
        "scope" => Label::new(named, scope.to_owned()),
        kind => Label::new(kind, label),
    });
    Key::from_parts(metric.full_name(), labels.collect::<Vec<_>>())
}

/// The handles of one kind: by scope, then by short name and label.
struct Handles<H>(RwLock<BTreeMap<Box<str>, HashMap<Series, H>>>);

/// The short name of a metric, and the value of its last label.
type Series = (&'static str, &'static str);

impl<H> Default for Handles<H> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<H: Clone> Handles<H> {
    /// The handle of this series; `register` makes it the first time.
    fn get(&self, scope: &str, series: Series, register: impl FnOnce() -> H) -> H {
        let scopes = self.0.read();
        if let Some(known) = scopes.get(scope).and_then(|known| known.get(&series)) {
            return known.clone();
        }
        drop(scopes);
        let registered = register();
        let mut scopes = self.0.write();
        scopes
            .entry(scope.into())
            .or_default()
            .entry(series)
            .or_insert(registered)
            .clone()
    }
}
