//! `oncegate replay --queue`, on a real queue and a real store.

use std::sync::Arc;
use std::time::Duration;

use oncegate::amqp::AmqpSource;
use oncegate::redis::RedisStore;
use oncegate::sqs::SqsSource;
use oncegate::{Attempt, Consumer, Failure, Gate, Key, Message};
use oncegate_testkit::{Queue, QueueKind, RabbitMq, Redis, Sqs, Watched, unique};

use super::{Answer, oncegate, oncegate_with};

const DONE: u32 = 30;

fn order(id: u32) -> String {
    format!(r#"{{"order_id":{id}}}"#)
}

/// A queue whose orders were all handled once.
struct Done {
    sqs: Sqs,
    redis: Redis,
    queue: Queue,
    scope: String,
}

impl Done {
    async fn new() -> Self {
        let sqs = Sqs::shared().await;
        let redis = Redis::shared().await;
        let queue = sqs.new_queue("looked-into").await;
        let scope = unique("looked-into");
        let done = Self {
            sqs,
            redis,
            queue,
            scope,
        };
        done.queue.send((0..DONE).map(order)).await;
        let store = RedisStore::connect(done.redis.url())
            .await
            .expect("connects");
        let gate = Gate::new(done.scope.as_str(), Key::json(["order_id"]), store);
        let source = SqsSource::from_client(done.sqs.client().clone(), done.queue.url());
        let handler = async |_: Message, _: Attempt| Ok::<(), Failure>(());
        let watched = Watched::new();
        let consumer = Consumer::new(source.wait(Duration::from_secs(1)), gate, handler);
        let consumer = consumer.observer(Arc::clone(&watched) as _);
        consumer
            .run_until(watched.until("acks", DONE.into()))
            .await
            .expect("it ends well");
        assert_eq!(watched.total("handler_runs"), u64::from(DONE));
        done
    }

    async fn look(&self, more: &[&str]) -> Answer {
        let known = [
            "replay",
            "--queue",
            self.queue.url(),
            "--store",
            self.redis.url(),
            "--scope",
            &self.scope,
        ];
        let arguments = [&known[..], &["--key", "order_id", "--json"], more].concat();
        let credentials = [
            ("AWS_ACCESS_KEY_ID", "none"),
            ("AWS_SECRET_ACCESS_KEY", "none"),
        ];
        oncegate_with(&arguments, &credentials, b"").await
    }
}

#[tokio::test]
async fn a_look_into_a_queue_counts_and_gives_everything_back() {
    let done = Done::new().await;
    done.queue.send((0..20).map(order)).await;
    let answer = done.look(&["--use-up-a-receive"]).await;
    answer.ended(0);
    let json = answer.json();
    assert_eq!(
        (json["messages"].as_u64(), json["completed"].as_u64()),
        (Some(20), Some(20))
    );
    assert_eq!(
        (&json["passed"], &json["complete"]),
        (&true.into(), &true.into())
    );
    let depth = done.queue.depth().await;
    assert_eq!(
        (depth.visible, depth.in_flight),
        (20, 0),
        "all are visible at once"
    );

    done.queue.send([order(DONE), "no JSON".to_owned()]).await;
    let answer = done.look(&["--use-up-a-receive"]).await;
    answer.ended(1);
    let json = answer.json();
    assert_eq!(
        (
            json["would_run_again"].as_u64(),
            json["undecodable"].as_u64()
        ),
        (Some(1), Some(1))
    );
    assert_eq!(done.queue.depth().await.visible, 22);
}

#[tokio::test]
async fn a_part_of_a_queue_is_no_proof() {
    let done = Done::new().await;
    done.queue.send((0..20).map(order)).await;
    let answer = done.look(&["--use-up-a-receive", "--most", "5"]).await;
    answer.ended(1);
    assert_eq!(
        (&answer.json()["messages"], &answer.json()["complete"]),
        (&5.into(), &false.into())
    );
    done.queue
        .until("given back", |depth| depth.visible == 20)
        .await;
}

/// Under another route, the same payload is another message.
#[tokio::test]
async fn the_messages_may_belong_to_another_route() {
    let done = Done::new().await;
    done.queue.send([order(1)]).await;
    done.look(&["--use-up-a-receive", "--route", "another"])
        .await
        .ended(1);
    done.look(&["--use-up-a-receive", "--route", done.queue.name()])
        .await
        .ended(0);
}

#[tokio::test]
async fn nothing_is_received_without_leave() {
    let done = Done::new().await;
    done.queue.send([order(1)]).await;
    done.look(&[]).await.ended(2).says("--use-up-a-receive");
    let depth = done.queue.depth().await;
    assert_eq!((depth.visible, depth.in_flight), (1, 0));
    let fifo = [
        "replay",
        "--queue",
        "orders.fifo",
        "--use-up-a-receive",
        "--store",
        "x",
        "--scope",
        "s",
        "--key",
        "id",
    ];
    oncegate(&fifo, b"").await.ended(2).says("FIFO");
}

#[tokio::test]
async fn a_peek_into_a_rabbitmq_queue_gives_everything_back_in_order() {
    let rabbit = RabbitMq::shared().await;
    let redis = Redis::shared().await;
    let queue = rabbit.new_queue("looked-into", QueueKind::Quorum).await;
    let scope = unique("looked-into");
    queue.send((0..DONE).map(order)).await;
    let store = RedisStore::connect(redis.url()).await.expect("connects");
    let gate = Gate::new(scope.as_str(), Key::json(["order_id"]), store);
    let handler = async |_: Message, _: Attempt| Ok::<(), Failure>(());
    let watched = Watched::new();
    let consumer = Consumer::new(AmqpSource::new(rabbit.uri(), queue.name()), gate, handler);
    let consumer = consumer.observer(Arc::clone(&watched) as _);
    consumer
        .run_until(watched.until("acks", DONE.into()))
        .await
        .expect("it ends well");

    let ids = [3, 7, 1_000, 5];
    queue.send(ids.map(order)).await;
    let known = [
        "replay",
        "--queue",
        queue.name(),
        "--store",
        redis.url(),
        "--scope",
        &scope,
        "--key",
        "order_id",
    ];
    let url = rabbit.uri();
    let look = async |more: &[&str]| {
        oncegate_with(
            &[&known[..], more].concat(),
            &[("ONCEGATE_AMQP_URL", &url)],
            b"",
        )
        .await
    };
    look(&[]).await.ended(2).says("delivery limit");
    for _ in 0..2 {
        let json = look(&["--use-up-a-receive", "--json"])
            .await
            .ended(1)
            .json();
        assert_eq!(
            (&json["messages"], &json["would_run_again"]),
            (&4.into(), &1.into()),
            "{json}"
        );
        assert_eq!(json["complete"], true);
    }
    let left = queue.take().await;
    assert_eq!(
        left.iter()
            .map(|message| message.data.clone())
            .collect::<Vec<_>>(),
        ids.map(|id| order(id).into_bytes())
    );
}
