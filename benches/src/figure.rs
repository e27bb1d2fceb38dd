//! The figures of a benchmark: a value compared with its baseline.

use serde::Serialize;

/// A result: the median of the repetitions, and of their ratios to the baseline in the same round.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) unit: Unit,
    pub(crate) value: Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) baseline: Option<Baseline>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) target: Option<Target>,
    #[serde(skip)]
    values: Vec<f64>,
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Unit {
    #[serde(rename = "msg/s")]
    MessagesPerSecond,
    #[serde(rename = "us/msg")]
    MicrosPerMessage,
    #[serde(rename = "us")]
    Micros,
    #[serde(rename = "ns/msg")]
    NanosPerMessage,
    #[serde(rename = "B")]
    BytesPerResult,
    #[serde(rename = "B/key")]
    BytesPerKey,
    #[serde(rename = "MiB")]
    Mebibytes,
    #[serde(rename = "calls/1000 msg")]
    CallsPerThousand,
    #[serde(rename = "tries/msg")]
    TriesPerMessage,
    #[serde(rename = "switches/msg")]
    SwitchesPerMessage,
}

/// The baseline that a figure is compared with.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Baseline {
    pub(crate) name: &'static str,
    pub(crate) value: Summary,
    pub(crate) ratio: Summary,
}

/// The median and the extremes of the repetitions.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// The target of a figure.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Target {
    pub(crate) bound: Bound,
    pub(crate) limit: f64,
    pub(crate) met: bool,
}

/// The quantity that a target limits, and the direction of the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Bound {
    RatioAtLeast,
    RatioAtMost,
    ValueAtLeast,
    ValueAtMost,
}

impl Figure {
    pub(crate) fn new(name: &'static str, unit: Unit, values: &[f64]) -> Self {
        let value = Summary::of(values);
        let values = values.to_vec();
        Self {
            name,
            unit,
            value,
            baseline: None,
            target: None,
            values,
        }
    }

    /// Adds a baseline with the values of the same rounds.
    pub(crate) fn against(mut self, baseline: &'static str, values: &[f64]) -> Self {
        let ratios: Vec<f64> = self
            .values
            .iter()
            .zip(values)
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        let value = Summary::of(values);
        let ratio = Summary::of(&ratios);
        self.baseline = Some(Baseline {
            name: baseline,
            value,
            ratio,
        });
        self
    }

    /// Adds a target. A missed target is shown and does not fail the run.
    pub(crate) fn target(mut self, bound: Bound, limit: f64) -> Self {
        let ratio = self
            .baseline
            .as_ref()
            .map_or(f64::NAN, |baseline| baseline.ratio.median);
        let met = match bound {
            Bound::RatioAtLeast => ratio >= limit,
            Bound::RatioAtMost => ratio <= limit,
            Bound::ValueAtLeast => self.value.median >= limit,
            Bound::ValueAtMost => self.value.median <= limit,
        };
        self.target = Some(Target { bound, limit, met });
        self
    }
}

impl Summary {
    fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |n: usize| sorted.get(n).copied().unwrap_or(f64::NAN);
        let last = sorted.len().saturating_sub(1);
        Self {
            median: f64::midpoint(at(last / 2), at(last.div_ceil(2))),
            min: at(0),
            max: at(last),
        }
    }
}

impl Unit {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::MessagesPerSecond => "msg/s",
            Self::MicrosPerMessage => "us/msg",
            Self::Micros => "us",
            Self::NanosPerMessage => "ns/msg",
            Self::BytesPerResult => "B",
            Self::BytesPerKey => "B/key",
            Self::Mebibytes => "MiB",
            Self::CallsPerThousand => "calls",
            Self::TriesPerMessage => "tries",
            Self::SwitchesPerMessage => "sw/msg",
        }
    }
}
