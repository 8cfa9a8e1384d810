//! Media parameters: from a checkpoint's `processor_config.json`, `preprocessor_config.json` and `config.json` to the manifest's front ends.
//!
//! A value may stand in several files; they must agree. Where no file has it, it is the class default of transformers, stated in `defaults`.

use crate::{
    Config, ForgeError,
    config::MOST_SIZE,
    read::{Checkpoint, ReadError},
};
use qhx_bundle::media::{AudioFrontEnd, ImageFrontEnd, PatchOrder, Patches, Placeholder, Resize};
use serde_json::Value;

/// The class defaults of transformers: what its processors use for a field that no file sets.
mod defaults {
    /// `Qwen2VLImageProcessor.size`.
    pub(super) const MIN_PIXELS: u64 = 56 * 56;
    pub(super) const MAX_PIXELS: u64 = 28 * 28 * 1280;
    /// Its `image_mean` and `image_std`: those of CLIP.
    pub(super) const AREA_MEAN: [f64; 3] = [0.48145466, 0.4578275, 0.40821073];
    pub(super) const AREA_STD: [f64; 3] = [0.26862954, 0.26130258, 0.27577711];
    /// The limit in its `smart_resize`, which no file sets.
    pub(super) const MAX_ASPECT: f64 = 200.0;
    /// `Gemma4ImageProcessor`.
    pub(super) const MAX_SOFT_TOKENS: usize = 280;
    pub(super) const BUDGET_MEAN: [f64; 3] = [0.0; 3];
    pub(super) const BUDGET_STD: [f64; 3] = [1.0; 3];
    /// All image processors.
    pub(super) const RESCALE_FACTOR: f64 = 1.0 / 255.0;
    pub(super) const BICUBIC: u64 = 3;
    /// `Gemma4AudioFeatureExtractor`; its other values are those of [`super::AudioFrontEnd::default`].
    pub(super) const FRAME_LENGTH_MS: f64 = 20.0;
    pub(super) const HOP_LENGTH_MS: f64 = 10.0;
}

/// The files of a checkpoint that describe its front ends.
#[derive(Default)]
pub struct MediaFiles {
    processor: Option<Value>,
    preprocessor: Option<Value>,
}

impl MediaFiles {
    /// Reads what there is.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, ReadError> {
        let file = |name| checkpoint.json_file(name);
        Ok(Self { processor: file("processor_config.json")?, preprocessor: file("preprocessor_config.json")? })
    }

    /// The settings of one part of the processor: its own section, and the flat file that older checkpoints have.
    fn settings<'a>(&'a self, part: &'a str) -> Settings<'a> {
        let section = self.processor.as_ref().and_then(|value| Config::of_file("processor_config.json", value).section(part));
        let flat = self.preprocessor.as_ref().map(|value| Config::of_file("preprocessor_config.json", value));
        Settings { places: section.into_iter().chain(flat).collect() }
    }
}

/// A tower's side of an image front end.
pub struct VisionSide<'a> {
    /// The tower's section of the configuration.
    pub section: Config<'a>,
    /// How an image stands among the tokens.
    pub placeholder: Placeholder,
    /// The name of the block's side in the tower's section and in the processor's.
    pub block_fields: (&'static str, &'static str),
}

