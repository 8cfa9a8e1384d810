//! Recipes: how a bundle weight is made from checkpoint tensors.
//!
//! Large weights are copied row by row; small ones may be computed from whole tensors.

use qhx_ir::Encoding;

/// How a bundle weight is made from checkpoint tensors.
#[derive(Clone, Debug, PartialEq)]
pub enum Recipe {
    /// The tensor as it is (its shape may have extra dimensions of 1).
    Copy(String),
    /// The tensor plus one: zero-centred norm weights.
    PlusOne(String),
    /// Tensors of equal shape, one after the other along a new first dimension.
    Stack(Vec<String>),
    /// The tensor's numbers from number `first` on, in the weight's shape.
    Part {
        /// The tensor.
        tensor: String,
        /// Its shape in the checkpoint.
        shape: Vec<usize>,
        /// Where the weight starts in it.
        first: usize,
    },
    /// Numbers made of whole tensors, for small weights.
    Computed {
        /// The tensors.
        tensors: Vec<String>,
        /// Their shapes in the checkpoint.
        shapes: Vec<Vec<usize>>,
        /// What is made of them.
        formula: Formula,
    },
    /// Another weight, rotated.
    Rotated(Box<Rotated>),
    /// A bias that a constant before a product became.
    Folded(Box<Folded>),
    /// Another weight, each number the nearest that an encoding has.
    Rounded(Box<Recipe>, Encoding),
}

/// A weight that is rotated by the transform of [`qhx_ir::hadamard`]: blocks of neighbouring inputs or outputs, one after the other, are transformed each on its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotated {
    /// The weight as it was.
    pub inner: Recipe,
    /// What is rotated.
    pub side: Side,
    /// Whether the mean of each block is taken away.
    pub centred: bool,
}

/// `matrix · vector + bias`: what a vector that was added to all rows before a product adds behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Folded {
    /// The product's matrix, or those of all experts.
    pub matrix: Recipe,
    /// The matrix's shape: that of the bias, and the columns.
    pub shape: Vec<usize>,
    /// What was added.
    pub vector: Recipe,
    /// The bias that the product had.
    pub bias: Option<Recipe>,
}

/// The side of a matrix on which it is rotated.
#[derive(Clone, Debug, PartialEq)]
pub enum Side {
    /// Every row, in blocks of columns. A vector is one row.
    Input {
        /// Numbers of a block.
        block: usize,
        /// A vector by which every row is multiplied first, number by number.
        gain: Option<Recipe>,
    },
    /// Every column, in blocks of rows.
    Output {
        /// Numbers of a block.
        block: usize,
    },
}

/// What is computed when a bundle is made. Sums are in f64.
#[derive(Clone, Debug, PartialEq)]
pub enum Formula {
    /// The dimensions in another order: dimension `i` of the result is dimension `axes[i]` of the tensor.
    Permute(Vec<usize>),
    /// `ln(1 + eˣ)` of each number.
    Softplus,
    /// Each row times a number of its own.
    ScaleRows(Vec<f32>),
    /// `−a · b`, number by number, of two tensors.
    NegatedProduct,
    /// `rows · tensorᵀ`: constant inputs that a matrix `[out, in]` projects.
    Project {
        /// The rows, one after the other.
        rows: Vec<f32>,
    },
}

impl Recipe {
    /// The checkpoint tensors it reads, in order.
    pub fn tensors(&self) -> Vec<&String> {
        match self {
            Self::Copy(tensor) | Self::PlusOne(tensor) | Self::Part { tensor, .. } => vec![tensor],
            Self::Stack(tensors) | Self::Computed { tensors, .. } => tensors.iter().collect(),
            Self::Rotated(rotated) => {
                rotated.inner.tensors().into_iter().chain(rotated.gain().into_iter().flat_map(Self::tensors)).collect()
            }
            Self::Folded(folded) => folded.parts(&[]).flat_map(|(part, _)| part.tensors()).collect(),
            Self::Rounded(inner, _) => inner.tensors(),
        }
    }

    /// The same weight, rotated on one side, and without its mean there if `centred`.
    pub fn rotated(&self, side: Side, centred: bool) -> Self {
        Self::Rotated(Box::new(Rotated { inner: self.clone(), side, centred }))
    }

