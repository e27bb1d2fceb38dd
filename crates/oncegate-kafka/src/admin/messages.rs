//! The requests that this client sends, each with its answer and its versions.
//!
//! The newest version that both sides know is used. The ranges begin where Kafka 4 begins, and end
//! where the meaning of a field changes.

use kafka_protocol::messages::{
    ApiKey, ApiVersionsRequest, ApiVersionsResponse, CreateTopicsRequest, CreateTopicsResponse,
    DeleteGroupsRequest, DeleteGroupsResponse, DeleteTopicsRequest, DeleteTopicsResponse,
    DescribeConfigsRequest, DescribeConfigsResponse, FindCoordinatorRequest,
    FindCoordinatorResponse, MetadataRequest, MetadataResponse, SaslAuthenticateRequest,
    SaslAuthenticateResponse, SaslHandshakeRequest, SaslHandshakeResponse,
};
use kafka_protocol::protocol::{Decodable, Encodable, HeaderVersion, StrBytes, VersionRange};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::types::RDKafkaRespErr;

/// A request that this client sends.
pub(super) trait Call: Encodable + HeaderVersion + Sync {
    /// The request's number in the protocol.
    const KEY: ApiKey;
    /// The versions in which this client sets all that is needed.
    const VERSIONS: VersionRange;
    /// The request's answer.
    type Response: Decodable + HeaderVersion + Send;
}

const fn versions(min: i16, max: i16) -> VersionRange {
    VersionRange { min, max }
}

impl Call for ApiVersionsRequest {
    const KEY: ApiKey = ApiKey::ApiVersions;
    /// The version that every broker answers.
    const VERSIONS: VersionRange = versions(0, 0);
    type Response = ApiVersionsResponse;
}

impl Call for SaslHandshakeRequest {
    const KEY: ApiKey = ApiKey::SaslHandshake;
    /// After version 0, the login is not sent in requests.
    const VERSIONS: VersionRange = versions(1, 1);
    type Response = SaslHandshakeResponse;
}

impl Call for SaslAuthenticateRequest {
    const KEY: ApiKey = ApiKey::SaslAuthenticate;
    const VERSIONS: VersionRange = versions(0, 2);
    type Response = SaslAuthenticateResponse;
}

impl Call for MetadataRequest {
    const KEY: ApiKey = ApiKey::Metadata;
    /// Before version 4, it may create topics.
    const VERSIONS: VersionRange = versions(4, 12);
    type Response = MetadataResponse;
}

impl Call for CreateTopicsRequest {
    const KEY: ApiKey = ApiKey::CreateTopics;
    const VERSIONS: VersionRange = versions(2, 7);
    type Response = CreateTopicsResponse;
}

impl Call for DeleteTopicsRequest {
    const KEY: ApiKey = ApiKey::DeleteTopics;
    /// Version 6 names topics in another field.
    const VERSIONS: VersionRange = versions(1, 5);
    type Response = DeleteTopicsResponse;
}

impl Call for FindCoordinatorRequest {
    const KEY: ApiKey = ApiKey::FindCoordinator;
    /// Version 4 names several groups, in another field.
    const VERSIONS: VersionRange = versions(1, 3);
    type Response = FindCoordinatorResponse;
}

impl Call for DeleteGroupsRequest {
    const KEY: ApiKey = ApiKey::DeleteGroups;
    const VERSIONS: VersionRange = versions(0, 2);
    type Response = DeleteGroupsResponse;
}

impl Call for DescribeConfigsRequest {
    const KEY: ApiKey = ApiKey::DescribeConfigs;
    const VERSIONS: VersionRange = versions(1, 4);
    type Response = DescribeConfigsResponse;
}

/// A text in a request.
pub(super) fn text(text: impl Into<String>) -> StrBytes {
    StrBytes::from_string(text.into())
}

/// Translates the number of an error in an answer; 0 is none.
pub(super) fn result(code: i16) -> Result<(), RDKafkaErrorCode> {
    match RDKafkaRespErr::try_from(i32::from(code)) {
        Ok(RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR) => Ok(()),
        Ok(error) => Err(error.into()),
        Err(_) => Err(RDKafkaErrorCode::Unknown),
    }
}
