//! Numbers for people, written the same way by every command: bytes in powers of 1024 (`1.5 GiB`), counts in powers of 1000 (`134.5 M`), rates per second, and
//! durations. JSON has plain numbers whose unit stands in the name of the field.

pub(crate) use qhx_runtime::memory::show_bytes;

/// An amount of memory as people write it: `2GiB`, `900MiB`, `1.5g`, or plain bytes.
pub(crate) fn read_bytes(text: &str) -> Result<u64, String> {
    let number_ends = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(number_ends);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(format!("expected a unit such as MiB or GiB, found {unit:?}")),
    };
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && number * 2f64.powi(shift) <= 2f64.powi(60) => Ok((number * 2f64.powi(shift)) as u64),
        _ => Err("expected an amount of memory, such as 2GiB".into()),
    }
}

/// A large number: `134.5 M`.
pub(crate) fn show_count(count: u64) -> String {
    let units = [(1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")];
    match units.iter().find(|(size, _)| count as f64 >= *size) {
        Some((size, unit)) => format!("{:.1}{unit}", count as f64 / size),
        None => count.to_string(),
    }
}

/// A duration: `3 ms`, `0.21 s`, `12.3 s`, `3 min 5 s`.
pub(crate) fn show_seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.0995 => format!("{:.0} ms", s * 1e3),
        s if s < 10.0 => format!("{s:.2} s"),
        s if s < 120.0 => format!("{s:.1} s"),
        s => format!("{} min {} s", s as u64 / 60, s as u64 % 60),
    }
}

/// How much of a memory or a disk is moved in a second: `12.3 GiB/s`.
pub(crate) fn show_bandwidth(bytes_per_second: f64) -> String {
    format!("{}/s", show_bytes(bytes_per_second as u64))
}

/// A speed in tokens: `12.3 tok/s`.
pub(crate) fn show_speed(tokens_per_second: f64) -> String {
    format!("{tokens_per_second:.1} tok/s")
}

/// One thing or several of them: `1 token`, `2 tokens`.
pub(crate) fn show_number(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!([999, 134_515_008].map(show_count), ["999", "134.5 M"]);
        assert_eq!([0.0031, 0.2149, 61.24, 185.9].map(show_seconds), ["3 ms", "0.21 s", "61.2 s", "3 min 5 s"]);
        assert_eq!((show_bandwidth(1.5 * 1024.0 * 1024.0), show_speed(12.345)), ("1.5 MiB/s".into(), "12.3 tok/s".into()));
        let read = |text| read_bytes(text).ok();
        assert_eq!(["2GiB", "1.5 mib", "7", "3k"].map(read), [Some(2 << 30), Some(3 << 19), Some(7), Some(3072)]);
        assert_eq!(["", "GiB", "0", "-1GiB", "1GB2", "1e9", "9999999999TiB", "1..2MiB"].map(read), [None; 8]);
        assert_eq!([1, 2].map(|n| show_number(n, "token")), ["1 token", "2 tokens"]);
    }
}
