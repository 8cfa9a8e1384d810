//! A small bundle with real programs, and the means to spoil it.

use qhx_bundle::{layout::stored_parts, manifest::*, *};
use qhx_ir::{
    Activation, ActivationForm, AlignedBytes, Bytes, DType, Dim, Encoding, Generator, Input, Name, Op, OpKind, Output, PROGRAM_VERSION,
    Program, Stage, Weight,
};
use std::{collections::BTreeMap, fs, path::Path};

/// A seeded generator, the same on every machine.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

pub(crate) fn path(text: &str) -> BundlePath {
    BundlePath::new(text).unwrap()
}

/// A program that uses each of these weights: vectors as norms, matrices as tables, and for rank 3 a set of experts `[e, out, in]`
/// (`NAME.gate`, `NAME.up`, `NAME.down`).
pub(crate) fn program(name: &str, weights: &[(&str, Encoding, Vec<usize>)]) -> Program {
    let mut program = Program {
        program_version: PROGRAM_VERSION,
        name: name.into(),
        inputs: Vec::new(),
        outputs: Vec::new(),
        slots: BTreeMap::new(),
        epochs: Vec::new(),
        rotaries: BTreeMap::new(),
        stages: vec![Stage { name: "all".into(), tap: None, rotated: false, centred: false }],
        weights: BTreeMap::new(),
        ops: Vec::new(),
    };
    let input = |p: &mut Program, name: String, dtype, shape| {
        let name = Name::from(name);
        p.inputs.push(Input { name: name.clone(), dtype, shape, generator: Generator::Carried });
        name
    };
    for (weight, encoding, shape) in weights {
        let declare = |p: &mut Program, suffix: &str, shape: &[usize]| {
            let name = Name::from(format!("{weight}{suffix}"));
            p.weights.insert(name.clone(), Weight { shape: shape.to_vec(), encoding: *encoding });
            name
        };
        let path = Name::from(format!("all.{weight}"));
        let op = match shape[..] {
            [n] => {
                let weight = Some(declare(&mut program, "", shape));
                let x = input(&mut program, format!("{path}.x"), DType::F32, vec![Dim::T, Dim::Fixed(n)]);
                OpKind::RmsNorm { x, weight, eps: 1e-6 }
            }
            [_, _] => {
                let table = declare(&mut program, "", shape);
                let ids = input(&mut program, format!("{path}.ids"), DType::I32, vec![Dim::T]);
                OpKind::Embed { ids, table, scale: 1.0 }
            }
            [e, out, inner] => {
                let gate = declare(&mut program, ".gate", &[e, out, inner]);
                let up = declare(&mut program, ".up", &[e, out, inner]);
                let down = declare(&mut program, ".down", &[e, inner, out]);
                let x = input(&mut program, format!("{path}.x"), DType::F32, vec![Dim::T, Dim::Fixed(inner)]);
                let experts = input(&mut program, format!("{path}.experts"), DType::I32, vec![Dim::T, Dim::Fixed(1)]);
                let weights = input(&mut program, format!("{path}.weights"), DType::F32, vec![Dim::T, Dim::Fixed(1)]);
                OpKind::Experts {
                    x,
                    experts,
                    weights,
                    gate,
                    up,
                    down,
                    form: ActivationForm::F32,
                    activation: Activation::Silu,
                    bias: None,
                    held: None,
                }
            }
            _ => panic!("no op for rank {}", shape.len()),
        };
        program.ops.push(Op { path: path.clone(), op });
        program.outputs.push(Output { name: path.clone(), value: path });
    }
    program
}

/// A manifest that lacks only what the writer fills in.
pub(crate) fn manifest() -> Manifest {
    Manifest {
        schema_version: SCHEMA_VERSION,
        model: ModelFacts {
            name: "tiny".into(),
            family: "plain".into(),
            architecture: None,
            source_format: SourceFormat::Config,
            dsp_arch: None,
            soc_model: None,
            parameters: 1000,
            context_length: 64,
            vocab_size: 32,
            hidden_size: 8,
            synthetic: Some(Synthetic { seed: 1 }),
        },
        plan: None,
        placement: None,
        precision: "mixed".into(),
        rounding: None,
        chat: Chat {
            mode: ChatMode::Template,
            template: Some(path("chat_template.jinja")),
            bos_token: None,
            eos_token: Some("</s>".into()),
            template_arguments: BTreeMap::new(),
        },
        tokens: Tokens { bos: Some(1), eos: vec![2], pad: None },
        generation: None,
        media: Default::default(),
        tokenizer: Some(path("tokenizer.json")),
        programs: BTreeMap::new(),
        weights: Vec::new(),
        ignored_tensors: None,
        parity: None,
        fixture_dir: None,
        draft: None,
        files: BTreeMap::new(),
    }
}

/// The stored bytes of every part, by stored name.
pub(crate) type Parts = BTreeMap<String, Vec<u8>>;

