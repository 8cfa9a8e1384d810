//! Weights in the device's memory.

use crate::{
    transfers::{Content, Piece, Source},
    upload::Upload,
    vulkan::{Buffer, Fault, Gpu, PAGE_BYTES, Use, pages_of},
};
use qhx_ir::{BlockEncoding, Checked, DeviceError, Encoding, LoadOptions, Name, Quants, ScaleType, WeightTensor, Weights};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Range,
    sync::Arc,
};

/// A weight as it is stored in a bundle, on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    pub(crate) encoding: Encoding,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) data: u64,
    pub(crate) scales: u64,
    pub(crate) minima: u64,
    pub(crate) data_bytes: u32,
    pub(crate) scale_bytes: u32,
    pub(crate) min_bytes: u32,
}

impl Matrix {
    /// Numbers of a row that `product.glsl` takes at once.
    pub(crate) fn chunk_columns(&self) -> usize {
        match self.constants()[0] {
            0 => 4,
            1 | 2 => 8,
            3 => 16,
            _ => 32,
        }
    }

    /// Its encoding as the constants of `weight.glsl`.
    pub(crate) fn constants(&self) -> [u32; 4] {
        match self.encoding {
            Encoding::F32 => [0, 0, 0, 0],
            Encoding::F16 => [1, 0, 0, 0],
            Encoding::Bf16 => [2, 0, 0, 0],
            Encoding::I8Row => [3, 0, 0, 1],
            Encoding::Block(BlockEncoding { quants, block, min, scale }) => {
                let kind = match quants {
                    Quants::I8 => 3,
                    Quants::I6 => 4,
                    Quants::I4 => 5,
                };
                [kind, block as u32, min as u32, (scale == ScaleType::F32) as u32]
            }
        }
    }
}

/// All weights of a program on the device.
pub(crate) struct DeviceWeights {
    /// Weights that enter products and look-ups, as they are stored.
    pub(crate) matrices: HashMap<Name, Matrix>,
    /// Weights that are read as plain numbers, in f32.
    pub(crate) plain: HashMap<Name, u64>,
    /// Numbers that the program holds itself, by their use.
    pub(crate) tables: HashMap<String, u64>,
    /// Where the parts of matrices can be replaced: their data, scales and minima.
    replaceable: HashMap<Name, [Option<Located>; 3]>,
    /// The same for numbers, and how many there are.
    replaceable_numbers: HashMap<Name, (Located, usize)>,
    /// The memory behind the addresses.
    _buffers: Vec<Arc<Buffer>>,
}

/// A buffer, and the first byte in it.
type Located = (Arc<Buffer>, u64);

impl DeviceWeights {
    /// What has to be written where, so that one of the parts of a weight becomes another.
    pub(crate) fn replacement(&self, weight: &str, number: usize, part: &WeightTensor) -> Result<Vec<Piece>, DeviceError> {
        let wrong = |reason: String| DeviceError::Weight { name: weight.into(), reason };
        let unfit = || wrong(format!("{} {:?} cannot be its part {number}", part.encoding(), part.shape()));
        let mut pieces = Vec::new();
        if let Some((own, places)) = self.matrices.get(weight).zip(self.replaceable.get(weight)) {
            let (rows, count) = (part.rows(), own.rows / part.rows().max(1));
            if (part.encoding(), part.columns()) != (own.encoding, own.columns) || rows * count != own.rows || number >= count {
                return Err(unfit());
            }
            for (content, place) in [Content::Data, Content::Scale, Content::Min].into_iter().zip(places) {
                if let Some((to, offset)) = place {
                    let offset = offset + (number * content.of(part).len()) as u64;
                    pieces.push(Piece { to: to.clone(), offset, content: Source::Stored(part.clone(), content) });
                }
            }
        }
        if let Some(((to, offset), count)) = self.replaceable_numbers.get(weight) {
            let part = decoded(part);
            if part.is_empty() || count % part.len() != 0 || number >= count / part.len() {
                return Err(unfit());
            }
            let offset = offset + 4 * (number * part.len()) as u64;
            pieces.push(Piece { to: to.clone(), offset, content: Source::Numbers(part) });
        }
        if pieces.is_empty() {
            return Err(wrong("cannot be replaced".into()));
        }
        Ok(pieces)
    }
}

/// Parts of weights begin at multiples of this.
const ALIGNMENT: u64 = 256;
const LARGEST_SLAB: u64 = 1 << 30;

