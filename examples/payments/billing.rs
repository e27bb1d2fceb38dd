//! The handler, which must run once for each payment, and the key, which makes two payments the
//! same: the code that you would write yourself.

use std::time::Duration;

use oncegate::{Attempt, Failure, Field, Handler, Key, Message};
use oncegate_examples::hang::Hang;
use oncegate_examples::payments::{Bank, Entry, Ledger};
use serde::{Deserialize, Serialize};

/// The fields that make two payments the same, whatever else the messages contain.
pub(crate) fn key() -> Key {
    Key::json([Field::from("order_id"), Field::path("amount").decimal()])
}

/// The time that the bank takes.
const BANK_TAKES: Duration = Duration::from_millis(2);

#[derive(Debug, Deserialize)]
pub(crate) struct Payment {
    pub(crate) order_id: String,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Receipt {
    charge: String,
}

pub(crate) struct Billing {
    pub(crate) bank: Bank,
    pub(crate) ledger: Ledger,
    /// The payment in which this worker may be killed; yours has none.
    pub(crate) hang: Hang,
}

impl Handler for Billing {
    type Output = Receipt;

    async fn handle(&self, message: &Message, attempt: &Attempt) -> Result<Receipt, Failure> {
        let payment: Payment = message.json()?;
        self.hang.here(&payment.order_id).await?;
        tokio::time::sleep(BANK_TAKES).await;
        // The same for every attempt: after a crash the bank recognises the request, and charges no
        // second time.
        let charge = attempt.idempotency_key("charge");
        self.ledger.append(&Entry::request(
            payment.order_id,
            &charge,
            attempt.recovered(),
        ))?;
        self.bank.charge(&charge)?;
        Ok(Receipt { charge })
    }

    async fn duplicate(&self, message: &Message, receipt: Receipt) -> Result<(), Failure> {
        let payment: Payment = message.json()?;
        self.ledger
            .append(&Entry::answer(payment.order_id, &receipt.charge))?;
        Ok(())
    }
}
