//! What the server logs: a line on stderr for each event, with the time in UTC:
//!
//! ```text
//! 2026-11-19T06:06:15.123456Z  INFO request method=GET path="/v1/models" status=200 milliseconds=1
//! ```

use std::{
    fmt::{self, Write as _},
    io::{self, Write as _},
    time::{SystemTime, UNIX_EPOCH},
};
use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
    subscriber::set_global_default,
};

/// From now on. What is less than information is left out.
pub(crate) fn to_stderr() {
    // Where somebody listens already, they keep listening.
    let _ = set_global_default(Log);
}

struct Log;

impl Subscriber for Log {
    fn enabled(&self, of: &Metadata<'_>) -> bool {
        of.is_event() && *of.level() <= Level::INFO
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::INFO)
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let line = format!("{} {:>5}{}{}\n", Time(SystemTime::now()), event.metadata().level().as_str(), fields.message, fields.others);
        // With stderr closed there is nobody to tell. One call: lines of several threads are not mixed.
        let _ = io::stderr().write_all(line.as_bytes());
    }

    // Nothing of ours has spans.
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The fields of an event as text, each with a space before it.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = match field.name() {
            "message" => write!(self.message, " {value:?}"),
            name => write!(self.others, " {name}={}", InLine(&format!("{value:?}"))),
        };
    }
}

/// A text that stays within its line and commands no terminal, whoever wrote it.
struct InLine<'a>(&'a str);

impl fmt::Display for InLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| if c.is_control() { write!(f, "{}", c.escape_default()) } else { f.write_char(c) })
    }
}

/// A time in UTC, in the form of RFC 3339.
struct Time(SystemTime);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (days, second) = (since.as_secs() / 86400, since.as_secs() % 86400);
        // Years that begin in March have their leap day last; eras of 400 of them are all alike. 1970 began 719468 days after March of year 0.
        let (era, day) = ((days + 719_468) / 146_097, (days + 719_468) % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let day = day - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = era * 400 + year + u64::from(month <= 2);
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:06}Z", since.subsec_micros())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (951_868_800, "2000-03-01T00:00:00.000000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(Time(UNIX_EPOCH + Duration::from_secs(seconds)).to_string(), expected);
        }
    }

    #[test]
    fn what_others_wrote_stays_in_its_line() {
        assert_eq!(InLine("a\n\x1b[2Jé").to_string(), "a\\n\\u{1b}[2Jé");
    }
}