/// Starts a bundle with `programs`, writes random numbers for every weight in rows of random count and order, and gives what was written.
pub(crate) fn write(place: &Path, programs: &[Program], options: WriteOptions, random: &mut Random) -> (BundleWriter, Parts) {
    let mut writer = BundleWriter::create(place, options).unwrap();
    writer.add_file(&path("tokenizer.json"), b"{}").unwrap();
    writer.add_file(&path("chat_template.jinja"), b"{{ messages }}").unwrap();
    for program in programs {
        writer.add_program(program).unwrap();
    }
    let specs = TensorSpec::of_programs(programs);
    writer.declare_weights(specs.clone()).unwrap();
    let mut written = Parts::new();
    for spec in specs {
        for part in stored_parts(spec.encoding, &spec.shape).unwrap() {
            let bytes = random.bytes(part.bytes());
            let mut pieces = Vec::new();
            let mut row = 0;
            while row < part.rows {
                let end = (row + 1 + random.below(part.rows)).min(part.rows);
                pieces.insert(random.below(pieces.len() + 1), row..end);
                row = end;
            }
            for rows in pieces {
                let bytes = &bytes[rows.start * part.row_bytes..rows.end * part.row_bytes];
                writer.write_rows(&spec.name, part.part, rows.start, bytes).unwrap();
            }
            written.insert(part.part.stored_name(&spec.name), bytes);
        }
    }
    (writer, written)
}

/// Weights of every kind of part: floats, a scale per row, scales and minima per block.
pub(crate) fn usual_program() -> Program {
    program(
        "text",
        &[
            ("norm", Encoding::F32, vec![17]),
            ("table", Encoding::I8Row, vec![5, 33]),
            ("head", Encoding::I4_BLOCK32_MIN, vec![3, 70]),
            ("moe", Encoding::I8_BLOCK32, vec![2, 3, 40]),
        ],
    )
}

/// A usual bundle at `place`.
pub(crate) fn write_usual(place: &Path) {
    let (writer, _) = write(place, &[usual_program()], WriteOptions::default(), &mut Random(7));
    writer.finish(manifest()).unwrap();
}

/// Opens without a memory of earlier checks.
pub(crate) fn open(place: &Path) -> Result<Bundle, BundleError> {
    Bundle::open_with(place, &OpenOptions { cache_dir: None, ..OpenOptions::default() })
}

/// A bundle's files in memory, to be spoiled.
#[derive(Clone)]
pub(crate) struct Files(pub(crate) BTreeMap<BundlePath, Vec<u8>>);

impl Files {
    pub(crate) fn usual() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("model");
        write_usual(&place);
        let manifest = open(&place).unwrap().manifest().clone();
        let files = manifest.files.into_keys().chain([path(MANIFEST_FILE)]);
        Self(files.map(|file| (file.clone(), fs::read(place.join(file.to_relative())).unwrap())).collect())
    }

    pub(crate) fn open(&self) -> Result<Bundle, BundleError> {
        Bundle::from_memory(self.0.iter().map(|(path, content)| (path.clone(), Bytes::from(AlignedBytes::copy_of(content)))))
    }

    pub(crate) fn error(&self) -> String {
        self.open().map(|_| ()).unwrap_err().to_string()
    }

    pub(crate) fn get(&mut self, file: &str) -> &mut Vec<u8> {
        self.0.get_mut(&path(file)).unwrap()
    }

    /// Changes the manifest as JSON.
    pub(crate) fn edit_manifest(&mut self, change: impl FnOnce(&mut serde_json::Value)) {
        let text = self.get(MANIFEST_FILE);
        let mut value = serde_json::from_slice(text).unwrap();
        change(&mut value);
        *text = serde_json::to_vec_pretty(&value).unwrap();
    }

    /// Replaces a file and makes the manifest agree, as somebody who forges a bundle would.
    pub(crate) fn replace(&mut self, file: &str, content: Vec<u8>) {
        let (bytes, sum) = (content.len(), Digest::of(&content));
        *self.get(file) = content;
        self.edit_manifest(|m| m["files"][file] = serde_json::json!({"bytes": bytes, "sha256": sum.to_string()}));
    }

    /// Changes the header of the weight file, keeping its length; the data stays.
    pub(crate) fn edit_header(&mut self, change: impl FnOnce(&mut serde_json::Value)) {
        let bytes = self.get(WEIGHTS).clone();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        change(&mut header);
        let mut header = serde_json::to_vec(&header).unwrap();
        assert!(header.len() <= length);
        header.resize(length, b' ');
        self.replace(WEIGHTS, [&bytes[..8], &header, &bytes[8 + length..]].concat());
    }
}

/// The weight file of a usual bundle.
pub(crate) const WEIGHTS: &str = "weights/00001-of-00001.safetensors";
/// Its program.
pub(crate) const PROGRAM: &str = "programs/text.json";
