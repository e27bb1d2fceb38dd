//! JUnit XML, which CI systems show beside other tests.

use std::fmt::Write as _;

use super::escaped;
use crate::defect::Defect;
use crate::verdict::{Finding, Verdict};

/// The reason why a fault is a test case that was skipped.
const NOT_TRIED: &str = "it has not begun: the trial was too short for it, or what it begins with never happened; give the \
                         trial more time or rounds, or a shorter lease";

/// Returns the verdict as JUnit XML: a test case for each kind of defect, which fails if the defect
/// was found, and one for each fault that was to be tried and was not, which is skipped.
pub fn junit(verdict: &Verdict, repeat: impl Fn(&Finding) -> String) -> String {
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let untried = verdict.untried();
    let tests = Defect::ALL.len() + untried.len();
    let failures = verdict.findings.len();
    let seconds = verdict.took.as_secs_f64();
    // Writing to a string cannot fail.
    _ = writeln!(
        out,
        "<testsuites tests=\"{tests}\" failures=\"{failures}\" time=\"{seconds:.3}\">"
    );
    _ = writeln!(
        out,
        "  <testsuite name=\"oncegate prove\" tests=\"{tests}\" failures=\"{failures}\" skipped=\"{}\" time=\"{seconds:.3}\">",
        untried.len()
    );
    _ = writeln!(
        out,
        "    <properties><property name=\"seed\" value=\"{}\"/><property name=\"rounds\" value=\"{}\"/></properties>",
        verdict.seed, verdict.rounds
    );
    for defect in Defect::ALL {
        let finding = verdict
            .findings
            .iter()
            .find(|finding| finding.violation.defect == defect);
        let Some(finding) = finding else {
            _ = writeln!(
                out,
                "    <testcase classname=\"oncegate.prove\" name=\"{defect}\"/>"
            );
            continue;
        };
        let what = escaped(&finding.violation.what);
        _ = writeln!(
            out,
            "    <testcase classname=\"oncegate.prove\" name=\"{defect}\">"
        );
        _ = writeln!(out, "      <failure type=\"{defect}\" message=\"{what}\">");
        for line in [
            defect.meaning(),
            defect.remedy(),
            &format!("repeat: {}", repeat(finding)),
        ] {
            _ = writeln!(out, "{}", escaped(line));
        }
        out.push_str("      </failure>\n    </testcase>\n");
    }
    for fault in untried {
        _ = writeln!(
            out,
            "    <testcase classname=\"oncegate.prove.faults\" name=\"{fault}\">"
        );
        _ = writeln!(
            out,
            "      <skipped message=\"{}\"/>\n    </testcase>",
            escaped(NOT_TRIED)
        );
    }
    out.push_str("  </testsuite>\n</testsuites>\n");
    out
}
