//! Programs: typed lists of ops over named values, with named weights, rotaries and state slots.

use crate::{Encoding, Name, Op, Shape};
use half::f16;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The version of the program format that this code reads and writes.
pub const PROGRAM_VERSION: u32 = 1;

/// A model, or a tower of one, as data. JSON is its readable form: see [`Program::to_json`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Program {
    /// [`PROGRAM_VERSION`].
    pub program_version: u32,
    /// `text`, `vision`, `audio` …
    pub name: Name,
    /// The inputs of a call, in order.
    pub inputs: Vec<Input>,
    /// The outputs of a call.
    pub outputs: Vec<Output>,
    /// State that outlives a call.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub slots: BTreeMap<Name, Slot>,
    /// Total lengths beyond which constants change: epoch `e` holds while exactly `e` of these are below the total length.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub epochs: Vec<usize>,
    /// Rotary tables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rotaries: BTreeMap<Name, Rotary>,
    /// The default stages, in order. Every op's path lies under exactly one.
    pub stages: Vec<Stage>,
    /// Weights by name, as the bundle stores them.
    pub weights: BTreeMap<Name, Weight>,
    /// The ops, in order.
    pub ops: Vec<Op>,
}

/// An input of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Input {
    /// The value's name.
    pub name: Name,
    /// Its type.
    pub dtype: DType,
    /// Its shape.
    pub shape: Shape,
    /// How the runtime generates it.
    pub generator: Generator,
}

/// How the runtime generates an input: described by behaviour, never by model family.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Generator {
    /// Token ids `[T]`.
    #[serde(rename = "ids")]
    Ids,
    /// Token ids with media placeholders replaced by the padding id `[T]`.
    #[serde(rename = "ids_media_as_pad")]
    IdsMediaAsPad,
    /// The row's index in its session, `[1, T]`.
    #[serde(rename = "positions.sequence")]
    PositionsSequence,
    /// Time, height and width positions, `[3, T]`; equal to the sequence for text.
    #[serde(rename = "positions.mrope")]
    PositionsMrope,
    /// Indexes of the rows whose outputs are wanted, `[L]`.
    #[serde(rename = "wanted_rows")]
    WantedRows,
    /// Soft rows (encoded media) `[R, hidden]`.
    #[serde(rename = "soft_rows")]
    SoftRows,
    /// Rows to be added after a text layer, by number of the deepstack output, `[R, hidden]`.
    #[serde(rename = "deepstack_rows")]
    DeepstackRows(usize),
    /// The row indexes in the call at which soft rows are placed, `[R]`.
    #[serde(rename = "soft_rows_at")]
    SoftRowsAt,
    /// Image patches `[T, numbers]`, in merge- or pool-block order.
    #[serde(rename = "patches")]
    Patches,
    /// Row and column of each patch, `[2, T]`.
    #[serde(rename = "patch_grid")]
    PatchGrid,
    /// Column of each patch, `[T]`, as an index into a table.
    #[serde(rename = "patch_columns")]
    PatchColumns,
    /// Row of each patch, `[T]`, as an index into a table.
    #[serde(rename = "patch_rows")]
    PatchRows,
    /// Table rows for interpolated positions `[T, 4]`.
    #[serde(rename = "interpolation_taps.index")]
    InterpolationIndex,
    /// Their factors `[T, 4]`.
    #[serde(rename = "interpolation_taps.factor")]
    InterpolationFactor,
    /// Audio feature frames `[T, bins]`, valid ones only.
    #[serde(rename = "frames")]
    Frames,
    /// The id behind each row, `[T]`: what was chosen after it. Of drafting programs.
    #[serde(rename = "next_ids")]
    NextIds,
    /// What the stage of the text program that the manifest names made of each row, `[T, hidden]`. Of drafting programs.
    #[serde(rename = "hidden_rows")]
    HiddenRows,
    /// Rows of this program's own output `hidden`, in place of hidden rows that the text program has not made, `[R, hidden]`. Of drafting programs.
    #[serde(rename = "chained_rows")]
    ChainedRows,
    /// The row indexes in the call at which chained rows are placed, `[R]`. Of drafting programs.
    #[serde(rename = "chained_rows_at")]
    ChainedRowsAt,
    /// The index in the session of the id behind each row, `[1, T]`. Of drafting programs.
    #[serde(rename = "positions.next")]
    PositionsNext,
    /// What the text program's slot of this name holds as keys of the rows, `[T, kv_heads, head_dim]`. Of drafting programs, which have a slot of the same name for them.
    #[serde(rename = "text_keys")]
    TextKeys(Name),
    /// The same for values.
    #[serde(rename = "text_values")]
    TextValues(Name),
    /// A value computed by another part of a program that was cut.
    #[serde(rename = "carried")]
    Carried,
}

/// An output of a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// The output's name: `logits`, `soft_rows`, `deepstack.0` …
    pub name: Name,
    /// The value.
    pub value: Name,
}

