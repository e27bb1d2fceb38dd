//! Paths with decoders: `body|json.order_id`, `awslogs.data|base64|gzip|json`.

use super::super::error::KeySpecError;
use super::super::limits::MAX_PATH_BYTES;
use super::super::path::{self, Path};
use super::MAX_DECODERS;
use super::decode::Decoder;

/// A parsed path of a part: names into the payload, then decoders, each with names into what it has
/// decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlacePath {
    /// The names before the first decoder. Empty for the payload's own value.
    pub(super) names: Vec<String>,
    pub(super) steps: Vec<(Decoder, Vec<String>)>,
    /// The canonical spelling.
    pub(super) text: String,
}

impl PlacePath {
    pub(super) fn parse(text: &str) -> Result<Self, KeySpecError> {
        if text.len() > MAX_PATH_BYTES {
            return Err(path::too_long(text));
        }
        let mut segments = path::split_unescaped(text, '|');
        let first = segments.next().unwrap_or_default();
        let is_root = first.is_empty() && text.starts_with('|');
        let (names, mut spelt) = if is_root {
            (Vec::new(), String::new())
        } else {
            names_of(first, text)?
        };
        let mut steps: Vec<(Decoder, Vec<String>)> = Vec::new();
        for segment in segments {
            let (name, inner) = segment
                .split_once('.')
                .map_or((segment, None), |(a, b)| (a, Some(b)));
            let decoder: Decoder = name.parse().map_err(|()| {
                bad_decoder(
                    text,
                    "only json, base64 and gzip may follow a `|`; a `|` in a name is `\\|`",
                )
            })?;
            if inner.is_some() && decoder != Decoder::Json {
                return Err(bad_decoder(
                    text,
                    "only `|json` gives a document that a path may go into",
                ));
            }
            if steps.len() == MAX_DECODERS {
                return Err(bad_decoder(text, "it has too many decoders"));
            }
            spelt.push('|');
            spelt.push_str(name);
            let names = match inner {
                Some(inner) => {
                    let (names, inner) = names_of(inner, text)?;
                    spelt.push('.');
                    spelt.push_str(&inner);
                    names
                }
                None => Vec::new(),
            };
            steps.push((decoder, names));
        }
        Ok(Self {
            names,
            steps,
            text: spelt,
        })
    }

    /// The path as one of [`Key::json`](super::super::Key::json), where `|` is an ordinary
    /// character; `None` when it has a decoder.
    pub(super) fn plain(text: &str) -> Option<String> {
        let path = Self::parse(text).ok()?;
        path.steps.is_empty().then(|| path.text.replace("\\|", "|"))
    }
}

fn bad_decoder(path: &str, problem: &'static str) -> KeySpecError {
    KeySpecError::BadDecoder {
        path: path.to_owned(),
        problem,
    }
}

/// Parses names between dots. Returns them and their canonical spelling.
fn names_of(text: &str, whole: &str) -> Result<(Vec<String>, String), KeySpecError> {
    let parsed = Path::parse_escaped(text, &['.', '\\', ',', ':', '*', '|', '$', '[', '/'], whole)?;
    let spelt = parsed.text.replace('|', "\\|");
    Ok((parsed.parts, spelt))
}
