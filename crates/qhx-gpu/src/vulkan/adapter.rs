//! Finding Vulkan and the devices that it offers.

use super::queues::Queues;
use ash::{ext, khr, vk};
use std::{
    ffi::{CStr, c_void},
    sync::{Arc, Mutex, PoisonError},
};

/// The loaded Vulkan library with an instance.
pub(crate) struct Driver {
    pub(super) instance: ash::Instance,
    /// Receives what the validation layer says.
    messages: Arc<Mutex<Vec<String>>>,
    messenger: Option<(ext::debug_utils::Instance, vk::DebugUtilsMessengerEXT)>,
    // Last, so that the library outlives everything.
    _entry: ash::Entry,
}

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Discrete,
    Integrated,
    Virtual,
    Other,
    /// Software on the processor.
    Software,
}

/// A device that was found, with what matters of it here.
#[derive(Clone)]
pub(crate) struct Adapter {
    pub(super) handle: vk::PhysicalDevice,
    pub(crate) name: String,
    pub(crate) kind: Kind,
    pub(crate) driver: String,
    /// Version of Vulkan, such as `1.3.289`.
    pub(crate) vulkan: String,
    /// Identifies device and driver, for caches.
    pub(crate) identity: [u8; 16],
    /// Bytes of the memory that is the device's own; where memory is shared, of that.
    pub(crate) memory: u64,
    /// The heap that this is.
    heap: usize,
    /// Whether the driver says how much of it this process may use.
    pub(super) tells_budget: bool,
    /// Memory of the host can be used in place if it begins and ends at multiples of this.
    pub(crate) import_alignment: Option<u64>,
    /// Whether the host can see all of the device's memory: nothing has to be held twice.
    pub(crate) unified: bool,
    pub(crate) subgroup_size: u32,
    /// Whether sums over subgroups can be had.
    pub(crate) subgroups: bool,
    /// Whether pipelines may ask for `subgroup_size`: also the largest workgroup, of which a device takes only so many subgroups where it is asked for.
    pub(super) subgroup_control: bool,
    pub(crate) integer_dot: bool,
    pub(crate) float16: bool,
    pub(crate) storage16: bool,
    /// Products of small matrices, where there are all that are used.
    pub(crate) cooperative_matrix: Option<SmallMatrices>,
    /// Whether steps of one row may be done in one dispatch.
    pub(crate) streams: bool,
    pub(super) memory_model: bool,
    /// Whether shaders can read a clock.
    pub(crate) clock: bool,
    /// Invocations of a workgroup.
    pub(crate) max_group: u32,
    pub(crate) shared_memory: u32,
    pub(crate) max_allocation: u64,
    /// None: it cannot compute.
    pub(super) queues: Option<Queues>,
    /// Bits of a time that its queues write and the host can compare with its own; none where that cannot be had.
    pub(super) time_bits: Option<u32>,
    /// Nanoseconds of a tick of its clock.
    pub(super) tick_ns: f32,
    /// Why it cannot be used.
    pub(crate) lacks: Option<String>,
}

impl Adapter {
    /// Whether it has what `step.comp` needs.
    pub(crate) fn can_stream(&self) -> bool {
        self.memory_model && self.subgroups && self.integer_dot && self.max_group >= 128
    }

    /// Whether copies can be made while shaders run.
    pub(crate) fn copies_apart(&self) -> bool {
        self.queues.is_some_and(|queues| queues.are_apart())
    }

    /// Has copies made in turn with shaders.
    pub(crate) fn copy_in_turn(&mut self) {
        self.queues = self.queues.map(Queues::one);
    }
}

/// Matrices that a subgroup multiplies at once, from int8 to int32 and from f16 to f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SmallMatrices {
    /// Rows of the left one and columns of the right one.
    pub(crate) size: u32,
    /// Columns of the left one and rows of the right one, in int8.
    pub(crate) byte_depth: u32,
    /// The same in f16.
    pub(crate) half_depth: u32,
    /// They are used from so many rows on.
    pub(crate) from_rows: usize,
    /// For products also with so few rows, from and to.
    pub(crate) few_rows: [usize; 2],
}

impl SmallMatrices {
    /// The fewest rows of a call that uses them.
    pub(crate) fn fewest_rows(&self) -> usize {
        let [from, to] = self.few_rows;
        if from <= to { from.min(self.from_rows) } else { self.from_rows }
    }
}

const VALIDATION: &CStr = c"VK_LAYER_KHRONOS_validation";

/// Lanes of the largest workgroup of any kernel, but for steps in one dispatch.
const LARGEST_GROUP: u32 = 256;

