//! An opened device: its pipelines, submitting work to its queues, and waiting for it.

use super::{
    Adapter, Driver, Event, Fault, Injected, Lane, Recording, Submission,
    queues::{Line, QueuePlace},
};
use crate::cache;
use ash::{ext, khr, vk};
use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

const INJECTED: &str = "a failure that a test asked for";

/// How long a thread watches the device before it sleeps: about a step of one row.
const AWAKE: Duration = Duration::from_millis(3);

/// How long it sleeps between two looks then.
const GLANCE: Duration = Duration::from_micros(100);

/// An opened device.
pub(crate) struct Gpu {
    pub(crate) adapter: Adapter,
    pub(super) device: ash::Device,
    pub(super) layout: vk::PipelineLayout,
    /// By [`Lane`].
    lines: [Line; 2],
    /// Of both lanes.
    submissions: AtomicU64,
    memory: vk::PhysicalDeviceMemoryProperties,
    pipeline_cache: vk::PipelineCache,
    pipelines: Mutex<Pipelines>,
    /// Bytes of buffers on the device.
    pub(super) used: AtomicU64,
    /// No more than this is allocated.
    limit: u64,
    /// How long a submission may take.
    patience: Duration,
    lost: AtomicBool,
    /// For tests: what goes wrong, and when.
    fault: Option<(Injected, u64)>,
    /// Buffers that were made so far.
    buffers: AtomicU64,
    /// To compare its times with the host's.
    calibrated: Option<ext::calibrated_timestamps::Device>,
    /// To use memory of the host in place.
    pub(super) import: Option<ext::external_memory_host::Device>,
    cache_folder: Option<PathBuf>,
    /// Where dispatches are timed: how many of each shader there were, and their nanoseconds.
    profile: Option<Mutex<Profile>>,
    driver: Arc<Driver>,
}

/// How a device is to be used.
pub(crate) struct Conduct {
    /// Bounds its memory; absent: all of it.
    pub(crate) memory_limit: Option<u64>,
    /// Bounds the time of a submission.
    pub(crate) patience: Duration,
    pub(crate) fault: Option<(Injected, u64)>,
    pub(crate) cache_folder: Option<PathBuf>,
    pub(crate) profiled: bool,
}

