//! JUnit XML, which CI systems show beside other tests.

use std::fmt::Write as _;

use super::escaped;
use crate::defect::Defect;
use crate::verdict::{Finding, Verdict};

/// Returns the verdict as JUnit XML: a test case for each kind of defect, which fails if the defect was found.
pub fn junit(verdict: &Verdict, repeat: impl Fn(&Finding) -> String) -> String {
    let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
    let (tests, failures) = (Defect::ALL.len(), verdict.findings.len());
    let seconds = verdict.took.as_secs_f64();
    // Writing to a string cannot fail.
    _ = writeln!(out, "<testsuites tests=\"{tests}\" failures=\"{failures}\" time=\"{seconds:.3}\">");
    _ = writeln!(
        out,
        "  <testsuite name=\"oncegate prove\" tests=\"{tests}\" failures=\"{failures}\" time=\"{seconds:.3}\">"
    );
    _ = writeln!(
        out,
        "    <properties><property name=\"seed\" value=\"{}\"/><property name=\"rounds\" value=\"{}\"/></properties>",
        verdict.seed, verdict.rounds
    );
    for defect in Defect::ALL {
        let finding = verdict.findings.iter().find(|finding| finding.violation.defect == defect);
        let Some(finding) = finding else {
            _ = writeln!(out, "    <testcase classname=\"oncegate.prove\" name=\"{defect}\"/>");
            continue;
        };
        let what = escaped(&finding.violation.what);
        _ = writeln!(out, "    <testcase classname=\"oncegate.prove\" name=\"{defect}\">");
        _ = writeln!(out, "      <failure type=\"{defect}\" message=\"{what}\">");
        for line in [defect.meaning(), defect.remedy(), &format!("repeat: {}", repeat(finding))] {
            _ = writeln!(out, "{}", escaped(line));
        }
        out.push_str("      </failure>\n    </testcase>\n");
    }
    out.push_str("  </testsuite>\n</testsuites>\n");
    out
}