impl VisionSide<'_> {
    fn patches(&self, settings: &Settings<'_>, order: PatchOrder, temporal: bool) -> Result<Patches, ForgeError> {
        let same = |field: &str, processor_field: &str| {
            let size = self.section.kernel(field)?;
            match settings.size(processor_field)? {
                Some(found) if found != size => {
                    let reason = format!("is {found}, but the tower was made for {size} (`{field}` in config.json)");
                    Err(settings.error(processor_field, reason))
                }
                _ => Ok(size),
            }
        };
        let (size, block) = (same("patch_size", "patch_size")?, same(self.block_fields.0, self.block_fields.1)?);
        let temporal = if temporal { same("temporal_patch_size", "temporal_patch_size")? } else { 1 };
        Ok(Patches { size, block, temporal, order })
    }

    /// Height and width of the images that the tower was trained on, where a file says one size: `image_size` of the tower, else `size` of the processor.
    fn trained_size(&self, settings: &Settings<'_>) -> Result<Option<[usize; 2]>, ForgeError> {
        let field = "image_size";
        let sizes = settings.sections("size");
        match self.section.get(field) {
            None => Ok(sizes.size("height")?.zip(sizes.size("width")?).map(|(height, width)| [height, width])),
            Some(Value::Array(_)) => match self.section.counts_if_any(field)?.as_deref() {
                Some(&[height, width]) if height > 0 && width > 0 => Ok(Some([height, width])),
                _ => Err(self.section.error(field, "must be one side, or height and width")),
            },
            Some(_) => Ok(Some([self.section.size(field)?; 2])),
        }
    }
}

/// An image front end that keeps the image's area within bounds; patches have the channel first.
pub fn area_image(files: &MediaFiles, side: &VisionSide<'_>) -> Result<ImageFrontEnd, ForgeError> {
    let settings = files.settings("image_processor");
    let patches = side.patches(&settings, PatchOrder::ChannelFirst, true)?;
    // Areas, though they are called edges; older files call them what they are.
    let bound = |edge: &'static str, pixels: &'static str, default: u64| -> Result<u64, ForgeError> {
        let sizes = settings.sections("size");
        let found = [(sizes.area(edge)?, "size"), (sizes.area(pixels)?, "size"), (settings.area(pixels)?, pixels)];
        let mut given = found.into_iter().filter_map(|(value, field)| Some((value?, field)));
        let Some((value, _)) = given.next() else { return Ok(default) };
        match given.find(|(other, _)| *other != value) {
            Some((other, field)) => Err(settings.error(field, format!("says {other} for {pixels}, but `size` says {value}"))),
            None => Ok(value as u64),
        }
    };
    let resize = Resize::Area {
        min_pixels: bound("shortest_edge", "min_pixels", defaults::MIN_PIXELS)?,
        max_pixels: bound("longest_edge", "max_pixels", defaults::MAX_PIXELS)?,
        max_aspect: defaults::MAX_ASPECT,
    };
    let (rescale, mean, std) = levels(&settings, true, defaults::AREA_MEAN, defaults::AREA_STD)?;
    let positions = side.section.size("num_position_embeddings")?;
    let position_side = Some(positions.isqrt());
    let (placeholder, trained_size) = (side.placeholder.clone(), side.trained_size(&settings)?);
    Ok(ImageFrontEnd { program: "vision".into(), placeholder, resize, rescale, mean, std, patches, position_side, trained_size })
}

/// An image front end that fills a budget of soft rows; patches have the channel last. The tower takes numbers from −1 to 1: `2 · (x − 0.5)` of what the
/// processor gives is part of `mean` and `std` here.
pub fn budget_image(files: &MediaFiles, side: &VisionSide<'_>) -> Result<ImageFrontEnd, ForgeError> {
    let settings = files.settings("image_processor");
    let patches = side.patches(&settings, PatchOrder::ChannelLast, false)?;
    let resize = Resize::Budget { max_soft_rows: settings.size("max_soft_tokens")?.unwrap_or(defaults::MAX_SOFT_TOKENS) };
    let (rescale, mean, std) = levels(&settings, false, defaults::BUDGET_MEAN, defaults::BUDGET_STD)?;
    let mean = std::array::from_fn(|channel| mean[channel] + 0.5 * std[channel]);
    let std = std.map(|std| std / 2.0);
    let (placeholder, trained_size) = (side.placeholder.clone(), side.trained_size(&settings)?);
    Ok(ImageFrontEnd { program: "vision".into(), placeholder, resize, rescale, mean, std, patches, position_side: None, trained_size })
}

