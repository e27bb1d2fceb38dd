//! The faults of a run. Every fault begins, lasts, and ends, so that several can overlap.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use oncegate_testing::promise::{Occurrence, STORE_LOSS};

use super::settings::StoreKind;
use super::stage::{Server, Stage};
use super::stdio::TIME_LIMIT;
use super::work::{LEASE, SESSION};
use crate::proxy::Mode;

/// A reply is lost behind fewer others than these.
const PASSING_REPLIES: usize = 8;

/// How many workers start when the store forgets everything: with those that are there, more than
/// the topic has partitions.
const FRESH_WORKERS: usize = 2;

/// How long a broker that comes and goes is away, and how long it is back.
const BROKER_AWAY: Duration = Duration::from_secs(2);
const BROKER_BACK: Duration = Duration::from_secs(4);

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// Nothing but handlers that fail, panic, block and give up, which every run has.
    Handlers,
    /// A worker is killed with SIGKILL, and another one started.
    Kill,
    /// A worker ends itself at one of the nine points of a message.
    Crash,
    /// A worker is stopped past its lease and its session, and goes on.
    Freeze,
    /// A worker joins, and another one leaves.
    Rebalance,
    /// The store's server is killed, and started again with its data.
    StoreKill,
    /// The store's server is stopped past the leases, and goes on.
    StoreStall,
    /// The store forgets everything.
    Flush,
    /// The store forgets everything while members have just started, or have nothing to do.
    FlushFresh,
    /// Redis forgets its scripts.
    ScriptFlush,
    /// Redis is full.
    Full,
    /// Connections to the store are cut, and refused for a while.
    Cut,
    /// Answers of the store are lost, again and again.
    LostReplies,
    /// Nothing comes back from the store past the leases, and no connection closes.
    Silence,
    /// The broker is killed, and started again.
    BrokerKill,
    /// The broker is stopped past the sessions, and goes on.
    BrokerStall,
    /// The broker is killed and back for seconds, twice, and then stopped past the sessions, while
    /// a worker is replaced.
    BrokerFlap,
    /// Workers on standard streams stop answering in the middle of a message, or answer after their
    /// time limit.
    Hang,
    /// SIGINT or SIGTERM reaches the whole process group of a program while a worker of it has a
    /// message.
    GroupSignal,
}

