//! A unit: 1 to n messages of one route that start together. One path for all of them: claims →
//! calls → finish → [`settle`](super::settle).
//!
//! 1. **Claim** (`claims`): the keys are claimed by one call of the store, or, for a transactional
//!    handler, taken in its transaction (`transaction`). A member that is busy, failed or without
//!    an answer ends here.
//! 2. **Call** (`calls`): handlers, and `duplicate` hooks of completed members, are called one
//!    after another, each with a permit. One that waits for something goes on in a task of its own,
//!    and takes the permit along. A batch handler is called once (`batch`).
//! 3. **Finish** (`finish`): those that ended together are completed by one call.
//!
//! How many members a unit has follows from the [pace](super::pace) of its route: it claims what
//! begins within a few milliseconds. No member waits for a slower one: what does not end at once
//! goes on [apart](tasks::Tasks::apart), and what cannot begin soon is released, uncounted.

use std::sync::Arc;

use super::member::{Ended, Member};

mod alone;
mod batch;
mod calls;
mod claims;
mod duplicate;
mod finish;
mod tasks;
mod transaction;

pub(super) use tasks::{Tasks, after_ready_tasks};

use calls::Work;
use claims::Purpose;
use duplicate::Answering;
use finish::without_key;

/// Starts a unit. Its first members hold the permits of all.
pub(super) fn start(tasks: &Arc<Tasks>, members: Vec<Member>) {
    tasks.spawn(run(Arc::clone(tasks), members));
}

/// Runs the unit. Returns those of its members that have not been reported, and do not go on apart.
async fn run(tasks: Arc<Tasks>, mut members: Vec<Member>) -> Vec<Ended> {
    if let Some(first) = members.first_mut() {
        take_turn(first).await;
    }
    let mut ended = Vec::with_capacity(members.len());
    let mut started = Vec::with_capacity(members.len());
    let mut found = Vec::new();
    for mut member in members {
        if member.item.route.gate.is_stopped() || !member.item.start() {
            ended.push(member.not_ours());
        } else if member.item.identity.is_err() && member.item.route.transactional.is_some() {
            let end = without_key(&member.item);
            tasks.settle(&mut ended, member, end);
        } else if let Some(stored) = member.item.found.take() {
            found.push(Work::Answer(Answering::found(member, stored)));
        } else {
            started.push(member);
        }
    }
    let Some(first) = started.first() else {
        return calls::run(&tasks, found, Vec::new(), ended).await;
    };
    let route = Arc::clone(&first.item.route);
    if !found.is_empty() {
        // They waited behind others, and are in a batch with what is new now.
        let others = Arc::clone(&tasks);
        tasks.spawn(async move { calls::run(&others, found, Vec::new(), Vec::new()).await });
    }
    match &route.transactional {
        None => claims::run(&tasks, started, Purpose::Run, ended).await,
        Some(transactional) => {
            transaction::run(&tasks, &transactional.handler, started, ended).await
        }
    }
}

/// Waits for the turn of the unit before anything is claimed. Its first member keeps the turn until
/// its handler begins.
async fn take_turn(first: &mut Member) {
    let item = &mut first.item;
    let claims = item.identity.is_ok() && item.found.is_none();
    if claims && item.route.transactional.is_none() {
        let shard = first.asks.map_or(0, |shard| shard.number);
        item.turn = item.route.pace.turn(shard).await;
        if item.turn.is_some() {
            // Units that have just started are ready to run one after another, before every other
            // task. They wait for their turns meanwhile.
            after_ready_tasks().await;
        }
    }
}