/// From levels to numbers: factor, mean and deviation. Refuses other ways of resizing.
fn levels(settings: &Settings<'_>, normalised: bool, mean: [f64; 3], std: [f64; 3]) -> Result<(f64, [f64; 3], [f64; 3]), ForgeError> {
    settings.only("do_resize", true.into())?;
    settings.only("resample", defaults::BICUBIC.into())?;
    let rescale = match settings.flag("do_rescale")?.unwrap_or(true) {
        true => settings.number("rescale_factor")?.unwrap_or(defaults::RESCALE_FACTOR),
        false => 1.0,
    };
    let three = |field: &'static str, default: [f64; 3]| match settings.numbers(field)? {
        None => Ok(default),
        Some(found) => <[f64; 3]>::try_from(found).map_err(|_| settings.error(field, "must be three numbers, one for each channel")),
    };
    match settings.flag("do_normalize")?.unwrap_or(normalised) {
        true => Ok((rescale, three("image_mean", mean)?, three("image_std", std)?)),
        false => Ok((rescale, [0.0; 3], [1.0; 3])),
    }
}

/// A sound front end: log-mel frames of `bins` bins.
pub fn mel_audio(files: &MediaFiles, bins: usize, placeholder: Placeholder) -> Result<AudioFrontEnd, ForgeError> {
    let settings = files.settings("feature_extractor");
    for unsupported in ["preemphasis", "dither"] {
        settings.only(unsupported, 0.0.into())?;
    }
    let usual = AudioFrontEnd::default();
    let found = settings.size("feature_size")?.unwrap_or(usual.bins);
    if found != bins {
        return Err(settings.error("feature_size", format!("is {found}, but the tower was made for {bins}")));
    }
    let rate = settings.size("sampling_rate")?.unwrap_or(usual.sampling_rate as usize);
    let samples = |milliseconds: f64| (rate as f64 * milliseconds / 1000.0).round_ties_even() as usize;
    let length = |field: &'static str, field_ms: &'static str, default: f64| -> Result<usize, ForgeError> {
        let (given, from_ms) = (settings.size(field)?, settings.number(field_ms)?.map(samples));
        match (given, from_ms) {
            (Some(given), Some(from_ms)) if given != from_ms => {
                Err(settings.error(field, format!("is {given}, but `{field_ms}` makes it {from_ms}")))
            }
            _ => match given.or(from_ms).unwrap_or_else(|| samples(default)) {
                length if length <= MOST_SIZE => Ok(length),
                length => Err(settings.error(field_ms, format!("makes {length} samples, at most {MOST_SIZE} are supported"))),
            },
        }
    };
    let frame_length = length("frame_length", "frame_length_ms", defaults::FRAME_LENGTH_MS)?;
    let fft_length = frame_length.next_power_of_two() << usize::from(settings.flag("fft_overdrive")?.unwrap_or(false));
    Ok(AudioFrontEnd {
        program: "audio".into(),
        placeholder,
        sampling_rate: u32::try_from(rate).map_err(|_| settings.error("sampling_rate", "is too large"))?,
        // An argument of the extractor's call, which no file sets.
        max_samples: usual.max_samples,
        frame_length,
        hop_length: length("hop_length", "hop_length_ms", defaults::HOP_LENGTH_MS)?,
        fft_length,
        bins,
        min_frequency: settings.number("min_frequency")?.unwrap_or(usual.min_frequency),
        max_frequency: settings.number("max_frequency")?.unwrap_or(usual.max_frequency),
        mel_floor: settings.number("mel_floor")?.unwrap_or(usual.mel_floor),
        input_scale: settings.number("input_scale_factor")?.unwrap_or(usual.input_scale),
        bin_mean: settings.numbers("per_bin_mean")?.unwrap_or_default(),
        bin_std: settings.numbers("per_bin_stddev")?.unwrap_or_default(),
    })
}