impl Driver {
    /// Loads Vulkan; the error says why there is none. With `validate`, the validation layer has to be there.
    pub(crate) fn open(validate: bool) -> Result<Arc<Self>, String> {
        // SAFETY: the system's Vulkan loader is loaded by its usual name and kept as long as the instance.
        let entry = unsafe { ash::Entry::load() }.map_err(|e| format!("no Vulkan library was found ({e})"))?;
        let application = vk::ApplicationInfo::default().application_name(c"qhx").engine_name(c"qhx").api_version(vk::API_VERSION_1_3);
        let mut create = vk::InstanceCreateInfo::default().application_info(&application);
        let (layers, extensions) = ([VALIDATION.as_ptr()], [ext::debug_utils::NAME.as_ptr()]);
        if validate {
            create = create.enabled_layer_names(&layers).enabled_extension_names(&extensions);
        }
        // SAFETY: the structures live through the call.
        let instance = unsafe { entry.create_instance(&create, None) }.map_err(|e| match e {
            vk::Result::ERROR_LAYER_NOT_PRESENT => "Vulkan's validation layer is not installed".to_owned(),
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => "no Vulkan driver was found".to_owned(),
            e => format!("Vulkan did not start: {e}"),
        })?;
        let messages: Arc<Mutex<Vec<String>>> = Arc::default();
        let mut driver = Self { instance, messages, messenger: None, _entry: entry };
        if validate {
            driver.listen()?;
        }
        Ok(Arc::new(driver))
    }

    fn listen(&mut self) -> Result<(), String> {
        use vk::{DebugUtilsMessageSeverityFlagsEXT as Severity, DebugUtilsMessageTypeFlagsEXT as Type};
        let utilities = ext::debug_utils::Instance::new(&self._entry, &self.instance);
        let create = vk::DebugUtilsMessengerCreateInfoEXT::default()
            .message_severity(Severity::ERROR | Severity::WARNING)
            .message_type(Type::VALIDATION | Type::PERFORMANCE)
            .pfn_user_callback(Some(receive))
            .user_data(Arc::as_ptr(&self.messages).cast_mut().cast());
        // SAFETY: the list of messages is kept by the driver, which destroys the messenger before it.
        let messenger = unsafe { utilities.create_debug_utils_messenger(&create, None) }.map_err(|e| format!("validation: {e}"))?;
        self.messenger = Some((utilities, messenger));
        Ok(())
    }

    /// What the validation layer has said so far.
    pub(crate) fn messages(&self) -> Vec<String> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The devices, best first.
    pub(crate) fn adapters(&self) -> Result<Vec<Adapter>, String> {
        // SAFETY: the instance lives.
        let handles = unsafe { self.instance.enumerate_physical_devices() }.map_err(|e| format!("Vulkan lists no devices: {e}"))?;
        let mut adapters: Vec<Adapter> = handles.into_iter().map(|handle| self.adapter(handle)).collect();
        adapters.sort_by_key(|adapter| (adapter.lacks.is_some(), adapter.kind));
        Ok(adapters)
    }

