//! Handlers, right ones and some with planted bugs.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use oncegate::{Attempt, BoxError, Failure, Handler, Message};
use oncegate_testing::{Downstream, DownstreamError};
use serde_json::{Value, json};

/// The way in which a handler does its work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Way {
    Right,
    RightWithTwoSteps,
    RightAndImpatient,
    WithoutKey,
    WithKeyOfAttempt,
    WithKeyOfPosition,
    WithAttemptInBody,
    WithRandomKey,
    WithOneKeyForTwoSteps,
    WithOneKeyForAll,
    SwallowsErrors,
    TakesNoAnswerForSuccess,
    GivesUp,
    MarksBeforeEffect,
    AnswersBeforeEffect,
    ChargesDuplicates,
    ChargesDuplicatesThatItCannotRead,
    ReturnsRandomResults,
    UsesFieldsOfTheMessageBefore,
    RetriesInPlaceWithoutKey,
    SkipsOlderOrders,
    HangsAfterAnError,
    KeepsOneOrderForAll,
    ChargesInPartsWithoutKeys,
    DoesNotReturnAfterCancel,
    UndoesWhatWasCancelled,
}

pub(crate) struct Billing {
    way: Way,
    bank: Downstream,
    seen: Mutex<BTreeSet<String>>,
    before: Mutex<Option<Value>>,
}

impl Billing {
    pub(crate) fn new(way: Way, bank: Downstream) -> Self {
        Self {
            way,
            bank,
            seen: Mutex::default(),
            before: Mutex::default(),
        }
    }

    async fn charge(
        &self,
        order: &Value,
        key: Option<&str>,
        step: &str,
    ) -> Result<String, DownstreamError> {
        let body = json!({ "order": order["order_id"], "amount": order["amount"], "currency": order["currency"] });
        let request = self.bank.effect(&body).step(step);
        let answer = match key {
            Some(key) => request.idempotency_key(key).send().await?,
            None => request.send().await?,
        };
        Ok(answer["receipt"].to_string())
    }

    async fn charge_right(
        &self,
        order: &Value,
        attempt: &Attempt,
    ) -> Result<String, DownstreamError> {
        self.charge(order, Some(&attempt.idempotency_key("charge")), "")
            .await
    }

    /// Undoes the charge of a run that is cancelled, which another one may have made.
    async fn charge_or_undo(&self, order: &Value, attempt: &Attempt) -> Result<String, Failure> {
        tokio::select! {
            receipt = self.charge_right(order, attempt) => Ok(receipt?),
            () = attempt.cancelled() => {
                let key = attempt.idempotency_key("undo");
                self.charge(order, Some(&key), "undo").await?;
                Err(Failure::retry("cancelled"))
            }
        }
    }

    async fn handle_order(&self, order: &Value, attempt: &Attempt) -> Result<String, Failure> {
        let id = order["order_id"].as_str().unwrap_or_default().to_owned();
        let key = attempt.idempotency_key("charge");
        match self.way {
            Way::Right | Way::ChargesDuplicates | Way::ChargesDuplicatesThatItCannotRead => {
                Ok(self.charge_right(order, attempt).await?)
            }
            Way::RightWithTwoSteps => {
                let receipt = self.charge(order, Some(&key), "charge").await?;
                self.charge(order, Some(&attempt.idempotency_key("mail")), "mail")
                    .await?;
                Ok(receipt)
            }
            Way::RightAndImpatient => {
                let charge = self.charge_right(order, attempt);
                Ok(tokio::time::timeout(Duration::from_millis(300), charge).await??)
            }
            Way::WithoutKey => Ok(self.charge(order, None, "").await?),
            Way::WithKeyOfAttempt => Ok(self
                .charge(order, Some(&format!("{key}-{}", attempt.number())), "")
                .await?),
            Way::WithAttemptInBody => {
                let body = json!({ "order": order["order_id"], "currency": order["currency"], "try": attempt.number() });
                let answer = self.bank.effect(&body).idempotency_key(&key).send().await?;
                Ok(answer["receipt"].to_string())
            }
            Way::WithRandomKey => Ok(self
                .charge(order, Some(&fastrand::u64(..).to_string()), "")
                .await?),
            Way::WithOneKeyForTwoSteps => {
                let receipt = self.charge(order, Some(&key), "charge").await?;
                self.charge(order, Some(&key), "mail").await?;
                Ok(receipt)
            }
            Way::WithOneKeyForAll => Ok(self.charge(order, Some("charge"), "").await?),
            Way::SwallowsErrors => {
                drop(self.charge_right(order, attempt).await);
                Ok("done".to_owned())
            }
            Way::TakesNoAnswerForSuccess => match self.charge_right(order, attempt).await {
                Err(DownstreamError::NoAnswer) => Ok("it was sent".to_owned()),
                answered => Ok(answered.map(|_| "it was sent".to_owned())?),
            },
            Way::GivesUp => self
                .charge_right(order, attempt)
                .await
                .map_err(Failure::permanent),
            Way::MarksBeforeEffect => {
                if !self.seen.lock().unwrap().insert(id) {
                    return Ok("seen".to_owned());
                }
                Ok(self.charge_right(order, attempt).await?)
            }
            _ => self.handle_rarely(order, attempt, id).await,
        }
    }