/// The type of a value's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    /// Activations.
    F32,
    /// Ids, positions, row indexes.
    I32,
}

/// State that outlives a call. The session owns it; ops name it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Slot {
    /// Keys and values, a row per committed position: canonical form `[position, kv_heads, head_dim]`.
    Kv {
        /// Key/value heads.
        kv_heads: usize,
        /// Head dimension.
        head_dim: usize,
        /// The largest window of its readers; absent: all rows are read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        window: Option<usize>,
        /// The type in which rows are stored.
        dtype: KvType,
    },
    /// The last `rows` inputs of a causal convolution, oldest first, zeros at the start: `[rows, channels]`, f32.
    Fifo {
        /// Kernel length − 1.
        rows: usize,
        /// Channels.
        channels: usize,
    },
    /// Delta-rule state `[heads, key_dim, value_dim]`, f32, zeros at the start.
    Delta {
        /// Value heads.
        heads: usize,
        /// Numbers per key.
        key_dim: usize,
        /// Numbers per value.
        value_dim: usize,
    },
}

impl Slot {
    /// Whether the slot holds a running state instead of rows by position.
    pub fn is_recurrent(&self) -> bool {
        !matches!(self, Self::Kv { .. })
    }

    /// Bytes for a session of `context` rows, saturating on overflow.
    pub fn bytes(&self, context: usize) -> u64 {
        let product = |sizes: &[usize]| sizes.iter().fold(2u64, |bytes, &n| bytes.saturating_mul(n as u64));
        match *self {
            Self::Kv { kv_heads, head_dim, dtype, .. } => product(&[context, kv_heads, head_dim, dtype.bytes()]),
            // Double-buffered: a step is a transaction.
            Self::Fifo { rows, channels } => product(&[rows, channels, 4]),
            Self::Delta { heads, key_dim, value_dim } => product(&[heads, key_dim, value_dim, 4]),
        }
    }
}

/// The type in which a KV slot stores its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats, rounded to nearest even.
    F16,
}

impl KvType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }

    /// The numbers of little-endian elements.
    pub fn numbers(self, bytes: &[u8]) -> Vec<f32> {
        match self {
            Self::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Self::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        }
    }
}

/// A rotary embedding as data. Frequency `f` rotates one pair of values by the angle `positions[stream[f]] · inv_freq[f]`.
///
/// A block (start, length) has `length / 2` frequencies; its frequency `i` pairs number `start + i` with `start + i + length / 2`:
/// `(a, b) → (a·cos − b·sin, b·cos + a·sin)`, cos and sin multiplied by the amplitude. Frequencies are counted through all blocks.
/// Values outside the blocks are unchanged.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rotary {
    /// (start, length) in the head.
    pub blocks: Vec<(usize, usize)>,
    /// Position stream per frequency; empty: stream 0 for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub streams: Vec<usize>,
    /// One for all epochs, or one per epoch.
    pub variants: Vec<RotaryVariant>,
}

/// The parameters of a [`Rotary`] in one epoch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RotaryVariant {
    /// One per frequency.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin.
    pub amplitude: f32,
}

impl Rotary {
    /// The parameters in `epoch`.
    pub fn variant(&self, epoch: usize) -> &RotaryVariant {
        &self.variants[epoch.min(self.variants.len() - 1)]
    }

    /// The position stream of frequency `f`.
    pub fn stream(&self, f: usize) -> usize {
        self.streams.get(f).copied().unwrap_or(0)
    }
}

/// A named part of the program: all ops whose path starts with its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Stage {
    /// `embed`, `layers.3.attn`, `lm_head` …
    pub name: Name,
    /// The value that shows the stage's effect: usually the residual stream after it. Absent in a part of a program that does not complete the stage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<Name>,
    /// Whether the tap's rows are kept in the basis of [`crate::hadamard`]. They are turned back before anyone sees them: see [`crate::Tap::show`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rotated: bool,
    /// Whether the tap's rows are kept without their mean, which nothing that reads them depends on. The mean cannot be put back: whoever compares them with the rows of another program takes it from
    /// those as well.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub centred: bool,
}

/// A weight as the program expects it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Weight {
    /// Logical shape.
    pub shape: Vec<usize>,
    /// How it is stored.
    pub encoding: Encoding,
}

impl Program {
    /// The epoch for a total length (prompt and answer so far).
    pub fn epoch(&self, total: usize) -> usize {
        self.epochs.iter().filter(|&&limit| limit < total).count()
    }