/// What a fault takes away. Two faults of one place do not overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    Nowhere,
    /// A worker that a member has started, not the member.
    Handler,
    Worker,
    Store,
    Wire,
    Broker,
}

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 19] = [
        Self::Handlers,
        Self::Kill,
        Self::Crash,
        Self::Freeze,
        Self::Rebalance,
        Self::StoreKill,
        Self::StoreStall,
        Self::Flush,
        Self::FlushFresh,
        Self::ScriptFlush,
        Self::Full,
        Self::Cut,
        Self::LostReplies,
        Self::Silence,
        Self::BrokerKill,
        Self::BrokerStall,
        Self::BrokerFlap,
        Self::Hang,
        Self::GroupSignal,
    ];

    /// Those that can happen to consumers with this store; `broker`: whether the broker belongs to
    /// this run.
    #[must_use]
    pub fn of(store: StoreKind, broker: bool) -> Vec<Self> {
        Self::possible(store, broker)
            .filter(|fault| !fault.needs_programs())
            .collect()
    }

    /// Those that can happen to programs of `oncegate run` with this store. They do not end
    /// themselves at a point, and their calls of the store, which tell when a loss of it would be
    /// noticed, are not recorded.
    #[must_use]
    pub fn of_programs(store: StoreKind, broker: bool) -> Vec<Self> {
        let is_recorded =
            |fault: &Self| matches!(fault, Self::Crash | Self::Flush | Self::FlushFresh);
        Self::possible(store, broker)
            .filter(|fault| !is_recorded(fault))
            .collect()
    }

    /// Whether only programs of `oncegate run`, which start workers, can have it.
    #[must_use]
    pub const fn needs_programs(self) -> bool {
        matches!(self, Self::Hang | Self::GroupSignal)
    }

    fn possible(store: StoreKind, broker: bool) -> impl Iterator<Item = Self> {
        let can = move |fault: &Self| match (fault.place(), store) {
            (Place::Broker, _) => broker,
            (Place::Nowhere | Place::Handler | Place::Worker, _) | (_, StoreKind::Redis) => true,
            (_, StoreKind::Sqlite) => false,
            // A stopped server of PostgreSQL is many processes; silence on the wire is the same to
            // a client.
            (_, StoreKind::Postgres | StoreKind::DynamoDb) => {
                matches!(
                    fault,
                    Self::StoreKill | Self::Cut | Self::LostReplies | Self::Silence
                )
            }
        };
        Self::ALL.into_iter().filter(can)
    }

    /// Its name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Handlers => "handlers",
            Self::Kill => "kill",
            Self::Crash => "crash",
            Self::Freeze => "freeze",
            Self::Rebalance => "rebalance",
            Self::StoreKill => "store-kill",
            Self::StoreStall => "store-stall",
            Self::Flush => "flush",
            Self::FlushFresh => "flush-fresh",
            Self::ScriptFlush => "script-flush",
            Self::Full => "full",
            Self::Cut => "cut",
            Self::LostReplies => "lost-replies",
            Self::Silence => "silence",
            Self::BrokerKill => "broker-kill",
            Self::BrokerStall => "broker-stall",
            Self::BrokerFlap => "broker-flap",
            Self::Hang => "hang",
            Self::GroupSignal => "group-signal",
        }
    }

    pub(super) const fn place(self) -> Place {
        match self {
            Self::Handlers => Place::Nowhere,
            Self::Hang => Place::Handler,
            Self::Kill | Self::Crash | Self::Freeze | Self::Rebalance | Self::GroupSignal => {
                Place::Worker
            }
            Self::StoreKill
            | Self::StoreStall
            | Self::Flush
            | Self::FlushFresh
            | Self::ScriptFlush
            | Self::Full => Place::Store,
            Self::Cut | Self::LostReplies | Self::Silence => Place::Wire,
            Self::BrokerKill | Self::BrokerStall | Self::BrokerFlap => Place::Broker,
        }
    }

    /// How long it lasts.
    pub(super) fn lasts(self) -> Duration {
        match self {
            Self::Handlers | Self::Kill | Self::Flush | Self::FlushFresh | Self::ScriptFlush => {
                Duration::from_millis(300)
            }
            Self::Rebalance
            | Self::StoreKill
            | Self::Full
            | Self::Cut
            | Self::BrokerKill
            | Self::GroupSignal => Duration::from_millis(1_500),
            Self::Crash | Self::LostReplies => Duration::from_millis(2_500),
            Self::StoreStall | Self::Silence => LEASE * 2,
            // Until workers are cancelled; the run's end waits until their messages are finished.
            Self::Hang => TIME_LIMIT,
            Self::Freeze | Self::BrokerStall | Self::BrokerFlap => SESSION + LEASE * 3 / 2,
        }
    }

    pub(super) async fn begin(self, stage: &mut Stage<'_>) {
        match self {
            Self::Handlers => stage.note(self.name(), 0),
            Self::Kill => {
                let Some(mut worker) = stage
                    .some_worker()
                    .map(|index| stage.workers.swap_remove(index))
                else {
                    return;
                };
                stage.note(self.name(), worker.process.id());
                worker.process.kill();
                stage.start_worker(None);
            }
            Self::Crash => {
                stage.note(self.name(), 0);
                stage.start_doomed_worker();
            }
            Self::Freeze => {
                let Some(index) = stage.some_worker() else {
                    return;
                };
                let Some(worker) = stage.workers.get_mut(index) else {
                    return;
                };
                worker.process.signal("STOP");
                worker.is_frozen = true;
                let pid = worker.process.id();
                stage.note(self.name(), pid);
            }
            Self::Rebalance => {
                stage.note(self.name(), 0);
                stage.start_worker(None);
            }
            // Each worker that hangs notes it.
            Self::Hang => stage.plan_hangs(),
            Self::GroupSignal => stage.signal_a_group().await,
            _ => self.begin_elsewhere(stage).await,
        }
    }

    async fn begin_elsewhere(self, stage: &mut Stage<'_>) {
        if matches!(self, Self::Flush | Self::FlushFresh) {
            stage.until_a_loss_would_be_noticed().await;
        }
        stage.note(self.name(), 0);
        match self {
            Self::StoreKill => match &mut stage.server {
                Server::Redis(server) => server.kill(),
                Server::Postgres(server) => server.kill(),
                Server::DynamoDb(server) => server.kill(),
                Server::File => {}
            },
            Self::StoreStall => stage.signal_store("STOP"),
            Self::Flush => stage.forget_everything().await,
            Self::FlushFresh => {
                // One more than there are partitions for.
                (0..FRESH_WORKERS).for_each(|_| stage.start_worker(None));
                stage.forget_everything().await;
            }
            Self::BrokerFlap => stage.flap_the_broker().await,
            Self::ScriptFlush => stage.tell_redis(&["SCRIPT", "FLUSH", "SYNC"]).await,
            Self::Full => stage.tell_redis(&["CONFIG", "SET", "maxmemory", "1"]).await,
            Self::Cut => stage.wire(Mode::Refuse),
            Self::LostReplies => stage.lose_a_reply(),
            Self::Silence => stage.wire(Mode::HoldAll),
            Self::BrokerKill => stage.broker.iter_mut().for_each(|broker| broker.kill()),
            Self::BrokerStall => stage
                .broker
                .iter_mut()
                .for_each(|broker| broker.process().signal("STOP")),
            _ => {}
        }
    }

    /// While it lasts, a few times a second.
    pub(super) fn go_on(self, stage: &mut Stage<'_>) {
        if self == Self::LostReplies {
            stage.lose_a_reply();
        }
    }

    pub(super) async fn end(self, stage: &mut Stage<'_>) {
        match self {
            Self::Freeze => {
                for worker in stage.workers.iter_mut().filter(|worker| worker.is_frozen) {
                    worker.is_frozen = false;
                    worker.process.signal("CONT");
                }
            }
            Self::Rebalance => stage.one_leaves(),
            Self::Crash => stage.doom_is_over(),
            Self::StoreKill => match &mut stage.server {
                Server::Redis(server) => server.start_again().await,
                Server::Postgres(server) => server.start_again().await,
                Server::DynamoDb(server) => server.start_again().await,
                Server::File => {}
            },
            Self::StoreStall => stage.signal_store("CONT"),
            Self::Full => stage.tell_redis(&["CONFIG", "SET", "maxmemory", "0"]).await,
            Self::Cut | Self::LostReplies | Self::Silence => stage.wire(Mode::Pass),
            Self::BrokerKill => {
                if let Some(broker) = &mut stage.broker {
                    broker.start_again().await;
                }
            }
            Self::BrokerStall | Self::BrokerFlap => {
                stage
                    .broker
                    .iter_mut()
                    .for_each(|broker| broker.process().signal("CONT"));
            }
            Self::FlushFresh => {
                stage.until_the_watches_have_looked().await;
                (0..FRESH_WORKERS).for_each(|_| stage.one_leaves());
            }
            // Workers that stop before their next look notice nothing, and need not.
            Self::Flush => stage.until_the_watches_have_looked().await,
            Self::Handlers | Self::Kill | Self::ScriptFlush | Self::Hang | Self::GroupSignal => {}
        }
        stage.history.note_of(
            0,
            Occurrence::FaultEnds {
                fault: self.name().to_owned(),
            },
        );
    }
}

