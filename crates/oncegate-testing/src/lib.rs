//! Tries to make a handler of oncegate lose an effect or have it twice, and judges what happened.
//!
//! [`Trial`] plays rounds: an embedded broker delivers samples and duplicates of them to consumers
//! with the handler, while [faults](Fault) of a seeded [`Schedule`] happen. The handler has its
//! effects in the [`Downstream`] service, which is the witness, and not part of the gate; or a
//! [`Witness`] lists them. [`judge`] finds violations in the history, and names the [`Defect`]
//! behind each. The result is a [`Verdict`], which [`report`] writes as JSON, JUnit XML and HTML.
//!
//! `oncegate prove` does the same for handlers in any language; `docs/PROVE.md` has the catalogue
//! of defects.
//!
//! The module `promise`, behind a feature of that name, judges oncegate itself, for stores and
//! sources of your own: whether its promise holds while workers are killed and stores are lost.
//! Both judges decide about effects with [`judge_effects`].
//!
//! # Features
//!
//! | feature | what | default |
//! |---|---|---|
//! | `http` | [`Service`](https://docs.rs/oncegate-testing): the downstream service by HTTP | no |
//! | `promise` | `promise`: recorders of stores and sources, and the judge of what they recorded | no |

mod broker;
mod defect;
mod effects;
mod facts;
mod fault;
mod history;
mod judge;
mod launch;
mod plan;
#[cfg(feature = "promise")]
pub mod promise;
pub mod report;
mod round;
mod rounds;
mod samples;
mod schedule;
#[cfg(feature = "http")]
mod service;
mod trial;
mod verdict;
mod witness;

pub use broker::{Broker, Topic};
pub use defect::Defect;
pub use effects::{EffectFindings, Repetition, judge_effects};
pub use fault::{Fault, UnknownFault};
pub use history::{CallAnswer, Event, Form, Outcome, What};
pub use judge::{Violation, judge, steps};
pub use launch::{Launch, Launched};
pub use round::{Downstream, DownstreamError, EffectRequest};
pub use samples::{BadSamples, MAX_SAMPLES};
pub use schedule::{PlannedMessage, Schedule, Strike};
#[cfg(feature = "http")]
pub use service::{Service, ServiceAddress};
pub use trial::{Progress, Trial, TrialError, random_seed};
pub use verdict::{Finding, Verdict};
pub use witness::Witness;
