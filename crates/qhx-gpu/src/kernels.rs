//! The shaders of this crate: one entry for each file in `shaders/`.

use crate::vulkan::{Adapter, Command, Gpu};
use qhx_ir::DeviceError;

/// A shader, with the variants that it has for devices without some feature.
pub(crate) struct Kernel {
    name: &'static str,
    spirv: &'static [u8],
    /// For devices without integer dot products.
    no_dot: Option<(&'static str, &'static [u8])>,
    /// For devices without subgroup operations.
    plain: Option<(&'static str, &'static [u8])>,
}

macro_rules! spirv {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../spirv/", $name, ".spv")).as_slice())
    };
}

macro_rules! kernels {
    ($($constant:ident: $name:literal $(, no_dot $no_dot:literal)? $(, plain $plain:literal)?;)*) => {
        $(
            #[doc = concat!("`shaders/", $name, ".comp`.")]
            #[allow(clippy::needless_update)]
            pub(crate) const $constant: &Kernel = &Kernel {
                name: $name,
                spirv: include_bytes!(concat!("../spirv/", $name, ".spv")),
                no_dot: kernels!(@ $($no_dot)?),
                plain: kernels!(@ $($plain)?),
            };
        )*
    };
    (@ $name:literal) => { Some(spirv!($name)) };
    (@) => { None };
}

kernels! {
    MAP: "map";
    ROWS: "rows";
    EMBED: "embed";
    ROW: "row", plain "row_plain";
    LINEAR: "linear", no_dot "linear_no_dot", plain "linear_plain";
    LINEAR_MATRIX: "linear_matrix";
    LINEAR_MATRIX_HALF: "linear_matrix_half";
    EXPERTS: "experts", no_dot "experts_no_dot", plain "experts_plain";
    GROUP: "group";
    COMBINE: "combine";
    ROTARY: "rotary";
    ROPE: "rope", plain "rope_plain";
    KEEP: "keep";
    ATTEND: "attend", plain "attend_plain";
    ATTEND_TILES: "attend_tiles", plain "attend_tiles_plain";
    ATTEND_MERGE: "attend_merge";
    ATTEND_MATRIX: "attend_matrix";
    SHORT_CONV: "short_conv";
    DELTA_ROWS: "delta_rows", plain "delta_rows_plain";
    DELTA: "delta", plain "delta_plain";
    ROUTE: "route";
    CONV2D: "conv2d";
    POOL: "pool";
    HADAMARD: "hadamard";
    LARGEST: "largest";
    STEP: "step";
    STEP_TIMED: "step_timed";
}

impl Kernel {
    /// The variant for a device: its name and SPIR-V.
    pub(crate) fn variant(&self, adapter: &Adapter) -> (&'static str, &'static [u8]) {
        let own = (self.name, self.spirv);
        if !adapter.subgroups {
            self.plain.unwrap_or(own)
        } else if !adapter.integer_dot {
            self.no_dot.unwrap_or(own)
        } else {
            own
        }
    }
}

/// A dispatch with its pipeline: addresses come before numbers, as the shaders' arguments do.
pub(crate) fn command(
    gpu: &Gpu,
    kernel: &Kernel,
    constants: &[u32],
    groups: [u32; 3],
    addresses: &[u64],
    numbers: &[u32],
) -> Result<Command, DeviceError> {
    let (name, spirv) = kernel.variant(&gpu.adapter);
    let pipeline = gpu.pipeline(name, spirv, constants)?;
    let arguments = addresses.iter().flat_map(|a| a.to_le_bytes()).chain(numbers.iter().flat_map(|n| n.to_le_bytes())).collect();
    Ok(Command::Dispatch { pipeline, groups, arguments })
}

/// How `delta.comp` divides its work: invocations that share a column of a state, and columns of a workgroup.
pub(crate) fn delta_share(adapter: &Adapter, key_dim: usize) -> (u32, usize) {
    let most = if adapter.subgroups { 16.min(1 << adapter.subgroup_size.trailing_zeros()) } else { 1 };
    let share = most.min(key_dim.next_power_of_two() as u32);
    (share, 64 / share as usize)
}

#[cfg(test)]
mod tests {
    use crate::cache::fingerprint;
    use std::{fs, path::Path};

    /// Whoever changes a shader compiles it, too.
    #[test]
    fn spirv_was_made_from_these_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut sources: Vec<_> = fs::read_dir(root.join("shaders")).unwrap().map(|entry| entry.unwrap().path()).collect();
        sources.sort();
        let bytes = sources.iter().flat_map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().as_bytes().to_vec();
            name.into_iter().chain([0]).chain(fs::read(path).unwrap()).chain([0])
        });
        let noted = fs::read_to_string(root.join("spirv/SOURCES")).unwrap();
        assert_eq!(format!("{:016x}", fingerprint(bytes)), noted.trim(), "run `cargo xtask shaders`");
    }
}