    fn adapter(&self, handle: vk::PhysicalDevice) -> Adapter {
        let mut driver = vk::PhysicalDeviceDriverProperties::default();
        let mut subgroups = vk::PhysicalDeviceSubgroupProperties::default();
        let mut maintenance = vk::PhysicalDeviceMaintenance3Properties::default();
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut maintenance4 = vk::PhysicalDeviceMaintenance4Properties::default();
        let mut sizes = vk::PhysicalDeviceSubgroupSizeControlProperties::default();
        let extensions = self.extensions(handle);
        let has = |name: &CStr| extensions.iter().any(|own| own == name);
        // SAFETY: the instance lives; every structure of a chain lives through its call.
        let (properties, families, memory) = unsafe {
            let mut all =
                vk::PhysicalDeviceProperties2::default().push_next(&mut driver).push_next(&mut subgroups).push_next(&mut maintenance);
            if has(ext::external_memory_host::NAME) {
                all = all.push_next(&mut host);
            }
            if has(khr::maintenance4::NAME) {
                all = all.push_next(&mut maintenance4);
            }
            if has(ext::subgroup_size_control::NAME) {
                all = all.push_next(&mut sizes);
            }
            self.instance.get_physical_device_properties2(handle, &mut all);
            let families = self.instance.get_physical_device_queue_family_properties(handle);
            (all.properties, families, self.instance.get_physical_device_memory_properties(handle))
        };
        let text = |bytes: &[std::ffi::c_char]| {
            let bytes: Vec<u8> = bytes.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let version = properties.api_version;
        let number = |v: u32| format!("{}.{}.{}", vk::api_version_major(v), vk::api_version_minor(v), vk::api_version_patch(v));
        let queues = Queues::choose(&families);
        let heaps = &memory.memory_heaps[..memory.memory_heap_count as usize];
        let types = &memory.memory_types[..memory.memory_type_count as usize];
        let own = heaps.iter().enumerate().filter(|(_, heap)| heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL));
        let (heap, memory_bytes) = own.map(|(place, heap)| (place, heap.size)).max_by_key(|(_, size)| *size).unwrap_or_default();
        let kind = match properties.device_type {
            vk::PhysicalDeviceType::DISCRETE_GPU => Kind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => Kind::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => Kind::Virtual,
            vk::PhysicalDeviceType::CPU => Kind::Software,
            _ => Kind::Other,
        };
        let visible = vk::MemoryPropertyFlags::DEVICE_LOCAL | vk::MemoryPropertyFlags::HOST_VISIBLE;
        let unified = matches!(kind, Kind::Integrated | Kind::Software) && types.iter().any(|t| t.property_flags.contains(visible));
        let mut time_bits = None;
        let (
            mut lacks,
            mut subgroup_control,
            mut integer_dot,
            mut float16,
            mut storage16,
            mut cooperative_matrix,
            mut memory_model,
            mut clock,
        ) = (None, false, false, false, false, None, false, false);
        if version < vk::API_VERSION_1_2 {
            lacks = Some(format!("Vulkan {} is too old: 1.2 or newer is needed", number(version)));
        } else {
            let mut v11 = vk::PhysicalDeviceVulkan11Features::default();
            let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
            let mut control = vk::PhysicalDeviceSubgroupSizeControlFeatures::default();
            let mut dot = vk::PhysicalDeviceShaderIntegerDotProductFeatures::default();
            let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
            let newest = version >= vk::API_VERSION_1_3;
            let mut features = vk::PhysicalDeviceFeatures2::default().push_next(&mut v11).push_next(&mut v12);
            if newest || has(ext::subgroup_size_control::NAME) {
                features = features.push_next(&mut control);
            }
            if newest || has(khr::shader_integer_dot_product::NAME) {
                features = features.push_next(&mut dot);
            }
            let mut clocks = vk::PhysicalDeviceShaderClockFeaturesKHR::default();
            if has(khr::shader_clock::NAME) {
                features = features.push_next(&mut clocks);
            }
            if has(khr::cooperative_matrix::NAME) {
                features = features.push_next(&mut matrix);
            }
            // SAFETY: as above.
            unsafe { self.instance.get_physical_device_features2(handle, &mut features) };
            let wide = features.features.shader_int64 == vk::TRUE;
            time_bits = queues.filter(|_| v12.host_query_reset == vk::TRUE).map(|queues| {
                let bits = queues.families().into_iter().map(|(family, _)| families[family as usize].timestamp_valid_bits);
                bits.min().unwrap_or(0)
            });
            let largest = subgroups.subgroup_size.saturating_mul(sizes.max_compute_workgroup_subgroups);
            subgroup_control = control.subgroup_size_control == vk::TRUE && newest && largest >= LARGEST_GROUP;
            integer_dot = dot.shader_integer_dot_product == vk::TRUE && newest;
            memory_model = v12.vulkan_memory_model == vk::TRUE && v12.vulkan_memory_model_device_scope == vk::TRUE;
            clock = clocks.shader_subgroup_clock == vk::TRUE;
            float16 = v12.shader_float16 == vk::TRUE;
            storage16 = v11.storage_buffer16_bit_access == vk::TRUE;
            let usable = matrix.cooperative_matrix == vk::TRUE
                && memory_model
                && v12.shader_int8 == vk::TRUE
                && float16
                // The shaders count on the size of subgroups.
                && subgroup_control;
            cooperative_matrix = usable.then(|| self.small_matrices(handle)).flatten();
            let needed = [
                (v12.buffer_device_address == vk::TRUE, "buffer device addresses"),
                (v12.timeline_semaphore == vk::TRUE, "timeline semaphores"),
                (wide, "64-bit integers in shaders"),
                (queues.is_some(), "a queue for compute"),
            ];
            let missing: Vec<_> = needed.iter().filter(|(there, _)| !there).map(|(_, what)| *what).collect();
            if !missing.is_empty() {
                lacks = Some(format!("its driver does not offer {}", missing.join(", ")));
            }
        }
        use vk::SubgroupFeatureFlags as Operations;
        let wanted = Operations::BASIC | Operations::ARITHMETIC | Operations::SHUFFLE;
        Adapter {
            handle,
            name: text(&properties.device_name),
            kind,
            driver: format!("{} {}", text(&driver.driver_name), text(&driver.driver_info)).trim().to_owned(),
            vulkan: number(version),
            identity: properties.pipeline_cache_uuid,
            memory: memory_bytes,
            heap,
            tells_budget: has(ext::memory_budget::NAME),
            import_alignment: has(ext::external_memory_host::NAME)
                .then_some(host.min_imported_host_pointer_alignment)
                .filter(|&alignment| alignment > 0),
            unified,
            subgroup_size: subgroups.subgroup_size.max(1),
            subgroups: subgroups.supported_stages.contains(vk::ShaderStageFlags::COMPUTE)
                && subgroups.supported_operations.contains(wanted),
            subgroup_control,
            integer_dot,
            float16,
            storage16,
            cooperative_matrix,
            streams: memory_model && kind != Kind::Software,
            memory_model,
            clock,
            max_group: properties.limits.max_compute_work_group_invocations.min(properties.limits.max_compute_work_group_size[0]),
            shared_memory: properties.limits.max_compute_shared_memory_size,
            max_allocation: match maintenance4.max_buffer_size {
                0 => maintenance.max_memory_allocation_size,
                most => most.min(maintenance.max_memory_allocation_size),
            },
            queues,
            time_bits: time_bits.filter(|&bits| bits > 0 && has(ext::calibrated_timestamps::NAME)),
            tick_ns: properties.limits.timestamp_period,
            lacks,
        }
    }

