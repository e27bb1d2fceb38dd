//! Derives the key of a message.

use std::borrow::Cow;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::ops::Range;

use super::custom::CustomKey;
use super::encode::{self, Writer};
use super::error::{KeyError, KeySpecError};
use super::explain::Explanation;
use super::format::{DocumentPlace, PrepareError, SharedFormat, Wanted, is_batch_of_events};
use super::input::{ByRef, HeaderValue, KeySource};
use super::limits::{KEY_FORMAT, MAX_NAME_BYTES};
use super::normaliser::Normaliser;
use super::parts::{Composed, Reading};
use super::path::{Node, Path};
use super::paths::{PathList, PathTrees};
use super::routes::Routes;
use super::scratch::{Scanning, Scratch, with_scratch, within};
use super::store_key::{Digest, Scope, StoreKey};
use super::{Domain, Field, Key, Source, TenantSource};

/// The BLAKE3 context: separates hashes of keys from all other hashes.
const CONTEXT: &str = "oncegate 2026-11-21 idempotency key v1";

/// A checked key specification that derives keys from messages. Cheap to share behind a reference
/// or an `Arc`.
#[derive(Clone, Debug)]
pub struct CompiledKey {
    scope: Scope,
    /// Version, domain and scope: the prefix of the canonical bytes of every message.
    prefix: Vec<u8>,
    tenant: Option<Tenant>,
    plan: KeyPlan,
    /// The wanted paths: the fields in order, then the tenant.
    paths: PathTrees,
    max_payload_bytes: usize,
    /// `None`: the payload is the document.
    format: Option<SharedFormat>,
    routes: Routes,
    hasher: blake3::Hasher,
}

#[derive(Clone, Debug)]
enum KeyPlan {
    Json(Vec<FieldPlan>),
    Payload { except: Node },
    Header(String),
    MessageKey,
    MessageId,
    Custom(CustomKey),
    Composed(Composed),
}

#[derive(Clone, Debug)]
struct FieldPlan {
    path: String,
    normalisers: Vec<Normaliser>,
    takes_default: bool,
}

#[derive(Clone, Debug)]
enum Tenant {
    Json { field: FieldPlan, target: usize },
    Header(String),
}

impl Key {
    /// Checks the specification and compiles it for a scope. Call it once, at start-up.
    ///
    /// # Errors
    /// The first error in the specification.
    pub fn compile(&self, scope: &Scope) -> Result<CompiledKey, KeySpecError> {
        let key = self.canonical()?;
        let domain = match key.domain {
            Domain::Messages => encode::DOMAIN_KEY,
            Domain::Http => encode::DOMAIN_HTTP_KEY,
        };
        let mut prefix = vec![KEY_FORMAT, domain];
        encode::put_bytes(scope.as_str().as_bytes(), &mut prefix);

        let mut paths = PathList::default();
        let plan = match key.source {
            Source::Json(fields) => {
                for field in &fields {
                    paths.target(Path::parse(&field.path)?.parts, field.takes_default);
                }
                KeyPlan::Json(fields.into_iter().map(Into::into).collect())
            }
            Source::Payload => {
                let except = key
                    .except
                    .iter()
                    .map(|path| Path::parse(path))
                    .collect::<Result<Vec<_>, _>>()?;
                KeyPlan::Payload {
                    except: Node::of(&except),
                }
            }
            Source::Header(name) => KeyPlan::Header(name),
            Source::MessageKey => KeyPlan::MessageKey,
            Source::MessageId => KeyPlan::MessageId,
            Source::Custom(custom) => KeyPlan::Custom(custom),
            Source::Parts(parts) => KeyPlan::Composed(Composed::parts(&parts, &mut paths)?),
            Source::Cases(cases) => KeyPlan::Composed(Composed::cases(&cases, &mut paths)?),
        };
        let tenant = match key.tenant {
            Some(TenantSource::Json(field)) => {
                let target = paths.target(Path::parse(&field.path)?.parts, field.takes_default);
                Some(Tenant::Json {
                    field: field.into(),
                    target,
                })
            }
            Some(TenantSource::Header(name)) => Some(Tenant::Header(name)),
            None => None,
        };
        Ok(CompiledKey {
            scope: scope.clone(),
            prefix,
            tenant,
            plan,
            paths: paths.compile(),
            max_payload_bytes: key.max_payload_bytes,
            format: key.format,
            routes: key.routes,
            hasher: blake3::Hasher::new_derive_key(CONTEXT),
        })
    }
}