/// By shader and constants.
type Pipelines = HashMap<(&'static str, Vec<u32>), Arc<Pipeline>>;

/// By shader.
pub(crate) type Profile = BTreeMap<String, (u64, f64)>;

/// A shader that is ready to run.
pub(crate) struct Pipeline {
    pub(super) handle: vk::Pipeline,
    pub(super) name: &'static str,
    module: vk::ShaderModule,
}

impl Gpu {
    /// Opens a device.
    pub(crate) fn open(driver: &Arc<Driver>, adapter: Adapter, conduct: Conduct) -> Result<Arc<Self>, Fault> {
        let Conduct { memory_limit, patience, fault, cache_folder, profiled } = conduct;
        let wrong = |e| Fault::of("opening the device", e);
        let newest = adapter.vulkan.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok()).is_some_and(|minor| minor >= 3);
        let Some(queues) = adapter.queues else { return Err(wrong(vk::Result::ERROR_FEATURE_NOT_PRESENT)) };
        let priorities = [1.0; 2];
        let created: Vec<_> = queues
            .families()
            .into_iter()
            .map(|(family, count)| vk::DeviceQueueCreateInfo::default().queue_family_index(family).queue_priorities(&priorities[..count]))
            .collect();
        let mut v11 = vk::PhysicalDeviceVulkan11Features::default().storage_buffer16_bit_access(adapter.storage16);
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default()
            .buffer_device_address(true)
            .timeline_semaphore(true)
            .host_query_reset(adapter.time_bits.is_some())
            .shader_float16(adapter.float16)
            .shader_int8(adapter.cooperative_matrix.is_some())
            .vulkan_memory_model(adapter.memory_model)
            .vulkan_memory_model_device_scope(adapter.memory_model);
        let mut v13 = vk::PhysicalDeviceVulkan13Features::default()
            .subgroup_size_control(adapter.subgroup_control)
            .compute_full_subgroups(adapter.subgroup_control)
            .shader_integer_dot_product(adapter.integer_dot);
        let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
        let mut clock = vk::PhysicalDeviceShaderClockFeaturesKHR::default().shader_subgroup_clock(true);
        let mut extensions = Vec::new();
        let mut create = vk::DeviceCreateInfo::default().queue_create_infos(&created).push_next(&mut v11).push_next(&mut v12);
        if newest {
            create = create.push_next(&mut v13);
        }
        if adapter.tells_budget {
            extensions.push(ext::memory_budget::NAME.as_ptr());
        }
        if adapter.time_bits.is_some() {
            extensions.push(ext::calibrated_timestamps::NAME.as_ptr());
        }
        if adapter.import_alignment.is_some() {
            extensions.push(ext::external_memory_host::NAME.as_ptr());
        }
        if adapter.clock && profiled {
            extensions.push(khr::shader_clock::NAME.as_ptr());
            create = create.push_next(&mut clock);
        }
        if adapter.cooperative_matrix.is_some() {
            extensions.push(khr::cooperative_matrix::NAME.as_ptr());
            create = create.push_next(&mut matrix);
        }
        let features = vk::PhysicalDeviceFeatures::default().shader_int64(true);
        let create = create.enabled_features(&features).enabled_extension_names(&extensions);
        // SAFETY: the instance lives, held by `driver`; all structures live through their calls.
        unsafe {
            let device = driver.instance.create_device(adapter.handle, &create, None).map_err(wrong)?;
            let queue = |place: QueuePlace| Arc::new(Mutex::new(device.get_device_queue(place.family, place.index)));
            let compute = queue(queues.compute);
            let transfer = if queues.are_apart() { queue(queues.transfer) } else { compute.clone() };
            let range = [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(128)];
            let layout = vk::PipelineLayoutCreateInfo::default().push_constant_ranges(&range);
            let layout = device.create_pipeline_layout(&layout, None).map_err(wrong)?;
            let line = |family: u32, queue| {
                let mut timeline = vk::SemaphoreTypeCreateInfo::default().semaphore_type(vk::SemaphoreType::TIMELINE);
                let done = device.create_semaphore(&vk::SemaphoreCreateInfo::default().push_next(&mut timeline), None).map_err(wrong)?;
                Ok::<_, Fault>(Line::new(family, queue, done))
            };
            let lines = [line(queues.compute.family, compute)?, line(queues.transfer.family, transfer)?];
            let stored = cache::load(cache_folder.as_deref(), &adapter.identity);
            let initial = vk::PipelineCacheCreateInfo::default().initial_data(&stored);
            let pipeline_cache = device
                .create_pipeline_cache(&initial, None)
                .or_else(|_| device.create_pipeline_cache(&vk::PipelineCacheCreateInfo::default(), None))
                .map_err(wrong)?;
            let memory = driver.instance.get_physical_device_memory_properties(adapter.handle);
            let import = adapter.import_alignment.map(|_| ext::external_memory_host::Device::new(&driver.instance, &device));
            let calibrated = adapter.time_bits.map(|_| ext::calibrated_timestamps::Device::new(&driver.instance, &device));
            Ok(Arc::new(Self {
                device,
                layout,
                lines,
                submissions: AtomicU64::new(0),
                memory,
                pipeline_cache,
                pipelines: Mutex::default(),
                used: AtomicU64::new(0),
                limit: memory_limit.unwrap_or(u64::MAX).min(adapter.memory),
                patience,
                lost: AtomicBool::new(false),
                fault,
                buffers: AtomicU64::new(0),
                calibrated,
                import,
                cache_folder,
                profile: profiled.then(Mutex::default),
                adapter,
                driver: driver.clone(),
            }))
        }
    }

    /// What the validation layer has said so far.
    pub(crate) fn messages(&self) -> Vec<String> {
        self.driver.messages()
    }

    /// Bytes that may still be allocated, as far as is known now.
    pub(crate) fn available(&self) -> u64 {
        self.limit.min(self.driver.budget(&self.adapter)).saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// The most bytes of one buffer.
    pub(crate) fn largest_buffer(&self) -> u64 {
        self.adapter.max_allocation
    }

    /// Counts a buffer on the device that is about to be made.
    pub(super) fn count(&self, bytes: u64) -> Result<(), Fault> {
        let number = self.buffers.fetch_add(1, Ordering::Relaxed);
        if self.fails(Injected::OutOfMemory, number) {
            return Err(Fault::Memory(INJECTED.into()));
        }
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used > self.limit {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Fault::Memory(format!("{used} bytes are needed, {} may be used", self.limit)));
        }
        Ok(())
    }

    pub(super) fn memory_type(&self, allowed: u32, wanted: vk::MemoryPropertyFlags) -> Option<u32> {
        let types = &self.memory.memory_types[..self.memory.memory_type_count as usize];
        (0..types.len() as u32).find(|&i| allowed & 1 << i != 0 && types[i as usize].property_flags.contains(wanted))
    }

    /// The pipeline of a shader with these constants, made once. `name` stands for the shader.
    pub(crate) fn pipeline(&self, name: &'static str, spirv: &[u8], constants: &[u32]) -> Result<Arc<Pipeline>, Fault> {
        let mut pipelines = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = pipelines.get(&(name, constants.to_vec())) {
            return Ok(found.clone());
        }
        let wrong = |e| Fault::of(&format!("compiling the shader `{name}`"), e);
        let code: Vec<u32> = spirv.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let entries: Vec<_> =
            (0..constants.len() as u32).map(|id| vk::SpecializationMapEntry::default().constant_id(id).offset(4 * id).size(4)).collect();
        let data: Vec<u8> = constants.iter().flat_map(|c| c.to_ne_bytes()).collect();
        let special = vk::SpecializationInfo::default().map_entries(&entries).data(&data);
        // SAFETY: the SPIR-V was checked when it was made, and its constants are those that the entry in `kernels.rs` gives; the module lives as long as the pipeline.
        let pipeline = unsafe {
            let module = self.device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(&code), None).map_err(wrong)?;
            let mut size =
                vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default().required_subgroup_size(self.adapter.subgroup_size);
            let mut stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(c"main")
                .specialization_info(&special);
            if self.adapter.subgroup_control && self.adapter.subgroups {
                stage = stage.push_next(&mut size);
            }
            let create = vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.layout);
            let made = self.device.create_compute_pipelines(self.pipeline_cache, &[create], None);
            match made {
                Ok(handles) => Pipeline { handle: handles[0], name, module },
                Err((_, e)) => {
                    self.device.destroy_shader_module(module, None);
                    return Err(wrong(e));
                }
            }
        };
        let pipeline = Arc::new(pipeline);
        pipelines.insert((name, constants.to_vec()), pipeline.clone());
        Ok(pipeline)
    }

    /// Writes the pipelines that were compiled to the cache on disk.
    pub(crate) fn keep_pipelines(&self) {
        if self.cache_folder.is_none() || self.is_lost() {
            return;
        }
        // SAFETY: the device lives.
        if let Ok(data) = unsafe { self.device.get_pipeline_cache_data(self.pipeline_cache) } {
            cache::store(self.cache_folder.as_deref(), &self.adapter.identity, &data);
        }
    }

    fn line(&self, lane: Lane) -> &Line {
        &self.lines[lane as usize]
    }

    /// The family of a lane's queue.
    pub(super) fn family(&self, lane: Lane) -> u32 {
        self.line(lane).family
    }

    /// Begins to run recordings of one lane, in order, after everything that was submitted to it before, and after one submission to the other if there is one to wait for.
    pub(crate) fn submit(&self, recordings: &[&Recording], after: Option<Submission>) -> Result<Submission, Fault> {
        self.check_alive()?;
        let lane = recordings.first().map_or(Lane::Compute, |recording| recording.lane);
        assert!(recordings.iter().all(|recording| recording.lane == lane), "recordings of two lanes");
        let buffers: Vec<_> = recordings.iter().map(|recording| recording.buffer).collect();
        let line = self.line(lane);
        let queue = line.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let number = line.next();
        if self.fails(Injected::Loss, 1 + self.submissions.fetch_add(1, Ordering::Relaxed)) {
            self.lost.store(true, Ordering::Relaxed);
            return Err(Fault::Lost(INJECTED.into()));
        }
        let (signals, signal_values) = ([line.done], [number]);
        let waits: Vec<_> = after.iter().map(|after| self.line(after.lane).done).collect();
        let (wait_values, stages): (Vec<_>, Vec<_>) = after.iter().map(|after| (after.number, lane.stages())).unzip();
        let mut values =
            vk::TimelineSemaphoreSubmitInfo::default().signal_semaphore_values(&signal_values).wait_semaphore_values(&wait_values);
        let submit = vk::SubmitInfo::default()
            .wait_semaphores(&waits)
            .wait_dst_stage_mask(&stages)
            .signal_semaphores(&signals)
            .command_buffers(&buffers)
            .push_next(&mut values);
        // SAFETY: the queue is locked; recordings live until their owners have waited.
        let result = unsafe { self.device.queue_submit(*queue, &[submit], vk::Fence::null()) };
        result.map_err(|e| self.fault("submitting work", e))?;
        line.count(number);
        Ok(Submission { lane, number })
    }

    /// Whether a submission has ended.
    pub(crate) fn has_ended(&self, submission: Submission) -> Result<bool, Fault> {
        // SAFETY: the semaphore lives as long as the device.
        let done = unsafe { self.device.get_semaphore_counter_value(self.line(submission.lane).done) };
        done.map(|done| done >= submission.number).map_err(|e| self.fault("waiting for the device", e))
    }

    /// Waits until a submission has ended; one that takes too long counts as the loss of the device.
    pub(crate) fn wait(&self, submission: Submission) -> Result<(), Fault> {
        // Short work is over before a sleeping thread would wake up.
        let began = Instant::now();
        while began.elapsed() < AWAKE {
            if self.has_ended(submission)? && !self.fails(Injected::Hang, submission.number) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let (semaphores, values) = ([self.line(submission.lane).done], [submission.number]);
        let wait = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        // SAFETY: the semaphore lives as long as the device.
        match unsafe { self.device.wait_semaphores(&wait, self.patience.as_nanos() as u64) } {
            Ok(()) if !self.fails(Injected::Hang, self.submissions.load(Ordering::Relaxed)) => Ok(()),
            Ok(()) | Err(vk::Result::TIMEOUT) => {
                self.lost.store(true, Ordering::Relaxed);
                Err(Fault::Lost(format!("it did not end its work within {} s", self.patience.as_secs_f32())))
            }
            Err(e) => Err(self.fault("waiting for the device", e)),
        }
    }

    /// Waits until a submission reaches an event, as [`Gpu::wait`] does for its end.
    pub(crate) fn wait_for(&self, event: &Event, submission: Submission) -> Result<(), Fault> {
        let began = Instant::now();
        while !event.has_happened()? || self.fails(Injected::Hang, submission.number) {
            let waited = began.elapsed();
            if waited > self.patience || self.fails(Injected::Hang, submission.number) {
                self.lost.store(true, Ordering::Relaxed);
                return Err(Fault::Lost(format!("it did not go on with its work within {} s", self.patience.as_secs_f32())));
            }
            // Short work is over before a sleeping thread would wake up.
            if waited < AWAKE { std::hint::spin_loop() } else { std::thread::sleep(GLANCE) }
        }
        Ok(())
    }

    /// Whether a test wants something of this number to go wrong.
    fn fails(&self, kind: Injected, number: u64) -> bool {
        self.fault.is_some_and(|(own, first)| own == kind && number >= first)
    }

    /// Runs a recording to its end.
    pub(crate) fn run(&self, recording: &Recording) -> Result<(), Fault> {
        self.submit(&[recording], None).and_then(|submission| self.wait(submission))
    }

    pub(super) fn fault(&self, action: &str, result: vk::Result) -> Fault {
        let fault = Fault::of(action, result);
        if matches!(fault, Fault::Lost(_)) {
            self.lost.store(true, Ordering::Relaxed);
        }
        fault
    }

    /// Whether [`Gpu::at`] knows the times that its queues write.
    pub(super) fn tells_time(&self) -> bool {
        self.calibrated.is_some()
    }

    /// When its clock had been at these times, which lie in the past.
    pub(super) fn at(&self, ticks: [u64; 2]) -> Option<[Instant; 2]> {
        let mask = u64::MAX >> (64 - self.adapter.time_bits?.clamp(1, 64));
        let device = [vk::CalibratedTimestampInfoEXT::default().time_domain(vk::TimeDomainEXT::DEVICE)];
        // SAFETY: the device has the extension.
        let (now, _) = unsafe { self.calibrated.as_ref()?.get_calibrated_timestamps(&device) }.ok()?;
        let (now, host) = (*now.first()?, Instant::now());
        let at = |tick: u64| {
            let ago = (now.wrapping_sub(tick) & mask) as f64 * f64::from(self.adapter.tick_ns);
            host.checked_sub(Duration::from_nanos(ago as u64))
        };
        let [first, last] = ticks.map(at);
        Some([first?, last?])
    }

    pub(crate) fn is_profiled(&self) -> bool {
        self.profile.is_some()
    }

    /// Counts times, in nanoseconds.
    pub(crate) fn count_times(&self, times: impl IntoIterator<Item = (String, f64)>) {
        let Some(profile) = &self.profile else { return };
        let mut profile = profile.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, time) in times {
            let entry = profile.entry(name).or_default();
            *entry = (entry.0 + 1, entry.1 + time);
        }
    }

    /// What was counted since the last time.
    pub(crate) fn take_profile(&self) -> Profile {
        self.profile
            .as_ref()
            .map(|profile| std::mem::take(&mut *profile.lock().unwrap_or_else(PoisonError::into_inner)))
            .unwrap_or_default()
    }

    /// The error where it can no longer be used.
    pub(crate) fn check_alive(&self) -> Result<(), Fault> {
        match self.is_lost() {
            true => Err(Fault::Lost("it was lost before".into())),
            false => Ok(()),
        }
    }

    /// Whether it can no longer be used: what it holds is left to the system, for it may still be at work.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.is_lost() {
            // What is left of it needs the library and the instance.
            std::mem::forget(self.driver.clone());
            return;
        }
        // SAFETY: buffers and recordings hold the device, so none is left.
        unsafe {
            let _ = self.device.device_wait_idle();
            for pipeline in self.pipelines.lock().unwrap_or_else(PoisonError::into_inner).values() {
                self.device.destroy_pipeline(pipeline.handle, None);
                self.device.destroy_shader_module(pipeline.module, None);
            }
            self.device.destroy_pipeline_cache(self.pipeline_cache, None);
            self.lines.iter().for_each(|line| self.device.destroy_semaphore(line.done, None));
            self.device.destroy_pipeline_layout(self.layout, None);
            self.device.destroy_device(None);
        }
    }
}
