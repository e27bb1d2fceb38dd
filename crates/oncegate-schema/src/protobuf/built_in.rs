//! The files that serialisers have built in: a schema that imports one is registered without a
//! reference to it.

use protox::file::{File, FileResolver};

/// Confluent's options and types, and Google's common types. The compiler has `google/protobuf`.
const FILES: &[(&str, &str)] = &[
    (
        "confluent/meta.proto",
        include_str!("../../proto/confluent/meta.proto"),
    ),
    (
        "confluent/type/decimal.proto",
        include_str!("../../proto/confluent/type/decimal.proto"),
    ),
    (
        "confluent/type/variant.proto",
        include_str!("../../proto/confluent/type/variant.proto"),
    ),
    (
        "confluent/types/decimal.proto",
        include_str!("../../proto/confluent/types/decimal.proto"),
    ),
    (
        "google/type/calendar_period.proto",
        include_str!("../../proto/google/type/calendar_period.proto"),
    ),
    (
        "google/type/color.proto",
        include_str!("../../proto/google/type/color.proto"),
    ),
    (
        "google/type/date.proto",
        include_str!("../../proto/google/type/date.proto"),
    ),
    (
        "google/type/datetime.proto",
        include_str!("../../proto/google/type/datetime.proto"),
    ),
    (
        "google/type/dayofweek.proto",
        include_str!("../../proto/google/type/dayofweek.proto"),
    ),
    (
        "google/type/decimal.proto",
        include_str!("../../proto/google/type/decimal.proto"),
    ),
    (
        "google/type/expr.proto",
        include_str!("../../proto/google/type/expr.proto"),
    ),
    (
        "google/type/fraction.proto",
        include_str!("../../proto/google/type/fraction.proto"),
    ),
    (
        "google/type/interval.proto",
        include_str!("../../proto/google/type/interval.proto"),
    ),
    (
        "google/type/latlng.proto",
        include_str!("../../proto/google/type/latlng.proto"),
    ),
    (
        "google/type/localized_text.proto",
        include_str!("../../proto/google/type/localized_text.proto"),
    ),
    (
        "google/type/money.proto",
        include_str!("../../proto/google/type/money.proto"),
    ),
    (
        "google/type/month.proto",
        include_str!("../../proto/google/type/month.proto"),
    ),
    (
        "google/type/phone_number.proto",
        include_str!("../../proto/google/type/phone_number.proto"),
    ),
    (
        "google/type/postal_address.proto",
        include_str!("../../proto/google/type/postal_address.proto"),
    ),
    (
        "google/type/quaternion.proto",
        include_str!("../../proto/google/type/quaternion.proto"),
    ),
    (
        "google/type/timeofday.proto",
        include_str!("../../proto/google/type/timeofday.proto"),
    ),
];

/// Gives the compiler these files.
pub(super) struct BuiltIn;

impl FileResolver for BuiltIn {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        match FILES.iter().find(|(known, _)| *known == name) {
            Some((_, source)) => File::from_source(name, source),
            None => Err(protox::Error::file_not_found(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FILES;
    use crate::protobuf::{ProtoFile, ProtobufSchema};

    #[test]
    fn each_built_in_file_can_be_imported() {
        for (name, _) in FILES {
            let file = ProtoFile {
                name: "schema.proto".to_owned(),
                text: format!("syntax = \"proto3\"; import \"{name}\"; message A {{}}"),
            };
            let compiled = ProtobufSchema::compile(&[file]);
            assert!(compiled.is_ok(), "{name}: {compiled:?}");
        }
    }
}
