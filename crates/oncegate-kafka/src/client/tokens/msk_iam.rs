//! Tokens for Amazon MSK: a presigned URL of the action `kafka-cluster:Connect`, in the base64 of
//! URLs.
//!
//! Source: the [signers of AWS](https://github.com/aws/aws-msk-iam-sasl-signer-go), which agree on
//! this form. The broker replays the URL's signature to find out who made it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_config::{BehaviorVersion, Region};
use aws_credential_types::Credentials;
use aws_credential_types::provider::ProvideCredentials as _;
use aws_sigv4::http_request::{
    SignableBody, SignableRequest, SignatureLocation, SigningSettings, sign,
};
use aws_sigv4::sign::v4;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rdkafka::client::OAuthToken;

use super::{METHOD, REGION, TokenError};

/// The validity of a token: that of AWS's signers, and the most that a broker accepts.
const VALID: Duration = Duration::from_secs(900);

/// The characters that stay as they are in a query.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~');

/// The name of this client in the token; it is not signed.
const USER_AGENT: &str = concat!("oncegate/", env!("CARGO_PKG_VERSION"));

/// Signs tokens with the credentials that the AWS SDK finds.
pub(super) struct MskIam {
    region: Option<String>,
}

impl MskIam {
    pub(super) fn new(region: Option<String>) -> Self {
        Self { region }
    }

    /// Makes a token.
    pub(super) async fn token(&self) -> Result<OAuthToken, TokenError> {
        let mut loader = aws_config::defaults(BehaviorVersion::latest());
        if let Some(region) = &self.region {
            loader = loader.region(Region::new(region.clone()));
        }
        let config = loader.load().await;
        let region = config.region().ok_or_else(|| {
            TokenError::refused(format!(
                "{METHOD}=aws_msk_iam needs a region: set {REGION}, or AWS_REGION"
            ))
        })?;
        let provider = config
            .credentials_provider()
            .ok_or_else(|| no_credentials("no provider"))?;
        let credentials = provider
            .provide_credentials()
            .await
            .map_err(no_credentials)?;
        signed(region.as_ref(), credentials, SystemTime::now())
    }
}

fn no_credentials(why: impl std::fmt::Display) -> TokenError {
    TokenError::away(format!("{METHOD}=aws_msk_iam: no AWS credentials: {why}"))
}

/// The token of these credentials, signed at `now`. It ends with them, if that is earlier than its
/// own end.
fn signed(
    region: &str,
    credentials: Credentials,
    now: SystemTime,
) -> Result<OAuthToken, TokenError> {
    let own_end = now + VALID;
    let ends = credentials
        .expiry()
        .map_or(own_end, |expiry| expiry.min(own_end));
    if ends <= now {
        return Err(TokenError::away(format!(
            "{METHOD}=aws_msk_iam: the AWS credentials have expired"
        )));
    }
    let token = presigned(region, credentials, now).map_err(|why| {
        TokenError::refused(format!(
            "{METHOD}=aws_msk_iam: the token cannot be signed: {why}"
        ))
    })?;
    let ends = ends.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(OAuthToken {
        token,
        // The broker takes the name from the signature; the client library wants one.
        principal_name: "aws".to_owned(),
        lifetime_ms: i64::try_from(ends.as_millis()).unwrap_or(i64::MAX),
    })
}

