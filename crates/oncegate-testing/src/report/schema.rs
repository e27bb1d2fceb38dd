//! The JSON schema of the JSON document.

use schemars::generate::SchemaSettings;
use schemars::transform::RestrictFormats;
use serde_json::Value;

use super::VerdictDocument;

/// Returns the JSON schema (draft 2020-12) of the document that [`json`](super::json) makes;
/// `oncegate generate schema prove` prints it. Its descriptions are the doc comments of the types.
/// Later releases may add members, defects, faults and events under the same name, and remove none.
pub fn schema() -> Value {
    SchemaSettings::draft2020_12()
        .for_serialize()
        // Validators that know only the formats of the draft would refuse `uint64`.
        .with_transform(RestrictFormats::default())
        .into_generator()
        .into_root_schema_for::<VerdictDocument<'_>>()
        .to_value()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::defect::Defect;
    use crate::fault::Fault;
    use crate::history::{CallAnswer, Event, Form, Outcome, What};
    use crate::judge::Violation;
    use crate::report::json;
    use crate::verdict::{Finding, Verdict};

    /// The schema without what later releases may add, so that a member without a schema is seen.
    fn closed(mut schema: Value) -> Value {
        match &mut schema {
            Value::Object(members) => {
                if members.contains_key("properties") {
                    members.insert("unevaluatedProperties".to_owned(), json!(false));
                }
                // The kinds of events share what each event has.
                members
                    .iter_mut()
                    .filter(|(name, _)| *name != "oneOf")
                    .for_each(|(_, member)| *member = closed(member.take()));
            }
            Value::Array(items) => items
                .iter_mut()
                .for_each(|item| *item = closed(item.take())),
            _ => {}
        }
        schema
    }

    fn digest() -> String {
        "0a1b".to_owned()
    }

    fn produced(form: Form, key: Option<String>) -> What {
        What::Produced {
            message: 1,
            sample: 1,
            form,
            key,
        }
    }

    fn ended(outcome: Outcome, result: Option<String>) -> What {
        What::Ended {
            run: 1,
            outcome,
            result,
        }
    }

    fn called(sample: Option<usize>, run: Option<u64>, in_duplicate: bool) -> What {
        What::Called {
            call: 1,
            sample,
            step: String::new(),
            idempotency_key: sample.map(|_| digest()),
            run,
            in_duplicate,
        }
    }

    fn every_event() -> Vec<What> {
        let mut all = run_events();
        all.extend(effect_events());
        let forms = [
            Form::Original,
            Form::Duplicate,
            Form::Poison,
            Form::Malformed,
        ];
        all.extend(forms.map(|form| produced(form, Some(digest()))));
        let outcomes = [
            Outcome::Completed,
            Outcome::Failed,
            Outcome::Later,
            Outcome::GaveUp,
            Outcome::Dropped,
        ];
        all.extend(outcomes.map(|outcome| ended(outcome, None)));
        let answers = [CallAnswer::Answered, CallAnswer::Refused, CallAnswer::Lost];
        all.extend(answers.map(|answer| What::Returned { call: 1, answer }));
        all.extend(Fault::ALL.map(|fault| What::FaultBegan {
            fault,
            sample: Some(1),
        }));
        all.push(What::FaultBegan {
            fault: Fault::LostReplies,
            sample: None,
        });
        all
    }

    fn run_events() -> Vec<What> {
        vec![
            produced(Form::Original, None),
            What::Started,
            What::Killed,
            What::Stopping,
            What::Stopped,
            What::Hung,
            What::ConsumerFailed {
                error: "no broker".to_owned(),
            },
            What::Delivered { message: 1 },
            What::Claimed {
                key: digest(),
                verdict: "granted",
            },
            What::Began {
                run: 1,
                message: 1,
                attempt: 1,
                recovered: false,
                batch: Some(2),
            },
            What::Began {
                run: 1,
                message: 1,
                attempt: 1,
                recovered: true,
                batch: None,
            },
            What::Cancelled { run: 1 },
            ended(Outcome::Completed, Some(digest())),
            What::ToldOfDuplicate { message: 1 },
        ]
    }

    fn effect_events() -> Vec<What> {
        vec![
            called(Some(1), Some(1), false),
            called(None, None, true),
            What::Performed { call: 1 },
            What::Repeated {
                call: 2,
                first: 1,
                other_body: false,
            },
            What::Repeated {
                call: 3,
                first: 1,
                other_body: true,
            },
            What::Completed {
                key: digest(),
                applied: true,
            },
            What::Acked {
                message: 1,
                accepted: true,
            },
            What::DeadLettered {
                message: 1,
                cause: "permanent",
            },
            What::Listed {
                effect: 1,
                sample: Some(1),
                step: String::new(),
            },
            What::Listed {
                effect: 2,
                sample: None,
                step: String::new(),
            },
            What::Unfinished { message: 1 },
        ]
    }

    /// A document with every event, fault and defect that there is.
    fn everything() -> Value {
        let events = every_event().into_iter().enumerate();
        let timeline: Vec<Event> = events
            .map(|(n, what)| Event {
                at_ms: n as u64,
                process: (n % 2 == 0).then_some(1),
                what,
            })
            .collect();
        let verdict = Verdict {
            seed: u64::MAX,
            rounds: 2,
            messages: 3,
            runs: 4,
            effects: 5,
            unassigned: 0,
            faults: Fault::ALL.into_iter().map(|fault| (fault, 1)).collect(),
            findings: Defect::ALL
                .into_iter()
                .enumerate()
                .map(|(n, defect)| Finding {
                    violation: Violation {
                        defect,
                        sample: (n > 0).then_some(n),
                        what: "it happened".to_owned(),
                        after: Fault::ALL.to_vec(),
                        unexplained: n as u64,
                        events: vec![0, 1],
                    },
                    follows: (n > 0).then_some(Defect::NoKey),
                    round: 1,
                    faults: vec![Fault::Freeze],
                    left_out: vec![Fault::Poison],
                    only_samples: vec![1],
                    rounds: 2,
                    found_after: Duration::from_millis(500),
                    timeline: timeline.clone(),
                })
                .collect(),
            took: Duration::from_millis(1_500),
            asked_for: Fault::ALL.into(),
        };
        json(&verdict, |_| "oncegate prove".to_owned())
    }

    fn errors(document: &Value) -> Vec<String> {
        let validator = jsonschema::validator_for(&closed(schema())).expect("it is a schema");
        validator
            .iter_errors(document)
            .map(|error| format!("{}: {error}", error.instance_path()))
            .collect()
    }

    // invariant: report-schema
    #[test]
    fn a_report_with_everything_is_valid() {
        assert_eq!(errors(&everything()), Vec::<String>::new());
        let clean = Verdict {
            faults: BTreeMap::new(),
            ..Verdict::new(7)
        };
        assert_eq!(
            errors(&json(&clean, |_| String::new())),
            Vec::<String>::new()
        );
    }

    // invariant: report-schema
    #[test]
    fn what_is_no_report_is_refused() {
        for (pointer, wrong) in [
            ("/schema", json!("oncegate.prove/2")),
            ("/seed", json!("7")),
            ("/faults", json!({ "frost": 1 })),
            ("/findings/0/defect", json!("no-name")),
            ("/findings/0/after/0", json!(7)),
            ("/findings/0/timeline/0/event", json!("slept")),
            ("/findings/0/timeline/0/at_ms", json!(-1)),
            ("/findings/0", json!({ "defect": "no-key" })),
        ] {
            let mut document = everything();
            *document.pointer_mut(pointer).expect("it is there") = wrong;
            assert!(!errors(&document).is_empty(), "{pointer}");
        }
    }
}
