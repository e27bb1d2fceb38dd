//! Programs to start from: see `payments/`.
