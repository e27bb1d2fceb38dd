//! Keys of Avro, Protobuf and JSON Schema, with a schema registry or a schema file, and of
//! compressed payloads.
//!
//! A [`SchemaFormat`] is the layer before the keys: it turns a payload into a document, whose JSON
//! has the same key. Give it to [`Key::format`](oncegate_core::key::Key::format). `docs/FORMATS.md`
//! says how each type is written.
//!
//! ```
//! use std::sync::Arc;
//!
//! use oncegate_core::key::{Key, KeyInput, Scope};
//! use oncegate_schema::SchemaFormat;
//!
//! let schema = r#"{"type": "record", "name": "Order", "fields": [
//!     {"name": "order_id", "type": "string"},
//!     {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}}]}"#;
//! let scope = Scope::new("billing")?;
//! let json = Key::json(["order_id", "amount"]).compile(&scope)?;
//! let avro = Key::json(["order_id", "amount"]).format(Arc::new(SchemaFormat::avro(schema)?)).compile(&scope)?;
//!
//! let twin = json.derive("orders", &KeyInput::payload(r#"{"order_id": "A-7", "amount": 12.34}"#))?;
//! let binary = [6, b'A', b'-', b'7', 4, 0x04, 0xD2];
//! assert_eq!(avro.derive("orders", &KeyInput::payload(&binary))?, twin);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod avro;
mod encoding;
mod framing;
mod inside;
mod json;
mod protobuf;
mod registry;
mod time;

use std::borrow::Cow;

use async_trait::async_trait;
use oncegate_core::key::{
    DocumentPlace, Format, HeaderValue, KeyError, KeySource, PrepareError, Wanted, foreign_avro,
    foreign_form,
};

use self::avro::AvroSchema;
pub use self::encoding::Encoding;
use self::framing::Framed;
use self::inside::Place;
use self::json::Json;
use self::protobuf::{ProtoFile, ProtobufSchema};
pub use self::registry::Registry;
use self::registry::{Schema, Schemas};

/// The error of a format that cannot be used: its schema, or its registry's address or login. It is
/// reported at start-up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct SchemaError {
    /// The part that cannot be used, and the reason.
    pub what: String,
}

/// Turns payloads into documents.
#[derive(Debug)]
pub struct SchemaFormat {
    body: Body,
    encodings: Vec<Encoding>,
    encoding_header: Option<String>,
    /// The place inside a document of JSON; `None` when the payload itself has this format.
    place: Option<Place>,
}

#[derive(Debug)]
enum Body {
    Json,
    Avro(AvroSchema),
    Protobuf {
        schema: ProtobufSchema,
        message: usize,
    },
    Registry(Box<Schemas>),
}

impl SchemaFormat {
    /// JSON, for payloads that are compressed or encoded.
    #[must_use]
    pub fn json() -> Self {
        Self::of(Body::Json)
    }

    /// Avro's binary encoding without any framing, all of one schema: the text of an `.avsc` file.
    ///
    /// # Errors
    /// When it is no schema.
    pub fn avro(schema: &str) -> Result<Self, SchemaError> {
        let schema = AvroSchema::parse(schema, &[]);
        let schema = schema.map_err(|why| SchemaError {
            what: format!("the Avro schema cannot be used: {why}"),
        })?;
        Ok(Self::of(Body::Avro(schema)))
    }

    /// Protobuf without any framing, all of one message: the source of a `.proto` file, or base64
    /// of its descriptor, and the full name of the message. A file with one message needs no name.
    /// It may import Google's well-known types.
    ///
    /// # Errors
    /// When the source does not compile, or has no such message.
    pub fn protobuf(source: &str, message: Option<&str>) -> Result<Self, SchemaError> {
        let file = ProtoFile {
            name: "schema.proto".to_owned(),
            text: source.to_owned(),
        };
        let schema = ProtobufSchema::compile(&[file]).map_err(unusable_protobuf)?;
        let message = schema.named(message).map_err(unusable_protobuf)?;
        Ok(Self::of(Body::Protobuf { schema, message }))
    }

    /// Avro, Protobuf and JSON Schema whose schemas are in a registry. Payloads name their schema
    /// in front (Confluent's framing) or in the header `__value_schema_id`.
    ///
    /// # Errors
    /// When the address cannot be read, or there are no certificate authorities. It connects to
    /// nothing.
    pub fn registry(registry: Registry) -> Result<Self, SchemaError> {
        Ok(Self::of(Body::Registry(Box::new(registry.open()?))))
    }