/// A token id of `config.json`, under the first of `fields` or any other; all that are there must agree.
pub fn token(config: Config<'_>, fields: &[&str]) -> Result<u32, ForgeError> {
    let mut id = None;
    for field in fields {
        let Some(found) = config.get(field) else { continue };
        let found = found.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| config.error(field, "must be a token id"))?;
        if id.is_some_and(|id| id != found) {
            return Err(config.error(field, format!("is {found}, but `{}` is {}", fields[0], id.unwrap_or_default())));
        }
        id = Some(found);
    }
    id.ok_or_else(|| config.error(fields[0], "is missing: the model has a tower, but nothing says where its rows stand"))
}

/// Places where a field may stand: the first that has it counts, and the others must not contradict it.
struct Settings<'a> {
    places: Vec<Config<'a>>,
}

impl<'a> Settings<'a> {
    fn size(&self, field: &str) -> Result<Option<usize>, ForgeError> {
        self.read(field, Config::size_if_any)
    }

    fn area(&self, field: &str) -> Result<Option<usize>, ForgeError> {
        self.read(field, Config::length_if_any)
    }

    fn number(&self, field: &str) -> Result<Option<f64>, ForgeError> {
        self.read(field, Config::number_if_any)
    }

    fn numbers(&self, field: &str) -> Result<Option<Vec<f64>>, ForgeError> {
        self.read(field, Config::numbers_if_any)
    }

    fn flag(&self, field: &str) -> Result<Option<bool>, ForgeError> {
        self.read(field, |place, field| place.get(field).map(|_| place.flag_or(field, false)).transpose())
    }

    /// The same places, a section deeper.
    fn sections(&self, name: &'a str) -> Self {
        Self { places: self.places.iter().filter_map(|place| place.section(name)).collect() }
    }

    fn only(&self, field: &str, supported: Value) -> Result<(), ForgeError> {
        let same = |found: &Value| *found == supported || (found.is_number() && found.as_f64() == supported.as_f64());
        let wrong = self.places.iter().find(|place| place.get(field).is_some_and(|found| !same(found)));
        wrong.map_or(Ok(()), |place| place.only(field, std::slice::from_ref(&supported)))
    }

