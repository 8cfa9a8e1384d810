//! AVX2 and AVX-512 vectors.

use super::{Kernel, MOST_LANES, Vector};
use std::arch::x86_64::*;

/// Runs a kernel with AVX2 vectors.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn with_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx2>() }
}

/// Runs a kernel with AVX-512 vectors.
///
/// # Safety
/// The CPU has what [`super::super::InstructionSet::Avx512Vnni`] names.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(crate) unsafe fn with_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's promise.
    unsafe { kernel.run::<Avx512>() }
}

/// Eight lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub(crate) __m256);

/// Sixteen lanes.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

const TO_NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// The lanes below `n`.
#[inline(always)]
unsafe fn first_lanes(n: usize) -> __m256i {
    // SAFETY: the caller has AVX2.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

// SAFETY of every block below: the promises that `Vector` asks of its callers (CPU features, enough elements behind pointers).
#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx2 {
    const LANES: usize = 8;

    #[inline(always)]
    unsafe fn fetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[inline(always)]
    unsafe fn fetch_early(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(_mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_part(from: *const f32, n: usize) -> Self {
        unsafe { Self(_mm256_maskload_ps(from, first_lanes(n))) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe { Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()))))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe { Self(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self, Self) {
        unsafe {
            let bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
            let low = _mm256_and_si256(bytes, _mm256_set1_epi32(15));
            (Self(_mm256_cvtepi32_ps(low)), Self(_mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        unsafe { _mm256_stream_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn streamed() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        unsafe { _mm256_maskstore_ps(to, first_lanes(n), self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe { _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        unsafe {
            let whole = _mm256_cvtps_epi32(self.0);
            let halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
            _mm_storel_epi64(to.cast(), _mm_packs_epi16(halves, halves));
        }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { Self(_mm256_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        unsafe { Self(_mm256_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        unsafe { Self(_mm256_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        unsafe { Self(_mm256_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // The instruction gives its second operand where either is not a number.
        unsafe { Self(_mm256_max_ps(b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        unsafe { Self(_mm256_min_ps(b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Self(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Self(_mm256_round_ps::<TO_NEAREST>(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        unsafe {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
        }
    }
    #[inline(always)]
    unsafe fn less(self, than: Self, yes: Self, no: Self) -> Self {
        unsafe { Self(_mm256_blendv_ps(no.0, yes.0, _mm256_cmp_ps::<_CMP_LT_OQ>(self.0, than.0))) }
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; MOST_LANES]) {
        unsafe {
            // Squares of 4 x 4 inside the halves of vectors, then the halves.
            let mut fours = [_mm256_setzero_ps(); 8];
            for (rows, fours) in square.chunks_exact(4).zip(fours.chunks_exact_mut(4)) {
                let (low, high) = (_mm256_unpacklo_ps(rows[0].0, rows[1].0), _mm256_unpackhi_ps(rows[0].0, rows[1].0));
                let (more_low, more_high) = (_mm256_unpacklo_ps(rows[2].0, rows[3].0), _mm256_unpackhi_ps(rows[2].0, rows[3].0));
                fours[0] = _mm256_shuffle_ps::<0x44>(low, more_low);
                fours[1] = _mm256_shuffle_ps::<0xee>(low, more_low);
                fours[2] = _mm256_shuffle_ps::<0x44>(high, more_high);
                fours[3] = _mm256_shuffle_ps::<0xee>(high, more_high);
            }
            for c in 0..4 {
                square[c] = Self(_mm256_permute2f128_ps::<0x20>(fours[c], fours[4 + c]));
                square[4 + c] = Self(_mm256_permute2f128_ps::<0x31>(fours[c], fours[4 + c]));
            }
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe {
            let half = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }
    #[inline(always)]
    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        unsafe {
            let [a, b, c, d] = four.map(|lanes| _mm_add_ps(_mm256_castps256_ps128(lanes.0), _mm256_extractf128_ps::<1>(lanes.0)));
            let first = _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
            let second = _mm_add_ps(_mm_movelh_ps(c, d), _mm_movehl_ps(d, c));
            let mut sums = [0.0; 4];
            let sum = _mm_add_ps(_mm_shuffle_ps::<0x88>(first, second), _mm_shuffle_ps::<0xdd>(first, second));
            _mm_storeu_ps(sums.as_mut_ptr(), sum);
            sums
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe {
            let half = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)))
        }
    }
}

#[allow(clippy::undocumented_unsafe_blocks)]
impl Vector for Avx512 {
    const LANES: usize = 16;

    #[inline(always)]
    unsafe fn fetch(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }
    #[inline(always)]
    unsafe fn fetch_early(address: *const u8) {
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        unsafe { Self(_mm512_loadu_ps(from)) }
    }
    #[inline(always)]
    unsafe fn load_part(from: *const f32, n: usize) -> Self {
        unsafe { Self(_mm512_maskz_loadu_ps((1u16 << n) - 1, from)) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        unsafe { Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))) }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> Self {
        unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(from: *const u8) -> (Self, Self) {
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
            let low = _mm512_and_si512(bytes, _mm512_set1_epi32(15));
            (Self(_mm512_cvtepi32_ps(low)), Self(_mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(bytes))))
        }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn stream(self, to: *mut f32) {
        unsafe { _mm512_stream_ps(to, self.0) }
    }
    #[inline(always)]
    unsafe fn streamed() {
        unsafe { _mm_sfence() }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize) {
        unsafe { _mm512_mask_storeu_ps(to, (1u16 << n) - 1, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, to: *mut i8) {
        unsafe { _mm_storeu_si128(to.cast(), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(self.0))) }
    }
    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        unsafe { Self(_mm512_add_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        unsafe { Self(_mm512_sub_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        unsafe { Self(_mm512_mul_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        unsafe { Self(_mm512_div_ps(self.0, b.0)) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, b: Self, c: Self) -> Self {
        unsafe { Self(_mm512_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        unsafe { Self(_mm512_max_ps(b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        unsafe { Self(_mm512_min_ps(b.0, self.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Self(_mm512_abs_ps(self.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Self(_mm512_roundscale_ps::<TO_NEAREST>(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_whole(self) -> Self {
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent)))
        }
    }
    #[inline(always)]
    unsafe fn less(self, than: Self, yes: Self, no: Self) -> Self {
        unsafe { Self(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(self.0, than.0), no.0, yes.0)) }
    }
    #[inline(always)]
    unsafe fn transpose(square: &mut [Self; MOST_LANES]) {
        unsafe {
            // Squares of 4 x 4 inside the quarters of vectors, then the quarters.
            let mut fours = [_mm512_setzero_ps(); MOST_LANES];
            for (rows, fours) in square.chunks_exact(4).zip(fours.chunks_exact_mut(4)) {
                let (low, high) = (_mm512_unpacklo_ps(rows[0].0, rows[1].0), _mm512_unpackhi_ps(rows[0].0, rows[1].0));
                let (more_low, more_high) = (_mm512_unpacklo_ps(rows[2].0, rows[3].0), _mm512_unpackhi_ps(rows[2].0, rows[3].0));
                fours[0] = _mm512_shuffle_ps::<0x44>(low, more_low);
                fours[1] = _mm512_shuffle_ps::<0xee>(low, more_low);
                fours[2] = _mm512_shuffle_ps::<0x44>(high, more_high);
                fours[3] = _mm512_shuffle_ps::<0xee>(high, more_high);
            }
            for c in 0..4 {
                let even = _mm512_shuffle_f32x4::<0x88>(fours[c], fours[4 + c]);
                let more_even = _mm512_shuffle_f32x4::<0x88>(fours[8 + c], fours[12 + c]);
                let odd = _mm512_shuffle_f32x4::<0xdd>(fours[c], fours[4 + c]);
                let more_odd = _mm512_shuffle_f32x4::<0xdd>(fours[8 + c], fours[12 + c]);
                square[c] = Self(_mm512_shuffle_f32x4::<0x88>(even, more_even));
                square[4 + c] = Self(_mm512_shuffle_f32x4::<0x88>(odd, more_odd));
                square[8 + c] = Self(_mm512_shuffle_f32x4::<0xdd>(even, more_even));
                square[12 + c] = Self(_mm512_shuffle_f32x4::<0xdd>(odd, more_odd));
            }
        }
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        unsafe { Avx2(_mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0))).sum() }
    }
    #[inline(always)]
    unsafe fn sums(four: [Self; 4]) -> [f32; 4] {
        unsafe {
            // Halves of two vectors side by side, then quarters of four.
            let halves = |a: Self, b: Self| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a.0, b.0), _mm512_shuffle_f32x4::<0xee>(a.0, b.0));
            let (first, second) = (halves(four[0], four[1]), halves(four[2], four[3]));
            let quarters = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(first, second), _mm512_shuffle_f32x4::<0xdd>(first, second));
            // Within each quarter, as four lanes are summed.
            let pairs = _mm512_add_ps(quarters, _mm512_permute_ps::<0b01_00_11_10>(quarters));
            let sums = _mm512_add_ps(pairs, _mm512_permute_ps::<0b10_11_00_01>(pairs));
            let sums = _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), sums);
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(sums));
            out
        }
    }
    #[inline(always)]
    unsafe fn largest(self) -> f32 {
        unsafe { _mm512_reduce_max_ps(self.0) }
    }
}
