//! The part of QNN's C interface that qhx uses, declared by hand.
//!
//! Layouts hold for 64-bit Linux and Android; the assertions below fix every offset that the library reads. Tables of functions are never
//! copied and grow at their end from release to release: only slots that the oldest accepted version has are declared.
#![allow(unsafe_code)] // Declarations of foreign functions; calls are in the safe modules beside this one.

use std::{
    ffi::{c_char, c_void},
    mem::{offset_of, size_of},
    ptr,
};

/// An object owned by the library.
pub(crate) type Handle = *mut c_void;
/// What every call returns: 0, or an error in the low 16 bits.
pub(crate) type Status = u64;
/// A function that qhx does not call.
type Unused = Option<unsafe extern "C" fn()>;
/// Receives the library's log lines: format, level, time stamp, `va_list`.
pub(crate) type LogCallback = unsafe extern "C" fn(*const c_char, u32, u64, *mut c_void);
/// A null-terminated array of pointers to configurations.
pub(crate) type Configs = *const *const Config;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(crate) major: u32,
    pub(crate) minor: u32,
    pub(crate) patch: u32,
}

/// An entry of `QnnInterface_getProviders`.
#[repr(C)]
pub(crate) struct Interface {
    pub(crate) backend_id: u32,
    pub(crate) provider: *const c_char,
    pub(crate) core: Version,
    pub(crate) backend: Version,
    pub(crate) table: Table,
}

#[repr(C)]
pub(crate) struct Table {
    _property_has_capability: Unused,
    pub(crate) backend_create: Option<unsafe extern "C" fn(Handle, Configs, *mut Handle) -> Status>,
    _backend_set_config: Unused,
    _backend_get_api_version: Unused,
    pub(crate) backend_get_build_id: Option<unsafe extern "C" fn(*mut *const c_char) -> Status>,
    _backend_register_op_package: Unused,
    _backend_get_supported_operations: Unused,
    pub(crate) backend_validate_op: Option<unsafe extern "C" fn(Handle, Op) -> Status>,
    pub(crate) backend_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    pub(crate) context_create: Option<unsafe extern "C" fn(Handle, Handle, Configs, *mut Handle) -> Status>,
    _context_set_config: Unused,
    pub(crate) context_get_binary_size: Option<unsafe extern "C" fn(Handle, *mut u64) -> Status>,
    pub(crate) context_get_binary: Option<unsafe extern "C" fn(Handle, *mut c_void, u64, *mut u64) -> Status>,
    pub(crate) context_create_from_binary:
        Option<unsafe extern "C" fn(Handle, Handle, Configs, *const c_void, u64, *mut Handle, Handle) -> Status>,
    pub(crate) context_free: Option<unsafe extern "C" fn(Handle, Handle) -> Status>,
    pub(crate) graph_create: Option<unsafe extern "C" fn(Handle, *const c_char, Configs, *mut Handle) -> Status>,
    _graph_create_subgraph: Unused,
    _graph_set_config: Unused,
    pub(crate) graph_add_node: Option<unsafe extern "C" fn(Handle, Op) -> Status>,
    pub(crate) graph_finalize: Option<unsafe extern "C" fn(Handle, Handle, Handle) -> Status>,
    pub(crate) graph_retrieve: Option<unsafe extern "C" fn(Handle, *const c_char, *mut Handle) -> Status>,
    pub(crate) graph_execute: Option<unsafe extern "C" fn(Handle, *const Tensor, u32, *mut Tensor, u32, Handle, Handle) -> Status>,
    _graph_execute_async: Unused,
    _tensor_create_context_tensor: Unused,
    pub(crate) tensor_create: Option<unsafe extern "C" fn(Handle, *mut Tensor) -> Status>,
    pub(crate) log_create: Option<unsafe extern "C" fn(LogCallback, u32, *mut Handle) -> Status>,
    _log_set_level: Unused,
    pub(crate) log_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _unused_28_to_39: [Unused; 12],
    pub(crate) device_create: Option<unsafe extern "C" fn(Handle, Configs, *mut Handle) -> Status>,
    _unused_41_to_42: [Unused; 2],
    pub(crate) device_free: Option<unsafe extern "C" fn(Handle) -> Status>,
    _unused_44_to_47: [Unused; 4],
    pub(crate) error_get_message: Option<unsafe extern "C" fn(Status, *mut *const c_char) -> Status>,
}