    async fn handle_rarely(
        &self,
        order: &Value,
        attempt: &Attempt,
        id: String,
    ) -> Result<String, Failure> {
        match self.way {
            Way::AnswersBeforeEffect => {
                let bank = self.bank.clone();
                let key = attempt.idempotency_key("charge");
                let body = json!({ "order": order["order_id"], "amount": order["amount"] });
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    bank.effect(&body).idempotency_key(&key).send().await
                });
                Ok("accepted".to_owned())
            }
            Way::ReturnsRandomResults => {
                let receipt = self.charge_right(order, attempt).await?;
                Ok(format!("{receipt} at {}", fastrand::u64(..)))
            }
            Way::UsesFieldsOfTheMessageBefore => {
                let before = self.before.lock().unwrap().replace(order.clone());
                Ok(self
                    .charge_right(&before.unwrap_or_else(|| order.clone()), attempt)
                    .await?)
            }
            Way::RetriesInPlaceWithoutKey => {
                for _ in 0..3 {
                    if let Ok(receipt) = self.charge(order, None, "").await {
                        return Ok(receipt);
                    }
                }
                Err(Failure::retry("three calls failed"))
            }
            Way::SkipsOlderOrders => {
                let is_older = self.seen.lock().unwrap().iter().any(|seen| *seen > id);
                self.seen.lock().unwrap().insert(id);
                if is_older {
                    Ok("older".to_owned())
                } else {
                    Ok(self.charge_right(order, attempt).await?)
                }
            }
            Way::HangsAfterAnError => match self.charge_right(order, attempt).await {
                Ok(receipt) => Ok(receipt),
                Err(_) => std::future::pending().await,
            },
            Way::KeepsOneOrderForAll => {
                *self.before.lock().unwrap() = Some(order.clone());
                tokio::time::sleep(Duration::from_millis(20)).await;
                let order = self.before.lock().unwrap().clone().unwrap();
                Ok(self.charge_right(&order, attempt).await?)
            }
            Way::ChargesInPartsWithoutKeys => {
                self.charge(order, None, "reserve").await?;
                Ok(self.charge(order, None, "capture").await?)
            }
            Way::DoesNotReturnAfterCancel => {
                let mut charge = std::pin::pin!(self.charge(order, None, ""));
                tokio::select! {
                    receipt = &mut charge => Ok(receipt?),
                    () = attempt.cancelled() => Ok(charge.await?),
                }
            }
            Way::UndoesWhatWasCancelled => self.charge_or_undo(order, attempt).await,
            other => unreachable!("{other:?}"),
        }
    }
}

impl Handler for Billing {
    type Output = String;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<String, Failure> {
        let order: Value = message.json()?;
        if self.way == Way::WithKeyOfPosition {
            let position = message.origin().to_string();
            return Ok(self.charge(&order, Some(&position), "").await?);
        }
        self.handle_order(&order, attempt).await
    }

    async fn duplicate(&self, message: &Message, _: String) -> Result<(), Failure> {
        if self.way == Way::ChargesDuplicates {
            self.charge(&message.json()?, None, "").await?;
        }
        Ok(())
    }

    async fn undecodable_duplicate(&self, message: &Message, _: Bytes, _: BoxError) {
        if self.way == Way::ChargesDuplicatesThatItCannotRead {
            drop(self.charge(&message.json().unwrap(), None, "").await);
        }
    }
}
