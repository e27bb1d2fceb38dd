//! What a run has done, from witnesses that are not oncegate's own code.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use fastrand::Rng;
use oncegate::BoxError;
use oncegate::dead_letters::{DeadLetter, DeadLetters};

/// What happened, from witnesses that are not oncegate's own code.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    pub(crate) effects: Mutex<BTreeMap<u64, u32>>,
    pub(crate) results: Mutex<BTreeMap<u64, Vec<String>>>,
    /// What must not have happened.
    pub(crate) wrong: Mutex<Vec<&'static str>>,
    pub(crate) letters: Mutex<BTreeMap<String, String>>,
    wanted_later: Mutex<BTreeMap<u64, u32>>,
}

impl Ledger {
    /// Counts that a payment is asked for that is not due; how often it was.
    pub(crate) fn note_later(&self, id: u64) -> u32 {
        let mut wanted_later = self.wanted_later.lock().unwrap();
        let times = wanted_later.entry(id).or_default();
        *times += 1;
        *times
    }
}

/// Dead letters in memory, which fail now and then.
#[derive(Debug)]
pub(crate) struct Letters {
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) rng: Mutex<Rng>,
}

#[async_trait]
impl DeadLetters for Letters {
    async fn send(&self, letter: &DeadLetter) -> Result<(), BoxError> {
        if self.rng.lock().unwrap().u32(..8) == 0 {
            return Err("the dead letters are down".into());
        }
        let origin = letter.message.origin().to_string();
        self.ledger
            .letters
            .lock()
            .unwrap()
            .insert(origin, letter.cause.as_str().to_owned());
        Ok(())
    }
}