/// An entry of `QnnSystemInterface_getProviders`.
#[repr(C)]
pub(crate) struct SystemInterface {
    pub(crate) backend_id: u32,
    pub(crate) provider: *const c_char,
    pub(crate) version: Version,
    pub(crate) table: SystemTable,
}

#[repr(C)]
pub(crate) struct SystemTable {
    pub(crate) context_create: Option<unsafe extern "C" fn(*mut Handle) -> Status>,
    _get_binary_info: Unused,
    pub(crate) get_metadata: Option<unsafe extern "C" fn(Handle, *const c_void, u64, *mut *const BinaryInfo) -> Status>,
    pub(crate) context_free: Option<unsafe extern "C" fn(Handle) -> Status>,
}

/// A configuration of a device, a context or a graph: `option` 0 points to one of the backend's own.
#[repr(C)]
pub(crate) struct Config {
    pub(crate) option: u32,
    pub(crate) custom: *const c_void,
}

impl Config {
    pub(crate) const CUSTOM: u32 = 0;
}

/// HTP's device option SOC as four words: releases differ in whether the model is at byte 4 or 8.
#[repr(C, align(8))]
pub(crate) struct HtpSoc(pub(crate) [u32; 4]);

/// One of HTP's graph options.
#[repr(C, align(8))]
pub(crate) struct HtpGraphOption {
    pub(crate) option: u32,
    _pad: u32,
    pub(crate) value: [u32; 12],
}

impl HtpGraphOption {
    pub(crate) fn new(option: u32, first: u32, second: u32) -> Self {
        Self { option, _pad: 0, value: [first, second, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0] }
    }
}

