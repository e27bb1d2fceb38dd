//! The format of a consumer's payloads.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use oncegate::Key;
use oncegate::schema::{Encoding, Registry, SchemaFormat};
use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Names, Secret};

/// The largest schema file that is read, in bytes.
const SCHEMA_MAX_BYTES: u64 = 4 * 1024 * 1024;

/// The format of payloads that are not JSON: at most one of `registry`, `avro` and `protobuf`, and
/// how the whole is encoded.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Format {
    /// Payloads name their schema in this registry, which speaks Confluent's API: Avro, Protobuf
    /// and JSON Schema. Several addresses with commas.
    pub(crate) registry: Option<RegistryUrl>,
    /// The user name, or the API key, for the registry.
    pub(crate) user: Option<String>,
    /// The password, or the secret of the API key.
    pub(crate) password: Option<Secret>,
    /// Sent to the registry as `Authorization: Bearer …`.
    pub(crate) token: Option<Secret>,
    /// The authority that has signed the registry's certificate, a file in PEM. Without it, those
    /// of the machine.
    pub(crate) tls_root: Option<PathBuf>,
    /// Payloads are Avro without framing, all of the schema in this file.
    pub(crate) avro: Option<PathBuf>,
    /// An Avro schema, whose aliases and defaults count for payloads too that were written without
    /// them. For `registry` and `avro`.
    pub(crate) reader: Option<PathBuf>,
    /// Payloads are Protobuf without framing, all of one message of this `.proto` file.
    pub(crate) protobuf: Option<PathBuf>,
    /// The full name of that message. A file with one message needs none.
    pub(crate) message: Option<String>,
    /// The compressions or encodings of whole payloads, the outermost first: `gzip`, `zstd`,
    /// `base64`.
    pub(crate) encoding: Option<Names>,
    /// Payloads are JSON that has what the other settings describe in the string at this path, such
    /// as `record.data`. `encoding` is that of the string, base64 by default. The document has the
    /// decoded value in its place.
    pub(crate) at: Option<String>,
    /// A header that names how a payload is compressed or encoded, such as `content-encoding`.
    pub(crate) encoding_header: Option<String>,
    /// The payload that workers get: the bytes that came (`payload`), or the document of the whole
    /// message as JSON (`json`).
    #[schemars(extend("default" = "payload"))]
    pub(crate) deliver: Option<Deliver>,
    /// The format, once it is built: the key and the documents of workers share its schemas.
    #[serde(skip)]
    built: Arc<OnceLock<Arc<SchemaFormat>>>,
}

/// The addresses of a registry. A login in one of them is never shown.
#[derive(Clone, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub(crate) struct RegistryUrl(String);

impl RegistryUrl {
    /// Returns whether a password stands in an address.
    pub(crate) fn has_password(&self) -> bool {
        let login = self.0.rsplit_once('@');
        login.is_some_and(|(login, _)| {
            login
                .split_once("://")
                .map_or(login, |(_, login)| login)
                .contains(':')
        })
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Registry::new(&self.0).addresses())
    }
}

impl fmt::Debug for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What workers get as the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
pub(crate) enum Deliver {
    Payload,
    Json,
}

impl Format {
    /// The key with this format.
    ///
    /// # Errors
    /// When a file or secret cannot be read, or the settings do not fit together; the text names
    /// the setting.
    pub(crate) fn apply(&self, key: Key) -> Result<Key, String> {
        if let Some(format) = self.built.get() {
            return Ok(key.format(Arc::clone(format) as _));
        }
        let format = Arc::new(self.build()?);
        Ok(key.format(Arc::clone(self.built.get_or_init(|| format)) as _))
    }