    /// Whether it is made of other weights, each with a recipe of its own.
    pub fn is_derived(&self) -> bool {
        matches!(self, Self::Rotated(_) | Self::Folded(_) | Self::Rounded(..))
    }

    /// Whether its columns are rotated, so that it takes rotated rows.
    pub fn has_rotated_inputs(&self) -> bool {
        match self {
            Self::Rotated(rotated) => matches!(rotated.side, Side::Input { .. }) || rotated.inner.has_rotated_inputs(),
            Self::Rounded(inner, _) => inner.has_rotated_inputs(),
            _ => false,
        }
    }

    /// Rows that can be computed only together: from a multiple of this number to the next.
    pub fn rows_together(&self) -> usize {
        match self {
            Self::Rotated(rotated) => match rotated.side {
                Side::Input { .. } => rotated.inner.rows_together(),
                Side::Output { block } => block.max(rotated.inner.rows_together()),
            },
            Self::Rounded(inner, _) => inner.rows_together(),
            _ => 1,
        }
    }

    /// Why a tensor of shape `found` cannot be tensor `index` of a weight of shape `weight`, if it cannot.
    pub fn mismatch(&self, index: usize, found: &[usize], weight: &[usize]) -> Option<Vec<usize>> {
        let expected = match self {
            Self::Part { shape, .. } => return (found != shape).then(|| shape.clone()),
            Self::Computed { shapes, .. } => return (found != shapes[index]).then(|| shapes[index].clone()),
            Self::Rotated(rotated) => {
                let own = rotated.inner.tensors().len();
                return match rotated.gain() {
                    Some(gain) if index >= own => gain.mismatch(index - own, found, &weight[weight.len() - 1..]),
                    _ => rotated.inner.mismatch(index, found, weight),
                };
            }
            Self::Folded(folded) => {
                let mut before = 0;
                for (part, shape) in folded.parts(weight) {
                    let own = part.tensors().len();
                    if index < before + own {
                        return part.mismatch(index - before, found, shape);
                    }
                    before += own;
                }
                return None;
            }
            Self::Rounded(inner, _) => return inner.mismatch(index, found, weight),
            Self::Stack(_) => &weight[1..],
            Self::Copy(_) | Self::PlusOne(_) => weight,
        };
        let real = |shape: &[usize]| shape.iter().copied().filter(|&d| d != 1).collect::<Vec<_>>();
        let fits = real(found) == real(expected) && found.last().copied().unwrap_or(1) == weight[weight.len() - 1];
        (!fits).then(|| expected.to_vec())
    }
}

impl Rotated {
    fn gain(&self) -> Option<&Recipe> {
        match &self.side {
            Side::Input { gain, .. } => gain.as_ref(),
            Side::Output { .. } => None,
        }
    }
}

impl Folded {
    /// What it is made of, with the shape of each; the bias has that of the weight.
    fn parts<'a>(&'a self, weight: &'a [usize]) -> impl Iterator<Item = (&'a Recipe, &'a [usize])> {
        let vector = &self.shape[self.shape.len() - 1..];
        [(&self.matrix, &self.shape[..]), (&self.vector, vector)].into_iter().chain(self.bias.iter().map(move |bias| (bias, weight)))
    }
}

impl Formula {
    /// The weight's numbers, from the numbers of the tensors of these shapes.
    pub fn compute(&self, shapes: &[Vec<usize>], tensors: &[Vec<f32>]) -> Vec<f32> {
        let numbers = &tensors[0];
        match self {
            Self::Permute(axes) => permute(&shapes[0], axes, numbers),
            Self::Softplus => numbers.iter().map(|&x| softplus(f64::from(x)) as f32).collect(),
            Self::ScaleRows(factors) => {
                let columns = numbers.len() / factors.len().max(1);
                numbers.iter().enumerate().map(|(place, x)| x * factors[place / columns.max(1)]).collect()
            }
            Self::NegatedProduct => numbers.iter().zip(&tensors[1]).map(|(a, b)| -(a * b)).collect(),
            Self::Project { rows } => {
                let columns = shapes[0][shapes[0].len() - 1];
                let dot = |row: &[f32], line: &[f32]| row.iter().zip(line).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>() as f32;
                rows.chunks_exact(columns).flat_map(|row| numbers.chunks_exact(columns).map(move |line| dot(row, line))).collect()
            }
        }
    }
}

