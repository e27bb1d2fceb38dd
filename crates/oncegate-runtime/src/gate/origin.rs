//! The check that a source reads the broker that the records of a scope were made of.
//!
//! A key has the name of the topic or queue, and nothing of the broker. Two clusters, regions,
//! accounts or virtual hosts with a topic of one name would share their records, and the messages
//! of the second be acknowledged as duplicates of the first's.

use std::sync::Arc;

use async_trait::async_trait;
use oncegate_core::key::Scope;
use oncegate_core::store::{RecordOrigin, ScopeDescriptor, Store, StoreError};

use super::scope_descriptor::change;
use super::{Gate, OtherBroker};
use crate::observe::Observer;
use crate::source::{Source, SourceError, SourceWrapper, StreamOrigin};

/// The most brokers that a scope knows. The oldest is forgotten first.
const MAX_BROKERS: usize = 16;

/// The most routes that a scope knows of a broker. With more of them, the broker counts as that of
/// every route.
const MAX_ROUTES: usize = 64;

/// A source that opens only while its messages come from the broker that the records of a gate's
/// scope were made of; see [`Gate::checked_source`].
#[derive(Debug)]
pub struct CheckedSource {
    source: Arc<dyn Source>,
    store: Arc<dyn Store>,
    scope: String,
    /// The routes in keys have other names than those of the source.
    key: oncegate_core::key::Key,
    other_broker: OtherBroker,
}

impl Gate {
    /// Returns the source with a check before it opens: its messages must come from the broker that
    /// the records of the scope were made of, which the scope's descriptor remembers. The first
    /// broker is remembered without a word.
    ///
    /// On another one, the source does not open, unless
    /// [`other_broker`](Self::other_broker) says that it has the same messages. Nothing has been
    /// received then.
    pub fn checked_source(&self, source: impl Source + 'static) -> CheckedSource {
        CheckedSource {
            source: Arc::new(source),
            store: Arc::clone(&self.store),
            scope: self.scope.clone(),
            key: self.key.clone(),
            other_broker: self.settings.other_broker,
        }
    }
}

#[async_trait]
impl SourceWrapper for CheckedSource {
    fn inner(&self) -> &dyn Source {
        &*self.source
    }

    async fn open(&self, observer: Arc<dyn Observer>) -> Result<(), SourceError> {
        // Before the source opens: what a broker has delivered and gets back counts as a delivery.
        self.check().await?;
        self.source.open(observer).await
    }
}

impl CheckedSource {
    /// Returns why the source would not open, because its messages come from another broker than
    /// those of the scope's records; `None` if it would. Writes nothing.
    ///
    /// # Errors
    /// When the broker or the store does not answer.
    pub async fn refused(&self) -> Result<Option<String>, SourceError> {
        let scope = self.scope()?;
        let held = self.store.descriptor(&scope).await.map_err(not_compared)?;
        let Some(text) = held else {
            return Ok(None);
        };
        let held = ScopeDescriptor::parse(&scope, &text).map_err(not_compared)?;
        Ok(self.refusal(&held, &self.streams().await?))
    }

    async fn check(&self) -> Result<(), SourceError> {
        let streams = self.streams().await?;
        if streams.is_empty() {
            return Ok(());
        }
        let scope = self.scope()?;
        let changed = change(&*self.store, &scope, |mut held| {
            // Another process may have written its broker in the meantime.
            if self.refusal(&held, &streams).is_none() {
                streams
                    .iter()
                    .for_each(|stream| add(&mut held.origins, stream));
            }
            held
        });
        let before = changed.await.map_err(not_compared)?;
        match before.and_then(|held| self.refusal(&held, &streams)) {
            Some(why) => Err(SourceError::new(why)),
            None => Ok(()),
        }
    }

    fn scope(&self) -> Result<Scope, SourceError> {
        Scope::new(&self.scope).map_err(|error| SourceError::new(error.to_string()))
    }