/// The token of these credentials, signed at `now`.
fn presigned(region: &str, credentials: Credentials, now: SystemTime) -> Result<String, String> {
    let host = format!("kafka.{region}.amazonaws.com");
    let url = format!("https://{host}/?Action=kafka-cluster%3AConnect");
    let mut settings = SigningSettings::default();
    settings.signature_location = SignatureLocation::QueryParams;
    settings.expires_in = Some(VALID);
    let identity = credentials.into();
    let parameters = v4::SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name("kafka-cluster")
        .time(now)
        .settings(settings)
        .build()
        .map_err(|error| error.to_string())?
        .into();
    let headers = std::iter::once(("host", host.as_str()));
    let request = SignableRequest::new("GET", &url, headers, SignableBody::Bytes(b""));
    let request = request.map_err(|error| error.to_string())?;
    let (signed, _) = sign(request, &parameters)
        .map_err(|error| error.to_string())?
        .into_parts();
    let mut url = url;
    for (name, value) in signed.params() {
        url = format!("{url}&{name}={}", utf8_percent_encode(value, QUERY));
    }
    url = format!(
        "{url}&User-Agent={}",
        utf8_percent_encode(USER_AGENT, QUERY)
    );
    Ok(URL_SAFE_NO_PAD.encode(url))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// 2024-01-02T03:04:05Z.
    const NOW: Duration = Duration::from_secs(1_704_164_645);

    fn url(session: Option<&str>) -> String {
        let credentials = Credentials::new(
            "AKIDEXAMPLE",
            "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
            session.map(str::to_owned),
            None,
            "test",
        );
        let token = presigned("eu-west-1", credentials, UNIX_EPOCH + NOW).unwrap();
        String::from_utf8(URL_SAFE_NO_PAD.decode(token).unwrap()).unwrap()
    }

    #[test]
    fn the_token_has_the_form_that_brokers_check() {
        let url = url(Some("session/token="));
        let (place, query) = url.split_once('?').unwrap();
        assert_eq!(place, "https://kafka.eu-west-1.amazonaws.com/");
        let parameters: BTreeMap<&str, &str> = query
            .split('&')
            .map(|pair| pair.split_once('=').unwrap())
            .collect();
        for (name, value) in [
            ("Action", "kafka-cluster%3AConnect"),
            ("X-Amz-Algorithm", "AWS4-HMAC-SHA256"),
            (
                "X-Amz-Credential",
                "AKIDEXAMPLE%2F20240102%2Feu-west-1%2Fkafka-cluster%2Faws4_request",
            ),
            ("X-Amz-Date", "20240102T030405Z"),
            ("X-Amz-Expires", "900"),
            ("X-Amz-SignedHeaders", "host"),
            ("X-Amz-Security-Token", "session%2Ftoken%3D"),
        ] {
            assert_eq!(parameters.get(name), Some(&value), "{name}");
        }
        assert!(parameters["User-Agent"].starts_with("oncegate%2F"));
        assert_eq!(parameters.len(), 9, "{parameters:?}");
    }

    #[test]
    fn a_token_ends_with_its_credentials_if_they_end_first() {
        let now = UNIX_EPOCH + NOW;
        let until = |expiry: Option<SystemTime>| {
            let credentials = Credentials::new("AKIDEXAMPLE", "secret", None, expiry, "test");
            signed("eu-west-1", credentials, now)
                .map(|token| token.lifetime_ms - NOW.as_millis() as i64)
        };
        for (valid, lifetime_ms) in [
            (None, 900_000),
            (Some(3_600), 900_000),
            (Some(120), 120_000),
        ] {
            let expiry = valid.map(|seconds| now + Duration::from_secs(seconds));
            assert_eq!(until(expiry).unwrap(), lifetime_ms, "{valid:?}");
        }
        // A role's next credentials may be there at the next attempt.
        let error = until(Some(now)).unwrap_err();
        assert!(
            error.is_away && error.to_string().contains("expired"),
            "{error}"
        );
    }

    /// The signatures were computed from AWS's description of Signature Version 4 by the program in
    /// the comment of `SIGNATURES`, with no library of AWS.
    #[test]
    fn the_signature_is_that_of_the_specification() {
        for (session, signature) in SIGNATURES {
            let url = url(*session);
            assert!(
                url.contains(&format!("&X-Amz-Signature={signature}")),
                "{url}"
            );
        }
    }

    /// ```python
    /// import hashlib, hmac, urllib.parse as u
    /// def signature(session):
    ///     q = {"Action": "kafka-cluster:Connect", "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
    ///          "X-Amz-Credential": "AKIDEXAMPLE/20240102/eu-west-1/kafka-cluster/aws4_request",
    ///          "X-Amz-Date": "20240102T030405Z", "X-Amz-Expires": "900", "X-Amz-SignedHeaders": "host"}
    ///     if session: q["X-Amz-Security-Token"] = session
    ///     query = "&".join(f"{k}={u.quote(q[k], safe='-_.~')}" for k in sorted(q))
    ///     sha = lambda text: hashlib.sha256(text.encode()).hexdigest()
    ///     request = f"GET\n/\n{query}\nhost:kafka.eu-west-1.amazonaws.com\n\nhost\n{sha('')}"
    ///     text = f"AWS4-HMAC-SHA256\n20240102T030405Z\n20240102/eu-west-1/kafka-cluster/aws4_request\n{sha(request)}"
    ///     key = b"AWS4wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
    ///     for part in ["20240102", "eu-west-1", "kafka-cluster", "aws4_request"]:
    ///         key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    ///     return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    /// print(signature(None), signature("session/token="))
    /// ```
    const SIGNATURES: &[(Option<&str>, &str)] = &[
        (
            None,
            "8e46bd6787e09b7c58faaa04d36154378d4dfcda99f072994912d5e4d9a64b8e",
        ),
        (
            Some("session/token="),
            "a0d118b37181b453138c343f2d382cfaae78e60ed95751d57169edf4f914aa6b",
        ),
    ];
}
