//! Writes dates and times as ISO 8601, from counts since 1970.

/// The units of a count, as their number in a second.
pub(crate) const MILLIS: i64 = 1_000;
pub(crate) const MICROS: i64 = 1_000_000;
pub(crate) const NANOS: i64 = 1_000_000_000;

const DAY_SECONDS: i64 = 86_400;

/// A date, from days since 1970: `2024-05-01`. Years outside 0 to 9999 have a sign and six digits
/// or more.
pub(crate) fn date(days: i64) -> String {
    // Howard Hinnant's civil_from_days: years begin in March, so that a leap day is the last of its
    // year.
    let shifted = i128::from(days) + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 {
        month_from_march + 3
    } else {
        month_from_march - 9
    };
    let year = year_of_era + era * 400 + i128::from(month <= 2);
    if (0..=9_999).contains(&year) {
        format!("{year:04}-{month:02}-{day:02}")
    } else {
        format!("{year:+07}-{month:02}-{day:02}")
    }
}

/// A time of day, from a count since midnight: `10:00:00.250`.
pub(crate) fn time(count: i64, unit: i64) -> String {
    let seconds = count.div_euclid(unit);
    let hour = seconds / 3_600;
    let minute = seconds / 60 % 60;
    let second = seconds % 60;
    format!(
        "{hour:02}:{minute:02}:{second:02}{}",
        fraction(count.rem_euclid(unit) * (NANOS / unit))
    )
}

/// A date and time without an offset, from a count since 1970: `2024-05-01T10:00:00.250`.
pub(crate) fn date_time(count: i64, unit: i64) -> String {
    let seconds = count.div_euclid(unit);
    let days = seconds.div_euclid(DAY_SECONDS);
    let of_day = seconds.rem_euclid(DAY_SECONDS) * unit + count.rem_euclid(unit);
    format!("{}T{}", date(days), time(of_day, unit))
}

/// The fraction of a second: nothing, or three, six or nine digits after a point.
pub(crate) fn fraction(nanos: i64) -> String {
    match nanos {
        0 => String::new(),
        _ if nanos % 1_000_000 == 0 => format!(".{:03}", nanos / 1_000_000),
        _ if nanos % 1_000 == 0 => format!(".{:06}", nanos / 1_000),
        _ => format!(".{nanos:09}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_written_as_iso_8601() {
        assert_eq!(date_time(0, MILLIS), "1970-01-01T00:00:00");
        assert_eq!(
            date_time(1_714_557_600_250, MILLIS),
            "2024-05-01T10:00:00.250"
        );
        assert_eq!(date_time(-1, MICROS), "1969-12-31T23:59:59.999999");
        assert_eq!(date_time(1, NANOS), "1970-01-01T00:00:00.000000001");
        assert_eq!(date(19_844), "2024-05-01");
        assert_eq!(date(-719_528), "0000-01-01");
        assert_eq!(date(-719_529), "-000001-12-31");
        assert_eq!(date_time(i64::MAX, MILLIS), "+292278994-08-17T07:12:55.807");
        assert_eq!(date_time(i64::MIN, MILLIS), "-292275055-05-16T16:47:04.192");
        assert_eq!(time(86_399_999_000, MICROS), "23:59:59.999");
    }
}
