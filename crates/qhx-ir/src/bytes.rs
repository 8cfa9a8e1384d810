//! Shared, immutable bytes: a range of a file mapping or buffer that keeps its owner alive.

use std::{fmt, ops::Range, sync::Arc};

/// The alignment, in bytes, of every tensor and of every tensor row in the one weight layout.
pub const ALIGNMENT: usize = 64;

/// A cheap-to-clone view of immutable memory (a mapping or an [`AlignedBytes`]) that keeps its owner alive.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn AsRef<[u8]> + Send + Sync>,
    range: Range<usize>,
}

impl Bytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Self {
        let len = (*owner).as_ref().len();
        Self { owner, range: 0..len }
    }

    /// A part of these bytes, or `None` if `range` is out of bounds.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let (start, end) = (self.range.start.checked_add(range.start)?, self.range.start.checked_add(range.end)?);
        (start <= end && end <= self.range.end).then(|| Self { owner: self.owner.clone(), range: start..end })
    }

    /// The bytes themselves.
    pub fn as_slice(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.range.len())
    }
}

impl From<AlignedBytes> for Bytes {
    fn from(bytes: AlignedBytes) -> Self {
        Self::new(Arc::new(bytes))
    }
}

/// Owned bytes whose first byte is aligned to [`ALIGNMENT`].
#[derive(Clone, Default)]
pub struct AlignedBytes {
    lines: Vec<Line>,
    len: usize,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);

impl AlignedBytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        Self { lines: vec![Line([0; ALIGNMENT]); len.div_ceil(ALIGNMENT)], len }
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut copy = Self::zeroed(bytes.len());
        copy.as_mut().copy_from_slice(bytes);
        copy
    }
}

// SAFETY of the two casts is bytemuck's: `Line` is `repr(C)`, has no padding (64 bytes at alignment 64) and any bytes are valid.
#[allow(unsafe_code)]
mod pod {
    use super::Line;
    // SAFETY: all bit patterns of a byte array are valid.
    unsafe impl bytemuck::Zeroable for Line {}
    // SAFETY: `repr(C)`, no padding, no invalid bit patterns, `Copy` and `'static`.
    unsafe impl bytemuck::Pod for Line {}
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.lines)[..self.len]
    }
}

impl AsMut<[u8]> for AlignedBytes {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aligned_and_bounded() {
        let bytes = Bytes::from(AlignedBytes::copy_of(&[1, 2, 3, 4, 5]));
        assert_eq!(bytes.as_ptr() as usize % ALIGNMENT, 0);
        assert_eq!(&*bytes.slice(1..3).unwrap().slice(1..2).unwrap(), &[3]);
        assert!(bytes.slice(1..6).is_none());
        assert!(bytes.slice(1..3).unwrap().slice(0..3).is_none());
        assert!(bytes.slice(usize::MAX..usize::MAX).is_none());
    }
}
