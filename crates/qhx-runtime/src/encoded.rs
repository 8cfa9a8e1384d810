//! What a tower made of a medium: the rows that take the place of its placeholders.

use crate::{
    Medium,
    features::Features,
    soft_rows::{SOFT_ROWS, deepstack_count, deepstack_name, soft_row_width},
};
use qhx_bundle::Digest;
use qhx_ir::Checked;
use qhx_media::MediaKind;
use std::ops::Range;

/// What a tower made of an image or a sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoded {
    kind: MediaKind,
    digest: Digest,
    rows: usize,
    grid: Option<[usize; 2]>,
    soft: Vec<f32>,
    deepstack: Vec<Vec<f32>>,
}

impl Encoded {
    /// `soft` and each of `deepstack` have `rows` rows of one width.
    pub(crate) fn new(
        kind: MediaKind,
        digest: Digest,
        rows: usize,
        grid: Option<[usize; 2]>,
        soft: Vec<f32>,
        deepstack: Vec<Vec<f32>>,
    ) -> Self {
        Self { kind, digest, rows, grid, soft, deepstack }
    }

    /// What a tower gave of `medium` as its outputs, for the text program `text` to read.
    pub fn from_outputs(medium: &Medium, text: &Checked, output: impl Fn(&str) -> Option<Vec<f32>>) -> Result<Self, String> {
        let width = soft_row_width(text).filter(|width| *width > 0).ok_or("the text program takes no soft rows")?;
        let rows = output(SOFT_ROWS).map_or(0, |soft| soft.len() / width);
        Self::of(medium, [rows, width], deepstack_count(text), output)
    }

    pub(crate) fn of(
        medium: &Medium,
        shape: [usize; 2],
        deepstack: usize,
        output: impl Fn(&str) -> Option<Vec<f32>>,
    ) -> Result<Self, String> {
        let [rows, width] = shape;
        let output = |name: &str| match output(name) {
            Some(numbers) if numbers.len() == rows * width => Ok(numbers),
            Some(numbers) => Err(format!("there are {} numbers for `{name}`, expected {rows} x {width}", numbers.len())),
            None => Err(format!("there are no numbers for `{name}`, expected {rows} x {width}")),
        };
        let soft = output(SOFT_ROWS)?;
        // A sound beside images that have them adds nothing to the layers.
        let deepstack = (0..deepstack).map(|number| match medium.kind() {
            MediaKind::Image => output(&deepstack_name(number)),
            MediaKind::Audio => Ok(vec![0.0; soft.len()]),
        });
        let deepstack = deepstack.collect::<Result<_, _>>()?;
        Ok(Self::new(medium.kind(), medium.digest(), rows, medium.grid(), soft, deepstack))
    }

    /// What it was.
    pub fn kind(&self) -> MediaKind {
        self.kind
    }

    /// The sum of what the tower was given.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// How many soft rows it has: as many placeholders stand for it among the ids.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows and columns of an image's soft rows.
    pub fn grid(&self) -> Option<[usize; 2]> {
        self.grid
    }

    /// Numbers of a soft row.
    pub fn width(&self) -> usize {
        self.soft.len() / self.rows.max(1)
    }

    /// The numbers of some soft rows.
    pub fn soft_rows(&self, rows: Range<usize>) -> &[f32] {
        &self.soft[rows.start * self.width()..rows.end * self.width()]
    }

    /// The numbers alone.
    pub(crate) fn features(&self) -> Features {
        Features { rows: self.rows, soft: self.soft.clone(), deepstack: self.deepstack.clone(), grid: self.grid }
    }

    /// How many sets of rows there are that are added after text layers.
    pub fn deepstack_count(&self) -> usize {
        self.deepstack.len()
    }

    /// The numbers of some rows of deepstack set `number`.
    pub fn deepstack_rows(&self, number: usize, rows: Range<usize>) -> &[f32] {
        &self.deepstack[number][rows.start * self.width()..rows.end * self.width()]
    }

    pub(crate) fn is_same_content(&self, other: &Self) -> bool {
        (self.kind, self.digest) == (other.kind, other.digest)
    }

    /// Bytes that its numbers take.
    pub(crate) fn bytes(&self) -> usize {
        4 * (self.soft.len() + self.deepstack.iter().map(Vec::len).sum::<usize>())
    }
}
