//! The operations of the store.

use std::time::SystemTime;

use async_trait::async_trait;
use futures_util::future::join;
use oncegate_core::key::{Scope, StoreKey};
use oncegate_core::rules::{Operation, Reply};
use oncegate_core::store::{
    Checkup, Command, Completed, RecordSnapshot, Store, StoreError, StoreLoss, Upkeep,
};
use redis::Value;

use super::buckets::{marked, unmarked};
use super::checkup::{self, Persistence};
use super::durability::Durability;
use super::info::Info;
use super::link::PipeName;
use super::request::Request;
use super::topology::Topology;
use super::{Inner, RedisStore, descriptor_key, is_heartbeat, no_reply, pipe_of, replies};
use oncegate_store_toolkit::batch::MAX_BATCH_ITEMS;
use oncegate_store_toolkit::clock;

#[async_trait]
impl Store for RedisStore {
    async fn execute(&self, commands: Vec<Command>) -> Vec<Result<Reply, StoreError>> {
        let losses = &self.inner.losses;
        let refused_before = losses.refusal();
        let (heartbeats, bulk): (Vec<&Command>, Vec<&Command>) = commands
            .iter()
            .filter(|command| refused_before.is_none() || !is_claim(command))
            .partition(|command| is_heartbeat(command));
        let (bulk, heartbeats) = join(
            self.apply(PipeName::Bulk, &bulk),
            self.apply(PipeName::Heartbeats, &heartbeats),
        )
        .await;
        let mut bulk = bulk.into_iter();
        let mut heartbeats = heartbeats.into_iter();
        // A loss may have been noticed meanwhile, and then the server knows less than it should.
        let refused = losses.refusal().map(StoreError::refused);
        commands
            .iter()
            .map(|command| {
                // Such a claim was not sent, so the pipe has no reply for it.
                if let Some(refused) = refused_before.as_deref().filter(|_| is_claim(command)) {
                    return Err(StoreError::refused(refused));
                }
                let pipe = if is_heartbeat(command) {
                    &mut heartbeats
                } else {
                    &mut bulk
                };
                let reply = pipe.next().unwrap_or_else(no_reply);
                match refused.as_ref().filter(|_| is_claim(command)) {
                    Some(refused) => Err(refused.clone()),
                    None => reply,
                }
            })
            .collect()
    }

    async fn execute_one(&self, command: Command) -> Result<Reply, StoreError> {
        if let Some(refused) = self.refusal_if_claim(&command) {
            return Err(refused);
        }
        let reply = self.apply_one(pipe_of(&command), &command).await;
        // A loss may have been noticed meanwhile, and then the server knows less than it should.
        self.refusal_if_claim(&command).map_or(reply, Err)
    }