    /// The readable form: one line for each input, stage, weight and op.
    pub fn to_json(&self) -> String {
        use serde_json::Value;
        let line = |value: &Value| value.to_string();
        let fields = match serde_json::to_value(self) {
            Ok(Value::Object(fields)) => fields,
            // A struct of strings, numbers and lists always serialises to an object.
            other => unreachable!("a program serialises to an object, not {other:?}"),
        };
        let mut text = String::from("{");
        for (i, (name, value)) in fields.iter().enumerate() {
            text += if i == 0 { "\n  " } else { ",\n  " };
            text += &format!("{}: ", Value::from(name.as_str()));
            match value {
                Value::Array(items) if items.iter().any(Value::is_object) => {
                    let lines: Vec<_> = items.iter().map(|item| format!("    {}", line(item))).collect();
                    text += &format!("[\n{}\n  ]", lines.join(",\n"));
                }
                Value::Object(items) if !items.is_empty() => {
                    let lines: Vec<_> = items.iter().map(|(k, v)| format!("    {}: {}", Value::from(k.as_str()), line(v))).collect();
                    text += &format!("{{\n{}\n  }}", lines.join(",\n"));
                }
                value => text += &line(value),
            }
        }
        text + "\n}\n"
    }

    /// Reads a program; unknown fields and other versions are errors. Call [`crate::Checked::new`] before use.
    pub fn from_json(text: &str) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Version {
            program_version: u32,
        }
        let version: Version = serde_json::from_str(text).map_err(|e| format!("not a program: {e}"))?;
        if version.program_version != PROGRAM_VERSION {
            return Err(format!(
                "program_version is {}, but this qhx reads {PROGRAM_VERSION}: forge the bundle again or update qhx",
                version.program_version
            ));
        }
        serde_json::from_str(text).map_err(|e| format!("not a program: {e}"))
    }
}

/// Whether `path` is `stage` or lies under it.
pub fn is_under(path: &str, stage: &str) -> bool {
    path.strip_prefix(stage).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Checked, conformance::models};

    #[test]
    fn json_round_trips() {
        for model in (0..3).flat_map(models::tiny) {
            let json = model.program.to_json();
            let back = Program::from_json(&json).unwrap_or_else(|e| panic!("{}: {e}", model.name));
            assert_eq!(back, *model.program, "{}", model.name);
            assert_eq!(back.to_json(), json);
            Checked::new(back).unwrap();
            let ops = json.lines().filter(|line| line.contains("{\"path\"")).count();
            assert_eq!(ops, model.program.ops.len(), "one line for each op");
        }
    }

    #[test]
    fn unknown_fields_are_named() {
        let json = models::tiny(0)[0].program.to_json();
        let places = [
            ("{\n  \"program_version\"", "{ \"colour\": 1,\n  \"program_version\""),
            ("{\"path\":", "{\"colour\":1,\"path\":"),
            ("{\"linear\":{", "{\"linear\":{\"colour\":1,"),
            ("\"attend\":{", "\"attend\":{\"colour\":1,"),
            ("\"kv\":{\"k\"", "\"kv\":{\"colour\":1,\"k\""),
            ("\"kv\":{\"kv_heads\"", "\"kv\":{\"colour\":1,\"kv_heads\""),
            ("{\"shape\":", "{\"colour\":1,\"shape\":"),
            ("{\"inv_freq\":", "{\"colour\":1,\"inv_freq\":"),
            ("{\"blocks\":", "{\"colour\":1,\"blocks\":"),
        ];
        for (old, new) in places {
            assert!(json.contains(old), "the program has no {old}");
            let error = Program::from_json(&json.replacen(old, new, 1)).unwrap_err();
            assert!(error.contains("unknown field `colour`"), "{new}: {error}");
        }
        let error = Program::from_json(&json.replacen("\"linear\"", "\"convolve\"", 1)).unwrap_err();
        assert!(error.contains("unknown variant `convolve`"), "{error}");
        let error = Program::from_json(&json.replacen("\"encoding\":\"f32\"", "\"encoding\":\"f31\"", 1)).unwrap_err();
        assert!(error.contains("unknown weight encoding `f31`"), "{error}");
    }

    #[test]
    fn other_versions_are_refused_before_anything_else() {
        let newer = Program::from_json("{\"program_version\": 2, \"what\": \"ever\"}").unwrap_err();
        assert!(newer.contains("program_version is 2, but this qhx reads 1") && newer.contains("update qhx"), "{newer}");
        for broken in ["", "[]", "{}", "{\"program_version\": -1}", "{\"program_version\": 1}"] {
            assert!(Program::from_json(broken).unwrap_err().starts_with("not a program"), "{broken}");
        }
    }

    #[test]
    fn epochs_count_the_limits_below_the_total() {
        let mut program = (*models::tiny(0)[0].program).clone();
        program.epochs = vec![4096, 8192];
        assert_eq!([1, 4096, 4097, 8192, 8193].map(|total| program.epoch(total)), [0, 0, 1, 1, 2]);
    }

    #[test]
    fn stages_are_dotted_prefixes() {
        assert!(is_under("layers.1.attn.q", "layers.1") && is_under("layers.1", "layers.1"));
        assert!(!is_under("layers.10.attn", "layers.1") && !is_under("layers", "layers.1"));
        let program = &models::tiny(0)[0].program;
        assert_eq!(program.stage_of("layers.0.ffn.gate_proj").map(|s| &*s.name), Some("layers.0.ffn"));
        assert!(program.stage_of("layers").is_none());
    }
}
