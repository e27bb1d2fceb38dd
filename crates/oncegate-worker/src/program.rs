//! The program of a worker: looks for it, and for its script, without running them.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Programs whose first argument is a script.
const INTERPRETERS: [&str; 8] = [
    "python", "node", "ruby", "perl", "php", "sh", "bash", "dash",
];
/// Words that a shell understands without a program of that name.
const BUILTINS: [&str; 37] = [
    "!", ".", ":", "[", "alias", "bg", "break", "case", "cd", "command", "continue", "eval",
    "exec", "exit", "export", "fg", "for", "getopts", "hash", "if", "jobs", "local", "read",
    "readonly", "return", "set", "shift", "test", "times", "trap", "type", "ulimit", "umask",
    "unset", "until", "wait", "while",
];

/// The program of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// A command line for a shell.
    Shell(String),
    /// A list of arguments that needs no shell.
    Words(Vec<String>),
}

impl Program {
    /// Returns what the program needs and this machine does not have; `None` as far as nothing is
    /// known to be missing. Runs nothing.
    pub fn missing(&self) -> Option<String> {
        let words = match self {
            Self::Words(words) => words.clone(),
            Self::Shell(text) => {
                if let Some(missing) = missing_program("sh") {
                    return Some(format!(
                        "{missing}, which a text needs and a list of words does not"
                    ));
                }
                let words = plain_words(text)?;
                if words
                    .first()
                    .is_none_or(|first| BUILTINS.contains(&first.as_str()) || first.contains('='))
                {
                    return None;
                }
                words
            }
        };
        let first = words.first()?;
        missing_program(first).or_else(|| {
            let script = words.get(1).filter(|_| begins_with_a_script(&words))?;
            (!Path::new(script).exists())
                .then(|| format!("there is no file {script:?} in {}", here()))
        })
    }

    /// Returns the program with its file in this folder, if that is where the file is and it is not
    /// in the working directory. `None`: nothing is to be changed.
    pub fn beside(&self, folder: &Path) -> Option<Self> {
        let mut words = match self {
            Self::Words(words) => words.clone(),
            Self::Shell(text) => plain_words(text)?,
        };
        let place = usize::from(begins_with_a_script(&words));
        let file = words
            .get_mut(place)
            .filter(|file| place == 1 || file.contains('/'))?;
        let beside = folder.join(&*file);
        if Path::new(file).exists() || !beside.exists() {
            return None;
        }
        *file = beside.to_str()?.to_owned();
        Some(Self::Words(words))
    }
}

/// Returns whether the first word is an interpreter, and the second its script.
fn begins_with_a_script(words: &[String]) -> bool {
    let name = words
        .first()
        .and_then(|first| Path::new(first).file_name())
        .and_then(|name| name.to_str())
        .unwrap_or_default()
        .trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    INTERPRETERS.contains(&name)
        && words
            .get(1)
            .is_some_and(|script| !script.starts_with('-') && !script.contains('='))
}

/// The folder that relative paths begin in.
fn here() -> String {
    std::env::current_dir().map_or_else(
        |_| "this folder".to_owned(),
        |folder| folder.display().to_string(),
    )
}