    /// Bytes of a device's memory that this process may use now, what it uses already included: what the driver says, or else all of it.
    pub(crate) fn budget(&self, adapter: &Adapter) -> u64 {
        if !adapter.tells_budget {
            return adapter.memory;
        }
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: the instance lives, and the device has the extension.
        unsafe { self.instance.get_physical_device_memory_properties2(adapter.handle, &mut properties) };
        match budget.heap_budget[adapter.heap] {
            0 => adapter.memory,
            bytes => bytes.min(adapter.memory),
        }
    }

    /// The matrices that it multiplies, of a size that serves int8 and f16.
    fn small_matrices(&self, handle: vk::PhysicalDevice) -> Option<SmallMatrices> {
        use vk::ComponentTypeKHR as Type;
        let functions = khr::cooperative_matrix::Instance::new(&self._entry, &self.instance);
        // SAFETY: the device has the extension.
        let kinds = unsafe { functions.get_physical_device_cooperative_matrix_properties(handle) }.unwrap_or_default();
        let depth = |size: u32, numbers: Type, sums: Type| {
            let fits = |kind: &&vk::CooperativeMatrixPropertiesKHR<'_>| {
                [kind.m_size, kind.n_size] == [size; 2]
                    && [8, 16, 32].contains(&kind.k_size)
                    && [kind.a_type, kind.b_type] == [numbers; 2]
                    && [kind.c_type, kind.result_type] == [sums; 2]
                    && kind.scope == vk::ScopeKHR::SUBGROUP
            };
            kinds.iter().filter(fits).map(|kind| kind.k_size).max()
        };
        [16, 8].into_iter().find_map(|size| {
            let (byte_depth, half_depth) = (depth(size, Type::SINT8, Type::SINT32)?, depth(size, Type::FLOAT16, Type::FLOAT32)?);
            Some(SmallMatrices { size, byte_depth, half_depth, from_rows: 0, few_rows: [1, 0] })
        })
    }

    pub(super) fn extensions(&self, handle: vk::PhysicalDevice) -> Vec<std::ffi::CString> {
        // SAFETY: the instance lives.
        let all = unsafe { self.instance.enumerate_device_extension_properties(handle) }.unwrap_or_default();
        all.iter().filter_map(|e| e.extension_name_as_c_str().ok().map(CStr::to_owned)).collect()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: devices hold the driver, so none is left.
        unsafe {
            if let Some((utilities, messenger)) = &self.messenger {
                utilities.destroy_debug_utils_messenger(*messenger, None);
            }
            self.instance.destroy_instance(None);
        }
    }
}

/// Takes a message of the validation layer.
unsafe extern "system" fn receive(
    _: vk::DebugUtilsMessageSeverityFlagsEXT,
    _: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    list: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: Vulkan passes a message with a text, and the list that `listen` gave, which outlives the messenger.
    let (text, list) = unsafe {
        let text = (*data).message_as_c_str().map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        (text, &*list.cast_const().cast::<Mutex<Vec<String>>>())
    };
    list.lock().unwrap_or_else(PoisonError::into_inner).push(text);
    vk::FALSE
}