/// Loads all weights of a program, and tables of numbers that it needs beside them.
pub(crate) fn load(
    gpu: &Arc<Gpu>,
    program: &Checked,
    weights: &Arc<dyn Weights>,
    tables: BTreeMap<String, Vec<u8>>,
    options: &LoadOptions,
) -> Result<DeviceWeights, DeviceError> {
    let progress = &options.progress;
    let (matrices, plain) = uses(program);
    let is_replaceable = |name: &Name| options.replaceable.contains(name);
    let staying = matrices.iter().filter(|name| !is_replaceable(name)).cloned().collect();
    let imported = in_place(gpu, program, weights, &staying)?;
    // What is replaced is copied, so that no call sees half of it.
    let purpose = |replaceable: bool| if gpu.adapter.unified && !replaceable { Use::Unified } else { Use::Weights };
    let mut layout = Layout::default();
    let largest = gpu.largest_buffer();
    let too_large = |kind: &str, name: &str, bytes: u64| {
        DeviceError::Resources(format!("{kind} `{name}` has {bytes} bytes, but the GPU takes at most {largest} in one piece"))
    };
    let mut placed = Vec::new();
    for (name, declared) in &program.weights {
        let size = Size::new(declared.encoding, &declared.shape);
        let mut parts = [None; 3];
        let mut place =
            |bytes: u64| layout.place(bytes, largest, purpose(is_replaceable(name))).map_err(|bytes| too_large("weight", name, bytes));
        if matrices.contains(name) && (imported.is_none() || is_replaceable(name)) {
            for (part, bytes) in parts.iter_mut().zip(size.parts) {
                *part = place(bytes)?;
            }
        }
        placed.push((name, parts, place(if plain.contains(name) { 4 * size.numbers } else { 0 })?));
    }
    let mut table_places = Vec::new();
    for (name, bytes) in &tables {
        table_places.push(layout.place(bytes.len() as u64, largest, purpose(false)).map_err(|bytes| too_large("table", name, bytes))?);
    }
    let (needed, available) = (layout.bytes(), gpu.available());
    if needed > available {
        let reason = format!("program `{}` has {needed} bytes of weights, {available} bytes can be used", program.name);
        return Err(DeviceError::Exhausted { device: "gpu".into(), reason });
    }
    let buffers = layout.slabs.iter().map(|&(bytes, purpose)| Buffer::new(gpu, bytes, purpose).map(Arc::new));
    let buffers = buffers.collect::<Result<Vec<_>, _>>()?;
    let mut upload = Upload::new(gpu, false);
    let address = |place: Place| buffers[place.slab].address() + place.offset;
    let located = |place: Place| (buffers[place.slab].clone(), place.offset);
    let InPlace { addresses, buffers: lent } = imported.unwrap_or_default();
    let mut loaded = DeviceWeights {
        matrices: HashMap::new(),
        plain: HashMap::new(),
        tables: HashMap::new(),
        replaceable: HashMap::new(),
        replaceable_numbers: HashMap::new(),
        _buffers: lent,
    };
    let mut done = 0;
    for (name, parts, numbers) in placed {
        // One after the other: they may come from another process.
        let tensor = weights.declared(program, name)?;
        for (part, bytes) in parts.iter().zip([tensor.data(), tensor.scale(), tensor.min()]) {
            if let Some(place) = *part {
                upload.write(&buffers[place.slab], place.offset, bytes)?;
            }
        }
        if matrices.contains(name) {
            let row = tensor.row_bytes();
            let [data, scales, minima] = addresses.get(name).copied().unwrap_or_else(|| parts.map(|place| place.map_or(0, address)));
            let (encoding, rows, columns) = (tensor.encoding(), tensor.rows(), tensor.columns());
            let [data_bytes, scale_bytes, min_bytes] = [row.data, row.scale, row.min].map(|bytes| bytes as u32);
            let matrix = Matrix { encoding, rows, columns, data, scales, minima, data_bytes, scale_bytes, min_bytes };
            loaded.matrices.insert(name.clone(), matrix);
            if is_replaceable(name) {
                loaded.replaceable.insert(name.clone(), parts.map(|place| place.map(located)));
            }
        }
        if let Some(place) = numbers {
            upload.write(&buffers[place.slab], place.offset, bytemuck::cast_slice(&decoded(&tensor)))?;
            loaded.plain.insert(name.clone(), address(place));
            if is_replaceable(name) {
                loaded.replaceable_numbers.insert(name.clone(), (located(place), tensor.rows() * tensor.columns()));
            }
        }
        if let Some(progress) = progress {
            done += parts.iter().chain([&numbers]).flatten().map(|place| place.bytes).sum::<u64>();
            progress.tell(done, needed);
        }
    }
    for ((name, bytes), place) in tables.into_iter().zip(table_places) {
        if let Some(place) = place {
            upload.write(&buffers[place.slab], place.offset, &bytes)?;
            loaded.tables.insert(name, address(place));
        }
    }
    upload.finish()?;
    loaded._buffers.extend(buffers);
    Ok(loaded)
}

/// The bytes of a weight's parts, and how many numbers it has.
struct Size {
    parts: [u64; 3],
    numbers: u64,
}

impl Size {
    fn new(encoding: Encoding, shape: &[usize]) -> Self {
        let (columns, rows) = shape.split_last().map_or((0, 0), |(&columns, rows)| (columns, rows.iter().map(|&n| n as u64).product()));
        let row = encoding.row_bytes(columns).map_or([0; 3], |row| [row.data, row.scale, row.min]);
        Self { parts: row.map(|bytes| rows * bytes as u64), numbers: rows * columns as u64 }
    }
}