    fn read<T: PartialEq + std::fmt::Debug>(
        &self,
        field: &str,
        get: impl Fn(Config<'a>, &str) -> Result<Option<T>, ForgeError>,
    ) -> Result<Option<T>, ForgeError> {
        let mut value = None;
        for place in &self.places {
            match (get(*place, field)?, &value) {
                (Some(found), Some(known)) if found != *known => {
                    return Err(place.error(field, format!("is {found:?}, but another file of the checkpoint says {known:?}")));
                }
                (Some(found), None) => value = Some(found),
                _ => {}
            }
        }
        Ok(value)
    }

    /// An error about a field, naming the file that has it.
    fn error(&self, field: &str, reason: impl Into<String>) -> ForgeError {
        let place = self.places.iter().find(|place| place.get(field).is_some()).or(self.places.first());
        let missing = Value::Null;
        place.copied().unwrap_or(Config::of_file("preprocessor_config.json", &missing)).error(field, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn vision() -> Value {
        json!({"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304, "pooling_kernel_size": 3})
    }

    fn area(processor: Option<Value>, preprocessor: Option<Value>) -> Result<ImageFrontEnd, ForgeError> {
        let vision = vision();
        let placeholder = Placeholder { token: 9, begin: None, end: None };
        let side = VisionSide { section: Config::new(&vision), placeholder, block_fields: ("spatial_merge_size", "merge_size") };
        area_image(&MediaFiles { processor, preprocessor }, &side)
    }

    fn budget(processor: Option<Value>, preprocessor: Option<Value>) -> Result<ImageFrontEnd, ForgeError> {
        let vision = vision();
        let placeholder = Placeholder { token: 9, begin: Some(8), end: Some(10) };
        let fields = ("pooling_kernel_size", "pooling_kernel_size");
        let side = VisionSide { section: Config::new(&vision), placeholder, block_fields: fields };
        budget_image(&MediaFiles { processor, preprocessor }, &side)
    }

    fn audio(processor: Option<Value>, preprocessor: Option<Value>) -> Result<AudioFrontEnd, ForgeError> {
        mel_audio(&MediaFiles { processor, preprocessor }, 128, Placeholder { token: 5, begin: None, end: None })
    }

    #[test]
    fn every_published_style_of_areas() {
        let expected = Resize::Area { min_pixels: 65536, max_pixels: 16777216, max_aspect: 200.0 };
        let half = json!({"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "patch_size": 16, "merge_size": 2, "resample": 3});
        for sizes in [
            json!({"size": {"shortest_edge": 65536, "longest_edge": 16777216}}),
            json!({"min_pixels": 65536, "max_pixels": 16777216}),
            json!({"size": {"min_pixels": 65536, "max_pixels": 16777216}, "min_pixels": 65536, "max_pixels": 16777216}),
        ] {
            let mut flat = half.clone();
            flat.as_object_mut().unwrap().extend(sizes.as_object().unwrap().clone());
            for (processor, preprocessor) in [
                (None, Some(flat.clone())),
                (Some(json!({"image_processor": flat.clone()})), None),
                (Some(json!({"image_processor": flat})), Some(half.clone())),
            ] {
                let found = area(processor, preprocessor).unwrap();
                assert_eq!(found.resize, expected);
                assert_eq!((found.mean, found.std, found.rescale), ([0.5; 3], [0.5; 3], 1.0 / 255.0));
                assert_eq!(found.patches, Patches { size: 16, block: 2, temporal: 2, order: PatchOrder::ChannelFirst });
                assert_eq!(found.position_side, Some(48));
            }
        }
        let defaults = area(None, None).unwrap();
        assert_eq!(defaults.resize, Resize::Area { min_pixels: 3136, max_pixels: 1003520, max_aspect: 200.0 });
        assert_eq!(defaults.mean, defaults::AREA_MEAN);
    }

    #[test]
    fn budgets_fold_the_towers_own_scaling() {
        let found = budget(
            Some(json!({"image_processor": {"do_normalize": false, "max_soft_tokens": 560, "rescale_factor": 0.00392156862745098}})),
            None,
        );
        let found = found.unwrap();
        assert_eq!(found.resize, Resize::Budget { max_soft_rows: 560 });
        assert_eq!((found.mean, found.std), ([0.5; 3], [0.5; 3]), "2 · (x − 0.5)");
        assert_eq!(found.patches, Patches { size: 16, block: 3, temporal: 1, order: PatchOrder::ChannelLast });
        let scaled =
            budget(None, Some(json!({"do_normalize": true, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 1.0, 2.0]}))).unwrap();
        assert_eq!((scaled.mean, scaled.std), ([0.35, 0.7, 1.3], [0.25, 0.5, 1.0]));
        assert_eq!(budget(None, None).unwrap().resize, Resize::Budget { max_soft_rows: 280 });
    }

    #[test]
    fn the_size_of_training_where_a_file_says_one() {
        let size = |image_size: Value, preprocessor: Option<Value>| {
            let mut vision = vision();
            vision["image_size"] = image_size;
            let placeholder = Placeholder { token: 9, begin: None, end: None };
            let side = VisionSide { section: Config::new(&vision), placeholder, block_fields: ("spatial_merge_size", "merge_size") };
            let files = MediaFiles { processor: None, preprocessor };
            area_image(&files, &side).map(|front_end| front_end.trained_size).map_err(|e| e.to_string())
        };
        let edges = json!({"size": {"shortest_edge": 65536, "longest_edge": 16777216}});
        assert_eq!([size(Value::Null, None), size(Value::Null, Some(edges.clone()))], [Ok(None), Ok(None)]);
        assert_eq!(size(json!(448), Some(edges)), Ok(Some([448, 448])));
        assert_eq!(size(json!([224, 448]), None), Ok(Some([224, 448])));
        assert_eq!(size(Value::Null, Some(json!({"size": {"height": 128, "width": 256}}))), Ok(Some([128, 256])));
        for wrong in [json!([224]), json!([0, 224]), json!("large"), json!(-1)] {
            assert!(size(wrong.clone(), None).unwrap_err().contains("`image_size` must be"), "{wrong}");
        }
    }

    #[test]
    fn sounds_in_samples_or_milliseconds() {
        let published = json!({"frame_length": 320, "hop_length": 160, "fft_length": 512, "feature_size": 128, "sampling_rate": 16000,
            "min_frequency": 0.0, "max_frequency": 8000.0, "mel_floor": 0.001, "per_bin_mean": null, "dither": 0.0, "preemphasis": 0.0});
        let nested = audio(Some(json!({"feature_extractor": published.clone()})), None).unwrap();
        assert_eq!((nested.frame_length, nested.hop_length, nested.fft_length, nested.bins), (320, 160, 512, 128));
        assert_eq!(nested, audio(None, Some(published)).unwrap());
        assert_eq!(nested, audio(None, None).unwrap());
        let slow = audio(None, Some(json!({"sampling_rate": 8000, "frame_length_ms": 32.0, "fft_overdrive": true, "max_frequency": 4000})))
            .unwrap();
        assert_eq!((slow.frame_length, slow.hop_length, slow.fft_length), (256, 80, 512));
        let means = audio(None, Some(json!({"per_bin_mean": vec![1.5; 128], "per_bin_stddev": vec![2.0; 128]}))).unwrap();
        assert_eq!((means.bin_mean.len(), means.bin_std[3]), (128, 2.0));
    }

    #[test]
    fn contradictions_name_file_and_field() {
        let error = |result: Result<ImageFrontEnd, ForgeError>| result.unwrap_err().to_string();
        let cases = [
            (
                error(area(None, Some(json!({"patch_size": 14})))),
                "preprocessor_config.json: `patch_size` is 14, but the tower was made for 16",
            ),
            (
                error(area(Some(json!({"image_processor": {"merge_size": 3}})), None)),
                "processor_config.json: `image_processor.merge_size` is 3",
            ),
            (
                error(area(None, Some(json!({"size": {"shortest_edge": 4}, "min_pixels": 5})))),
                "`min_pixels` says 5 for min_pixels, but `size` says 4",
            ),
            (error(area(None, Some(json!({"resample": 2})))), "preprocessor_config.json: `resample` is 2, a variant that is not supported"),
            (error(area(None, Some(json!({"do_resize": false})))), "`do_resize` is false"),
            (error(area(None, Some(json!({"image_mean": [0.5]})))), "`image_mean` must be three numbers"),
            (error(area(None, Some(json!({"image_std": "none"})))), "`image_std` must be a list of numbers"),
            (
                error(budget(Some(json!({"image_processor": {"max_soft_tokens": 70}})), Some(json!({"max_soft_tokens": 280})))),
                "preprocessor_config.json: `max_soft_tokens` is 280, but another file of the checkpoint says 70",
            ),
            (
                audio(None, Some(json!({"feature_size": 80}))).unwrap_err().to_string(),
                "`feature_size` is 80, but the tower was made for 128",
            ),
            (audio(None, Some(json!({"dither": 0.1}))).unwrap_err().to_string(), "`dither` is 0.1, a variant"),
            (audio(None, Some(json!({"frame_length": 300, "frame_length_ms": 20}))).unwrap_err().to_string(), "`frame_length` is 300"),
        ];
        for (found, expected) in cases {
            assert!(found.contains(expected), "{found}");
        }
        let config = json!({"eoa_token_id": 7, "eoa_token_index": 8, "boa_token_id": "x"});
        let id = |fields: &[&str]| token(Config::new(&config), fields).map_err(|e| e.to_string());
        assert_eq!(id(&["eoa_token_id"]), Ok(7));
        assert!(
            id(&["eoa_token_id", "eoa_token_index"]).unwrap_err().contains("config.json: `eoa_token_index` is 8, but `eoa_token_id` is 7")
        );
        assert!(id(&["boa_token_id"]).unwrap_err().contains("must be a token id"));
        assert!(id(&["image_token_id"]).unwrap_err().contains("`image_token_id` is missing"));
    }
}
