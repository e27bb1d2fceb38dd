//! placeholder until the key module lands
#![allow(missing_docs)]
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Scope(std::sync::Arc<str>);
impl Scope {
    pub fn as_str(&self) -> &str {
        &self.0
    }
    pub fn new(s: &str) -> Result<Self, String> {
        Ok(Self(s.into()))
    }
}
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StoreKey(std::sync::Arc<str>);
impl StoreKey {
    pub fn as_str(&self) -> &str {
        &self.0
    }
    pub fn placeholder(s: &str) -> Self {
        Self(s.into())
    }
}
impl std::fmt::Display for StoreKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 7]);
impl Fingerprint {
    pub fn specification(self) -> u8 {
        self.0[0]
    }
}
#[derive(Debug)]
pub struct KeyInput;
