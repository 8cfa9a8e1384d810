//! From a picture to what an image's tower takes: scaled, normalised, cut into patches.

use super::{MediaError, Picture, picture, resize, size};
use qhx_bundle::{
    Digest,
    media::{ImageFrontEnd, PatchOrder, Patches},
};
use std::{fmt, path::Path};

const CHANNELS: usize = 3;

/// Rows and columns of something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// From top to bottom.
    pub rows: usize,
    /// From left to right.
    pub columns: usize,
}

impl Grid {
    /// How many there are.
    pub fn count(self) -> usize {
        self.rows * self.columns
    }
}

/// An image as its tower takes it.
///
/// It keeps the scaled pixels (three bytes each) and makes the numbers when they are asked for, since patches take up to 24 bytes a pixel.
/// All per-patch values are in block order: block rows, block columns, rows in the block, columns in the block.
#[derive(Clone)]
pub struct Image {
    /// The scaled picture.
    rgb: Vec<u8>,
    /// Patches down and across.
    grid: Grid,
    patches: Patches,
    /// The number for each level, by channel.
    levels: [[f32; 256]; CHANNELS],
    position_side: Option<usize>,
    digest: Digest,
}

impl Image {
    /// Decodes and scales an image file.
    pub fn open(path: &Path, front_end: &ImageFrontEnd) -> Result<Self, MediaError> {
        Self::from_picture(&path.display().to_string(), &Picture::open(path)?, front_end)
    }

    /// Decodes and scales the bytes of an image file. `name` is for errors.
    pub fn decode(name: &str, bytes: &[u8], front_end: &ImageFrontEnd) -> Result<Self, MediaError> {
        Self::from_picture(name, &Picture::decode(name, bytes)?, front_end)
    }

    /// Scales a picture. `name` is for errors.
    pub fn from_picture(name: &str, picture: &Picture, front_end: &ImageFrontEnd) -> Result<Self, MediaError> {
        let patches = front_end.patches;
        let from = (picture.height(), picture.width());
        let to = Self::scaled_size(name, from.0, from.1, front_end)?;
        let rgb = resize::bicubic(picture.rgb(), from, (to.rows, to.columns));
        let grid = Grid { rows: to.rows / patches.size, columns: to.columns / patches.size };
        let digest = Digest::of(&[Digest::of(&rgb).as_bytes().as_slice(), &(to.columns as u64).to_le_bytes()].concat());
        Ok(Self { rgb, grid, patches, levels: levels(front_end), position_side: front_end.position_side, digest })
    }

    /// Rows and columns of pixels that a picture of this size is scaled to, or why there is no such size. `name` is for errors.
    pub fn scaled_size(name: &str, height: usize, width: usize, front_end: &ImageFrontEnd) -> Result<Grid, MediaError> {
        let scaled = picture::check_pixels(width as u64, height as u64)
            .and_then(|()| size::scaled(front_end.resize, front_end.patches, height, width));
        scaled.map(|(rows, columns)| Grid { rows, columns }).map_err(|p| p.of(name))
    }

    /// Patches down and across; there are [`Grid::count`] of them.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// Blocks of patches down and across: the places of the soft rows, row by row.
    pub fn blocks(&self) -> Grid {
        Grid { rows: self.grid.rows / self.patches.block, columns: self.grid.columns / self.patches.block }
    }

    /// Soft rows that the tower makes of the image: one for each block.
    pub fn soft_rows(&self) -> usize {
        self.blocks().count()
    }

    /// Numbers in a patch.
    pub fn patch_numbers(&self) -> usize {
        CHANNELS * self.patches.temporal * self.patches.size * self.patches.size
    }

    /// Equal for images that look the same to the tower, whatever files they came from.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The scaled picture: rows of red, green, blue.
    pub fn scaled_rgb(&self) -> &[u8] {
        &self.rgb
    }

    /// The patches, `[patches, numbers]`: `patches`.
    pub fn patches(&self) -> Vec<f32> {
        let numbers = self.patch_numbers();
        let mut output = vec![0.0; self.grid.count() * numbers];
        for ((row, column), patch) in self.places().zip(output.chunks_exact_mut(numbers)) {
            match self.patches.order {
                PatchOrder::ChannelFirst => self.cut_channel_first(row, column, patch),
                PatchOrder::ChannelLast => self.cut_channel_last(row, column, patch),
            }
        }
        output
    }

    /// Row and column of each patch, `[2, patches]`: `patch_grid`.
    pub fn patch_grid(&self) -> Vec<i32> {
        [self.patch_rows(), self.patch_columns()].concat()
    }

