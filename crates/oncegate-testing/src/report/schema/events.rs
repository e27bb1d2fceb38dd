//! The schemas of events, and the parts that schemas are made of.

use serde_json::{Map, Value, json};

/// Returns one schema for each kind of event.
pub(super) fn events() -> Vec<Value> {
    let mut events = events_of_runs();
    events.extend(events_of_effects());
    events
}

/// The events of messages, processes and runs.
fn events_of_runs() -> Vec<Value> {
    let forms = json!({ "enum": ["original", "duplicate", "poison", "malformed"] });
    let outcomes = json!({ "enum": ["completed", "failed", "later", "gave_up", "dropped"] });
    vec![
        event(
            "produced",
            [
                message(),
                of_sample(true),
                ("form", forms, true),
                key(false),
            ],
        ),
        event("started", []),
        event("killed", []),
        event("stopping", []),
        event("stopped", []),
        event("hung", []),
        event("consumer_failed", [("error", text("The error."), true)]),
        event("delivered", [message()]),
        event(
            "claimed",
            [
                key(true),
                ("verdict", text("The store's answer to a claim."), true),
            ],
        ),
        event(
            "began",
            [
                run(true),
                message(),
                ("attempt", count("The number of the attempt."), true),
                ("recovered", flag(), true),
                ("batch", count("How many messages the batch has."), false),
            ],
        ),
        event("cancelled", [run(true)]),
        event(
            "ended",
            [
                run(true),
                ("outcome", outcomes, true),
                ("result", text("A digest of the result."), false),
            ],
        ),
        event("told_of_duplicate", [message()]),
    ]
}

/// The events of calls, and of what becomes of a message.
fn events_of_effects() -> Vec<Value> {
    let answers = json!({ "enum": ["answered", "refused", "lost"] });
    let fault = json!({ "$ref": "#/$defs/fault" });
    vec![
        event(
            "called",
            [
                call(),
                of_sample(false),
                step(),
                (
                    "idempotency_key",
                    text("A digest of the Idempotency-Key."),
                    false,
                ),
                run(false),
                ("in_duplicate", flag(), false),
            ],
        ),
        event("performed", [call()]),
        event(
            "repeated",
            [
                call(),
                ("first", count("The first call with that key."), true),
                ("other_body", flag(), false),
            ],
        ),
        event("returned", [call(), ("answer", answers, true)]),
        event("completed", [key(true), ("applied", flag(), true)]),
        event("acked", [message(), ("accepted", flag(), true)]),
        event(
            "dead_lettered",
            [message(), ("cause", text("Why, in one word."), true)],
        ),
        event(
            "listed",
            [
                (
                    "effect",
                    count("The number of the effect in the list."),
                    true,
                ),
                of_sample(false),
                step(),
            ],
        ),
        event("fault_began", [("fault", fault, true), of_sample(false)]),
        event("unfinished", [message()]),
    ]
}

/// A member of an event: its name, its schema, and whether each such event has it.
type EventMember = (&'static str, Value, bool);

fn message() -> EventMember {
    ("message", count("The number of the message."), true)
}

fn run(is_required: bool) -> EventMember {
    ("run", count("The number of the run."), is_required)
}

fn call() -> EventMember {
    ("call", count("The number of the call."), true)
}

fn key(is_required: bool) -> EventMember {
    ("key", text("A digest of the key."), is_required)
}

fn of_sample(is_required: bool) -> EventMember {
    ("sample", sample(), is_required)
}

fn step() -> EventMember {
    let schema = text("The step, for handlers with several effects.");
    ("step", schema, true)
}

fn flag() -> Value {
    json!({ "type": "boolean" })
}

fn event<const N: usize>(name: &str, members: [(&str, Value, bool); N]) -> Value {
    let mut properties = Map::new();
    let mut required = vec!["at_ms", "event"];
    properties.insert(
        "at_ms".to_owned(),
        count("Milliseconds since the round began."),
    );
    properties.insert(
        "process".to_owned(),
        count("The consumer process, if the event concerns one."),
    );
    properties.insert("event".to_owned(), json!({ "const": name }));
    for (member, schema, is_required) in members {
        properties.insert(member.to_owned(), schema);
        if is_required {
            required.push(member);
        }
    }
    json!({ "type": "object", "properties": properties, "required": required })
}

pub(super) fn sample() -> Value {
    json!({ "type": "integer", "minimum": 1, "description": "The number of the sample, from 1." })
}

pub(super) fn count(description: &str) -> Value {
    json!({ "type": "integer", "minimum": 0, "description": description })
}

pub(super) fn text(description: &str) -> Value {
    json!({ "type": "string", "description": description })
}

pub(super) fn list(description: &str, of: &str) -> Value {
    json!({ "type": "array", "items": { "$ref": format!("#/$defs/{of}") }, "description": description })
}
