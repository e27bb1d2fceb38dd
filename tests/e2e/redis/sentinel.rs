//! A primary that sentinels watch.

use oncegate::redis::RedisStore;
use oncegate_core::rules::{Reply, Verdict};
use oncegate_core::store::Store;
use oncegate_testkit::RedisSentinels;

use crate::faults::until_answered;
use crate::hand::{Hand, apply, claim, complete, key, scope, token};

const HELD: Reply = Reply::Applied { recreated: false };

fn completed() -> Reply {
    Reply::Verdict {
        verdict: Verdict::Completed {
            result: b"done".as_slice().into(),
        },
        uncompared: false,
    }
}

// invariant: demoted-server
#[tokio::test]
async fn a_demoted_primary_is_dropped_and_the_new_one_found() {
    let mut watched = RedisSentinels::start().await;
    let store = RedisStore::connect(&watched.url()).await.unwrap();
    assert!(store.check().await.unwrap().store.ends_with(" at watched"));
    let scope = scope();
    let owner = token();
    let [done, running] = [1, 2].map(|number| key(&scope, number));
    apply(&store, &done, claim(owner)).await.unwrap();
    assert_eq!(
        apply(&store, &done, complete(owner, b"done"))
            .await
            .unwrap(),
        HELD
    );
    apply(&store, &running, claim(owner)).await.unwrap();

    // No server is killed: the old primary keeps its connections and answers reads.
    watched.fail_over().await;
    let primary = watched.failed_over_from(0).await;
    assert_eq!(
        until_answered(&store, &done, &claim(token())).await,
        completed()
    );
    assert_eq!(
        until_answered(&store, &running, &complete(owner, b"done")).await,
        HELD
    );
    let hand = Hand::on(watched.server(primary)).await;
    let kept: u8 = hand.ask(&["EXISTS", running.as_str()]).await;
    assert_eq!(kept, 1, "it was written to the new primary");
}

#[tokio::test]
async fn a_dead_primary_is_replaced_and_a_dead_sentinel_not_missed() {
    let mut watched = RedisSentinels::start().await;
    watched.kill_sentinel(2);
    let store = RedisStore::connect(&watched.url()).await.unwrap();
    let scope = scope();
    let owner = token();
    let key = key(&scope, 1);
    apply(&store, &key, claim(owner)).await.unwrap();
    watched.server(0).kill();
    watched.failed_over_from(0).await;
    assert_eq!(
        until_answered(&store, &key, &complete(owner, b"done")).await,
        HELD
    );
}

#[tokio::test]
async fn sentinels_that_want_a_login_get_their_own() {
    let watched = RedisSentinels::start().await;
    watched
        .tell_all(&[
            "ACL",
            "SETUSER",
            "watcher",
            "on",
            ">right",
            "-@all",
            "+sentinel|master",
        ])
        .await;
    watched
        .tell_all(&["ACL", "SETUSER", "default", "-sentinel|master"])
        .await;
    let login = |user: &str, password: &str| {
        RedisStore::builder(&watched.url()).sentinel_login(user, password)
    };
    let store = login("watcher", "right").connect().await.unwrap();
    let granted = apply(&store, &key(&scope(), 1), claim(token()))
        .await
        .unwrap();
    assert!(
        matches!(
            granted,
            Reply::Verdict {
                verdict: Verdict::Granted(_),
                ..
            }
        ),
        "{granted:?}"
    );
    // A password in a file is read for each connection.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sentinel");
    std::fs::write(&file, "right\n").unwrap();
    let from_file = RedisStore::builder(&watched.url()).sentinel_password_file("watcher", &file);
    from_file.clone().connect().await.unwrap();
    std::fs::write(&file, "canary").unwrap();
    assert_eq!(from_file.connect().await.unwrap_err().class(), "refused");
    // They do not know the primary's user, and reject a wrong password.
    for refused in [
        RedisStore::connect(&watched.url()).await,
        login("watcher", "canary").connect().await,
    ] {
        let refused = refused.unwrap_err();
        assert_eq!(refused.class(), "refused", "{refused}");
        assert!(!refused.to_string().contains("canary"), "{refused}");
    }
}

#[tokio::test]
async fn an_unknown_name_and_a_dead_sentinel_are_told_apart() {
    let watched = RedisSentinels::start().await;
    let unknown = RedisStore::connect(&watched.url().replace("/watched", "/other"))
        .await
        .unwrap_err();
    assert!(
        unknown.class() == "refused" && unknown.to_string().contains("`other`"),
        "{unknown}"
    );
    let unreachable = RedisStore::connect("redis+sentinel://127.0.0.1:1/watched")
        .await
        .unwrap_err();
    assert_eq!(unreachable.class(), "unavailable", "{unreachable}");
}
