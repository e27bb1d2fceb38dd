//! Actions on the status page of `oncegate run`, by the code of the commands: pause, resume, dead
//! letters, redrive.

mod reading;
mod redriving;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use oncegate::admin::dead_letter_reader::DeadLetterReader;
use oncegate::core::key::Scope;
use oncegate::core::store::Store;
use oncegate::telemetry::Telemetry;
use oncegate::telemetry::operate::{
    self, Change, LetterDetail, Letters, Operate, Operator, RedriveOrder, RedriveReport,
    check_token,
};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::change::{Written, default_path};
use crate::config::values::Secret;
use crate::config::{Loaded, shape};
use crate::dead_letters;
use crate::exit::{Exit, Problem};
use crate::pause::{Changed, Verb, pause_scope, resume_scope};
use crate::sources::LetterPlace;

/// Time limit for what acts to end with the process.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for a pause or a resume: a browser is answered within 30 s.
const CHANGE_LIMIT: Duration = Duration::from_secs(20);
/// Time limit for a broker to take back what was read.
const CLOSE_LIMIT: Duration = Duration::from_secs(8);

/// Lets people act on the page, if the settings say so.
///
/// # Errors
/// When the token cannot be read or is too short, or there is no place for the journal.
pub(super) fn operated(
    loaded: &Loaded,
    status: &shape::Status,
    stores: impl IntoIterator<Item = (String, Arc<dyn Store>)>,
    telemetry: &Telemetry,
) -> Result<Operated, Problem> {
    let Some(operate) = &status.operate else {
        return Ok(Operated(None));
    };
    let token = operate
        .token
        .clone()
        .unwrap_or(Secret::Literal(String::new()));
    let read = token.resolve();
    read.and_then(|token| check_token(&token))
        .map_err(|why| Problem::configuration(format!("`status.operate.token`: {why}")))?;
    let operator = PageOperator::new(loaded, operate, stores)?;
    let acts = Arc::new(operator.clone());
    telemetry.operated_by(Operate::new(acts, move || token.resolve()));
    Ok(Operated(Some(operator)))
}

/// The part that acts for people on the page, if there is one.
pub(super) struct Operated(Option<PageOperator>);

impl Operated {
    /// Stops what runs, and waits for its end.
    pub(super) async fn stop(self) {
        let Some(PageOperator(parts)) = self.0 else {
            return;
        };
        parts.stop.cancel();
        let mut tasks = std::mem::take(&mut *parts.tasks.lock());
        let ending = async { while tasks.join_next().await.is_some() {} };
        if timeout(STOP_LIMIT, ending).await.is_err() {
            warn!("an action of the status page did not end, and is dropped");
            tasks.shutdown().await;
        }
    }
}

/// Acts for people on the page. Cheap to clone.
#[derive(Clone)]
pub(super) struct PageOperator(Arc<Parts>);

struct Parts {
    scopes: BTreeMap<String, Scoped>,
    journal: PathBuf,
    payloads: bool,
    /// Changes with each redrive that begins or ends.
    stamp: AtomicU64,
    /// The last redrive of each scope.
    redrives: Mutex<BTreeMap<String, Redriving>>,
    tasks: Mutex<JoinSet<()>>,
    stop: CancellationToken,
}

/// A redrive that runs or has ended.
struct Redriving {
    report: RedriveReport,
    stop: CancellationToken,
}

/// The parts that belong to the scope of a consumer.
struct Scoped {
    place: Result<Box<dyn LetterPlace>, Problem>,
    store: Arc<dyn Store>,
    /// One reads at a time.
    reading: tokio::sync::Mutex<()>,
}

impl PageOperator {
    /// Acts on these consumers' scopes, each with its store.
    ///
    /// # Errors
    /// When there is no place for the journal.
    pub(super) fn new(
        loaded: &Loaded,
        operate: &shape::Operate,
        stores: impl IntoIterator<Item = (String, Arc<dyn Store>)>,
    ) -> Result<Self, Problem> {
        let named = std::env::var_os("ONCEGATE_JOURNAL").filter(|path| !path.is_empty());
        let journal = operate
            .journal
            .clone()
            .or(named.map(PathBuf::from))
            .or_else(default_path);
        let journal = journal.ok_or_else(|| {
            Problem::configuration(
                "there is no home directory for the journal of the status page: set `status.operate.journal`",
            )
        })?;
        let scopes = stores.into_iter().map(|(name, store)| {
            let scoped = Scoped {
                place: dead_letters::of_consumer(loaded, &name),
                store,
                reading: tokio::sync::Mutex::default(),
            };
            (name, scoped)
        });
        Ok(Self(Arc::new(Parts {
            scopes: scopes.collect(),
            journal,
            payloads: operate.payloads.unwrap_or_default(),
            stamp: AtomicU64::new(0),
            redrives: Mutex::default(),
            tasks: Mutex::default(),
            stop: CancellationToken::new(),
        })))
    }