    /// Row of each patch: `patch_rows`.
    pub fn patch_rows(&self) -> Vec<i32> {
        self.places().map(|(row, _)| row as i32).collect()
    }

    /// Column of each patch: `patch_columns`.
    pub fn patch_columns(&self) -> Vec<i32> {
        self.places().map(|(_, column)| column as i32).collect()
    }

    /// For each patch the four rows of the position table between which it lies and their factors, `[patches, 4]` each: `interpolation_taps.index` and
    /// `interpolation_taps.factor`. None where the front end has no such table.
    pub fn interpolation_taps(&self) -> Option<(Vec<i32>, Vec<f32>)> {
        let side = self.position_side?;
        let rows: Vec<_> = (0..self.grid.rows).map(|row| axis_taps(row, self.grid.rows, side)).collect();
        let columns: Vec<_> = (0..self.grid.columns).map(|column| axis_taps(column, self.grid.columns, side)).collect();
        let count = self.grid.count() * 4;
        let (mut index, mut factor) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for (row, column) in self.places() {
            for (row_at, row_factor) in rows[row] {
                for (column_at, column_factor) in columns[column] {
                    index.push((row_at * side + column_at) as i32);
                    factor.push(row_factor * column_factor);
                }
            }
        }
        Some((index, factor))
    }

    /// Row and column of each patch, in block order.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let (block, blocks) = (self.patches.block, self.blocks());
        (0..self.grid.count()).map(move |number| {
            let (inside, of) = (number % (block * block), number / (block * block));
            (of / blocks.columns * block + inside / block, of % blocks.columns * block + inside % block)
        })
    }

    /// The pixels of row `y` of a patch.
    fn patch_row(&self, row: usize, column: usize, y: usize) -> &[u8] {
        let size = self.patches.size;
        let start = ((row * size + y) * self.grid.columns + column) * size * CHANNELS;
        &self.rgb[start..start + size * CHANNELS]
    }

    /// Channel, time, row, column.
    fn cut_channel_first(&self, row: usize, column: usize, patch: &mut [f32]) {
        let Patches { size, temporal, .. } = self.patches;
        let area = size * size;
        for (channel, copies) in patch.chunks_exact_mut(temporal * area).enumerate() {
            let (first, later) = copies.split_at_mut(area);
            for (y, numbers) in first.chunks_exact_mut(size).enumerate() {
                let pixels = self.patch_row(row, column, y).iter().skip(channel).step_by(CHANNELS);
                for (number, &level) in numbers.iter_mut().zip(pixels) {
                    *number = self.levels[channel][usize::from(level)];
                }
            }
            later.chunks_exact_mut(area).for_each(|copy| copy.copy_from_slice(first));
        }
    }

    /// Time, row, column, channel.
    fn cut_channel_last(&self, row: usize, column: usize, patch: &mut [f32]) {
        let size = self.patches.size;
        let (first, later) = patch.split_at_mut(size * size * CHANNELS);
        for (y, numbers) in first.chunks_exact_mut(size * CHANNELS).enumerate() {
            for (pixel, levels) in numbers.chunks_exact_mut(CHANNELS).zip(self.patch_row(row, column, y).chunks_exact(CHANNELS)) {
                for (channel, number) in pixel.iter_mut().enumerate() {
                    *number = self.levels[channel][usize::from(levels[channel])];
                }
            }
        }
        later.chunks_exact_mut(first.len()).for_each(|copy| copy.copy_from_slice(first));
    }
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Grid { rows, columns } = self.grid;
        write!(f, "Image({rows} x {columns} patches, {} soft rows)", self.soft_rows())
    }
}

/// `(level · rescale − mean) / std` for each level, in 32 bits and with the factor moved into mean and divisor, as the models' preprocessing does.
fn levels(front_end: &ImageFrontEnd) -> [[f32; 256]; CHANNELS] {
    let scale = (1.0 / front_end.rescale) as f32;
    std::array::from_fn(|channel| {
        let (mean, std) = (front_end.mean[channel] as f32 * scale, front_end.std[channel] as f32 * scale);
        std::array::from_fn(|level| (level as f32 - mean) / std)
    })
}

/// The two rows of a table of `side` between which position `at` of `count` lies when first meets first and last meets last, with their factors.
fn axis_taps(at: usize, count: usize, side: usize) -> [(usize, f32); 2] {
    let source = at as f32 * (side - 1) as f32 / (count - 1).max(1) as f32;
    let below = source.floor();
    [0, 1].map(|offset| {
        let factor = (1.0 - (source - below - offset as f32).abs()).max(0.0);
        ((below as usize + offset).min(side - 1), factor)
    })
}
