//! An OAuth 2.0 server that grants signed tokens to one client, and shows the key that verifies
//! them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};

use crate::secured_broker::SecuredKafka;
use crate::web::HttpServer;

/// An OAuth 2.0 server for one client, whose tokens name [`SecuredKafka::USER`] unless it is
/// [told](Self::grant_to) another user.
#[derive(Debug)]
pub struct TokenServer {
    server: HttpServer,
    issuer: Arc<Issuer>,
}

/// Why brokers refuse a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenFlaw {
    /// It has expired, though the token server says that it is valid.
    Expired,
    /// It is for another service than Kafka.
    OtherAudience,
    /// Another key has signed it than the one that the server shows.
    OtherKey,
}

#[derive(Debug)]
struct Issuer {
    key: EcdsaKeyPair,
    other_key: EcdsaKeyPair,
    flaw: Mutex<Option<TokenFlaw>>,
    user: Mutex<String>,
    valid_seconds: AtomicU64,
    granted: AtomicU64,
}

impl TokenServer {
    /// The client's id.
    pub const CLIENT: &str = "billing-service";

    /// Its secret.
    pub const SECRET: &str = "never said aloud";

    /// For whom the tokens are.
    pub(crate) const AUDIENCE: &str = "kafka";

    /// Starts it; its tokens are valid for so many seconds.
    ///
    /// # Panics
    /// When there is no free port.
    pub async fn start(valid_seconds: u64) -> Self {
        let random = SystemRandom::new();
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let key = || {
            let document = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("a key");
            EcdsaKeyPair::from_pkcs8(algorithm, document.as_ref(), &random)
                .expect("it was just made")
        };
        let issuer = Arc::new(Issuer {
            key: key(),
            other_key: key(),
            flaw: Mutex::default(),
            user: Mutex::new(SecuredKafka::USER.to_owned()),
            valid_seconds: valid_seconds.into(),
            granted: AtomicU64::new(0),
        });
        let app = Router::new()
            .route("/token", post(token))
            .route("/keys", get(keys))
            .with_state(Arc::clone(&issuer));
        Self {
            server: HttpServer::start(app).await,
            issuer,
        }
    }

    /// Where clients get tokens.
    #[must_use]
    pub fn token_url(&self) -> String {
        format!("http://{}/token", self.server.address())
    }

    /// Where brokers get the key.
    #[must_use]
    pub fn keys_url(&self) -> String {
        format!("http://{}/keys", self.server.address())
    }

    /// From now on it grants tokens that brokers refuse; `None`: good ones again.
    pub fn grant_with(&self, flaw: Option<TokenFlaw>) {
        *self
            .issuer
            .flaw
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = flaw;
    }

    /// From now on its tokens are valid for so many seconds.
    pub fn grant_for(&self, valid_seconds: u64) {
        self.issuer
            .valid_seconds
            .store(valid_seconds, Ordering::Relaxed);
    }

    /// From now on its tokens name this user.
    pub fn grant_to(&self, user: &str) {
        user.clone_into(
            &mut self
                .issuer
                .user
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// How many tokens it has granted.
    #[must_use]
    pub fn granted(&self) -> u64 {
        self.issuer.granted.load(Ordering::Relaxed)
    }
}

async fn token(State(issuer): State<Arc<Issuer>>, headers: HeaderMap) -> (StatusCode, Json<Value>) {
    // Both are sent in the form of a URL.
    let secret = TokenServer::SECRET.replace(' ', "%20");
    let login = format!(
        "Basic {}",
        STANDARD.encode(format!("{}:{secret}", TokenServer::CLIENT))
    );
    if headers
        .get("authorization")
        .and_then(|given| given.to_str().ok())
        != Some(&login)
    {
        return (
            StatusCode::UNAUTHORIZED,
            Json(json!({ "error": "invalid_client" })),
        );
    }
    issuer.granted.fetch_add(1, Ordering::Relaxed);
    let valid = issuer.valid_seconds.load(Ordering::Relaxed);
    let answer =
        json!({ "access_token": issuer.token(valid), "token_type": "Bearer", "expires_in": valid });
    (StatusCode::OK, Json(answer))
}

async fn keys(State(issuer): State<Arc<Issuer>>) -> Json<Value> {
    // An uncompressed point: a byte for its form, then 32 bytes each.
    let (x, y) = issuer.key.public_key().as_ref().split_at(1).1.split_at(32);
    let key = json!({
        "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "one",
        "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y),
    });
    Json(json!({ "keys": [key] }))
}

impl Issuer {
    /// A signed token (RFC 7519) that is valid for so long from now.
    fn token(&self, valid_seconds: u64) -> String {
        /// Longer than brokers still accept a token, because clocks differ, and shorter than
        /// clients do.
        const EXPIRED_FOR_S: u64 = 120;
        let flaw = *self.flaw.lock().unwrap_or_else(PoisonError::into_inner);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("after 1970")
            .as_secs();
        let from = if flaw == Some(TokenFlaw::Expired) {
            now - EXPIRED_FOR_S - valid_seconds
        } else {
            now
        };
        let audience = if flaw == Some(TokenFlaw::OtherAudience) {
            "another service"
        } else {
            TokenServer::AUDIENCE
        };
        let key = if flaw == Some(TokenFlaw::OtherKey) {
            &self.other_key
        } else {
            &self.key
        };
        let user = self
            .user
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let claims = json!({
            "iss": "testkit", "sub": user, "aud": audience, "scope": "kafka",
            "iat": from, "exp": from + valid_seconds,
        });
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!(
            "{}.{}",
            part(&json!({ "alg": "ES256", "typ": "JWT", "kid": "one" })),
            part(&claims)
        );
        let signature = key
            .sign(&SystemRandom::new(), text.as_bytes())
            .expect("it signs");
        format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref()))
    }
}
