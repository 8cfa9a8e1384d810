//! Buffers with their memory.

use super::{Fault, Gpu, Lane};
use ash::vk;
use qhx_ir::WeightTensor;
use std::{
    ffi::c_void,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, atomic::Ordering},
};

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Use {
    /// Read and written by shaders.
    Device,
    /// The same, and copied to while shaders run.
    Weights,
    /// Read and written by shaders, and written by the host, where memory is shared.
    Unified,
    /// Written by the host, read by shaders or copied from.
    Upload,
    /// Written by the host, copied from while shaders run.
    Staging,
    /// Written by shaders or copies, read by the host.
    Download,
}

/// A buffer.
pub(crate) struct Buffer {
    gpu: Arc<Gpu>,
    pub(super) handle: vk::Buffer,
    memory: vk::DeviceMemory,
    address: u64,
    bytes: u64,
    /// Where the host sees it.
    mapped: Option<NonNull<u8>>,
    counted: bool,
    /// Of memory that is not the buffer's own.
    owners: Vec<WeightTensor>,
}

/// Memory of the host is mapped in pages of this size, or of a multiple of it.
pub(crate) const PAGE_BYTES: usize = 4096;

/// The numbers of the pages that some bytes lie in.
pub(crate) fn pages_of(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr() as usize;
    start / PAGE_BYTES..(start + bytes.len()).div_ceil(PAGE_BYTES)
}

/// Whether every page of some has a byte of one of these weights.
fn covered(pages: &Range<usize>, owners: &[WeightTensor]) -> bool {
    let parts = owners.iter().flat_map(|tensor| [tensor.data(), tensor.scale(), tensor.min()]).filter(|part| !part.is_empty());
    let mut held: Vec<Range<usize>> = parts.map(pages_of).collect();
    held.sort_by_key(|part| part.start);
    let mut reached = pages.start / PAGE_BYTES;
    for part in held.into_iter().filter(|part| part.end > pages.start / PAGE_BYTES) {
        if part.start > reached {
            break;
        }
        reached = reached.max(part.end);
    }
    pages.start % PAGE_BYTES == 0 && pages.end % PAGE_BYTES == 0 && reached >= pages.end / PAGE_BYTES
}

