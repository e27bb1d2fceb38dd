//! Events of providers: signature, key, claim, handler.
