//! Where drafts come from: `--draft`.

use crate::{failure::Failure, interrupt::Interrupt, load::load_model, open::open_model};
use qhx_runtime::{
    LoadOptions, Model,
    draft::{DraftModel, DraftSource},
};
use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    str::FromStr,
};

/// Where drafts are to come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DraftChoice {
    Auto,
    None,
    Lookup,
    Mtp,
    Model(PathBuf),
}

impl FromStr for DraftChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "auto" => Self::Auto,
            "none" => Self::None,
            "lookup" => Self::Lookup,
            "mtp" => Self::Mtp,
            path => Self::Model(path.into()),
        })
    }
}

impl DraftChoice {
    /// Loads what drafts for a model that was loaded with these options.
    pub(crate) fn source(&self, model: &Model, load: &LoadOptions, interrupt: &Interrupt) -> Result<DraftSource, Failure> {
        let own = match self {
            Self::Auto => DraftSource::Auto,
            Self::None => DraftSource::None,
            Self::Lookup => DraftSource::Lookup,
            Self::Mtp => DraftSource::Mtp,
            Self::Model(path) => return self::model(path, model, load, interrupt),
        };
        own.check(model)?;
        Ok(own)
    }
}

/// Loads a smaller model.
fn model(path: &Path, model: &Model, load: &LoadOptions, interrupt: &Interrupt) -> Result<DraftSource, Failure> {
    let bundle = open_model(Some(path), load.device, interrupt)?.bundle;
    let context = model.context().min(bundle.manifest().model.context_length);
    let load = LoadOptions { context: Some(context), media: Vec::new(), placement: None, ..load.clone() };
    Ok(DraftSource::Model(DraftModel::new(load_model(&bundle, &load)?, model)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_paths() {
        let choices = ["auto", "none", "lookup", "mtp", "./mtp", "small"].map(|text| text.parse::<DraftChoice>().unwrap());
        let [path, name] = ["./mtp", "small"].map(|text| DraftChoice::Model(text.into()));
        let expected = [DraftChoice::Auto, DraftChoice::None, DraftChoice::Lookup, DraftChoice::Mtp, path, name];
        assert_eq!(choices, expected);
    }
}
