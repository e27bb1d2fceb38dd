//! The entries of the workers in `docs/prove/catalogue.html`, behind those of Rust.
//!
//! Processes are real, so two timelines of one bug differ. What must not differ is which bugs have
//! an entry, the defects that they are found as, and the sentences of the judge without what
//! depends on the moment.

use oncegate_testing::Fault;

use super::planted;

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/prove/catalogue.html"
);

/// What stands before the entries of the workers.
const HEADING: &str = "<h1 id=\"workers\">Workers in Python and Node</h1>\n";
const END: &str = "</body>\n</html>\n";

/// A planted bug with what was found in its worker, as HTML.
pub(super) struct Entry {
    title: String,
    defect: String,
    /// What happened, in the words of the judge.
    what: String,
    html: String,
}

/// The entries of a page: title, defect and what happened.
pub(super) struct Published(Vec<(String, String, String)>);

impl Entry {
    /// Takes the section of the defect from a report, without the command that repeats it and the
    /// table of events.
    pub(super) fn of_report(title: String, defect: &str, report: &str) -> Self {
        let heading = format!("<section id=\"{defect}\">\n<h2>{defect}: ");
        let section = report
            .split_once(&heading)
            .expect("the report has the defect")
            .1;
        let (what, rest) = section.split_once("</h2>\n").unwrap();
        let (words, rest) = rest.split_once("<p>Round ").unwrap();
        let picture = rest.split_once("<div class=\"picture\">").unwrap().1;
        let (picture, _) = picture.split_once("</div>").unwrap();
        let html = format!(
            "<section>\n<h2>{title}</h2>\n<p><strong>{defect}</strong>: {what}</p>\n{words}<div class=\"picture\">{picture}</div>\n</section>\n"
        );
        Self {
            title,
            defect: defect.to_owned(),
            what: shape(what),
            html,
        }
    }
}

impl Published {
    /// Demands that the entry is there; what happened is compared where the same defect was found.
    #[track_caller]
    pub(super) fn has(&self, entry: &Entry) {
        let known = self.0.iter().find(|(title, ..)| *title == entry.title);
        let Some((_, defect, what)) = known else {
            panic!(
                "there is no {:?}; scripts/prove-catalogue writes it",
                entry.title
            )
        };
        if *defect == entry.defect {
            assert_eq!(
                *what, entry.what,
                "{}: scripts/prove-catalogue brings it up to date",
                entry.title
            );
        }
    }
}

/// Reads the entries of the workers from the published page.
pub(super) fn read() -> Published {
    let page = std::fs::read_to_string(PAGE).unwrap();
    let workers = page.split_once(HEADING).map_or("", |(_, workers)| workers);
    let entry = |section: &str| {
        let (title, rest) = section.split_once("</h2>\n<p><strong>").unwrap();
        let (defect, rest) = rest.split_once("</strong>: ").unwrap();
        let (what, _) = rest.split_once("</p>").unwrap();
        (title.to_owned(), defect.to_owned(), shape(what))
    };
    Published(
        workers
            .split("<section>\n<h2>")
            .skip(1)
            .map(entry)
            .collect(),
    )
}

/// A sentence of the judge without numbers, the names of steps, and the faults that began before
/// what happened.
fn shape(what: &str) -> String {
    let unquoted: Vec<&str> = what.split("&quot;").step_by(2).collect();
    let shape = unquoted
        .join("step")
        .replace(|c: char| c.is_ascii_digit(), "#");
    // A lease that is lost on a busy machine is no fault of the trial.
    let shape = shape.replace(" though no fault explains it", "");
    Fault::ALL.iter().fold(shape, |shape, fault| {
        shape
            .replace(&format!(" after {fault}"), "")
            .replace(&format!(", {fault}"), "")
    })
}

/// Writes the entries of all workers behind those of Rust.
async fn write() {
    let mut entries = String::new();
    for one in planted::all() {
        entries.push_str(&one.found().await.html);
    }
    let page = std::fs::read_to_string(PAGE).unwrap();
    let page = page.strip_suffix(END).unwrap();
    let of_rust = page
        .split_once(HEADING)
        .map_or(page, |(of_rust, _)| of_rust);
    std::fs::write(PAGE, format!("{of_rust}{HEADING}{entries}{END}")).unwrap();
}

/// `scripts/prove-catalogue` writes the entries by this test.
#[tokio::test]
async fn the_published_catalogue_has_every_planted_worker() {
    if std::env::var_os("ONCEGATE_WRITE_CATALOGUE").is_some() {
        write().await;
    }
    let Published(entries) = read();
    let titles: Vec<&String> = entries.iter().map(|(title, ..)| title).collect();
    let planted: Vec<String> = planted::all().map(planted::Planted::title).collect();
    assert_eq!(
        titles,
        planted.iter().collect::<Vec<_>>(),
        "scripts/prove-catalogue writes them"
    );
    for (one, (title, defect, _)) in planted::all().zip(&entries) {
        assert!(
            one.expected.contains(&defect.as_str()),
            "{title} is found as {defect}"
        );
    }
}