/// Weights that are read where they lie in memory of the host.
#[derive(Default)]
struct InPlace {
    /// Of data, scales and minima; 0 for what a weight does not have.
    addresses: HashMap<Name, [u64; 3]>,
    buffers: Vec<Arc<Buffer>>,
}

/// Uses weights where they lie, on a GPU that shares memory with the host and can; none where they have to be copied.
fn in_place(
    gpu: &Arc<Gpu>,
    program: &Checked,
    weights: &Arc<dyn Weights>,
    matrices: &BTreeSet<Name>,
) -> Result<Option<InPlace>, DeviceError> {
    let alignment = gpu.adapter.import_alignment.filter(|&alignment| alignment as usize <= PAGE_BYTES);
    if !gpu.adapter.unified || alignment.is_none() {
        return Ok(None);
    }
    let tensors = matrices.iter().map(|name| Ok((name, weights.declared(program, name)?))).collect::<Result<Vec<_>, DeviceError>>()?;
    let mut all: Vec<(Range<usize>, &WeightTensor)> = Vec::new();
    for (_, tensor) in &tensors {
        let held = [tensor.data(), tensor.scale(), tensor.min()].into_iter().filter(|part| !part.is_empty());
        all.extend(held.map(|part| (pages_of(part), tensor)));
    }
    all.sort_by_key(|(pages, _)| pages.start);
    let most = gpu.largest_buffer() as usize / PAGE_BYTES;
    let mut runs: Vec<(Range<usize>, Vec<WeightTensor>)> = Vec::new();
    for (pages, tensor) in all {
        match runs.last_mut() {
            Some((run, owners)) if pages.start <= run.end && pages.end.max(run.end) - run.start <= most => {
                run.end = run.end.max(pages.end);
                owners.push(tensor.clone());
            }
            _ => runs.push((pages, vec![tensor.clone()])),
        }
    }
    let import = |(pages, owners): (Range<usize>, Vec<WeightTensor>)| {
        let bytes = pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
        Ok((bytes.clone(), Arc::new(Buffer::imported(gpu, bytes, owners)?)))
    };
    // A driver may take some memory and not other: then all is copied.
    let Ok(buffers) = runs.into_iter().map(import).collect::<Result<Vec<_>, Fault>>() else { return Ok(None) };
    let address = |part: &[u8]| {
        let start = part.as_ptr() as usize;
        let holds = |bytes: &Range<usize>| !part.is_empty() && bytes.start <= start && start + part.len() <= bytes.end;
        let found = buffers.iter().find(|(bytes, _)| holds(bytes));
        found.map_or(0, |(bytes, buffer)| buffer.address() + (start - bytes.start) as u64)
    };
    let addresses = tensors.iter().map(|(name, t)| ((*name).clone(), [t.data(), t.scale(), t.min()].map(address))).collect();
    Ok(Some(InPlace { addresses, buffers: buffers.into_iter().map(|(_, buffer)| buffer).collect() }))
}

/// The weights that enter products and look-ups, and those that are read as plain numbers.
fn uses(program: &Checked) -> (BTreeSet<Name>, BTreeSet<Name>) {
    let (mut matrices, mut plain) = (BTreeSet::new(), BTreeSet::new());
    for op in &program.ops {
        let own = op.op.matrices();
        plain.extend(op.op.weights().into_iter().skip(own.len()).cloned());
        matrices.extend(own.into_iter().cloned());
    }
    (matrices, plain)
}

fn decoded(tensor: &WeightTensor) -> Vec<f32> {
    let mut numbers = vec![0.0; tensor.rows() * tensor.columns()];
    numbers.chunks_exact_mut(tensor.columns().max(1)).enumerate().for_each(|(row, out)| tensor.decode_row(row, out));
    numbers
}

#[derive(Clone, Copy)]
struct Place {
    slab: usize,
    offset: u64,
    bytes: u64,
}

/// Which part of which buffer holds what.
#[derive(Default)]
struct Layout {
    /// Bytes of each buffer, and what it is for.
    slabs: Vec<(u64, Use)>,
}

impl Layout {
    /// A place for some bytes; none for none. The error is the number of bytes that no buffer can hold.
    fn place(&mut self, bytes: u64, largest: u64, purpose: Use) -> Result<Option<Place>, u64> {
        if bytes == 0 {
            return Ok(None);
        }
        let size = bytes.next_multiple_of(ALIGNMENT);
        if size > largest {
            return Err(bytes);
        }
        let has_room = |&(used, own): &(u64, Use)| own == purpose && used + size <= largest.min(LARGEST_SLAB);
        let slab = self.slabs.iter().rposition(has_room).unwrap_or_else(|| {
            self.slabs.push((0, purpose));
            self.slabs.len() - 1
        });
        let used = &mut self.slabs[slab].0;
        *used += size;
        Ok(Some(Place { slab, offset: *used - size, bytes }))
    }

    fn bytes(&self) -> u64 {
        self.slabs.iter().map(|(bytes, _)| bytes).sum()
    }
}