    /// Reads Avro's records with the aliases and defaults of this schema too, the text of an
    /// `.avsc` file. A path finds a field by the name in this schema or by an alias. A field that a
    /// payload was written without has its default. Everything else is as in the payload's own
    /// schema. The schema may be a union of records.
    ///
    /// # Errors
    /// When it is no schema, a default is no value of its type, or the format is not Avro.
    pub fn reader(mut self, schema: &str) -> Result<Self, SchemaError> {
        let reader = AvroSchema::reader(schema).map_err(unusable_reader)?;
        match &mut self.body {
            Body::Avro(schema) => *schema = schema.resolved(&reader).map_err(unusable_reader)?,
            Body::Registry(schemas) => schemas.read_with(reader),
            Body::Json | Body::Protobuf { .. } => {
                return Err(unusable_reader(
                    "it is for Avro, with a registry or a schema file".to_owned(),
                ));
            }
        }
        Ok(self)
    }

    /// Undoes these encodings of every payload, the first one first.
    #[must_use]
    pub fn encodings(mut self, encodings: impl IntoIterator<Item = Encoding>) -> Self {
        self.encodings
            .extend(encodings.into_iter().take(encoding::MAX_ENCODINGS));
        self
    }

    /// Undoes the encodings that this header names, such as `content-encoding`. A message without
    /// it has none.
    #[must_use]
    pub fn encoding_header(mut self, name: impl Into<String>) -> Self {
        self.encoding_header = Some(name.into());
        self
    }

    /// Reads payloads of JSON that have what this format describes in the string at this path, such
    /// as `record.data`: names between dots, with `\` before a dot or backslash in a name. The
    /// document then has the decoded value in the place of the string, and a document without the
    /// string stays as it is.
    ///
    /// [`encodings`](Self::encodings) are those of the string, base64 by default; those that
    /// [`encoding_header`](Self::encoding_header) names stay those of the payload.
    ///
    /// # Errors
    /// When the path has a blank name, another escape, or more than 16 names.
    pub fn at(mut self, path: &str) -> Result<Self, SchemaError> {
        self.place = Some(Place::parse(path)?);
        Ok(self)
    }

    /// Asks the registry whether it answers. Without one, there is nothing to ask.
    ///
    /// # Errors
    /// When it does not answer, or refuses.
    pub async fn check(&self) -> Result<(), PrepareError> {
        match &self.body {
            Body::Registry(schemas) => schemas.check().await,
            _ => Ok(()),
        }
    }

    fn of(body: Body) -> Self {
        Self {
            body,
            encodings: Vec::new(),
            encoding_header: None,
            place: None,
        }
    }