// SAFETY: the mapping is plain memory that is accessed through `&self` by `write` and `read` only, whose callers do not race with the device: see `write`.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of `bytes` bytes.
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: u64, purpose: Use) -> Result<Self, Fault> {
        use vk::{BufferUsageFlags as Usage, MemoryPropertyFlags as Memory};
        let bytes = bytes.max(256);
        let own = matches!(purpose, Use::Device | Use::Weights | Use::Unified);
        if own {
            gpu.count(bytes)?;
        }
        let uncount = |fault: Fault| {
            if own {
                gpu.used.fetch_sub(bytes, Ordering::Relaxed);
            }
            fault
        };
        let usage = Usage::STORAGE_BUFFER | Usage::SHADER_DEVICE_ADDRESS | Usage::TRANSFER_SRC | Usage::TRANSFER_DST;
        let mut create = vk::BufferCreateInfo::default().size(bytes).usage(usage).sharing_mode(vk::SharingMode::EXCLUSIVE);
        let families = [Lane::Compute, Lane::Transfer].map(|lane| gpu.family(lane));
        if purpose == Use::Weights && families[0] != families[1] {
            create = create.sharing_mode(vk::SharingMode::CONCURRENT).queue_family_indices(&families);
        }
        // SAFETY: the device lives, held by `gpu`; what is created is destroyed by `drop`, or below where a later step fails.
        unsafe {
            let handle = gpu.device.create_buffer(&create, None).map_err(|e| uncount(Fault::of("creating a buffer", e)))?;
            let needs = gpu.device.get_buffer_memory_requirements(handle);
            let visible = Memory::HOST_VISIBLE | Memory::HOST_COHERENT;
            let preferences: &[Memory] = match purpose {
                Use::Device | Use::Weights => &[Memory::DEVICE_LOCAL, Memory::empty()],
                Use::Unified | Use::Upload => &[Memory::DEVICE_LOCAL | visible, visible],
                // Not the device's own memory: bringing bytes there is what the copy is for.
                Use::Staging => &[visible],
                Use::Download => &[visible | Memory::HOST_CACHED, visible],
            };
            let mut result = Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
            let mut counted = own;
            for &wanted in preferences {
                let Some(kind) = gpu.memory_type(needs.memory_type_bits, wanted) else { continue };
                // Memory of the device that the host sees counts like any other.
                let local = !own && wanted.contains(Memory::DEVICE_LOCAL) && !gpu.adapter.unified;
                if local && gpu.count(bytes).is_err() {
                    continue;
                }
                let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
                let allocate = vk::MemoryAllocateInfo::default().allocation_size(needs.size).memory_type_index(kind).push_next(&mut flags);
                result = gpu.device.allocate_memory(&allocate, None);
                if result.is_ok() {
                    counted |= local;
                    break;
                }
                if local {
                    gpu.used.fetch_sub(bytes, Ordering::Relaxed);
                }
            }
            let memory = result.map_err(|e| {
                gpu.device.destroy_buffer(handle, None);
                uncount(Fault::of(&format!("allocating {bytes} bytes"), e))
            })?;
            let mut buffer = Self { gpu: gpu.clone(), handle, memory, address: 0, bytes, mapped: None, counted, owners: Vec::new() };
            let device = &gpu.device;
            device.bind_buffer_memory(handle, memory, 0).map_err(|e| Fault::of("binding memory", e))?;
            buffer.address = device.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(handle));
            if !matches!(purpose, Use::Device | Use::Weights) {
                let mapped = device.map_memory(memory, 0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
                buffer.mapped = NonNull::new(mapped.map_err(|e| Fault::of("mapping memory", e))?.cast());
            }
            Ok(buffer)
        }
    }

    /// A buffer over memory of the host, used where it is and only read: the pages of some weights. The error says why it has to be copied.
    pub(crate) fn imported(gpu: &Arc<Gpu>, pages: Range<usize>, owners: Vec<WeightTensor>) -> Result<Self, Fault> {
        assert!(covered(&pages, &owners), "every page of {pages:?} holds a byte of a weight, so that it is mapped");
        let cannot = |e| Fault::of("importing memory of the host", e);
        let Some(import) = &gpu.import else { return Err(cannot(vk::Result::ERROR_EXTENSION_NOT_PRESENT)) };
        let bytes = pages.len() as u64;
        let kind = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(kind);
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS;
        let create = vk::BufferCreateInfo::default().size(bytes).usage(usage).push_next(&mut external);
        let pointer = pages.start as *mut c_void;
        gpu.count(bytes)?;
        let uncount = |fault: Fault| {
            gpu.used.fetch_sub(bytes, Ordering::Relaxed);
            fault
        };
        // SAFETY: the device lives, held by `gpu`; the pages are mapped, as asserted, and stay so as long as their owners, which the buffer keeps. Nobody writes to
        // them: shaders only read weights. What is created is destroyed by `drop`, or below where a later step fails.
        unsafe {
            let mut types = vk::MemoryHostPointerPropertiesEXT::default();
            let ask = import.fp().get_memory_host_pointer_properties_ext;
            ask(gpu.device.handle(), kind, pointer, &mut types).result().map_err(cannot).map_err(uncount)?;
            let handle = gpu.device.create_buffer(&create, None).map_err(cannot).map_err(uncount)?;
            let discard = |fault| {
                gpu.device.destroy_buffer(handle, None);
                uncount(fault)
            };
            let needs = gpu.device.get_buffer_memory_requirements(handle);
            let found = gpu.memory_type(needs.memory_type_bits & types.memory_type_bits, vk::MemoryPropertyFlags::empty());
            let Some(place) = found.filter(|_| needs.size <= bytes) else {
                return Err(discard(cannot(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE)));
            };
            let mut flags = vk::MemoryAllocateFlagsInfo::default().flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            let mut host = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(kind).host_pointer(pointer);
            let allocate = vk::MemoryAllocateInfo::default().allocation_size(bytes).memory_type_index(place);
            let allocate = allocate.push_next(&mut flags).push_next(&mut host);
            let memory = gpu.device.allocate_memory(&allocate, None).map_err(|e| discard(cannot(e)))?;
            let mut buffer = Self { gpu: gpu.clone(), handle, memory, address: 0, bytes, mapped: None, counted: true, owners };
            gpu.device.bind_buffer_memory(handle, memory, 0).map_err(cannot)?;
            buffer.address = gpu.device.get_buffer_device_address(&vk::BufferDeviceAddressInfo::default().buffer(handle));
            Ok(buffer)
        }
    }

    /// Its address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Writes bytes where the host can; the device must not be using them: what is submitted later sees them.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        let Some(mapped) = self.checked(offset, bytes.len()) else { return };
        // SAFETY: within the mapping, as checked; the memory is coherent.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), mapped.as_ptr(), bytes.len()) };
    }

    /// Reads bytes that the device has written in a submission that has ended.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        let Some(mapped) = self.checked(offset, bytes.len()) else { return };
        // SAFETY: within the mapping, as checked; the memory is coherent.
        unsafe { std::ptr::copy_nonoverlapping(mapped.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
    }

    fn checked(&self, offset: u64, length: usize) -> Option<NonNull<u8>> {
        assert!(offset.checked_add(length as u64).is_some_and(|end| end <= self.bytes), "{length} bytes at {offset} of {}", self.bytes);
        // SAFETY: within the mapping, as just checked.
        self.mapped.map(|mapped| unsafe { mapped.add(offset as usize) })
    }

    /// Whether the host sees it.
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.gpu.is_lost() {
            // It may still be read.
            std::mem::forget(std::mem::take(&mut self.owners));
            return;
        }
        // SAFETY: owners wait for their submissions before they let go of buffers.
        unsafe {
            self.gpu.device.destroy_buffer(self.handle, None);
            self.gpu.device.free_memory(self.memory, None);
        }
        if self.counted {
            self.gpu.used.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}