    async fn read(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<RecordSnapshot>, StoreError>> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let answers = topology
            .ask(
                PipeName::Bulk,
                &keys,
                |key| scripts.slot(key),
                |key| scripts.read(key),
            )
            .await;
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| replies::snapshot(answer, key))
            .collect()
    }

    /// Reads the records without their expiry, which costs more than the record itself.
    ///
    /// The first read of each batch uses a script that a demoted primary refuses. The refusal
    /// applies to the whole batch: old data of such a server must not lead to an acknowledgement. A
    /// demoted node of a cluster redirects every read to the primary, so in a cluster all are plain
    /// reads.
    async fn prefetch(&self, keys: Vec<StoreKey>) -> Vec<Result<Option<Completed>, StoreError>> {
        let Inner {
            topology, scripts, ..
        } = &*self.inner;
        let items: Vec<(usize, &StoreKey)> = keys.iter().enumerate().collect();
        let answers = topology
            .ask(
                PipeName::Bulk,
                &items,
                |(_, key)| scripts.slot(key),
                |(position, key)| {
                    if self.is_guard(*position) {
                        scripts.prefetch(key)
                    } else {
                        Request::get(key.as_str())
                    }
                },
            )
            .await;
        let mut refusal = None;
        keys.iter()
            .zip(answers)
            .enumerate()
            .map(|(position, (key, answer))| {
                let record = if self.is_guard(position) {
                    let first = replies::snapshot(answer, key);
                    refusal = first
                        .as_ref()
                        .err()
                        .filter(|error| is_not_about_a_key(error))
                        .cloned();
                    first?.map(|snapshot| snapshot.record)
                } else {
                    refusal.clone().map_or(Ok(()), Err)?;
                    replies::record(answer, key)?
                };
                Ok(record.and_then(Completed::of))
            })
            .collect()
    }

    async fn describe(
        &self,
        scope: &Scope,
        expected: Option<&str>,
        proposed: &str,
    ) -> Result<String, StoreError> {
        self.try_rights(scope).await?;
        let scripts = &self.inner.scripts;
        let buckets = scripts.buckets();
        let kept = expected.map(|expected| marked(buckets, expected));
        let proposed = marked(buckets, proposed);
        let answer = self
            .ask_about(&descriptor_key(scope), |key| {
                scripts.describe(key, kept.as_deref(), &proposed)
            })
            .await?;
        match answer {
            Value::Nil => Ok(expected.unwrap_or_default().to_owned()),
            Value::BulkString(kept) => unmarked(buckets, &String::from_utf8_lossy(&kept)),
            _ => Err(StoreError::unknown(
                "describe.lua returned an unexpected answer",
            )),
        }
    }

    async fn descriptor(&self, scope: &Scope) -> Result<Option<String>, StoreError> {
        // A plain read would be answered by a replica that lags, too, behind an address that
        // follows the primary.
        let scripts = &self.inner.scripts;
        let answer = self
            .ask_about(&descriptor_key(scope), |key| scripts.described(key))
            .await?;
        match answer {
            Value::Nil => Ok(None),
            Value::BulkString(kept) => {
                unmarked(scripts.buckets(), &String::from_utf8_lossy(&kept)).map(Some)
            }
            _ => Err(StoreError::unknown(
                "the server returned an unexpected answer",
            )),
        }
    }

    fn shard(&self, key: &StoreKey) -> u64 {
        match &self.inner.topology {
            Topology::One(_) => 0,
            Topology::Cluster(cluster) => cluster.shard(self.inner.scripts.slot(key)),
        }
    }

    fn loss(&self) -> Option<StoreLoss> {
        self.inner.losses.loss()
    }

    fn accept_loss(&self) {
        self.inner.losses.accept_loss();
    }

    fn check_spacing(&self) -> u32 {
        self.inner.losses.spacing()
    }

    fn upkeep(&self) -> Upkeep {
        Upkeep {
            memory: self.inner.memory.get(),
            ..Upkeep::default()
        }
    }

    async fn check(&self) -> Result<Checkup, StoreError> {
        let Inner {
            topology,
            address,
            warnings,
            settings,
            ..
        } = &*self.inner;
        let asked = SystemTime::now();
        let (infos, persistences) = join(
            topology.ask_all(Request::info),
            topology.ask_all(Request::persistence),
        )
        .await;
        let answered = SystemTime::now();
        let mut checkups = Vec::new();
        for (node, answer) in infos {
            let Value::BulkString(info) = replies::value(answer)? else {
                return Err(StoreError::unknown("INFO returned an unexpected answer"));
            };
            let persistence = persistences.iter().find(|(of, _)| *of == node);
            let persistence = persistence.map(|(_, answer)| Persistence::of(answer.as_ref().ok()));
            let info = String::from_utf8_lossy(&info);
            let info = Info(&info);
            let mut checkup =
                checkup::read(&info, &persistence.unwrap_or_default(), &node, settings)?;
            let clock = info
                .clock()
                .and_then(|server| clock::warning(server, asked, answered));
            checkup.warnings.extend(clock);
            checkups.push(checkup);
        }
        let checkup = match topology {
            Topology::One(_) => checkups.pop(),
            Topology::Cluster(_) => checkup::of_cluster(checkups, address),
        };
        let mut checkup = checkup.ok_or_else(|| StoreError::unknown("no server has answered"))?;
        checkup.warnings.extend(warnings.iter().cloned());
        Ok(checkup)
    }
}

impl RedisStore {
    /// The refusal of a claim after a loss; `None` for other operations.
    fn refusal_if_claim(&self, command: &Command) -> Option<StoreError> {
        if is_claim(command) {
            self.inner.losses.refusal().map(StoreError::refused)
        } else {
            None
        }
    }

    /// Returns whether the read at this position of a batch uses the script.
    fn is_guard(&self, position: usize) -> bool {
        let Inner {
            topology,
            scripts,
            settings,
            ..
        } = &*self.inner;
        // Only a script can write a record once more for its durability, or read buckets.
        if settings.durability != Durability::Primary || scripts.buckets().is_some() {
            return true;
        }
        matches!(topology, Topology::One(_)) && position.is_multiple_of(MAX_BATCH_ITEMS)
    }
}

fn is_claim(command: &Command) -> bool {
    matches!(command.operation, Operation::Claim { .. })
}

fn is_not_about_a_key(error: &StoreError) -> bool {
    !matches!(error, StoreError::Unreadable { .. })
}
