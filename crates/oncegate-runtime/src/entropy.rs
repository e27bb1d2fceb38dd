//! The source of random bits: the operating system's generator, or a seed in a simulation.

use oncegate_core::record::Token;
use parking_lot::Mutex;

/// A source of tokens and jitter.
#[derive(Debug, Default)]
pub(crate) enum Entropy {
    /// The operating system's bits: a token must be unique among all processes.
    #[default]
    Os,
    /// The same bits in every run, for a simulation.
    #[cfg_attr(
        not(feature = "testing"),
        expect(dead_code, reason = "only simulations seed it")
    )]
    Seeded(Mutex<fastrand::Rng>),
}

impl Entropy {
    /// A new token.
    pub(crate) fn token(&self) -> Token {
        Token::from_bits(self.bits())
    }

    /// Random bits.
    pub(crate) fn bits(&self) -> u128 {
        match self {
            Self::Os => rand::random(),
            Self::Seeded(rng) => rng.lock().u128(..),
        }
    }

    /// A number from 0 up to 1.
    pub(crate) fn fraction(&self) -> f64 {
        match self {
            Self::Os => rand::random(),
            Self::Seeded(rng) => rng.lock().f64(),
        }
    }
}
