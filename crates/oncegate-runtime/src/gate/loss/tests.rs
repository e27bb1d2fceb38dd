//! Checks of a store that counts what it is asked.

use std::sync::atomic::AtomicU32;

use async_trait::async_trait;
use oncegate_core::key::{Digest, StoreKey};
use oncegate_core::record::{StoreTime, Token};
use oncegate_core::store::StoreWrapper;
use oncegate_core::store::{MemoryStore, RecordSnapshot, StoreLoss};
use tokio::sync::Notify;

use super::*;
use crate::observe::Counters;

/// Counts what it is asked, and answers nothing while it is away.
#[derive(Debug)]
struct Counting {
    inner: MemoryStore,
    is_away: AtomicBool,
    reads: AtomicU32,
    descriptors: AtomicU32,
    /// The next answer about the descriptor waits for this.
    holds_back: Mutex<Option<Arc<Notify>>>,
    /// A copy that answers reads in place of the store.
    copy: Mutex<Option<String>>,
    /// The loss that it has noticed itself.
    noticed: Mutex<Option<StoreLoss>>,
}

#[async_trait]
impl StoreWrapper for Counting {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        self.inner.read(keys).await
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        self.descriptors.fetch_add(1, Ordering::SeqCst);
        if self.is_away.load(Ordering::SeqCst) {
            return Err(StoreError::unavailable("connection refused"));
        }
        let copy = self.copy.lock().clone();
        let held = if copy.is_some() {
            Ok(copy)
        } else {
            self.inner.descriptor(scope).await
        };
        let held_back = self.holds_back.lock().take();
        if let Some(held_back) = held_back {
            held_back.notified().await;
        }
        held
    }

    fn loss(&self) -> Option<StoreLoss> {
        self.noticed.lock().clone()
    }

    fn check_spacing(&self) -> u32 {
        5
    }
}

async fn watched() -> (Arc<Counting>, LossWatch) {
    let store = Arc::new(Counting {
        inner: MemoryStore::with_clock(StoreTime::default),
        is_away: AtomicBool::new(false),
        reads: AtomicU32::new(0),
        descriptors: AtomicU32::new(0),
        holds_back: Mutex::default(),
        copy: Mutex::default(),
        noticed: Mutex::default(),
    });
    let watch = watching(&store).await;
    (store, watch)
}

/// Another process on the store.
async fn watching(store: &Arc<Counting>) -> LossWatch {
    let scope = Scope::new("billing").unwrap();
    let lease = Duration::from_secs(30);
    let observer = Arc::new(Counters::default());
    let entropy = Arc::default();
    let shared = Arc::clone(store) as _;
    let on_loss = OnStoreLoss::Halt;
    LossWatch::open(scope, shared, "{}", lease, on_loss, observer, entropy)
        .await
        .unwrap()
}

/// Completes a message, and lets the checks find that in the store; returns what a commit holds
/// then.
async fn completed(watch: &LossWatch) -> StorePosition {
    let before = watch.position();
    watch.note_completed();
    watch.look().await;
    watch.look().await;
    assert_ne!(watch.position(), before);
    watch.position()
}

// invariant: loss-checks-that-spread
#[tokio::test]
async fn with_many_processes_checks_read_descriptors_and_few_records() {
    let (store, watch) = watched().await;
    let key = StoreKey::new(&watch.scope, Digest::from_bytes([7; 16]));
    watch.witnesses.note_completed(
        &key,
        &Token::from_bits(1),
        Instant::now(),
        Duration::from_secs(3_600),
    );
    let before = store.descriptors.load(Ordering::SeqCst);
    // The first one was made when the gate opened.
    for _ in 0..3 {
        watch.look().await;
    }
    assert_eq!(
        (
            store.descriptors.load(Ordering::SeqCst) - before,
            store.reads.load(Ordering::SeqCst)
        ),
        (3, 0)
    );
    assert!(watch.refusal().is_none());
    watch.look().await;
    assert_eq!(
        store.reads.load(Ordering::SeqCst),
        2,
        "and once more before the halt is written"
    );
    assert!(watch.refusal().is_some(), "the record is not there");
}

// invariant: idle-store-away
#[tokio::test(start_paused = true)]
async fn checks_without_an_answer_are_noted_until_one_is_answered() {
    let (store, watch) = watched().await;
    assert_eq!(watch.unanswered(Instant::now()), None);
    store.is_away.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        watch.look().await;
        tokio::time::advance(Duration::from_secs(4)).await;
    }
    let (lasts, error) = watch.unanswered(Instant::now()).expect("it is away");
    assert!(
        lasts >= Duration::from_secs(12) && error.contains("connection refused"),
        "{lasts:?} {error}"
    );
    store.is_away.store(false, Ordering::SeqCst);
    watch.look().await;
    assert_eq!(watch.unanswered(Instant::now()), None);
}

// invariant: loss-undetected
#[tokio::test]
async fn what_others_commit_after_a_start_read_the_store_is_no_loss() {
    let (store, running) = watched().await;
    // It reads the store when it opens, and then waits for the broker, which tells what the other
    // one has committed since.
    let starting = watching(&store).await;
    let committed = completed(&running).await;
    starting.compare_with(&[committed]).await.unwrap();
    assert!(starting.refusal().is_none(), "nothing is lost");

    store.is_away.store(true, Ordering::SeqCst);
    let later = StorePosition {
        sequence: committed.sequence + 1,
        ..committed
    };
    assert!(starting.compare_with(&[later]).await.unwrap_err().is_away());
    assert!(starting.refusal().is_none(), "nothing was compared");
    store.is_away.store(false, Ordering::SeqCst);
    starting.compare_with(&[later]).await.unwrap();
    assert!(
        starting.refusal().is_some(),
        "the store is older than that commit"
    );
}