fn missing_program(name: &str) -> Option<String> {
    if name.contains('/') {
        let path = Path::new(name);
        return match (path.exists(), is_program(path)) {
            (_, true) => None,
            (true, false) => Some(format!("{name:?} may not be executed")),
            (false, _) if path.is_absolute() => Some(format!("there is no file {name:?}")),
            (false, _) => Some(format!("there is no file {name:?} in {}", here())),
        };
    }
    let path = std::env::var_os("PATH")?;
    let mut folders = std::env::split_paths(&path).map(|folder| -> PathBuf { folder.join(name) });
    let found = folders.any(|path| is_program(&path));
    (!found).then(|| {
        format!(
            "there is no program {name:?} in PATH ({})",
            path.to_string_lossy()
        )
    })
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// Returns whether the text is one command of a program, so that the shell can replace itself by it
/// (`exec`) and nothing changes. That binds the program to the end of oncegate, to which a child of
/// the shell is not bound.
pub(crate) fn is_one_command(text: &str) -> bool {
    if !begins_with_a_program(text.trim_start()) {
        return false;
    }
    let mut quote = None;
    let mut last = ' ';
    let mut characters = text.trim().chars();
    while let Some(c) = characters.next() {
        match (quote, c) {
            (Some('\''), c) if c != '\'' => {}
            (_, '\\') => {
                // Escapes what follows, a line feed among it.
                if characters.next().is_none() {
                    return false;
                }
            }
            (Some(open), c) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(c),
            (None, '&') if last == '>' => {}
            (None, ';' | '&' | '|' | '(' | ')' | '`' | '\n' | '#' | '{' | '}') => return false,
            (None, _) => {}
        }
        last = c;
    }
    quote.is_none()
}

/// Returns whether the first word of a text names a program, and neither a builtin of the shell nor
/// an assignment.
fn begins_with_a_program(text: &str) -> bool {
    // A path in quotes, as of a folder with a blank in its name.
    if let Some(quoted) = text.strip_prefix('\'') {
        return quoted.split_once('\'').is_some_and(|(path, rest)| {
            path.contains('/') && (rest.is_empty() || rest.starts_with(char::is_whitespace))
        });
    }
    let first = text.split_whitespace().next().unwrap_or_default();
    !first.is_empty()
        && first
            .chars()
            .all(|c| c.is_alphanumeric() || "-_./:,@%+".contains(c))
        && !BUILTINS.contains(&first)
}

/// The words of a text that a shell takes as they are; `None` for a text that means more.
fn plain_words(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut characters = text.trim().chars();
    while let Some(c) = characters.next() {
        match c {
            ' ' | '\t' => words.extend(word.take()),
            '\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match characters.next()? {
                        '\'' => break,
                        quoted => word.push(quoted),
                    }
                }
            }
            c if c.is_alphanumeric() || "-_./:=,@%+".contains(c) => {
                word.get_or_insert_default().push(c);
            }
            _ => return None,
        }
    }
    words.extend(word);
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Option<String> {
        Program::Shell(text.to_owned()).missing()
    }

    #[test]
    fn what_is_known_to_be_missing_is_named() {
        for (text, named) in [
            (
                "no-such-program --fast",
                "no program \"no-such-program\" in PATH",
            ),
            ("./no-such-worker", "no file \"./no-such-worker\" in /"),
            ("/no/such/worker", "no file \"/no/such/worker\""),
            ("sh no-such-script.sh", "no file \"no-such-script.sh\" in /"),
            (
                "sh 'no such script.sh' now",
                "no file \"no such script.sh\"",
            ),
            ("./Cargo.toml", "may not be executed"),
        ] {
            assert!(
                of(text).is_some_and(|what| what.contains(named)),
                "{text}: {:?}",
                of(text)
            );
        }
        let words = Program::Words(vec!["no such program".to_owned()]);
        assert!(words.missing().is_some());
    }

    #[test]
    fn a_file_that_is_not_here_is_the_one_beside() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("worker.py"), "").unwrap();
        std::fs::write(dir.path().join("Cargo.toml"), "").unwrap();
        let script = dir.path().join("worker.py").to_str().unwrap().to_owned();
        for text in ["python3 worker.py x", "python3 'worker.py' x"] {
            let words = ["python3", &script, "x"].map(str::to_owned).to_vec();
            let found = Program::Shell(text.to_owned()).beside(dir.path());
            assert_eq!(found, Some(Program::Words(words)), "{text}");
        }
        let own = Program::Words(vec!["./worker.py".to_owned()]).beside(dir.path());
        let expected = dir.path().join("./worker.py").to_str().unwrap().to_owned();
        assert_eq!(own, Some(Program::Words(vec![expected])));
        for same in [
            "python3 Cargo.toml",
            "python3 no-such.py",
            "worker.py",
            "cd x && python3 worker.py",
            "python3 -m worker.py",
        ] {
            assert_eq!(
                Program::Shell(same.to_owned()).beside(dir.path()),
                None,
                "{same}"
            );
        }
    }

    #[test]
    fn only_one_command_replaces_its_shell() {
        for one in [
            "sh work.sh",
            "python3 'a; b' \"$HOME/x\"",
            "work 2>&1 >>log",
            "sh -c 'a && b'",
            "a \\;b",
            "'/my work/worker' stdio '{\"a\":1}'",
        ] {
            assert!(is_one_command(one), "{one}");
        }
        for more in [
            "a; b",
            "a && b",
            "a | b",
            "a\nb",
            "a &",
            "X=1 a",
            "cd d",
            "! a",
            "if a",
            "(a)",
            "{ a; }",
            "$A b",
            "'cd' d",
            "a `b",
            "a \"b",
            "exec a",
            "a # b",
            "",
            "echo $(b)",
        ] {
            assert!(!is_one_command(more), "{more}");
        }
    }

    #[test]
    fn what_only_a_shell_can_know_is_not_guessed() {
        for text in [
            "sh",
            "sh -c true",
            "cd /tmp",
            "X=1 no-such-program",
            "no-such-program; true",
            "$WORKER",
            "exec no-such",
            "sh \"$HOME/worker.sh\"",
            "if true",
            "no-such-program || true",
            "env A=1 no-such-program",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }
}
