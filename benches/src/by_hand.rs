//! The store's side of a loop as one would write it by hand: two pipelines for what a poll has
//! returned. It handles no failure.

use redis::Value;

use crate::bare::{
    COMPLETE, LEASE_MILLIS, RETENTION_MILLIS, assembled, completed_record, first_record,
};
use crate::messages::fresh_scope;

/// A connection of its own, and keys in a scope of their own.
pub(crate) struct ByHand {
    connection: redis::Connection,
    /// The digest of the script that completes.
    complete: String,
    scope: String,
}

impl ByHand {
    pub(crate) fn connect(redis: &str) -> Self {
        let client = redis::Client::open(redis).expect("the URL is valid");
        let mut connection = client.get_connection().expect("the server answers");
        let mut load = redis::cmd("SCRIPT");
        let complete = load
            .arg("LOAD")
            .arg(assembled(COMPLETE))
            .query(&mut connection)
            .expect("it is valid");
        Self {
            connection,
            complete,
            scope: fresh_scope(),
        }
    }

    /// Claims the key of each payload. Returns those that were new, with their records.
    pub(crate) fn claim<'a>(
        &mut self,
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> Vec<(String, Vec<u8>)> {
        let claims: Vec<_> = payloads
            .map(|payload| (store_key(&self.scope, payload), first_record()))
            .collect();
        let mut pipeline = redis::pipe();
        for (key, record) in &claims {
            pipeline
                .cmd("SET")
                .arg(key)
                .arg(record)
                .arg("PX")
                .arg(LEASE_MILLIS)
                .arg("NX")
                .arg("GET");
        }
        let replies: Vec<Value> = pipeline
            .query(&mut self.connection)
            .expect("the server answers every call");
        let granted = claims
            .into_iter()
            .zip(replies)
            .filter(|(_, reply)| *reply == Value::Nil);
        granted.map(|(claim, _)| claim).collect()
    }

    /// Claims and completes the key of each payload in turn, by two plain commands. The `SET` that
    /// completes one is sent with the `SET … NX` of the next, so each waits for one answer.
    pub(crate) fn one_by_one<'a>(&mut self, payloads: impl Iterator<Item = &'a [u8]>) {
        let mut claimed: Option<String> = None;
        for payload in payloads {
            let key = store_key(&self.scope, payload);
            let mut pipeline = redis::pipe();
            if let Some(claimed) = claimed.take() {
                set_completed(&mut pipeline, &claimed);
            }
            pipeline.cmd("SET").arg(&key).arg("claimed").arg("NX");
            pipeline.arg("PX").arg(LEASE_MILLIS);
            let replies: Vec<Value> = pipeline
                .query(&mut self.connection)
                .expect("the server answers every call");
            if replies.last() == Some(&Value::Okay) {
                claimed = Some(key);
            }
        }
        if let Some(claimed) = claimed {
            let mut pipeline = redis::pipe();
            set_completed(&mut pipeline, &claimed);
            let _: Vec<Value> = pipeline
                .query(&mut self.connection)
                .expect("the server answers every call");
        }
    }

    /// Completes what was claimed.
    pub(crate) fn complete(&mut self, claims: &[(String, Vec<u8>)]) {
        if claims.is_empty() {
            return;
        }
        let mut pipeline = redis::pipe();
        for (key, record) in claims {
            let call = pipeline.cmd("EVALSHA").arg(&self.complete).arg(1).arg(key);
            call.arg(record)
                .arg(completed_record(record))
                .arg(RETENTION_MILLIS);
        }
        let _: Vec<Value> = pipeline
            .query(&mut self.connection)
            .expect("the server answers every call");
    }
}

fn set_completed(pipeline: &mut redis::Pipeline, key: &str) {
    let call = pipeline.cmd("SET").arg(key).arg("completed");
    call.arg("PX").arg(RETENTION_MILLIS);
}

/// A key of two fields, as a reader of JSON would make it.
fn store_key(scope: &str, payload: &[u8]) -> String {
    let json: serde_json::Value =
        serde_json::from_slice(payload).expect("the producer writes JSON");
    let [order, customer] = ["/order_id", "/customer/id"]
        .map(|pointer| json.pointer(pointer).expect("the producer writes it"));
    format!("{scope}:{order}:{customer}")
}
