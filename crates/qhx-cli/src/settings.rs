//! What can be changed in a conversation with `/set`.

use crate::{failure::Failure, table::facts};
use qhx_runtime::{Error, GenerateOptions};
use std::str::FromStr;

/// How the next answers are made.
pub(crate) struct Settings {
    pub(crate) options: GenerateOptions,
    /// Whether the oldest turns are dropped when the context is full.
    pub(crate) context_shift: bool,
}

impl Settings {
    /// Each setting and its value.
    pub(crate) fn show(&self) -> String {
        let sampler = &self.options.sampler;
        facts(&[
            ("temperature", sampler.temperature.to_string()),
            ("top-k", sampler.top_k.to_string()),
            ("top-p", sampler.top_p.to_string()),
            ("min-p", sampler.min_p.to_string()),
            ("repetition-penalty", sampler.repetition_penalty.to_string()),
            ("repetition-window", sampler.repetition_window.map_or("all".into(), |tokens| tokens.to_string())),
            ("seed", sampler.seed.to_string()),
            ("max-new", self.options.max_new.to_string()),
            ("context-shift", if self.context_shift { "on" } else { "off" }.into()),
        ])
    }

    /// Changes a setting. A value that it cannot have changes nothing.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        let mut options = self.options.clone();
        let sampler = &mut options.sampler;
        match name.replace('_', "-").as_str() {
            "temperature" => sampler.temperature = number(name, value)?,
            "top-k" => sampler.top_k = number(name, value)?,
            "top-p" => sampler.top_p = number(name, value)?,
            "min-p" => sampler.min_p = number(name, value)?,
            "repetition-penalty" => sampler.repetition_penalty = number(name, value)?,
            "repetition-window" => sampler.repetition_window = if value == "all" { None } else { Some(number(name, value)?) },
            "seed" => sampler.seed = number(name, value)?,
            "max-new" => options.max_new = number(name, value)?,
            "context-shift" => match value {
                "on" => self.context_shift = true,
                "off" => self.context_shift = false,
                _ => return Err(Failure::usage(format!("context-shift is on or off, found {value:?}"))),
            },
            _ => return Err(Failure::usage(format!("there is no setting {name:?}")).hint("/set alone lists the settings")),
        }
        options.sampler.validate().map_err(Error::from)?;
        self.options = options;
        Ok(())
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, Failure> {
    value
        .parse()
        .map_err(|_| Failure::usage(format!("{name}: expected a number, found {value:?}")).hint(format!("for example: /set {name} 1")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_changed_or_left_alone() {
        let mut settings = Settings { options: GenerateOptions::default(), context_shift: false };
        let shown = settings.show();
        let names: Vec<&str> = shown.lines().filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(names.len(), 9);
        for name in names {
            let value = if name == "context-shift" { "on" } else { "1" };
            settings.set(name, value).unwrap();
        }
        assert!(settings.context_shift && settings.options.sampler.top_k == 1 && settings.options.max_new == 1);
        settings.set("repetition_window", "all").unwrap();
        assert_eq!(settings.options.sampler.repetition_window, None);
        let before = settings.show();
        for (name, value) in [
            ("temperature", "-1"),
            ("temperature", "warm"),
            ("top-p", "0"),
            ("top-k", "-3"),
            ("colour", "1"),
            ("context-shift", "1"),
            ("seed", ""),
        ] {
            assert!(settings.set(name, value).is_err(), "{name} {value}");
        }
        assert_eq!(settings.show(), before);
    }
}