impl From<Field> for FieldPlan {
    fn from(field: Field) -> Self {
        Self {
            path: field.path,
            normalisers: field.normalisers,
            takes_default: field.takes_default,
        }
    }
}

impl CompiledKey {
    /// The scope of the keys.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// Derives the key of a message of `route`.
    ///
    /// # Errors
    /// Why this message cannot have a key. The error is permanent: a retry gives the same result.
    pub fn derive(
        &self,
        route: &str,
        message: &(impl KeySource + ?Sized),
    ) -> Result<StoreKey, KeyError> {
        with_scratch(|scratch| {
            self.write(route, &ByRef(message), scratch)?;
            Ok(StoreKey::new(&self.scope, self.digest(&scratch.out)))
        })
    }

    /// Derives the key like [`derive`](Self::derive), with a number for the tenant if tenants are a
    /// part of the key.
    ///
    /// Equal tenants have equal numbers. Two different tenants share a number with a probability of
    /// 1 in 2^64. The number has no meaning outside of this process.
    ///
    /// # Errors
    /// The same as `derive`.
    pub fn derive_with_tenant(
        &self,
        route: &str,
        message: &(impl KeySource + ?Sized),
    ) -> Result<(StoreKey, Option<u64>), KeyError> {
        with_scratch(|scratch| {
            let tenant = self.write(route, &ByRef(message), scratch)?;
            let key = StoreKey::new(&self.scope, self.digest(&scratch.out));
            let tenant = scratch.out.get(tenant).filter(|_| self.tenant.is_some());
            Ok((
                key,
                tenant
                    .map(|tenant| BuildHasherDefault::<DefaultHasher>::default().hash_one(tenant)),
            ))
        })
    }

    /// Derives the key like [`derive`](Self::derive), with everything that went into it. The
    /// explanation contains payload values: do not log it.
    ///
    /// # Errors
    /// The same as `derive`.
    pub fn explain(
        &self,
        route: &str,
        message: &(impl KeySource + ?Sized),
    ) -> Result<Explanation, KeyError> {
        with_scratch(|scratch| {
            self.write(route, &ByRef(message), scratch)?;
            let store_key = StoreKey::new(&self.scope, self.digest(&scratch.out));
            Ok(Explanation::new(
                std::mem::take(&mut scratch.out),
                store_key,
            ))
        })
    }

    /// Returns whether the key has a [format](Key::format), so that messages must be
    /// [prepared](Self::prepare).
    #[must_use]
    pub fn has_format(&self) -> bool {
        self.format.is_some()
    }

    /// Gets what the format needs for the document of this message. Returns at once when there is
    /// nothing to get. A key that is derived without it may be [`KeyError::NotPrepared`].
    ///
    /// # Errors
    /// When it cannot be got now, such as a schema from a registry that is away: call it again
    /// later.
    pub async fn prepare(&self, message: &(impl KeySource + Sync)) -> Result<(), PrepareError> {
        if self.reads_document() {
            self.prepare_document(message).await
        } else {
            Ok(())
        }
    }

    /// Gets what [`document`](Self::document) needs, also where the key reads something else.
    ///
    /// # Errors
    /// The same as `prepare`.
    pub async fn prepare_document(
        &self,
        message: &(impl KeySource + Sync),
    ) -> Result<(), PrepareError> {
        match &self.format {
            Some(SharedFormat(format)) => format.prepare(message, self.max_payload_bytes).await,
            None => Ok(()),
        }
    }

