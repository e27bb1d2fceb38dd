//! Writes the unscaled bytes of a decimal as a number.

/// The most bytes of an unscaled value: enough for the most digits that a schema may ask for. The
/// work grows with the square.
const MAX_BYTES: usize = 512;

/// The number whose unscaled value is these bytes, big-endian in two's complement. `None` when
/// there are too many.
pub(super) fn text(bytes: &[u8], scale: usize) -> Option<String> {
    let is_negative = bytes.first().is_some_and(|first| *first >= 0x80);
    let filler = if is_negative { 0xFF } else { 0 };
    let significant = bytes
        .iter()
        .position(|byte| *byte != filler)
        .unwrap_or(bytes.len());
    let bytes = bytes.get(significant..).unwrap_or_default();
    if bytes.len() > MAX_BYTES {
        return None;
    }
    let digits = digits(bytes, is_negative);
    let sign = if is_negative { "-" } else { "" };
    if scale == 0 {
        return Some(format!("{sign}{digits}"));
    }
    let padded = format!("{digits:0>width$}", width = scale + 1);
    let (whole, fraction) = padded.split_at(padded.len() - scale);
    Some(format!("{sign}{whole}.{fraction}"))
}

/// The decimal digits of the magnitude.
fn digits(bytes: &[u8], is_negative: bool) -> String {
    if let Some(magnitude) = small(bytes, is_negative) {
        return magnitude.to_string();
    }
    // Limbs of nine digits, the lowest first.
    const LIMB: u64 = 1_000_000_000;
    let mut limbs: Vec<u64> = vec![0];
    for byte in bytes {
        let mut carry = u64::from(if is_negative { !byte } else { *byte });
        for limb in &mut limbs {
            carry += *limb << 8;
            *limb = carry % LIMB;
            carry /= LIMB;
        }
        if carry > 0 {
            limbs.push(carry);
        }
    }
    if is_negative {
        // The magnitude is one more than the inverted bits.
        increment(&mut limbs, LIMB);
    }
    let mut limbs = limbs.into_iter().rev();
    let mut text = limbs.next().unwrap_or_default().to_string();
    for limb in limbs {
        text.push_str(&format!("{limb:09}"));
    }
    text
}

fn increment(limbs: &mut Vec<u64>, base: u64) {
    for limb in limbs.iter_mut() {
        *limb += 1;
        if *limb < base {
            return;
        }
        *limb = 0;
    }
    limbs.push(1);
}

/// The magnitude of at most fifteen bytes.
fn small(bytes: &[u8], is_negative: bool) -> Option<u128> {
    if bytes.len() > 15 {
        return None;
    }
    let inverted = if is_negative { 0xFF } else { 0 };
    let folded = bytes.iter().fold(0_u128, |value, byte| {
        (value << 8) | u128::from(byte ^ inverted)
    });
    Some(folded + u128::from(is_negative))
}

#[cfg(test)]
mod tests {
    use super::text;

    fn check(bytes: &[u8], scale: usize, expected: &str) {
        assert_eq!(text(bytes, scale).as_deref(), Some(expected), "{bytes:?}");
    }

    #[test]
    fn unscaled_bytes_are_numbers() {
        check(&[], 2, "0.00");
        check(&[0x04, 0xD2], 2, "12.34");
        check(&[0, 0, 0x04, 0xD2], 2, "12.34");
        check(&[0xFB, 0x2E], 2, "-12.34");
        check(&[0xFF], 2, "-0.01");
        check(&[0x80], 0, "-128");
        check(&[0xFF, 0x00], 0, "-256");
        check(&[5], 3, "0.005");
        let mut two_to_the_128 = vec![1];
        two_to_the_128.extend([0; 16]);
        check(
            &two_to_the_128,
            0,
            "340282366920938463463374607431768211456",
        );
        let mut negative = vec![0xFF];
        negative.extend([0; 16]);
        check(&negative, 1, "-34028236692093846346337460743176821145.6");
        assert_eq!(text(&[1; 513], 0), None);
    }
}
