//! Compiles Protobuf descriptors into the schema that the decoder follows.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use prost_reflect::{
    Cardinality, DescriptorPool, EnumDescriptor, FieldDescriptor, Kind as FieldKind,
    MessageDescriptor,
};
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};

use super::built_in::BuiltIn;
use super::source;

/// The most messages of a schema with its imports.
const MAX_MESSAGES: usize = 10_000;
/// The most files that a schema imports, directly or not.
const MAX_FILES: usize = 1_000;

/// The stack of the thread that compiles: for a chain of the most files, each with the deepest
/// nesting, in a build without optimisation.
const COMPILER_STACK_BYTES: usize = 64 * 1024 * 1024;

/// The position of a message in its schema.
pub(super) type MessageId = usize;

/// A file of a schema: the name by which others import it, and its source or base64 of its compiled
/// descriptor.
#[derive(Clone, Debug)]
pub(crate) struct ProtoFile {
    pub(crate) name: String,
    pub(crate) text: String,
}

/// A compiled schema.
#[derive(Debug)]
pub(crate) struct ProtobufSchema {
    pub(super) messages: Vec<Message>,
    pub(super) enums: Vec<HashMap<i32, String>>,
    /// The messages by full name.
    by_name: HashMap<String, MessageId>,
    /// The messages at the top of the schema's own file, in their order, each with those inside.
    tree: Vec<Nested>,
}

#[derive(Debug)]
struct Nested {
    id: MessageId,
    inner: Vec<Nested>,
}

#[derive(Debug)]
pub(super) struct Message {
    /// The fields, sorted by number.
    pub(super) fields: Vec<MessageField>,
    pub(super) well_known: WellKnown,
}

/// Messages that Protobuf's JSON writes in a form of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WellKnown {
    No,
    Timestamp,
    Duration,
    FieldMask,
    /// A wrapper, such as `StringValue`.
    Wrapper,
    Any,
    Struct,
    Value,
    ListValue,
}

#[derive(Debug)]
pub(super) struct MessageField {
    pub(super) number: u32,
    /// The name in the source.
    pub(super) name: String,
    pub(super) json_name: String,
    pub(super) kind: Kind,
    pub(super) shape: Shape,
    /// `true` when a message tells "not set" from "set to the default".
    pub(super) has_presence: bool,
    /// The `oneof` of the field, by position in the message.
    pub(super) oneof: Option<usize>,
}

impl MessageField {
    /// The names that paths may use.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        let other = Some(self.json_name.as_str()).filter(|name| *name != self.name);
        std::iter::once(self.name.as_str()).chain(other)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Single,
    List,
    /// A map. The kind is the entry: a message with the fields 1 and 2.
    Map,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Int32,
    Int64,
    Uint32,
    Uint64,
    Sint32,
    Sint64,
    Fixed32,
    Fixed64,
    Sfixed32,
    Sfixed64,
    Float,
    Double,
    Text,
    Bytes,
    Enum(usize),
    Message(MessageId),
}

impl ProtobufSchema {
    /// Compiles the first file, which may import the others, Google's well-known types, and what
    /// serialisers have built in.
    pub(crate) fn compile(files: &[ProtoFile]) -> Result<Self, String> {
        let first = files.first().ok_or("it has no file")?;
        if files.len() > MAX_FILES {
            return Err(format!("it imports more than {MAX_FILES} files"));
        }
        // The compiler opens the imports of a file by recursion, as deep as they go.
        let pool = std::thread::scope(|threads| {
            let thread = std::thread::Builder::new()
                .name("protobuf-schema".to_owned())
                .stack_size(COMPILER_STACK_BYTES)
                .spawn_scoped(threads, || pool_of(files, &first.name))
                .map_err(|error| format!("no thread to compile it: {error}"))?;
            thread
                .join()
                .map_err(|_| "the compiler has failed".to_owned())?
        });
        Self::of_pool(&pool?, &first.name)
    }

