//! Strings of JSON: their plain bytes and their escapes.

/// The lowest bit of each of the eight bytes of a word.
const ONES: u64 = 0x0101_0101_0101_0101;

/// The highest bit of each byte.
const HIGH: u64 = 0x8080_8080_8080_8080;

/// Marks the zero bytes of a word by their highest bit. Bytes above the first one may be marked
/// wrongly.
const fn zero_bytes(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & HIGH
}

/// Counts the leading bytes that are neither a quote, a backslash nor a control character. Reads
/// eight at a time.
#[inline]
pub(in super::super) fn plain_bytes(text: &[u8]) -> usize {
    let (words, rest) = text.as_chunks::<8>();
    for (index, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let control = word.wrapping_sub(ONES * 0x20) & !word & HIGH;
        let special = zero_bytes(word ^ (ONES * 0x22)) | zero_bytes(word ^ (ONES * 0x5C)) | control;
        if special != 0 {
            return index * 8 + special.trailing_zeros() as usize / 8;
        }
    }
    let plain = rest
        .iter()
        .position(|b| matches!(b, b'"' | b'\\' | 0..=0x1F))
        .unwrap_or(rest.len());
    text.len() - rest.len() + plain
}

/// Decodes `\uXXXX` or a surrogate pair `\uXXXX\uXXXX`. Returns the character and the length of the
/// escape in bytes; `None` for a lone surrogate or invalid hex digits.
pub(super) fn unicode_escape(text: &[u8]) -> Option<(char, usize)> {
    let first = hex4(text)?;
    if !(0xD800..0xE000).contains(&first) {
        return char::from_u32(first).map(|c| (c, 6));
    }
    let second = hex4(text.get(6..)?)?;
    if first >= 0xDC00 || !(0xDC00..0xE000).contains(&second) {
        return None;
    }
    char::from_u32(0x1_0000 + ((first - 0xD800) << 10) + (second - 0xDC00)).map(|c| (c, 12))
}

fn hex4(text: &[u8]) -> Option<u32> {
    let [b'\\', b'u', digits @ ..] = text.get(..6)? else {
        return None;
    };
    digits.iter().try_fold(0, |value, digit| {
        Some(value << 4 | char::from(*digit).to_digit(16)?)
    })
}

/// Appends the unescaped text of a string that the scanner has accepted.
pub(in super::super) fn unescape(mut text: &[u8], out: &mut Vec<u8>) {
    while let Some(plain) = text.iter().position(|b| *b == b'\\') {
        let (before, escape) = text.split_at(plain);
        out.extend_from_slice(before);
        let len = match escape {
            [_, b'u', ..] => {
                let (c, len) =
                    unicode_escape(escape).expect("the scanner has accepted this escape");
                out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                len
            }
            [_, c, ..] => {
                out.push(match c {
                    b'b' => 0x08,
                    b'f' => 0x0C,
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    c => *c,
                });
                2
            }
            _ => escape.len(),
        };
        text = escape.get(len..).unwrap_or_default();
    }
    out.extend_from_slice(text);
}