    /// The streams of the source, with the routes that their keys have.
    async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
        let mut streams = self.source.streams().await?;
        for stream in &mut streams {
            let route = stream.route.as_deref();
            stream.route = route.map(|route| self.key.route_in_keys(route).to_owned());
        }
        Ok(streams)
    }

    /// Returns why the streams are refused beside what the scope knows.
    fn refusal(&self, held: &ScopeDescriptor, streams: &[StreamOrigin]) -> Option<String> {
        if self.other_broker == OtherBroker::SameStream {
            return None;
        }
        let OtherOrigin { known, stream } = other_than(held, streams)?;
        let of_route = stream
            .route
            .as_ref()
            .map(|route| format!(" with the route `{route}`"))
            .unwrap_or_default();
        Some(format!(
            "the records of scope `{}` were made of messages{of_route} of {known}, and this source reads {}: an equal key may \
             be that of another message, which would be acknowledged as a duplicate. If both have the same messages (a mirror, \
             a failover, a broker that was set up again), set broker = \"same stream\"; otherwise give this source another \
             scope, or another `route`",
            self.scope, stream.broker
        ))
    }
}

fn not_compared(error: StoreError) -> SourceError {
    let is_away = error.is_away();
    let failed = SourceError::caused(
        "the broker that the records of the scope were made of could not be compared",
        error,
    );
    if is_away { failed.away() } else { failed }
}

/// A stream of a broker whose route the scope knows from other brokers alone.
struct OtherOrigin<'a> {
    known: &'a str,
    stream: &'a StreamOrigin,
}

/// Returns the first stream that is not at a broker which the scope knows for its route; `None`
/// while the scope knows none.
fn other_than<'a>(
    held: &'a ScopeDescriptor,
    streams: &'a [StreamOrigin],
) -> Option<OtherOrigin<'a>> {
    streams.iter().find_map(|stream| {
        let mut known = held
            .origins
            .iter()
            .filter(|origin| origin.has_route(stream.route.as_deref()))
            .peekable();
        let first = known.peek()?.broker.as_str();
        let is_known = known.any(|origin| origin.broker == stream.broker);
        (!is_known).then_some(OtherOrigin {
            known: first,
            stream,
        })
    })
}