    fn of_pool(pool: &DescriptorPool, file: &str) -> Result<Self, String> {
        let all: Vec<MessageDescriptor> = pool.all_messages().collect();
        if all.len() > MAX_MESSAGES {
            return Err(format!("it has more than {MAX_MESSAGES} messages"));
        }
        let by_name = all
            .iter()
            .enumerate()
            .map(|(id, message)| (message.full_name().to_owned(), id))
            .collect();
        let mut schema = Self {
            messages: Vec::new(),
            enums: Vec::new(),
            by_name,
            tree: Vec::new(),
        };
        let mut enums = HashMap::new();
        for (id, descriptor) in pool.all_enums().enumerate() {
            schema.enums.push(names_of(&descriptor));
            enums.insert(descriptor.full_name().to_owned(), id);
        }
        for message in &all {
            let compiled = schema.message(message, &enums);
            schema.messages.push(compiled);
        }
        let file = pool
            .get_file_by_name(file)
            .ok_or("its own file is missing")?;
        schema.tree = file
            .messages()
            .map(|message| schema.nested(&message))
            .collect();
        Ok(schema)
    }

    fn nested(&self, message: &MessageDescriptor) -> Nested {
        let id = self
            .by_name
            .get(message.full_name())
            .copied()
            .unwrap_or_default();
        Nested {
            id,
            inner: message
                .child_messages()
                .map(|inner| self.nested(&inner))
                .collect(),
        }
    }

    fn message(&self, descriptor: &MessageDescriptor, enums: &HashMap<String, usize>) -> Message {
        let mut fields: Vec<MessageField> = descriptor
            .fields()
            .map(|field| self.field(&field, enums))
            .collect();
        fields.sort_by_key(|field| field.number);
        Message {
            fields,
            well_known: well_known(descriptor.full_name()),
        }
    }

    fn field(&self, field: &FieldDescriptor, enums: &HashMap<String, usize>) -> MessageField {
        let shape = match field.cardinality() {
            _ if field.is_map() => Shape::Map,
            Cardinality::Repeated => Shape::List,
            _ => Shape::Single,
        };
        let oneof = field
            .containing_oneof()
            .filter(|oneof| !oneof.is_synthetic());
        let oneof = oneof.map(|oneof| {
            oneof
                .path()
                .last()
                .copied()
                .unwrap_or_default()
                .unsigned_abs() as usize
        });
        MessageField {
            number: field.number(),
            name: field.name().to_owned(),
            json_name: field.json_name().to_owned(),
            kind: self.kind(&field.kind(), enums),
            shape,
            has_presence: field.supports_presence(),
            oneof,
        }
    }

    fn kind(&self, kind: &FieldKind, enums: &HashMap<String, usize>) -> Kind {
        match kind {
            FieldKind::Bool => Kind::Bool,
            FieldKind::Int32 => Kind::Int32,
            FieldKind::Int64 => Kind::Int64,
            FieldKind::Uint32 => Kind::Uint32,
            FieldKind::Uint64 => Kind::Uint64,
            FieldKind::Sint32 => Kind::Sint32,
            FieldKind::Sint64 => Kind::Sint64,
            FieldKind::Fixed32 => Kind::Fixed32,
            FieldKind::Fixed64 => Kind::Fixed64,
            FieldKind::Sfixed32 => Kind::Sfixed32,
            FieldKind::Sfixed64 => Kind::Sfixed64,
            FieldKind::Float => Kind::Float,
            FieldKind::Double => Kind::Double,
            FieldKind::String => Kind::Text,
            FieldKind::Bytes => Kind::Bytes,
            FieldKind::Enum(of) => {
                Kind::Enum(enums.get(of.full_name()).copied().unwrap_or_default())
            }
            FieldKind::Message(of) => Kind::Message(
                self.by_name
                    .get(of.full_name())
                    .copied()
                    .unwrap_or_default(),
            ),
        }
    }

    /// The message with this full name, or the only one of the file if no name is given.
    pub(crate) fn named(&self, name: Option<&str>) -> Result<usize, String> {
        match (name, self.tree.as_slice()) {
            (Some(name), _) => self.by_name.get(name).copied().ok_or_else(|| {
                format!("it has no message `{name}`; write its full name, as in `shop.v1.Order`")
            }),
            (None, [only]) => Ok(only.id),
            (None, all) => Err(format!(
                "it has {} messages: name the one of the payloads",
                all.len()
            )),
        }
    }

