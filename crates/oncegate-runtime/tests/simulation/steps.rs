//! The steps of a unit with several members, as its store sees them: a fault can come between each
//! two of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::core::record::Token;
use oncegate::core::rules::{Operation, Reply};
use oncegate::core::store::{Command, Store, StoreError, StoreWrapper};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

/// How long a fault waits for a unit to come to its step.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a unit stays at a step where a fault waits for it.
const STAY: Duration = Duration::from_millis(1);

/// Where a unit of several members is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// Its claims are sent, and not executed.
    ClaimsSent,
    /// They are executed, and not answered: no handler has begun.
    ClaimsExecuted,
    /// Several handlers have ended, and none of their completions is executed.
    CompletionsSent,
    /// The completions are executed, and not answered: nothing is acknowledged.
    CompletionsExecuted,
}

impl Step {
    pub(crate) const ALL: [Self; 4] = [
        Self::ClaimsSent,
        Self::ClaimsExecuted,
        Self::CompletionsSent,
        Self::CompletionsExecuted,
    ];
}

/// What happens to a worker while one of its units is at a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Amid {
    Crash,
    Revoke,
}

impl Amid {
    /// The name under which it is counted.
    pub(crate) fn name(self, step: Step) -> &'static str {
        match (self, step) {
            (Self::Crash, Step::ClaimsSent) => "crash_amid_claims_sent",
            (Self::Crash, Step::ClaimsExecuted) => "crash_amid_claims_executed",
            (Self::Crash, Step::CompletionsSent) => "crash_amid_completions_sent",
            (Self::Crash, Step::CompletionsExecuted) => "crash_amid_completions_executed",
            (Self::Revoke, Step::ClaimsSent) => "revoke_amid_claims_sent",
            (Self::Revoke, Step::ClaimsExecuted) => "revoke_amid_claims_executed",
            (Self::Revoke, Step::CompletionsSent) => "revoke_amid_completions_sent",
            (Self::Revoke, Step::CompletionsExecuted) => "revoke_amid_completions_executed",
        }
    }
}

/// The store of one worker, which tells when one of its units is at a step.
#[derive(Debug)]
pub(crate) struct Steps {
    inner: Arc<dyn Store>,
    awaited: Mutex<Option<(Step, oneshot::Sender<()>)>>,
    /// How many answers to calls for several members were lost.
    lost_answers: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    /// The requests to discard a run that the store may have executed, as far as the worker knows.
    discards: Mutex<Vec<Token>>,
}

/// What a call does for the members of a unit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Call {
    Claims,
    Completions,
    Other,
}

impl Call {
    fn of(commands: &[Command]) -> Self {
        let are = |is: fn(&Operation) -> bool| {
            commands.iter().filter(|one| is(&one.operation)).count() > 1
        };
        if are(|operation| matches!(operation, Operation::Claim { .. })) {
            Self::Claims
        } else if are(|operation| matches!(operation, Operation::Complete { .. })) {
            Self::Completions
        } else {
            Self::Other
        }
    }
}

impl Steps {
    pub(crate) fn of(
        inner: Arc<dyn Store>,
        lost_answers: Arc<Mutex<BTreeMap<&'static str, u64>>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            inner,
            awaited: Mutex::default(),
            lost_answers,
            discards: Mutex::default(),
        })
    }

    /// How many runs are discarded in the store, or may be, without the worker knowing it.
    pub(crate) fn unknown_discards(&self) -> usize {
        let sent = self.discards.lock().unwrap();
        (0..sent.len())
            .filter(|place| !sent[..*place].contains(&sent[*place]))
            .count()
    }

    fn note_answers(&self, discards: &[Option<Token>], answers: &[Result<Reply, StoreError>]) {
        let mut sent = self.discards.lock().unwrap();
        for (token, answer) in discards.iter().zip(answers) {
            let place = sent.iter().position(|sent| Some(*sent) == *token);
            match (place, answer) {
                (Some(_), Ok(_)) => sent.retain(|sent| Some(*sent) != *token),
                // Of this request it is certain that it was not executed.
                (Some(place), Err(StoreError::Unavailable { .. })) => drop(sent.remove(place)),
                _ => {}
            }
        }
    }

    /// Waits until a unit is at this step. `false`: none came.
    pub(crate) async fn come_to(&self, step: Step) -> bool {
        let (tell, told) = oneshot::channel();
        *self.awaited.lock().unwrap() = Some((step, tell));
        let came = timeout(PATIENCE, told).await.is_ok_and(|told| told.is_ok());
        *self.awaited.lock().unwrap() = None;
        came
    }

    async fn pass(&self, step: Step) {
        let awaited = self
            .awaited
            .lock()
            .unwrap()
            .take_if(|(awaited, _)| *awaited == step);
        if let Some((_, tell)) = awaited
            && tell.send(()).is_ok()
        {
            sleep(STAY).await;
        }
    }

    /// Executes a call, and passes the steps of a unit with several members.
    async fn execute_by_steps(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let (sent, executed, name) = match Call::of(&commands) {
            Call::Other => return self.inner.execute(commands).await,
            Call::Claims => (
                Step::ClaimsSent,
                Step::ClaimsExecuted,
                "lost_claims_of_units",
            ),
            Call::Completions => (
                Step::CompletionsSent,
                Step::CompletionsExecuted,
                "lost_completions_of_units",
            ),
        };
        self.pass(sent).await;
        let answers = self.inner.execute(commands).await;
        self.note_lost(name, &answers);
        self.pass(executed).await;
        answers
    }

    fn note_lost(&self, name: &'static str, answers: &[Result<Reply, StoreError>]) {
        let lost = answers
            .iter()
            .filter(|answer| matches!(answer, Err(StoreError::Unknown { .. })))
            .count();
        *self.lost_answers.lock().unwrap().entry(name).or_default() += lost as u64;
    }
}

#[async_trait]
impl StoreWrapper for Steps {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let discards: Vec<Option<Token>> = commands.iter().map(discarded).collect();
        self.discards
            .lock()
            .unwrap()
            .extend(discards.iter().flatten());
        let answers = self.execute_by_steps(commands).await;
        self.note_answers(&discards, &answers);
        answers
    }
}

/// The run that a command discards.
fn discarded(command: &Command) -> Option<Token> {
    match &command.operation {
        Operation::Release { token, end, .. } if end.is_without_outcome() => Some(*token),
        _ => None,
    }
}