    /// Asks the registry whether it answers. Without one, there is nothing to ask.
    ///
    /// # Errors
    /// When it is away or refuses; the text says which, and what to change.
    pub(crate) async fn check(&self) -> Result<(), String> {
        self.apply(Key::payload())?;
        match self.built.get() {
            Some(format) => format.check().await.map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    fn build(&self) -> Result<SchemaFormat, String> {
        let format = match (&self.registry, &self.avro, &self.protobuf) {
            (None, None, None) => SchemaFormat::json(),
            (Some(url), None, None) => self.of_registry(&url.0)?,
            (None, Some(file), None) => {
                let schema = SchemaFormat::avro(&read("avro", file)?);
                schema.map_err(|error| format!("`avro`: {error}"))?
            }
            (None, None, Some(file)) => {
                let schema =
                    SchemaFormat::protobuf(&read("protobuf", file)?, self.message.as_deref());
                schema.map_err(|error| format!("`protobuf`: {error}"))?
            }
            _ => return Err("only one of `registry`, `avro` and `protobuf` can be set".to_owned()),
        };
        // A setting of another kind of format would have no effect.
        let login = self.user.is_some() || self.password.is_some() || self.token.is_some();
        if self.registry.is_none() && (login || self.tls_root.is_some()) {
            return Err(
                "`user`, `password`, `token` and `tls_root` are for a `registry`".to_owned(),
            );
        }
        if self.protobuf.is_none() && self.message.is_some() {
            return Err(
                "`message` is for `protobuf`; payloads with a registry name their message"
                    .to_owned(),
            );
        }
        let format = match &self.reader {
            Some(file) if self.registry.is_some() || self.avro.is_some() => {
                let format = format.reader(&read("reader", file)?);
                format.map_err(|error| format!("`reader`: {error}"))?
            }
            Some(_) => return Err("`reader` is for a `registry` or `avro`".to_owned()),
            None => format,
        };
        let format = format.encodings(self.encodings()?);
        let format = match &self.at {
            Some(path) => format.at(path).map_err(|error| error.to_string())?,
            None => format,
        };
        Ok(match &self.encoding_header {
            Some(header) => format.encoding_header(header),
            None => format,
        })
    }

    fn of_registry(&self, url: &str) -> Result<SchemaFormat, String> {
        let mut registry = Registry::new(url);
        registry = match (&self.user, &self.password, &self.token) {
            (None, None, None) => registry,
            (Some(user), Some(password), None) => {
                let password = password
                    .resolve()
                    .map_err(|why| format!("`password`: {why}"))?;
                registry
                    .basic_auth(user, &password)
                    .map_err(|error| error.to_string())?
            }
            (None, None, Some(token)) => {
                let token = token.resolve().map_err(|why| format!("`token`: {why}"))?;
                registry.bearer(&token).map_err(|error| error.to_string())?
            }
            _ => return Err("a registry takes `user` and `password`, or `token`".to_owned()),
        };
        if let Some(file) = &self.tls_root {
            registry = registry.tls_root(file);
        }
        SchemaFormat::registry(registry).map_err(|error| format!("`registry`: {error}"))
    }

    fn encodings(&self) -> Result<Vec<Encoding>, String> {
        let names = self.encoding.iter().flat_map(|names| &names.0);
        let encodings = names.map(|name| {
            Encoding::named(name).ok_or_else(|| {
                format!("`encoding`: {name} is none; there are gzip, zstd and base64")
            })
        });
        encodings.collect()
    }
}

/// `registry:http://localhost:8081`, `avro:order.avsc`, `protobuf:shop.proto#shop.Order`, or one or
/// several of `gzip`, `zstd` and `base64` with commas; or the JSON of the setting.
impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.starts_with('{') {
            return serde_json::from_str(text).map_err(|error| error.to_string());
        }
        let none = Self::default();
        Ok(match text.split_once(':') {
            Some(("registry", url)) => Self {
                registry: Some(RegistryUrl(url.to_owned())),
                ..none
            },
            Some(("avro", file)) => Self {
                avro: Some(file.into()),
                ..none
            },
            Some(("protobuf", file)) => match file.split_once('#') {
                Some((file, message)) => Self {
                    protobuf: Some(file.into()),
                    message: Some(message.to_owned()),
                    ..none
                },
                None => Self {
                    protobuf: Some(file.into()),
                    ..none
                },
            },
            Some(_) => {
                return Err(
                    "it must be registry:URL, avro:FILE, protobuf:FILE#MESSAGE, gzip, zstd or base64"
                        .to_owned(),
                );
            }
            None => {
                let names = text.split(',').map(|name| name.trim().to_owned()).collect();
                let format = Self {
                    encoding: Some(Names(names)),
                    ..none
                };
                format.encodings()?;
                format
            }
        })
    }
}

