//! A single HTML file without anything from elsewhere: the verdict, and for each finding its
//! timeline as a picture with words.

use std::fmt::Write as _;

use oncegate_core::reason::counted;

use super::escaped;
use super::picture::picture;
use crate::judge::Violation;
use crate::verdict::{Finding, Verdict};

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#8886;--soft:#8882;--bad:#c62828;--good:#2e7d32;--call:#1565c0;--store:#6a1b9a}\
@media (prefers-color-scheme:dark){:root{--bad:#f2867d;--good:#58c484;--call:#7ab3f5;--store:#c792ea}}\
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}\
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.5rem}\
code,pre{font:13px/1.5 ui-monospace,monospace}pre{background:var(--soft);padding:.6rem .8rem;overflow-x:auto}\
.repeat{display:flex;gap:.6rem;align-items:start}.repeat pre{flex:1;margin:0;min-width:0}\
.picture{overflow-x:auto;border:1px solid var(--line);padding:.4rem}\
table{border-collapse:collapse}td,th{text-align:left;padding:.1rem .8rem .1rem 0;vertical-align:top}\
td.number{text-align:right;font-variant-numeric:tabular-nums}\
.passed{color:var(--good)}.failed{color:var(--bad)}\
svg text{font:12px system-ui,sans-serif;fill:currentColor}svg .lane{text-anchor:middle;font-weight:600}\
svg .time{text-anchor:end;opacity:.7;font-variant-numeric:tabular-nums}svg text.marked{font-weight:600}\
.axis{stroke:var(--line)}.grid{stroke:var(--soft)}.run{fill:var(--call);fill-opacity:.15;stroke:var(--call);stroke-opacity:.4}\
.row{fill:var(--bad);fill-opacity:.12}\
circle{fill:#999}.fault,.bad{fill:var(--bad)}.effect{fill:var(--good)}.repeated{fill:none;stroke:var(--good);stroke-width:2}\
.call{fill:var(--call)}.store{fill:var(--store)}circle.marked{stroke:var(--bad);stroke-width:3;r:9px}\
.key span{margin-right:1.2rem}.key i{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin-right:.3rem}";

/// Copies the text before the button.
const COPY: &str = "<button type=\"button\" onclick=\"navigator.clipboard.writeText(this.previousElementSibling.textContent).then(()=>this.textContent='copied')\">copy</button>";

/// Returns an HTML file with findings of several trials, each under a title: for a catalogue of
/// planted bugs.
pub fn catalogue<'a>(findings: impl IntoIterator<Item = (&'a str, &'a Finding)>) -> String {
    let mut out = begun("Defects that oncegate prove finds");
    for (title, finding) in findings {
        let Violation { defect, what, .. } = &finding.violation;
        // Writing to a string cannot fail.
        _ = writeln!(out, "<section>\n<h2>{}</h2>", escaped(title));
        _ = writeln!(out, "<p><strong>{defect}</strong>: {}</p>", escaped(what));
        _ = writeln!(
            out,
            "<p>{} {}</p>",
            escaped(defect.meaning()),
            escaped(defect.remedy())
        );
        _ = writeln!(
            out,
            "<div class=\"picture\">\n{}</div>\n</section>",
            picture(finding)
        );
    }
    out.push_str("</body>\n</html>\n");
    out
}

/// The beginning of a file, with its first heading.
fn begun(title: &str) -> String {
    let head = "<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">";
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n{head}\n<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    )
}

/// Returns the verdict as an HTML file. `repeat` returns the command or the settings that play a
/// round again.
pub fn html(verdict: &Verdict, repeat: impl Fn(&Finding) -> String) -> String {
    let mut out = begun("oncegate prove");
    let (class, word) = match verdict.findings.len() {
        0 if !verdict.is_complete() => (
            "failed",
            "Nothing was found, but too few of the faults were tried.".to_owned(),
        ),
        0 => ("passed", "Nothing was found.".to_owned()),
        1 => ("failed", "One defect was found.".to_owned()),
        count => ("failed", format!("{count} defects were found.")),
    };
    // Writing to a string cannot fail.
    _ = writeln!(out, "<p class=\"{class}\"><strong>{word}</strong></p>");
    for finding in &verdict.findings {
        section(&mut out, finding, &repeat(finding));
    }
    numbers(&mut out, verdict);
    out.push_str("</body>\n</html>\n");
    out
}

fn numbers(out: &mut String, verdict: &Verdict) {
    out.push_str("<h2>The trial</h2>\n<table>\n");
    let rows = [
        ("seed", verdict.seed),
        ("rounds", verdict.rounds),
        ("messages", verdict.messages),
        ("runs of handlers", verdict.runs),
        ("effects", verdict.effects),
        ("calls of no sample", verdict.unassigned),
    ];
    for (name, number) in rows {
        _ = writeln!(
            out,
            "<tr><th>{name}</th><td class=\"number\">{number}</td></tr>"
        );
    }
    out.push_str("</table>\n<details><summary>Faults</summary>\n<table>\n");
    for (fault, times) in &verdict.faults {
        _ = writeln!(
            out,
            "<tr><th>{fault}</th><td class=\"number\">{times}</td></tr>"
        );
    }
    for fault in verdict.untried() {
        _ = writeln!(out, "<tr><th>{fault}</th><td>not tried</td></tr>");
    }
    out.push_str("</table>\n</details>\n");
}

fn section(out: &mut String, finding: &Finding, repeat: &str) {
    let violation = &finding.violation;
    let defect = violation.defect;
    _ = writeln!(
        out,
        "<section id=\"{defect}\">\n<h2>{defect}: {}</h2>",
        escaped(&violation.what)
    );
    _ = writeln!(
        out,
        "<p>{}</p>\n<p><strong>Remedy:</strong> {}</p>",
        escaped(defect.meaning()),
        escaped(defect.remedy())
    );
    if let Some(root) = finding.follows {
        _ = writeln!(
            out,
            "<p>It may follow from <code>{root}</code> alone: mend that first.</p>"
        );
    }
    let faults: Vec<&str> = finding.faults.iter().map(|fault| fault.as_str()).collect();
    let faults = if faults.is_empty() {
        "no faults".to_owned()
    } else {
        faults.join(", ")
    };
    _ = writeln!(
        out,
        "<p>Round {} ({faults}); found in {}. To play it again:</p>\n<div class=\"repeat\"><pre>{}</pre>{COPY}</div>",
        finding.round,
        counted(finding.rounds, "round"),
        escaped(repeat)
    );
    out.push_str("<p class=\"key\">");
    let colours = [
        ("--bad", "fault"),
        ("--good", "effect"),
        ("--call", "call of the downstream service"),
        ("--store", "store"),
    ];
    for (colour, name) in colours {
        _ = write!(
            out,
            "<span><i style=\"background:var({colour})\"></i>{name}</span>"
        );
    }
    _ = writeln!(
        out,
        "</p>\n<div class=\"picture\">\n{}</div>",
        picture(finding)
    );
    out.push_str("</section>\n");
}
