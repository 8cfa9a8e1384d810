//! Dates in chat templates: `strftime_now("%d %B %Y")`.
//!
//! Times are in UTC: the standard library knows no local time, and a prompt that is the same everywhere is worth more here.

use std::time::{SystemTime, UNIX_EPOCH};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];

/// Seconds since 1970 by the system's clock.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| i64::try_from(since.as_secs()).unwrap_or(i64::MAX))
}

/// The moment `seconds` after 1970 in the given format, as C's `strftime` writes it. Codes it does not know stay as they are.
pub(super) fn format(seconds: i64, format: &str) -> String {
    // Far outside the calendar that templates mean; keeps the arithmetic below in range.
    let seconds = seconds.clamp(-62_135_596_800, 253_402_300_799);
    let (days, second_of_day) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    let weekday = (days + 4).rem_euclid(7);
    let day_of_year = days - days_before_year(year) + 1;
    let half_day_hour = if hour % 12 == 0 { 12 } else { hour % 12 };

    let mut text = String::new();
    let mut rest = format.chars();
    while let Some(character) = rest.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut code = rest.next();
        let unpadded = code == Some('-');
        if unpadded {
            code = rest.next();
        }
        let number = |value: i64, width: usize| if unpadded { value.to_string() } else { format!("{value:0width$}") };
        match code {
            Some('Y') => text += &number(year, 4),
            Some('y') => text += &number(year.rem_euclid(100), 2),
            Some('m') => text += &number(month, 2),
            Some('d') => text += &number(day, 2),
            Some('e') => text += &if unpadded { day.to_string() } else { format!("{day:2}") },
            Some('j') => text += &number(day_of_year, 3),
            Some('H') => text += &number(hour, 2),
            Some('I') => text += &number(half_day_hour, 2),
            Some('M') => text += &number(minute, 2),
            Some('S') => text += &number(second, 2),
            Some('f') => text += "000000",
            Some('p') => text += if hour < 12 { "AM" } else { "PM" },
            Some('B') => text += MONTHS[(month - 1) as usize],
            Some('b' | 'h') => text += &MONTHS[(month - 1) as usize][..3],
            Some('A') => text += DAYS[weekday as usize],
            Some('a') => text += &DAYS[weekday as usize][..3],
            Some('u') => text += &if weekday == 0 { 7 } else { weekday }.to_string(),
            Some('w') => text += &weekday.to_string(),
            Some('F') => text += &format!("{year:04}-{month:02}-{day:02}"),
            Some('T') => text += &format!("{hour:02}:{minute:02}:{second:02}"),
            Some('s') => text += &seconds.to_string(),
            Some('z') => text += "+0000",
            Some('Z') => text += "UTC",
            Some('n') => text.push('\n'),
            Some('t') => text.push('\t'),
            Some('%') => text.push('%'),
            other => {
                text += if unpadded { "%-" } else { "%" };
                text.extend(other);
            }
        }
    }
    text
}

fn days_before_year(year: i64) -> i64 {
    let before = year - 1;
    before * 365 + before.div_euclid(4) - before.div_euclid(100) + before.div_euclid(400) - 719_162
}

/// Year, month and day of the day that many days after 1 January 1970.
fn date(days: i64) -> (i64, i64, i64) {
    // Never later than the year in question, then forward to it.
    let mut year = 1970 + if days < 0 { days.div_euclid(365) } else { days / 366 };
    while days_before_year(year + 1) <= days {
        year += 1;
    }
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut day = days - days_before_year(year);
    for (month, length) in (1..).zip(lengths) {
        if day < length {
            return (year, month, day + 1);
        }
        day -= length;
    }
    (year, 12, 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_c_writes_them() {
        assert_eq!(format(0, "%Y-%m-%d %H:%M:%S %A %j"), "1970-01-01 00:00:00 Thursday 001");
        assert_eq!(format(1_735_689_599, "%d %b %Y, %I:%M %p, %a, day %j"), "31 Dec 2024, 11:59 PM, Tue, day 366");
        assert_eq!(format(951_782_400, "%-d. %B %y (%F)"), "29. February 00 (2000-02-29)");
        assert_eq!(format(4_107_542_400, "%e|%-m|%u|%w"), " 1|3|1|1");
        assert_eq!(format(-1, "%F %T"), "1969-12-31 23:59:59");
        assert_eq!(format(0, "100%% %Q %-Q %"), "100% %Q %-Q %");
    }

    #[test]
    fn every_day_follows_the_one_before() {
        let mut last = date(-719_162);
        assert_eq!(last, (1, 1, 1));
        for days in -719_161..400_000 {
            let next = date(days);
            let (year, month, day) = last;
            let follows = [(year, month, day + 1), (year, month + 1, 1), (year + 1, 1, 1)];
            assert!(follows.contains(&next) && (next.2 > 1 || day >= 28), "{last:?} then {next:?}");
            last = next;
        }
    }

    #[test]
    fn absurd_moments_do_no_harm() {
        for seconds in [i64::MIN, i64::MAX] {
            assert!(!format(seconds, "%Y %j %s").is_empty());
        }
        assert!(now() > 1_700_000_000);
    }
}