/// The text of the scope's descriptor. Another process has opened the scope. What this one's store
/// has noticed before concerns other scopes.
// invariant: halt-without-loss
#[tokio::test]
async fn a_scope_that_began_after_a_loss_is_not_halted_by_it() {
    let (store, _first) = watched().await;
    for (ago, is_halted) in [(Duration::from_secs(3_600), false), (Duration::ZERO, true)] {
        let at = SystemTime::now() - ago;
        *store.noticed.lock() = Some(StoreLoss {
            at,
            reason: "it was emptied".into(),
        });
        assert_eq!(
            watching(&store).await.refusal().is_some(),
            is_halted,
            "noticed {ago:?} ago"
        );
    }
}

async fn text(store: &Counting) -> String {
    store
        .inner
        .descriptor(&Scope::new("billing").unwrap())
        .await
        .unwrap()
        .unwrap()
}

// invariant: halt-without-loss
#[tokio::test]
async fn an_answer_that_a_newer_one_overtook_halts_nothing() {
    let (store, watch) = watched().await;
    let watch = Arc::new(watch);
    let release = Arc::new(Notify::new());
    *store.holds_back.lock() = Some(Arc::clone(&release));
    let early = tokio::spawn({
        let watch = Arc::clone(&watch);
        async move { watch.look().await }
    });
    while store.holds_back.lock().is_some() {
        tokio::task::yield_now().await;
    }
    let confirmed = completed(&watch).await;
    release.notify_one();
    early.await.unwrap();
    assert!(watch.refusal().is_none(), "nothing is lost");
    assert_eq!(watch.position(), confirmed);
    assert!(!text(&store).await.contains("halt"));
}

// invariant: halt-without-loss
#[tokio::test]
async fn a_copy_that_lags_halts_only_while_it_answers() {
    let (store, watch) = watched().await;
    let earlier = text(&store).await;
    completed(&watch).await;
    *store.copy.lock() = Some(earlier);
    watch.look().await;
    assert!(
        watch.refusal().is_some(),
        "as far as is known, the store was put back"
    );
    *store.copy.lock() = None;
    watch.look().await;
    assert!(watch.refusal().is_none(), "the store has everything");
    assert_eq!(watch.lost_at(), None);
    assert!(!text(&store).await.contains("halt"));
}

// invariant: loss-undetected
#[tokio::test]
async fn a_loss_that_is_withdrawn_takes_no_other_along() {
    let (store, watch) = watched().await;
    let committed = completed(&watch).await;
    let later = StorePosition {
        sequence: committed.sequence + 1,
        ..committed
    };
    let noted = |reason, evidence| Loss::new(committed.epoch, reason, Vec::new(), evidence);
    // The broker knows of a later state, and that cannot be written yet.
    store.is_away.store(true, Ordering::SeqCst);
    watch
        .lost(noted("it is older", Evidence::Positions(vec![later])))
        .await;
    store.is_away.store(false, Ordering::SeqCst);
    // A copy that lags has answered another check, and answers no more.
    watch
        .lost(noted("it was put back", Evidence::Descriptor))
        .await;
    let refusal = watch
        .refusal()
        .expect("the first loss is as real as before");
    assert!(refusal.to_string().contains("it is older"), "{refusal}");
    watch.look().await;
    assert!(
        text(&store).await.contains("halt"),
        "and every process obeys"
    );
}

// invariant: run-after-loss
#[tokio::test]
async fn a_restored_store_whose_number_others_have_raised_stays_lost() {
    let (store, watch) = watched().await;
    let earlier = text(&store).await;
    let key = StoreKey::new(&watch.scope, Digest::from_bytes([7; 16]));
    watch.witnesses.note_completed(
        &key,
        &Token::from_bits(1),
        Instant::now(),
        Duration::from_secs(3_600),
    );
    completed(&watch).await;
    *store.copy.lock() = Some(earlier);
    watch.look().await;
    // The record is not there, whatever the number says.
    *store.copy.lock() = None;
    watch.look().await;
    assert!(watch.refusal().is_some());
    assert!(
        text(&store).await.contains("halt"),
        "and every process obeys"
    );
}

// invariant: halt-without-loss
#[tokio::test(start_paused = true)]
async fn a_completion_confirmed_after_a_long_outage_may_have_expired() {
    let (_, watch) = watched().await;
    let key = StoreKey::new(&watch.scope, Digest::from_bytes([7; 16]));
    let begun = Instant::now();
    tokio::time::advance(Duration::from_secs(2_000)).await;
    watch.witnesses.note_completed(
        &key,
        &Token::from_bits(1),
        begun,
        Duration::from_secs(3_600),
    );
    tokio::time::advance(Duration::from_secs(1_700)).await;
    for _ in 0..5 {
        watch.look().await;
    }
    assert!(
        watch.refusal().is_none(),
        "it expired an hour after its first execution"
    );
}