fn read(setting: &str, file: &Path) -> Result<String, String> {
    read_limited(file).map_err(|why| format!("`{setting}` is {}: {why}", file.display()))
}

fn read_limited(file: &Path) -> Result<String, String> {
    let size = std::fs::metadata(file)
        .map_err(|error| error.to_string())?
        .len();
    if size > SCHEMA_MAX_BYTES {
        return Err("it is too large for a schema".to_owned());
    }
    std::fs::read_to_string(file).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_form_is_the_setting() {
        let format: Format = "protobuf:shop.proto#shop.Order".parse().unwrap();
        assert_eq!(
            (format.protobuf, format.message.as_deref()),
            (Some("shop.proto".into()), Some("shop.Order"))
        );
        let format: Format = "registry:http://localhost:8081".parse().unwrap();
        assert_eq!(
            format.registry.unwrap().to_string(),
            "http://localhost:8081"
        );
        let format: Format = "base64, gzip".parse().unwrap();
        assert_eq!(
            format.encodings(),
            Ok(vec![Encoding::Base64, Encoding::Gzip])
        );
        let format: Format = r#"{"registry": "http://localhost:8081", "user": "u"}"#
            .parse()
            .unwrap();
        assert!(format.build().unwrap_err().contains("password"));
        for bad in ["brotli", "json:x", "{"] {
            assert!(bad.parse::<Format>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_login_in_the_address_is_used_and_never_shown() {
        for (url, is_right) in [
            ("http://svc:s3cret@localhost:8081", true),
            ("http://svc:s3cret@bad host", false),
            ("svc:s3cret@localhost", false),
            ("http://svc:s3%cret@localhost", false),
            ("http://svc:s3,cret@localhost", false),
            ("http://svc:s3/s3cret@localhost", false),
        ] {
            let format: Format = format!("registry:{url}").parse().unwrap();
            assert!(!format!("{format:?}").contains("cret"), "{format:?}");
            assert!(format.registry.as_ref().unwrap().has_password());
            let built = format.build();
            assert_eq!(built.is_ok(), is_right, "{url}: {built:?}");
            assert!(!format!("{built:?}").contains("cret"), "{built:?}");
        }
        let twice = r#"{"registry": "http://a:b@x", "user": "a", "password": "b"}"#;
        let error = twice.parse::<Format>().unwrap().build().unwrap_err();
        assert!(error.contains("leave one out"), "{error}");
    }

    #[test]
    fn settings_that_do_not_fit_together_are_refused() {
        for (text, what) in [
            (r#"{"registry": "http://x", "avro": "a.avsc"}"#, "only one"),
            (r#"{"registry": "ftp://x"}"#, "http://"),
            (r#"{"message": "shop.Order"}"#, "`protobuf`"),
            (r#"{"user": "u"}"#, "`registry`"),
            (r#"{"avro": "/nowhere.avsc"}"#, "/nowhere.avsc"),
            (
                r#"{"registry": "http://x", "reader": "/nowhere.avsc"}"#,
                "`reader` is /nowhere.avsc",
            ),
            (
                r#"{"encoding": "gzip", "reader": "/nowhere.avsc"}"#,
                "`reader` is for",
            ),
        ] {
            let error = text.parse::<Format>().unwrap().build().unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
    }
}
