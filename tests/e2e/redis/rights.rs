//! The rights of a user: which are enough, and what a missing one means.

use oncegate::redis::RedisStore;
use oncegate_core::key::StoreKey;
use oncegate_core::rules::{Reply, Verdict};
use oncegate_core::store::{Command, Store, StoreError};
use oncegate_testkit::RedisServer;

use crate::hand::{Hand, apply, claim, complete, key, scope, token};
use crate::server::{HELD, extend, is_granted, release};

#[tokio::test]
async fn the_fewest_rights_are_enough() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let scope = scope();
    let owner = token();
    let rules = RedisStore::connect(server.url())
        .await
        .unwrap()
        .acl_rules(&scope);
    let rules: Vec<&str> = rules.split(' ').collect();
    let manual = include_str!("../../../docs/REDIS.md");
    let documented = rules.join(" ").replace(scope.as_str(), "billing");
    assert!(
        manual.contains(&format!("ACL SETUSER billing on >password {documented}\n")),
        "{documented}"
    );
    let () = hand
        .ask(
            &[
                &["ACL", "SETUSER", "billing", "on", ">right"],
                rules.as_slice(),
            ]
            .concat(),
        )
        .await;
    let address = server.url().trim_start_matches("redis://").to_owned();
    let store = RedisStore::connect(&format!("redis://billing:right@{address}"))
        .await
        .unwrap();
    store.check().await.unwrap();
    assert_eq!(
        store.describe(&scope, None, "descriptor").await.unwrap(),
        "descriptor"
    );
    let own = key(&scope, 1);
    assert!(is_granted(&apply(&store, &own, claim(owner)).await));
    assert_eq!(apply(&store, &own, extend(owner)).await.unwrap(), HELD);
    assert_eq!(apply(&store, &own, release(owner)).await.unwrap(), HELD);
    assert!(
        store.read(vec![own.clone()]).await[0]
            .as_ref()
            .unwrap()
            .is_some()
    );
    assert_eq!(store.prefetch(vec![own.clone(), own]).await.len(), 2);
    // Another scope's records are out of reach.
    let foreign = key(&crate::hand::scope(), 1);
    let refused = apply(&store, &foreign, claim(owner)).await.unwrap_err();
    assert_eq!(refused.class(), "refused", "{refused}");
}

// invariant: neighbours-in-a-batch
#[tokio::test]
async fn a_forbidden_or_spoilt_key_fails_alone_in_its_batch() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let scope = scope();
    let owner = token();
    let rules = RedisStore::connect(server.url())
        .await
        .unwrap()
        .acl_rules(&scope);
    let words = ["ACL", "SETUSER", "billing", "on", ">right"]
        .into_iter()
        .chain(rules.split(' '));
    let () = hand.ask(&words.collect::<Vec<&str>>()).await;
    let store = RedisStore::connect(&server.url().replace("redis://", "redis://billing:right@"))
        .await
        .unwrap();
    let spoilt = key(&scope, 0);
    let forbidden = key(&crate::hand::scope(), 0);
    let () = hand.ask(&["RPUSH", spoilt.as_str(), "no record"]).await;
    let word = |reply: &Result<Reply, StoreError>| match reply {
        Ok(Reply::Verdict {
            verdict: Verdict::Granted(_),
            ..
        }) => "granted",
        Ok(Reply::Applied { recreated: false }) => "held",
        Ok(_) => "something else",
        Err(error) => error.class(),
    };
    // The second time, nothing keeps the others from travelling in one call.
    for last in [forbidden, key(&scope, 5)] {
        let keys = [key(&scope, 1), spoilt.clone(), key(&scope, 2), last.clone()];
        let fate = |sound| {
            if last.scope() == scope.as_str() {
                sound
            } else {
                "refused"
            }
        };
        for (operation, sound) in [
            (claim(owner), "granted"),
            (complete(owner, b"done"), "held"),
        ] {
            let command = |key: &StoreKey| Command {
                key: key.clone(),
                operation: operation.clone(),
            };
            let replies = store.execute(keys.iter().map(command).collect()).await;
            let words: Vec<&str> = replies.iter().map(word).collect();
            assert_eq!(
                words,
                [sound, "unreadable", sound, fate(sound)],
                "{replies:?}"
            );
        }
        let () = hand.ask(&["DEL", keys[0].as_str(), keys[2].as_str()]).await;
    }
}

// invariant: server-not-trusted
#[tokio::test]
async fn each_missing_right_is_found_before_the_first_message() {
    let server = RedisServer::start().await;
    let hand = Hand::on(&server).await;
    let scope = scope();
    let all = RedisStore::connect(server.url()).await.unwrap();
    let rules = all.acl_rules(&scope);
    let url = server.url().replace("redis://", "redis://billing:right@");
    let rights: Vec<&str> = rules
        .split(' ')
        .filter(|rule| rule.starts_with(['+', '~']))
        .collect();
    assert!(rights.len() > 8);
    for missing in rights {
        let granted = rules.split(' ').filter(|rule| *rule != missing);
        let words: Vec<&str> = ["ACL", "SETUSER", "billing", "reset", "on", ">right"]
            .into_iter()
            .chain(granted)
            .collect();
        let () = hand.ask(&words).await;
        // Also of the record that the check of the rights writes: it stays for a second.
        let () = hand.ask(&["FLUSHALL"]).await;
        let opened = async {
            let store = RedisStore::connect(&url).await?;
            store.check().await?;
            store.describe(&scope, None, "descriptor").await
        };
        let refused = opened.await.expect_err(missing);
        assert_eq!(refused.class(), "refused", "{missing}: {refused}");
        let left: usize = hand.ask(&["DBSIZE"]).await;
        assert!(
            left <= 1,
            "{missing}: one record at most is left behind, not {left}"
        );
        // Before the scope is known, the server's own words name the command.
        let connecting = ["+script|load", "+info"].contains(&missing);
        assert!(
            connecting || refused.to_string().contains(&rules),
            "{missing}: {refused}"
        );
    }
}