fn permute(shape: &[usize], axes: &[usize], numbers: &[f32]) -> Vec<f32> {
    let stride = |axis: usize| shape[axis + 1..].iter().product::<usize>();
    let sizes: Vec<(usize, usize)> = axes.iter().map(|&axis| (shape[axis], stride(axis))).collect();
    let source = |mut index: usize| {
        let mut at = 0;
        for &(size, stride) in sizes.iter().rev() {
            at += index % size * stride;
            index /= size;
        }
        at
    };
    (0..numbers.len()).map(|index| numbers[source(index)]).collect()
}

fn softplus(x: f64) -> f64 {
    // ln(1 + eˣ) = max(x, 0) + ln(1 + e^−|x|), which cannot overflow.
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas() {
        let numbers: Vec<f32> = (0..24).map(|n| n as f32).collect();
        let found = Formula::Permute(vec![0, 2, 3, 1]).compute(&[vec![2, 3, 2, 2]], std::slice::from_ref(&numbers));
        // Result [o, r, c, i] is tensor [o, i, r, c].
        assert_eq!(found[..6], [0.0, 4.0, 8.0, 1.0, 5.0, 9.0]);
        assert_eq!(found[12..15], [12.0, 16.0, 20.0]);
        let matrix = vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let rows = vec![1.0, 0.0, 0.0, 0.5, 0.5, 0.5];
        assert_eq!(Formula::Project { rows }.compute(&[vec![2, 3]], &[matrix]), [1.0, 4.0, 3.0, 7.5]);
        assert_eq!(Formula::ScaleRows(vec![1.0, 0.5]).compute(&[], &[vec![2.0, 4.0, 6.0, 8.0]]), [2.0, 4.0, 3.0, 4.0]);
        assert_eq!(Formula::NegatedProduct.compute(&[], &[vec![2.0, -1.0], vec![3.0, 4.0]]), [-6.0, 4.0]);
        let softplus = Formula::Softplus.compute(&[], &[vec![0.0, 200.0, -200.0]]);
        assert_eq!(softplus[..2], [std::f32::consts::LN_2, 200.0]);
        assert!(softplus[2] >= 0.0);
    }

    #[test]
    fn shapes_must_fit() {
        let copy = Recipe::Copy("w".into());
        assert_eq!(copy.mismatch(0, &[6, 1, 4], &[6, 4]), None);
        assert_eq!(copy.mismatch(0, &[4, 6], &[6, 4]), Some(vec![6, 4]));
        let part = Recipe::Part { tensor: "w".into(), shape: vec![8, 3, 2, 2], first: 0 };
        assert_eq!(part.mismatch(0, &[8, 3, 2, 2], &[8, 12]), None);
        assert_eq!(part.mismatch(0, &[8, 12], &[8, 12]), Some(vec![8, 3, 2, 2]));
        let rotated = copy
            .rotated(Side::Input { block: 4, gain: Some(Recipe::PlusOne("norm".into())) }, false)
            .rotated(Side::Output { block: 6 }, true);
        assert_eq!(rotated.tensors(), ["w", "norm"]);
        assert_eq!(rotated.mismatch(0, &[6, 4], &[6, 4]), None);
        assert_eq!(rotated.mismatch(1, &[4], &[6, 4]), None);
        assert_eq!(rotated.mismatch(1, &[6], &[6, 4]), Some(vec![4]));
        let [matrix, vector, bias] = ["w", "norm.bias", "bias"].map(|name| Recipe::Copy(name.into()));
        let folded = Recipe::Folded(Box::new(Folded { matrix, shape: vec![6, 4], vector, bias: Some(bias) }));
        assert_eq!(folded.tensors(), ["w", "norm.bias", "bias"]);
        let shapes = |shapes: [&[usize]; 3]| [0, 1, 2].map(|index| folded.mismatch(index, shapes[index], &[6]));
        assert_eq!(shapes([&[6, 4], &[4], &[6]]), [None, None, None]);
        assert_eq!(shapes([&[4, 6], &[6], &[4]]), [Some(vec![6, 4]), Some(vec![4]), Some(vec![6])]);
        assert_eq!(Recipe::Stack(vec!["a".into()]).mismatch(0, &[3, 4], &[1, 4, 3]), Some(vec![4, 3]));
    }
}
