//! The memory of this process, by the kernel's counts.

use std::fs;

/// The memory in use, in MiB.
pub(crate) fn rss_mebibytes() -> f64 {
    mebibytes("VmRSS:")
}

/// The most memory that this process takes beyond what it has at the beginning.
pub(crate) struct PeakMemory {
    before: f64,
}

impl PeakMemory {
    pub(crate) fn begin() -> Self {
        // Sets the highest value back to the present one.
        fs::write("/proc/self/clear_refs", "5").expect("the kernel counts the memory");
        Self {
            before: rss_mebibytes(),
        }
    }

    pub(crate) fn mebibytes(&self) -> f64 {
        mebibytes("VmHWM:") - self.before
    }
}

fn mebibytes(of: &str) -> f64 {
    const KIB_PER_MEBIBYTE: f64 = 1_024.0;
    let status = fs::read_to_string("/proc/self/status").expect("the kernel reports the memory");
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix(of)?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.trim().parse::<f64>().ok())
        .map_or(f64::NAN, |kib| kib / KIB_PER_MEBIBYTE)
}