impl Stage<'_> {
    /// Asks a worker to end. It leaves in its own time; faults of others may keep it.
    fn one_leaves(&mut self) {
        let Some(mut worker) = self
            .some_worker()
            .map(|index| self.workers.swap_remove(index))
        else {
            return;
        };
        if worker.process.try_wait().is_none() {
            worker.process.signal("TERM");
        }
        self.leaving(worker);
    }

    async fn forget_everything(&self) {
        self.note(STORE_LOSS, 0);
        self.tell_redis(&["FLUSHALL", "SYNC"]).await;
        self.history.note_of(
            0,
            Occurrence::FaultEnds {
                fault: STORE_LOSS.to_owned(),
            },
        );
    }

    /// Kills the broker twice, with seconds in between in which members come back, and stops it.
    async fn flap_the_broker(&mut self) {
        for _ in 0..2 {
            let Some(broker) = &mut self.broker else {
                return;
            };
            broker.kill();
            tokio::time::sleep(BROKER_AWAY).await;
            broker.start_again().await;
            if let Some(mut worker) = self
                .some_worker()
                .map(|index| self.workers.swap_remove(index))
            {
                self.note(Fault::Kill.name(), worker.process.id());
                worker.process.kill();
                self.start_worker(None);
                self.history.note_of(
                    0,
                    Occurrence::FaultEnds {
                        fault: Fault::Kill.name().to_owned(),
                    },
                );
            }
            tokio::time::sleep(BROKER_BACK).await;
        }
        self.broker
            .iter_mut()
            .for_each(|broker| broker.process().signal("STOP"));
    }

    fn wire(&self, mode: Mode) {
        if let Some(proxy) = &self.proxy {
            proxy.set(mode);
        }
    }

    /// The next one, or one further behind: the first replies of a pipeline may arrive and the
    /// others not.
    fn lose_a_reply(&mut self) {
        let passing = self.rng.usize(..PASSING_REPLIES);
        if let Some(proxy) = &self.proxy {
            proxy.set_after(passing, Mode::Lose);
        }
    }

    fn signal_store(&mut self, signal: &str) {
        if let Server::Redis(server) = &mut self.server {
            server.process().signal(signal);
        }
    }

    async fn tell_redis(&self, words: &[&str]) {
        let Server::Redis(server) = &self.server else {
            return;
        };
        let mut command = ::redis::Cmd::new();
        words.iter().for_each(|word| {
            command.arg(*word);
        });
        let () = command
            .query_async(&mut server.connection().await)
            .await
            .expect("Redis obeys");
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = Self::ALL.into_iter().find(|fault| fault.name() == text);
        let names = || Self::ALL.map(Self::name).join(", ");
        named.ok_or_else(|| format!("there is no fault {text:?}; there are {}", names()))
    }
}