    /// Returns the whole document of a message as JSON text. Without a [format](Key::format) it is
    /// the payload.
    ///
    /// # Errors
    /// Why the message has no document.
    pub fn document<'m>(&self, message: &'m impl KeySource) -> Result<Cow<'m, [u8]>, KeyError> {
        let payload = message.payload().ok_or(KeyError::NoPayload)?;
        let Some(SharedFormat(format)) = &self.format else {
            return Ok(Cow::Borrowed(payload));
        };
        within("payload", payload.len(), self.max_payload_bytes)?;
        let mut text = Vec::new();
        match format.document(message, Wanted::all(), self.max_payload_bytes, &mut text)? {
            DocumentPlace::Borrowed(document) => Ok(Cow::Borrowed(document)),
            DocumentPlace::Written => Ok(Cow::Owned(text)),
        }
    }

    fn digest(&self, canonical: &[u8]) -> Digest {
        let hash = self.hasher.clone().update(canonical).finalize();
        let (first, _) = hash
            .as_bytes()
            .split_first_chunk()
            .expect("a BLAKE3 hash has 32 bytes");
        Digest::from_bytes(*first)
    }

    /// Writes the canonical bytes to `scratch.out`. Returns the range of the tenant in them.
    fn write(
        &self,
        route: &str,
        message: &dyn KeySource,
        scratch: &mut Scratch,
    ) -> Result<Range<usize>, KeyError> {
        self.write_all(route, message, scratch)
            .map_err(|error| match error {
                // A path of one event finds nothing in several, and the names are right.
                KeyError::MissingField { .. } | KeyError::NoCase if is_batch_of_events(message) => {
                    KeyError::Framed {
                        what: "a batch of CloudEvents, several messages in one, which is not taken apart; let the producer send each event by itself",
                    }
                }
                error => error,
            })
    }

    fn write_all(
        &self,
        route: &str,
        message: &dyn KeySource,
        scratch: &mut Scratch,
    ) -> Result<Range<usize>, KeyError> {
        let route = self.routes.name(route);
        within("route", route.len(), MAX_NAME_BYTES)?;
        scratch.out.extend_from_slice(&self.prefix);
        encode::put_bytes(route.as_bytes(), &mut scratch.out);

        let scanned = if self.reads_document() {
            self.scan(message, scratch)?
        } else {
            Scanned::Nothing
        };
        let Scratch {
            doc,
            order,
            out,
            text,
        } = scratch;
        let payload = match scanned {
            Scanned::Nothing => None,
            Scanned::InMessage(document) => Some(document),
            Scanned::Written => Some(text.as_slice()),
        };
        let mut writer = Writer {
            payload: payload.unwrap_or_default(),
            doc,
            order,
            out,
            substance: false,
        };
        let start = writer.out.len();
        self.write_tenant(message, &mut writer)?;
        let tenant = start..writer.out.len();
        if let KeyPlan::Composed(composed) = &self.plan {
            let limit = self.max_payload_bytes;
            let Writer {
                doc, order, out, ..
            } = writer;
            composed.write(&mut Reading {
                message,
                payload,
                doc,
                order,
                out,
                limit,
                decoded: Vec::new(),
            })?;
        } else {
            self.write_source(message, &mut writer)?;
        }
        Ok(tenant)
    }

    /// Scans the payload. Only keys of parts, which may be optional, go on without one.
    fn scan<'m>(
        &self,
        message: &'m dyn KeySource,
        scratch: &mut Scratch,
    ) -> Result<Scanned<'m>, KeyError> {
        let Some(payload) = message.payload() else {
            let may_be_absent = matches!(self.plan, KeyPlan::Composed(_))
                && !matches!(self.tenant, Some(Tenant::Json { .. }));
            return if may_be_absent {
                Ok(Scanned::Nothing)
            } else {
                Err(KeyError::NoPayload)
            };
        };
        within("payload", payload.len(), self.max_payload_bytes)?;
        let reading = Scanning {
            format: self.format.as_ref(),
            paths: &self.paths,
            all_but: self.exceptions(),
            limit: self.max_payload_bytes,
        };
        Ok(scratch
            .scan(message, payload, reading)?
            .map_or(Scanned::Written, Scanned::InMessage))
    }

    /// The exceptions from the whole document; `None` when the key does not read all of it.
    fn exceptions(&self) -> Option<&Node> {
        match &self.plan {
            KeyPlan::Payload { except } => Some(except),
            _ => None,
        }
    }

    fn reads_document(&self) -> bool {
        self.exceptions().is_some() || self.paths.targets > 0
    }

    fn write_tenant(
        &self,
        message: &dyn KeySource,
        writer: &mut Writer<'_>,
    ) -> Result<(), KeyError> {
        writer.out.push(u8::from(self.tenant.is_some()));
        match &self.tenant {
            None => Ok(()),
            Some(Tenant::Json { field, target }) => {
                let value = writer.doc.value(*target, field.takes_default);
                writer.field(&field.path, &field.normalisers, value, None)
            }
            Some(Tenant::Header(name)) => self.write_header(name, message, writer.out),
        }
    }

    fn write_source(
        &self,
        message: &dyn KeySource,
        writer: &mut Writer<'_>,
    ) -> Result<(), KeyError> {
        match &self.plan {
            KeyPlan::Json(fields) => {
                writer.out.push(encode::SOURCE_JSON);
                encode::put_len(fields.len(), writer.out);
                for (target, field) in fields.iter().enumerate() {
                    encode::put_bytes(field.path.as_bytes(), writer.out);
                    let value = writer.doc.value(target, field.takes_default);
                    writer.field(&field.path, &field.normalisers, value, None)?;
                }
                Ok(())
            }
            KeyPlan::Payload { except } => {
                writer.out.push(encode::SOURCE_PAYLOAD);
                let root = writer.doc.root();
                writer.field("payload", &[], root, Some(except))
            }
            KeyPlan::Header(name) => {
                writer.out.push(encode::SOURCE_HEADER);
                encode::put_bytes(name.as_bytes(), writer.out);
                self.write_header(name, message, writer.out)
            }
            KeyPlan::MessageKey => {
                writer.out.push(encode::SOURCE_MESSAGE_KEY);
                let key = message.message_key().ok_or(KeyError::MissingMessageKey)?;
                self.write_bytes(|| "message key".to_owned(), key, writer.out)
            }
            KeyPlan::MessageId => {
                writer.out.push(encode::SOURCE_MESSAGE_ID);
                let id = message.message_id().ok_or(KeyError::MissingMessageId)?;
                self.write_bytes(|| "message id".to_owned(), id.as_bytes(), writer.out)
            }
            // Written by `write`, which has what it reads from.
            KeyPlan::Composed(_) => Ok(()),
            KeyPlan::Custom(custom) => {
                writer.out.push(encode::SOURCE_CUSTOM);
                custom.write(message, self.max_payload_bytes, writer.out)
            }
        }
    }

    fn write_header(
        &self,
        name: &str,
        message: &dyn KeySource,
        out: &mut Vec<u8>,
    ) -> Result<(), KeyError> {
        match message.header(name) {
            HeaderValue::One(value) => self.write_bytes(|| format!("header {name}"), value, out),
            HeaderValue::Absent => Err(KeyError::MissingHeader {
                name: name.to_owned(),
            }),
            HeaderValue::Several => Err(KeyError::RepeatedHeader {
                name: name.to_owned(),
            }),
        }
    }

    fn write_bytes(
        &self,
        what: impl Fn() -> String,
        bytes: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), KeyError> {
        if bytes.len() > self.max_payload_bytes {
            return Err(KeyError::TooLarge {
                what: what(),
                bytes: bytes.len(),
                limit: self.max_payload_bytes,
            });
        }
        if bytes.trim_ascii().is_empty() {
            return Err(KeyError::Blank { path: what() });
        }
        encode::put_value(encode::TAG_BYTES, bytes, out);
        Ok(())
    }
}

/// The place of the scanned document.
enum Scanned<'m> {
    Nothing,
    InMessage(&'m [u8]),
    /// In the buffers.
    Written,
}