    /// The message at these indexes: the first counts the messages of the file, each other one
    /// those inside the one before.
    pub(crate) fn at(&self, indexes: &[usize]) -> Option<MessageId> {
        let (first, rest) = indexes.split_first()?;
        let mut message = self.tree.get(*first)?;
        for index in rest {
            message = message.inner.get(*index)?;
        }
        Some(message.id)
    }

    /// The message that an `Any` names, as in `type.googleapis.com/shop.v1.Order`.
    pub(super) fn of_url(&self, url: &str) -> Option<MessageId> {
        let (_, name) = url.rsplit_once('/')?;
        self.by_name.get(name).copied()
    }
}

/// Compiles a file and what it imports.
fn pool_of(files: &[ProtoFile], name: &str) -> Result<DescriptorPool, String> {
    let mut resolver = ChainFileResolver::new();
    resolver.add(Given(files.to_vec()));
    resolver.add(GoogleFileResolver::new());
    resolver.add(BuiltIn);
    let mut compiler = protox::Compiler::with_file_resolver(resolver);
    // A file that is given by its name need not be on a disk.
    compiler
        .open_file(name)
        .map_err(|error| format!("it does not compile: {error}"))?;
    Ok(compiler.descriptor_pool())
}

/// The first name of each number.
fn names_of(descriptor: &EnumDescriptor) -> HashMap<i32, String> {
    let mut names = HashMap::new();
    // The descriptor has them in the order of the source; `values` has them by number.
    for value in &descriptor.enum_descriptor_proto().value {
        names
            .entry(value.number())
            .or_insert_with(|| value.name().to_owned());
    }
    names
}

fn well_known(name: &str) -> WellKnown {
    match name.strip_prefix("google.protobuf.") {
        Some("Timestamp") => WellKnown::Timestamp,
        Some("Duration") => WellKnown::Duration,
        Some("FieldMask") => WellKnown::FieldMask,
        Some("Any") => WellKnown::Any,
        Some("Struct") => WellKnown::Struct,
        Some("Value") => WellKnown::Value,
        Some("ListValue") => WellKnown::ListValue,
        Some(
            "DoubleValue" | "FloatValue" | "Int64Value" | "UInt64Value" | "Int32Value"
            | "UInt32Value" | "BoolValue" | "StringValue" | "BytesValue",
        ) => WellKnown::Wrapper,
        _ => WellKnown::No,
    }
}

/// The files that were given, for the compiler.
struct Given(Vec<ProtoFile>);

impl FileResolver for Given {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        let file = self.0.iter().find(|file| file.name == name);
        let file = file.ok_or_else(|| protox::Error::file_not_found(name))?;
        // Some clients register the compiled descriptor, and some registries give it back as it is.
        let compiled = STANDARD.decode(file.text.trim()).ok();
        match compiled.and_then(|bytes| File::decode_file_descriptor_proto(bytes.as_slice()).ok()) {
            Some(compiled) => {
                let mut descriptor = compiled.file_descriptor_proto().clone();
                name.clone_into(descriptor.name.get_or_insert_default());
                Ok(File::from_file_descriptor_proto(descriptor))
            }
            None => {
                source::check(&file.text).map_err(protox::Error::new)?;
                File::from_source(name, &file.text)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_FILES, ProtoFile, ProtobufSchema};

    // invariant: panic-in-keys
    #[test]
    fn a_chain_of_the_most_files_fits_the_stack() {
        // Each as deep as messages may be, and with an import of the next one.
        let names = (0..31).map(|level| format!("message A{level} {{"));
        let messages = format!("{}{}", names.collect::<String>(), "}".repeat(31));
        fn file(number: usize, messages: &str) -> ProtoFile {
            let import = if number + 1 < MAX_FILES {
                format!("import \"f{}.proto\";", number + 1)
            } else {
                String::new()
            };
            ProtoFile {
                name: format!("f{number}.proto"),
                text: format!("syntax = \"proto3\"; package p{number}; {import} {messages}"),
            }
        }
        let files: Vec<ProtoFile> = (0..MAX_FILES)
            .map(|number| file(number, &messages))
            .collect();
        let compiled = ProtobufSchema::compile(&files);
        // It must not end the process; that it has too many messages is said afterwards.
        assert!(compiled.unwrap_err().contains("messages"));
    }
}
