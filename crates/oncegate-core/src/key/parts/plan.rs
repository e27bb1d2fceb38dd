//! Compiles parts and cases: each text to decode, and each path into it, stands once.

use super::super::encode;
use super::super::error::KeySpecError;
use super::super::normaliser::Normaliser;
use super::super::paths::{PathList, PathTrees};
use super::decode::Decoder;
use super::path::PlacePath;
use super::{Blank, KeyCase, Literal, MAX_DECODERS, Part, Place, PlaceSource, When};

/// The compiled parts of a key.
#[derive(Clone, Debug)]
pub(in super::super) struct Composed {
    /// `true` for the cases of a specification; `false` for a single set of parts.
    pub(super) has_cases: bool,
    pub(super) cases: Vec<CasePlan>,
    /// The texts to decode. The n-th has the number n + 1: number 0 is the payload.
    pub(super) texts: Vec<TextPlan>,
}

#[derive(Clone, Debug)]
pub(super) struct CasePlan {
    pub(super) when: Option<WhenPlan>,
    /// The condition in canonical bytes.
    pub(super) label: Vec<u8>,
    pub(super) parts: Vec<PartPlan>,
}

#[derive(Clone, Debug)]
pub(super) struct WhenPlan {
    pub(super) place: PlacePlan,
    /// The canonical bytes of the literal.
    pub(super) is: Option<Vec<u8>>,
}

#[derive(Clone, Debug)]
pub(super) struct PartPlan {
    pub(super) label: Vec<u8>,
    pub(super) name: String,
    pub(super) places: Vec<PlacePlan>,
    pub(super) optional: bool,
    pub(super) blank: Blank,
}

#[derive(Clone, Debug)]
pub(super) struct PlacePlan {
    pub(super) name: String,
    pub(super) source: PlannedSource,
    pub(super) normalisers: Vec<Normaliser>,
    pub(super) takes_default: bool,
}

#[derive(Clone, Debug)]
pub(super) enum PlannedSource {
    Payload(Slot),
    Header(String),
    MessageKey,
    MessageId,
}

/// A value: the number of its text, and the target of its path in it. A text that is no JSON has no
/// paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) text: usize,
    pub(super) target: usize,
}

/// A text that is decoded from a value.
#[derive(Clone, Debug)]
pub(super) struct TextPlan {
    pub(super) decoder: Decoder,
    pub(super) from: Slot,
    /// The path up to here, for errors.
    pub(super) name: String,
    pub(super) paths: PathTrees,
}

/// Collects texts and their paths.
struct Planner<'a> {
    /// The paths into the payload, to which others may belong already.
    payload_paths: &'a mut PathList,
    texts: Vec<(Decoder, Slot, String, PathList)>,
}

impl Composed {
    /// Compiles the parts of a key. Adds the paths that they need of the payload to
    /// `payload_paths`.
    pub(in super::super) fn parts(
        parts: &[Part],
        payload_paths: &mut PathList,
    ) -> Result<Self, KeySpecError> {
        let mut planner = Planner {
            payload_paths,
            texts: Vec::new(),
        };
        let parts = planner.parts(parts)?;
        let case = CasePlan {
            when: None,
            label: Vec::new(),
            parts,
        };
        Ok(Self {
            has_cases: false,
            cases: vec![case],
            texts: planner.finish(),
        })
    }

    /// Compiles the cases of a key.
    pub(in super::super) fn cases(
        cases: &[KeyCase],
        payload_paths: &mut PathList,
    ) -> Result<Self, KeySpecError> {
        let mut planner = Planner {
            payload_paths,
            texts: Vec::new(),
        };
        let cases = cases
            .iter()
            .map(|case| planner.case(case))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            has_cases: true,
            cases,
            texts: planner.finish(),
        })
    }
}

impl Planner<'_> {
    fn case(&mut self, case: &KeyCase) -> Result<CasePlan, KeySpecError> {
        let mut label = Vec::new();
        let when = match &case.when {
            None => {
                label.push(encode::WHEN_OTHERWISE);
                None
            }
            Some(When { place, is }) => {
                label.push(if is.is_some() {
                    encode::WHEN_EQUAL
                } else {
                    encode::WHEN_PRESENT
                });
                place.label(&mut label);
                let is = is.as_ref().map(literal_bytes);
                label.extend(is.iter().flatten());
                Some(WhenPlan {
                    // A default in the place of a value would take every message; a value that
                    // the specification names does not.
                    place: self.place(place, place.takes_default || is.is_some())?,
                    is,
                })
            }
        };
        Ok(CasePlan {
            when,
            label,
            parts: self.parts(&case.parts)?,
        })
    }

    fn parts(&mut self, parts: &[Part]) -> Result<Vec<PartPlan>, KeySpecError> {
        parts.iter().map(|part| self.part(part)).collect()
    }

    fn part(&mut self, part: &Part) -> Result<PartPlan, KeySpecError> {
        Ok(PartPlan {
            label: part.label(),
            name: part.name(),
            places: part
                .places
                .iter()
                .map(|place| self.place(place, place.takes_default))
                .collect::<Result<_, _>>()?,
            optional: part.optional,
            blank: part.blank,
        })
    }

    fn place(&mut self, place: &Place, takes_default: bool) -> Result<PlacePlan, KeySpecError> {
        let source = match &place.source {
            PlaceSource::Payload(path) => PlannedSource::Payload(self.slot(path, takes_default)?),
            PlaceSource::Header(name) => PlannedSource::Header(name.clone()),
            PlaceSource::MessageKey => PlannedSource::MessageKey,
            PlaceSource::MessageId => PlannedSource::MessageId,
        };
        Ok(PlacePlan {
            name: place.name(),
            source,
            normalisers: place.normalisers.clone(),
            takes_default,
        })
    }

    fn slot(&mut self, text: &str, takes_default: bool) -> Result<Slot, KeySpecError> {
        let path = PlacePath::parse(text)?;
        let takes_default = takes_default && path.steps.is_empty();
        let mut slot = Slot {
            text: 0,
            target: self.payload_paths.target(path.names, takes_default),
        };
        for (decoder, names) in path.steps {
            let known = self
                .texts
                .iter()
                .position(|(other, from, ..)| *other == decoder && *from == slot);
            let at = known.unwrap_or_else(|| {
                self.texts
                    .push((decoder, slot, text.to_owned(), PathList::default()));
                self.texts.len() - 1
            });
            if at >= MAX_DECODERS {
                let problem = "the key has too many decoders; at most 16 different ones";
                return Err(KeySpecError::BadDecoder {
                    path: text.to_owned(),
                    problem,
                });
            }
            let Some((.., paths)) = self.texts.get_mut(at) else {
                break;
            };
            slot = Slot {
                text: at + 1,
                target: paths.target(names, false),
            };
        }
        Ok(slot)
    }

    fn finish(self) -> Vec<TextPlan> {
        let texts = self.texts.into_iter();
        texts
            .map(|(decoder, from, name, paths)| TextPlan {
                decoder,
                from,
                name,
                paths: paths.compile(),
            })
            .collect()
    }
}

fn literal_bytes(literal: &Literal) -> Vec<u8> {
    let mut out = Vec::new();
    match literal {
        Literal::Text(text) => encode::put_value(encode::TAG_STRING, text.as_bytes(), &mut out),
        Literal::Integer(number) => encode::put_integer(*number, &mut out),
        Literal::Bool(value) => encode::put_value(encode::TAG_BOOL, &[u8::from(*value)], &mut out),
    }
    out
}
