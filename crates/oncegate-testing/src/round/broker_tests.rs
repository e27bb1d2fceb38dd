use super::*;
use oncegate_runtime::Origin;

fn broker(messages: usize, partitions: usize) -> Arc<EmbeddedBroker> {
    EmbeddedBroker::new(
        (0..messages)
            .map(|number| {
                (
                    number % partitions,
                    Message::new("samples", Origin::Other(number.to_string().into()), None),
                )
            })
            .collect(),
        partitions,
        Rng::new(),
        Arc::new(Recorder::new()),
    )
}

async fn received(member: &Member, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    while deliveries.len() < count {
        deliveries.extend(
            member
                .receive(count - deliveries.len())
                .await
                .unwrap()
                .unwrap(),
        );
    }
    deliveries
}

#[tokio::test]
async fn what_is_not_acknowledged_comes_again_to_the_next_owner() {
    let broker = broker(4, 1);
    let first = Member {
        number: 1,
        broker: Arc::clone(&broker),
    };
    broker.join(1);
    let deliveries = received(&first, 4).await;
    deliveries[0].ack_handle.ack();
    deliveries[2].ack_handle.ack();
    broker.leave(1);
    broker.join(2);
    let second = Member {
        number: 2,
        broker: Arc::clone(&broker),
    };
    let again = received(&second, 3).await;
    let origins: Vec<String> = again
        .iter()
        .map(|delivery| delivery.message.origin().to_string())
        .collect();
    assert_eq!(
        origins,
        ["1", "2", "3"],
        "from the first that is not acknowledged"
    );
    assert!(
        !deliveries[1].ack_handle.start(),
        "the partition has another owner"
    );
    deliveries[1].ack_handle.ack();
    assert_eq!(
        broker.unacked(),
        [1, 3],
        "an ack of a former owner has no effect"
    );
    again.iter().for_each(|delivery| delivery.ack_handle.ack());
    assert!(broker.unacked().is_empty());
}

#[tokio::test]
async fn a_message_that_is_held_back_comes_after_another() {
    let broker = broker(2, 2);
    let first = Member {
        number: 1,
        broker: Arc::clone(&broker),
    };
    broker.join(1);
    assert_eq!(received(&first, 2).await.len(), 2);
    broker.hold_back(0, &[0, 1]);
    broker.leave(1);
    broker.join(2);
    let second = Member {
        number: 2,
        broker: Arc::clone(&broker),
    };
    let other = received(&second, 1).await;
    assert_eq!(other[0].message.origin().to_string(), "1");
    assert!(second.take(2).is_empty(), "it is held back");
    other[0].ack_handle.ack();
    assert_eq!(
        received(&second, 1).await[0].message.origin().to_string(),
        "0"
    );
    broker.hold_back(0, &[0, 1]);
    broker.leave(2);
    broker.join(3);
    let third = Member {
        number: 3,
        broker: Arc::clone(&broker),
    };
    assert_eq!(
        received(&third, 1).await.len(),
        1,
        "nothing is left that it could wait for"
    );
}

#[tokio::test]
async fn a_copy_reaches_a_second_member_while_the_first_holds_it() {
    let broker = broker(1, 1);
    broker.join(1);
    broker.join(2);
    let owner = received(
        &Member {
            number: 1,
            broker: Arc::clone(&broker),
        },
        1,
    )
    .await;
    broker.copy_to_others(0, 1);
    let copy = received(
        &Member {
            number: 2,
            broker: Arc::clone(&broker),
        },
        1,
    )
    .await;
    assert!(owner[0].ack_handle.start() && copy[0].ack_handle.start());
    broker.rewind();
    assert_eq!(
        received(
            &Member {
                number: 1,
                broker: Arc::clone(&broker)
            },
            1
        )
        .await
        .len(),
        1
    );
}
