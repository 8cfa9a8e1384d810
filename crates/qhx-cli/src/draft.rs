//! Where drafts come from: `--draft`.

use crate::{failure::Failure, interrupt::Interrupt, load::load_model, open::open_model};
use qhx_runtime::{
    LoadOptions, Model,
    draft::{DraftModel, DraftSource},
};
use std::{convert::Infallible, path::PathBuf, str::FromStr};

/// Where drafts are to come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DraftChoice {
    None,
    Lookup,
    Model(PathBuf),
}

impl FromStr for DraftChoice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "none" => Self::None,
            "lookup" => Self::Lookup,
            path => Self::Model(path.into()),
        })
    }
}

impl DraftChoice {
    /// Loads what drafts for a model that was loaded with these options.
    pub(crate) fn source(&self, model: &Model, load: &LoadOptions, interrupt: &Interrupt) -> Result<DraftSource, Failure> {
        let path = match self {
            Self::None => return Ok(DraftSource::None),
            Self::Lookup => return Ok(DraftSource::Lookup),
            Self::Model(path) => path,
        };
        let bundle = open_model(Some(path), load.device, interrupt)?.bundle;
        let context = model.context().min(bundle.manifest().model.context_length);
        let load = LoadOptions { context: Some(context), media: Vec::new(), placement: None, ..load.clone() };
        Ok(DraftSource::Model(DraftModel::new(load_model(&bundle, &load)?, model)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_paths() {
        let choices = ["none", "lookup", "./lookup", "small"].map(|text| text.parse::<DraftChoice>().unwrap());
        let expected = [DraftChoice::None, DraftChoice::Lookup, DraftChoice::Model("./lookup".into()), DraftChoice::Model("small".into())];
        assert_eq!(choices, expected);
    }
}