/// One of HTP's context options.
#[repr(C, align(8))]
pub(crate) struct HtpContextOption {
    pub(crate) option: u32,
    pub(crate) _pad: u32,
    pub(crate) value: [u32; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ScaleOffset {
    pub(crate) scale: f32,
    pub(crate) offset: i32,
}

/// `QuantizeParams`: a tag and a union selected by it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Quantize {
    pub(crate) definition: u32,
    pub(crate) encoding: u32,
    pub(crate) value: QuantizeValue,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union QuantizeValue {
    pub(crate) none: [u64; 4],
    pub(crate) tensor: ScaleOffset,
    pub(crate) axis: AxisScaleOffset,
    pub(crate) width_axis: WidthAxisScaleOffset,
    pub(crate) block: Block,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AxisScaleOffset {
    pub(crate) axis: i32,
    pub(crate) count: u32,
    pub(crate) scales: *const ScaleOffset,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct WidthAxisScaleOffset {
    pub(crate) width: u32,
    pub(crate) axis: i32,
    pub(crate) count: u32,
    pub(crate) scales: *const f32,
    pub(crate) offsets: *const i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) sizes: *const u32,
    pub(crate) scales: *const ScaleOffset,
}

impl Quantize {
    pub(crate) const UNDEFINED: u32 = 0x7fff_ffff;
    pub(crate) const NONE: Self = Self { definition: Self::UNDEFINED, encoding: Self::UNDEFINED, value: QuantizeValue { none: [0; 4] } };

    pub(crate) fn tensor(scale: f32) -> Self {
        Self { definition: 1, encoding: 0, value: QuantizeValue { tensor: ScaleOffset { scale, offset: 0 } } }
    }
}

/// A tensor; the layout of version 2, whose beginning is version 1.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) version: u32,
    pub(crate) _pad: u32,
    pub(crate) id: u32,
    pub(crate) name: *const c_char,
    pub(crate) role: u32,
    pub(crate) format: u32,
    pub(crate) dtype: u32,
    pub(crate) quantize: Quantize,
    pub(crate) rank: u32,
    pub(crate) dims: *const u32,
    pub(crate) memory: u32,
    pub(crate) data: *mut c_void,
    pub(crate) size: u32,
    pub(crate) dynamic_dims: *const u8,
    pub(crate) sparse: [u32; 3],
    pub(crate) produced: u8,
}

impl Tensor {
    /// Version 1, without name, shape or data.
    pub(crate) const EMPTY: Self = Self {
        version: 1,
        _pad: 0,
        id: 0,
        name: ptr::null(),
        role: 0,
        format: 0,
        dtype: 0,
        quantize: Quantize::NONE,
        rank: 0,
        dims: ptr::null(),
        memory: 0,
        data: ptr::null_mut(),
        size: 0,
        dynamic_dims: ptr::null(),
        sparse: [Quantize::UNDEFINED, 0, 0],
        produced: 0,
    };
}

/// Roles of tensors.
pub(crate) mod role {
    pub(crate) const INPUT: u32 = 0;
    pub(crate) const OUTPUT: u32 = 1;
    pub(crate) const INNER: u32 = 3;
    pub(crate) const CONSTANT: u32 = 4;
}

/// A scalar with its type, padded to the size of a tensor as the parameter union requires.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Scalar {
    pub(crate) dtype: u32,
    pub(crate) value: u64,
}

#[repr(C)]
pub(crate) struct Parameter {
    /// 0: a scalar, 1: a tensor.
    pub(crate) kind: u32,
    pub(crate) name: *const c_char,
    pub(crate) value: ParameterValue,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ParameterValue {
    pub(crate) scalar: Scalar,
    pub(crate) tensor: Tensor,
}

/// An operation; passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Op {
    pub(crate) version: u32,
    pub(crate) name: *const c_char,
    pub(crate) package: *const c_char,
    pub(crate) kind: *const c_char,
    pub(crate) parameter_count: u32,
    pub(crate) parameters: *const Parameter,
    pub(crate) input_count: u32,
    pub(crate) inputs: *const Tensor,
    pub(crate) output_count: u32,
    pub(crate) outputs: *const Tensor,
}

/// The system library's description of a context binary.
#[repr(C)]
pub(crate) struct BinaryInfo {
    pub(crate) version: u32,
    pub(crate) v3: BinaryInfoV3,
}

#[repr(C)]
pub(crate) struct BinaryInfoV3 {
    pub(crate) backend_id: u32,
    pub(crate) build_id: *const c_char,
    pub(crate) core: Version,
    pub(crate) backend: Version,
    pub(crate) soc_version: *const c_char,
    pub(crate) blob_version: Version,
    pub(crate) blob_size: u64,
    pub(crate) context_tensor_count: u32,
    pub(crate) context_tensors: *const Tensor,
    pub(crate) graph_count: u32,
    pub(crate) graphs: *const GraphInfo,
    pub(crate) platform: *const c_void,
    pub(crate) meta_size: u32,
    pub(crate) meta: *const HtpBinaryMeta,
    pub(crate) soc_model: u32,
}

#[repr(C)]
pub(crate) struct HtpBinaryMeta {
    pub(crate) version: u32,
    pub(crate) arch: u32,
}

#[repr(C)]
pub(crate) struct GraphInfo {
    pub(crate) version: u32,
    pub(crate) name: *const c_char,
    pub(crate) input_count: u32,
    pub(crate) inputs: *const Tensor,
    pub(crate) output_count: u32,
    pub(crate) outputs: *const Tensor,
    pub(crate) updatable_count: u32,
    pub(crate) updatable: *const Tensor,
    pub(crate) blob_size: u32,
    pub(crate) blob: *const HtpGraphBlob,
    pub(crate) start_op: u32,
    pub(crate) end_op: u32,
}

#[repr(C)]
pub(crate) struct HtpGraphBlob {
    pub(crate) version: u32,
    pub(crate) spill_fill: u64,
    pub(crate) vtcm_bytes: u32,
    pub(crate) optimization: u32,
    pub(crate) dlbc: u8,
    pub(crate) hvx_threads: u64,
}

const _: () = {
    assert!(size_of::<Version>() == 12);
    assert!(offset_of!(Interface, core) == 16 && offset_of!(Interface, table) == 40);
    assert!(offset_of!(SystemInterface, version) == 16 && offset_of!(SystemInterface, table) == 32);
    const fn slot(offset: usize, number: usize) {
        assert!(offset == 8 * number);
    }
    slot(offset_of!(Table, backend_create), 1);
    slot(offset_of!(Table, backend_get_build_id), 4);
    slot(offset_of!(Table, backend_validate_op), 7);
    slot(offset_of!(Table, backend_free), 8);
    slot(offset_of!(Table, context_create), 9);
    slot(offset_of!(Table, context_get_binary_size), 11);
    slot(offset_of!(Table, context_get_binary), 12);
    slot(offset_of!(Table, context_create_from_binary), 13);
    slot(offset_of!(Table, context_free), 14);
    slot(offset_of!(Table, graph_create), 15);
    slot(offset_of!(Table, graph_add_node), 18);
    slot(offset_of!(Table, graph_finalize), 19);
    slot(offset_of!(Table, graph_retrieve), 20);
    slot(offset_of!(Table, graph_execute), 21);
    slot(offset_of!(Table, tensor_create), 24);
    slot(offset_of!(Table, log_create), 25);
    slot(offset_of!(Table, log_free), 27);
    slot(offset_of!(Table, device_create), 40);
    slot(offset_of!(Table, device_free), 43);
    slot(offset_of!(Table, error_get_message), 48);
    slot(offset_of!(SystemTable, get_metadata), 2);
    slot(offset_of!(SystemTable, context_free), 3);
    assert!(size_of::<Config>() == 16 && offset_of!(Config, custom) == 8);
    assert!(size_of::<HtpSoc>() == 16 && size_of::<HtpGraphOption>() == 56 && size_of::<HtpContextOption>() == 24);
    assert!(size_of::<ScaleOffset>() == 8 && size_of::<Quantize>() == 40 && offset_of!(Quantize, value) == 8);
    assert!(size_of::<AxisScaleOffset>() == 16 && size_of::<WidthAxisScaleOffset>() == 32);
    assert!(offset_of!(WidthAxisScaleOffset, scales) == 16 && offset_of!(WidthAxisScaleOffset, offsets) == 24);
    assert!(size_of::<Tensor>() == 144);
    // The union of versions starts at 8; these are offsets inside it.
    const fn body(offset: usize, expected: usize) {
        assert!(offset == 8 + expected);
    }
    body(offset_of!(Tensor, id), 0);
    body(offset_of!(Tensor, name), 8);
    body(offset_of!(Tensor, role), 16);
    body(offset_of!(Tensor, dtype), 24);
    body(offset_of!(Tensor, quantize), 32);
    body(offset_of!(Tensor, rank), 72);
    body(offset_of!(Tensor, dims), 80);
    body(offset_of!(Tensor, memory), 88);
    body(offset_of!(Tensor, data), 96);
    body(offset_of!(Tensor, size), 104);
    body(offset_of!(Tensor, dynamic_dims), 112);
    body(offset_of!(Tensor, sparse), 120);
    body(offset_of!(Tensor, produced), 132);
    assert!(size_of::<Scalar>() == 16 && offset_of!(Scalar, value) == 8);
    assert!(size_of::<Parameter>() == 160 && offset_of!(Parameter, value) == 16);
    assert!(size_of::<Op>() == 80 && offset_of!(Op, outputs) == 72);
    assert!(size_of::<BinaryInfo>() == 144 && offset_of!(BinaryInfo, v3) == 8);
    assert!(offset_of!(BinaryInfoV3, blob_version) == 48 && offset_of!(BinaryInfoV3, context_tensors) == 80);
    assert!(offset_of!(BinaryInfoV3, graphs) == 96 && offset_of!(BinaryInfoV3, meta) == 120 && offset_of!(BinaryInfoV3, soc_model) == 128);
    assert!(size_of::<GraphInfo>() == 88 && offset_of!(GraphInfo, blob) == 72);
    assert!(offset_of!(HtpGraphBlob, optimization) == 20 && offset_of!(HtpGraphBlob, hvx_threads) == 32);
};