    /// Runs this to its end, also when the browser goes away meanwhile: what was opened is closed.
    async fn to_its_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, String>> + Send + 'static,
    ) -> Result<T, String> {
        let (sender, receiver) = oneshot::channel();
        self.spawn(async move {
            // The browser may have gone away.
            _ = sender.send(work.await);
        });
        receiver
            .await
            .unwrap_or_else(|_| Err("the process is stopping".to_owned()))
    }

    fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.0.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
    }

    async fn change(&self, change: Change, verb: Verb) -> Result<(), String> {
        let parts = Arc::clone(&self.0);
        let changing = async move {
            let scoped = parts.scoped(&change.scope)?;
            let scope = Scope::new(change.scope.as_str()).map_err(|error| error.to_string())?;
            let journal = parts.journal(&change)?;
            let changing = async {
                match verb {
                    Verb::Pause => pause_scope(&*scoped.store, &scope, &journal).await,
                    Verb::Resume => resume_scope(&*scoped.store, &scope, &journal).await,
                }
            };
            let changed = timeout(CHANGE_LIMIT, changing).await.map_err(|_| {
                format!("The store has not answered within {CHANGE_LIMIT:?}: it may have been done all the same.")
            })?;
            match (changed.map_err(|problem| problem.to_string())?, verb) {
                (Changed::Yes(_), _) => Ok(()),
                (Changed::No(_), Verb::Pause) => Err("The scope was paused already.".to_owned()),
                (Changed::No(_), Verb::Resume) => Err("The scope is not paused.".to_owned()),
            }
        };
        self.to_its_end(changing).await
    }
}

impl Parts {
    fn scoped(&self, scope: &str) -> Result<&Scoped, String> {
        self.scopes
            .get(scope)
            .ok_or_else(|| "no consumer of this process has this scope".to_owned())
    }

    fn journal(&self, change: &Change) -> Result<Written, String> {
        Written::open(&self.journal, change.by.clone(), change.why.clone())
            .map_err(|problem| problem.to_string())
    }

    fn changed(&self) {
        self.stamp.fetch_add(1, Relaxed);
    }
}

/// Returns what was not settled, and disconnects.
///
/// # Errors
/// When the broker does not answer in time, or refuses.
async fn close(letters: &mut dyn DeadLetterReader) -> Result<(), Problem> {
    let closed = timeout(CLOSE_LIMIT, letters.close()).await;
    match closed {
        Ok(closed) => Ok(closed?),
        Err(_) => Err(Problem::new(
            Exit::TimedOut,
            format!("no answer within {CLOSE_LIMIT:?}"),
        )),
    }
}

impl Scoped {
    fn place(&self) -> Result<&dyn LetterPlace, String> {
        let place = self.place.as_deref().map_err(ToString::to_string)?;
        match place.unreadable() {
            Some(why) => Err(why.to_owned()),
            None => Ok(place),
        }
    }
}

#[async_trait]
impl Operator for PageOperator {
    fn places(&self) -> Vec<operate::LetterPlace> {
        let places = self.0.scopes.iter().map(|(scope, scoped)| {
            let place = scoped.place.as_deref().ok();
            operate::LetterPlace {
                scope: scope.clone(),
                name: place.map_or("", |place| place.name()).to_owned(),
                unreadable: scoped.place().err(),
                cost: place.and_then(|place| place.cost()),
            }
        });
        places.collect()
    }

    fn stamp(&self) -> u64 {
        self.0.stamp.load(Relaxed)
    }

    async fn read(&self, scope: &str) -> Result<Letters, String> {
        let parts = Arc::clone(&self.0);
        let scope = scope.to_owned();
        self.to_its_end(async move { parts.read(&scope).await })
            .await
    }

    async fn show(&self, scope: &str, at: &str) -> Result<Option<LetterDetail>, String> {
        let parts = Arc::clone(&self.0);
        let scope = scope.to_owned();
        let at = at.to_owned();
        self.to_its_end(async move { parts.show(&scope, &at).await })
            .await
    }

    async fn redrive(&self, order: RedriveOrder) -> Result<(), String> {
        let parts = Arc::clone(&self.0);
        let begun = parts.begin_redrive(&order)?;
        self.spawn(async move { parts.redrive(order, begun).await });
        Ok(())
    }

    fn stop_redrive(&self, scope: &str) {
        if let Some(redriving) = self.0.redrives.lock().get(scope) {
            redriving.stop.cancel();
        }
    }

    fn redrives(&self) -> Vec<RedriveReport> {
        let redrives = self.0.redrives.lock();
        redrives
            .values()
            .map(|redriving| redriving.report.clone())
            .collect()
    }

    async fn pause(&self, change: Change) -> Result<(), String> {
        self.change(change, Verb::Pause).await
    }

    async fn resume(&self, change: Change) -> Result<(), String> {
        self.change(change, Verb::Resume).await
    }
}