/// Adds the stream to the brokers that the scope knows.
fn add(origins: &mut Vec<RecordOrigin>, stream: &StreamOrigin) {
    let known = origins
        .iter_mut()
        .find(|origin| origin.broker == stream.broker);
    match (known, &stream.route) {
        (Some(origin), Some(route)) if !origin.has_route(Some(route)) => {
            origin.routes.push(route.clone());
            if origin.routes.len() > MAX_ROUTES {
                origin.routes.clear();
            }
        }
        (Some(origin), None) => origin.routes.clear(),
        (Some(_), Some(_)) => {}
        (None, route) => {
            origins.push(RecordOrigin {
                broker: stream.broker.clone(),
                routes: route.iter().cloned().collect(),
            });
            let too_many = origins.len().saturating_sub(MAX_BROKERS);
            origins.drain(..too_many);
        }
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::key::Key;
    use oncegate_core::store::MemoryStore;

    use super::*;
    use crate::observe::Counters;
    use crate::source::Delivery;

    /// A source that reads these streams and has no messages.
    #[derive(Debug)]
    struct Silent(Vec<StreamOrigin>);

    #[async_trait]
    impl Source for Silent {
        async fn streams(&self) -> Result<Vec<StreamOrigin>, SourceError> {
            Ok(self.0.clone())
        }

        async fn open(&self, _observer: Arc<dyn Observer>) -> Result<(), SourceError> {
            Ok(())
        }

        async fn receive(&self, _most: usize) -> Result<Option<Vec<Delivery>>, SourceError> {
            Ok(None)
        }

        async fn close(&self, _deadline: std::time::Duration) -> Result<(), SourceError> {
            Ok(())
        }
    }

    fn stream(broker: &str, route: Option<&str>) -> StreamOrigin {
        StreamOrigin {
            broker: broker.to_owned(),
            route: route.map(str::to_owned),
        }
    }

    struct Shop {
        store: Arc<MemoryStore>,
    }

    impl Shop {
        fn new() -> Self {
            Self {
                store: Arc::new(MemoryStore::with_clock(Default::default)),
            }
        }

        fn gate(&self) -> Gate {
            let store = Arc::clone(&self.store);
            Gate::new("billing", Key::json(["order_id"]), store).simulated(7)
        }

        /// Opens a source of this stream behind the gate.
        async fn start(&self, gate: &Gate, stream: StreamOrigin) -> Result<(), String> {
            gate.open().await.unwrap();
            let source = gate.checked_source(Silent(vec![stream]));
            let opened = Source::open(&source, Arc::new(Counters::default())).await;
            opened.map_err(|error| error.to_string())
        }
    }

    #[tokio::test]
    async fn a_topic_of_one_name_at_another_broker_is_refused_and_named() {
        let shop = Shop::new();
        let orders = Some("orders");
        shop.start(&shop.gate(), stream("cluster a", orders))
            .await
            .unwrap();
        shop.start(&shop.gate(), stream("cluster a", orders))
            .await
            .unwrap();
        let refused = shop.start(&shop.gate(), stream("cluster b", orders)).await;
        let said = refused.unwrap_err();
        for word in [
            "`billing`",
            "`orders`",
            "cluster a",
            "cluster b",
            "same stream",
        ] {
            assert!(said.contains(word), "{word}: {said}");
        }
        let any = shop.start(&shop.gate(), stream("cluster b", None)).await;
        assert!(any.is_err(), "a source of any route may have this one");
        shop.start(&shop.gate(), stream("cluster a", orders))
            .await
            .unwrap();
    }

    #[tokio::test]
    async fn what_has_other_keys_may_come_from_anywhere() {
        let shop = Shop::new();
        shop.start(&shop.gate(), stream("cluster a", Some("orders")))
            .await
            .unwrap();
        shop.start(&shop.gate(), stream("cluster b", Some("payments")))
            .await
            .unwrap();
        let key = Key::json(["order_id"]).route("eu-orders");
        let other_route = Gate::new("billing", key, Arc::clone(&shop.store)).simulated(7);
        shop.start(&other_route, stream("cluster b", Some("orders")))
            .await
            .unwrap();
        let back = shop
            .start(&shop.gate(), stream("cluster b", Some("orders")))
            .await;
        assert!(back.is_err(), "the route alone tells them apart");
    }

    #[tokio::test]
    async fn a_mirror_becomes_known_once_it_was_named() {
        let shop = Shop::new();
        let orders = Some("orders");
        shop.start(&shop.gate(), stream("cluster a", orders))
            .await
            .unwrap();
        let told = shop.gate().other_broker(OtherBroker::SameStream);
        shop.start(&told, stream("cluster b", orders))
            .await
            .unwrap();
        for broker in ["cluster a", "cluster b"] {
            shop.start(&shop.gate(), stream(broker, orders))
                .await
                .unwrap();
        }
        assert!(
            shop.start(&shop.gate(), stream("cluster c", orders))
                .await
                .is_err()
        );
    }

    #[test]
    fn what_a_scope_knows_of_brokers_has_a_limit() {
        let mut origins = Vec::new();
        for number in 0..=MAX_ROUTES {
            add(
                &mut origins,
                &stream("cluster a", Some(&format!("topic-{number}"))),
            );
        }
        assert!(origins.len() == 1 && origins[0].has_route(Some("another")));
        for number in 0..MAX_BROKERS {
            add(&mut origins, &stream(&format!("cluster {number}"), None));
        }
        assert_eq!(origins.len(), MAX_BROKERS);
        assert!(origins.iter().all(|origin| origin.broker != "cluster a"));
    }
}
