//! A unit: 1 to n messages of one route that start together, each with its permit. One path for all
//! of them: claims → calls → finish → [`settle`](super::settle).
//!
//! 1. **Claim** (`claims`): the keys are claimed by one call of the store, or, for a transactional
//!    handler, taken in its transaction (`transaction`). A member that is completed, busy, failed
//!    or without an answer ends here.
//! 2. **Call** (`calls`): each handler is polled in the unit's own task; a batch handler is called
//!    once (`batch`). A handler that waits for something goes on in a task of its own. While one
//!    blocks its thread, another task calls the rest.
//! 3. **Finish** (`finish`): those that ended together are completed by one call.
//!
//! No member waits for a slower one: what does not end at once goes on
//! [apart](tasks::Tasks::apart).

use std::sync::Arc;

use bytes::Bytes;

use super::end::End;
use super::member::{Ended, Member};
use super::settle::settle;
use super::shared::Shared;
use crate::dead_letters::DeadLetterCause;

mod batch;
mod calls;
mod claims;
mod duplicate;
mod finish;
mod tasks;
mod transaction;

pub(super) use tasks::Tasks;

use claims::Purpose;
use duplicate::answer;

/// Starts a unit.
pub(super) fn start(tasks: &Arc<Tasks>, members: Vec<Member>) {
    tasks.spawn(run(Arc::clone(tasks), members));
}

/// Starts the answers to messages that were found completed, under one permit.
pub(super) fn start_answers(tasks: &Arc<Tasks>, members: Vec<Member>) {
    tasks.spawn(answer_all(Arc::clone(tasks), members));
}

/// Runs the unit. Returns those of its members that have not been reported, and do not go on apart.
async fn run(tasks: Arc<Tasks>, members: Vec<Member>) -> Vec<Ended> {
    let mut ended = Vec::with_capacity(members.len());
    let mut started = Vec::with_capacity(members.len());
    for mut member in members {
        // Not that the consumer stops: a unit of later messages may have begun before this one.
        if !member.item.start() {
            ended.push(member.not_ours());
        } else if let Err(error) = &member.item.identity {
            let cause = DeadLetterCause::BadKey;
            let reason = error.to_string();
            tasks.settle(
                &mut ended,
                member,
                End::GiveUp {
                    lease: None,
                    cause,
                    reason,
                    attempts: 0,
                },
            );
        } else if let Some(stored) = member.item.found.take() {
            let tasks_of_answer = Arc::clone(&tasks);
            tasks.apart(&mut ended, async move {
                answered(&tasks_of_answer.shared, member, stored).await
            });
        } else {
            started.push(member);
        }
    }
    let Some(first) = started.first() else {
        return ended;
    };
    let route = Arc::clone(&first.item.route);
    match &route.transactional {
        None => claims::run(&tasks, started, Purpose::Run, ended).await,
        Some(transactional) => {
            transaction::run(&tasks, &transactional.handler, started, ended).await
        }
    }
}

async fn answered(shared: &Shared, member: Member, stored: Bytes) -> Ended {
    let end = answer(&member.item, stored).await;
    settle(shared, member, end).await
}

async fn answer_all(tasks: Arc<Tasks>, members: Vec<Member>) -> Vec<Ended> {
    let mut ended = Vec::with_capacity(members.len());
    for mut member in members {
        match member.item.found.take() {
            Some(stored) if member.item.start() => {
                ended.push(answered(&tasks.shared, member, stored).await);
            }
            _ => ended.push(member.not_ours()),
        }
    }
    ended
}