    /// The payload without the encodings of its whole.
    fn decoded<'m>(
        &self,
        message: &'m dyn KeySource,
        limit: usize,
    ) -> Result<Cow<'m, [u8]>, KeyError> {
        let payload = message.payload().ok_or(KeyError::NoPayload)?;
        let encodings = match self.place {
            Some(_) => &[],
            None => self.encodings.as_slice(),
        };
        let Some(name) = &self.encoding_header else {
            return encoding::decode(payload, encodings, limit);
        };
        let of_header = match message.header(name) {
            HeaderValue::Absent => Vec::new(),
            HeaderValue::One(value) => encoding::of_header(value)?,
            HeaderValue::Several => return Err(KeyError::RepeatedHeader { name: name.clone() }),
        };
        // The encodings of the header were applied to the whole, so they are undone first.
        let payload = encoding::decode(payload, &of_header, limit)?;
        match encodings {
            [] => Ok(payload),
            encodings => Ok(Cow::Owned(
                encoding::decode(&payload, encodings, limit)?.into_owned(),
            )),
        }
    }

    /// The bytes that the string at the format's place stands for.
    fn decoded_string(&self, text: &str, limit: usize) -> Result<Vec<u8>, KeyError> {
        let encodings = match self.encodings.as_slice() {
            [] => &[Encoding::Base64],
            encodings => encodings,
        };
        Ok(encoding::decode(text.as_bytes(), encodings, limit)?.into_owned())
    }

    /// Writes the document of decoded bytes, unless it is a part of them: then it returns where it
    /// begins.
    fn write(
        &self,
        message: &dyn KeySource,
        payload: &[u8],
        wanted: Wanted<'_>,
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, KeyError> {
        match &self.body {
            Body::Json => match foreign_form(payload) {
                Some(what) => Err(KeyError::Framed { what }),
                None => Ok(Some(0)),
            },
            Body::Avro(schema) => {
                let read = schema.document(payload, 0, wanted, Json::new(out, limit));
                if let Err(KeyError::MalformedPayload { .. }) = read
                    && let Some(what) = foreign_avro(payload)
                {
                    return Err(KeyError::Framed { what });
                }
                read.map(|()| None)
            }
            Body::Protobuf {
                schema,
                message: id,
            } => {
                let read = schema.document(*id, payload, 0, wanted, Json::new(out, limit));
                read.map(|()| None)
            }
            Body::Registry(schemas) => {
                Self::framed(schemas, message, payload, wanted, Json::new(out, limit))
            }
        }
    }

    /// Writes a document whose string at the format's place is replaced by what it stands for.
    /// Returns `false` when there is nothing to replace, or a key wants nothing of it.
    fn write_around(
        &self,
        place: &Place,
        message: &dyn KeySource,
        document: &[u8],
        wanted: &Wanted<'_>,
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<bool, KeyError> {
        let Some(wanted) = place.wanted(wanted) else {
            return Ok(false);
        };
        let Some(found) = place.find(document)? else {
            return Ok(false);
        };
        let bytes = self.decoded_string(&found.text, limit)?;
        out.extend_from_slice(document.get(..found.literal.start).unwrap_or_default());
        if let Some(start) = self.write(message, &bytes, wanted, limit, out)? {
            let value = bytes.get(start..).unwrap_or_default();
            // More than one value could close the document around it, and write another one.
            place.check_value(value)?;
            out.extend_from_slice(value);
        }
        let rest = document.get(found.literal.end..).unwrap_or_default();
        Json::new(out, limit).raw_bytes(rest)?;
        Ok(true)
    }

    /// Writes the document of a payload whose schema is in the registry.
    fn framed(
        schemas: &Schemas,
        message: &dyn KeySource,
        payload: &[u8],
        wanted: Wanted<'_>,
        json: Json<'_>,
    ) -> Result<Option<usize>, KeyError> {
        let framed = Framed::of(message, payload)?;
        match &*schemas.get(framed.schema)? {
            Schema::Json => return Ok(Some(framed.body().1)),
            Schema::Avro(schema) => {
                let (body, offset) = framed.body();
                schema.document(body, offset, wanted, json)?;
            }
            Schema::Protobuf(schema) => {
                let (indexes, body, offset) = framed.indexed_body()?;
                let id = schema
                    .at(&indexes)
                    .ok_or_else(|| KeyError::UnusableSchema {
                        schema: framed.schema.to_string(),
                        why: "it has no message at the indexes of the payload".to_owned(),
                    })?;
                schema.document(id, body, offset, wanted, json)?;
            }
        }
        Ok(None)
    }
}

fn unusable_protobuf(why: String) -> SchemaError {
    SchemaError {
        what: format!("the Protobuf schema cannot be used: {why}"),
    }
}

fn unusable_reader(why: String) -> SchemaError {
    SchemaError {
        what: format!("the reader schema cannot be used: {why}"),
    }
}

#[async_trait]
impl Format for SchemaFormat {
    fn document<'m>(
        &self,
        message: &'m dyn KeySource,
        wanted: Wanted<'_>,
        limit: usize,
        out: &mut Vec<u8>,
    ) -> Result<DocumentPlace<'m>, KeyError> {
        let payload = self.decoded(message, limit)?;
        let plain = match &self.place {
            None => self.write(message, &payload, wanted, limit, out)?,
            Some(place) => {
                if let Some(what) = foreign_form(&payload) {
                    return Err(KeyError::Framed { what });
                }
                let written = self.write_around(place, message, &payload, &wanted, limit, out)?;
                (!written).then_some(0)
            }
        };
        match (plain, payload) {
            (None, _) => Ok(DocumentPlace::Written),
            (Some(start), Cow::Borrowed(payload)) => Ok(DocumentPlace::Borrowed(
                payload.get(start..).unwrap_or_default(),
            )),
            (Some(start), Cow::Owned(payload)) => {
                out.extend_from_slice(payload.get(start..).unwrap_or_default());
                Ok(DocumentPlace::Written)
            }
        }
    }

    async fn prepare(
        &self,
        message: &(dyn KeySource + Sync),
        limit: usize,
    ) -> Result<(), PrepareError> {
        let Body::Registry(schemas) = &self.body else {
            return Ok(());
        };
        // Only the head of the payload is needed, but an encoding hides it. A wrong payload is an
        // error of the key, not of the registry.
        let name = {
            let Ok(payload) = self.decoded(message, limit) else {
                return Ok(());
            };
            let payload = match &self.place {
                None => payload,
                Some(place) => {
                    let Ok(Some(found)) = place.find(&payload) else {
                        return Ok(());
                    };
                    let Ok(bytes) = self.decoded_string(&found.text, limit) else {
                        return Ok(());
                    };
                    Cow::Owned(bytes)
                }
            };
            let Ok(framed) = Framed::of(message, &payload) else {
                return Ok(());
            };
            framed.schema
        };
        schemas.fetch(name).await
    }
}
