//! A proxy for `Idempotency-Key` in front of a service.
