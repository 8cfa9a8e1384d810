//! From media to soft rows: the towers of a model, loaded when first needed, and what they have made so far.
//!
//! Knows programs without state, devices and the numbers of a medium; knows nothing of tokens or sessions.

use crate::{
    Cancel, DeviceChoice, Encoded, Error, LoadOptions,
    features::Features,
    medium::{FrontEnd, Medium, MediumNumbers, takes},
    memory::{TowerNeed, available_bytes},
    placement::{self, Placement, Rules},
    recorded::Recorded,
    registry::{self, CpuSettings, GpuSettings, NpuSettings},
    soft_rows::{SOFT_ROWS, deepstack_count, deepstack_name, soft_row_width},
};
use qhx_bundle::media::Media;
use qhx_ir::{Bindings, Call, Checked, Device, DeviceError, Dim, Executable, Generator, Outputs, Segment, Tap, Timeline, Weights};
use qhx_media::MediaKind;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The towers of a model.
pub(crate) struct Encoders {
    towers: Arc<Towers>,
    /// Of each tower what is loaded; locked while it is at work.
    loaded: Vec<Mutex<Option<Loaded>>>,
    /// Where the stages of each tower run that was loaded.
    placements: Vec<Mutex<Option<Placement>>>,
    candidates: Vec<Arc<dyn Device>>,
    choice: DeviceChoice,
    rules: Option<Rules>,
    overcommit: bool,
    /// Where calls are written down.
    timeline: Option<Timeline>,
    processor: CpuSettings,
    weights: Arc<dyn Weights>,
    /// Where what was prepared is.
    artifacts: Option<PathBuf>,
    /// Encoded media, the latest last.
    made: Mutex<Vec<Arc<Encoded>>>,
}

/// A program that makes soft rows.
struct Tower {
    kind: MediaKind,
    front_end: FrontEnd,
    program: Checked,
    /// Numbers of a soft row, and how many deepstack outputs the text program wants.
    width: usize,
    deepstack: usize,
}

/// The towers of a model: what it takes beside text, and how many rows that becomes. Needs no device.
pub(crate) struct Towers(Vec<Tower>);

impl Towers {
    /// The towers that `media` names, checked against the text program that reads what they make.
    pub(crate) fn new(media: &Media, programs: &BTreeMap<String, Checked>, text: &Checked) -> Result<Self, Error> {
        Ok(Self(FrontEnd::all(media).map(|front_end| Tower::new(front_end, programs, text)).collect::<Result<_, _>>()?))
    }

    /// What media the model takes.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = MediaKind> {
        self.0.iter().map(|tower| tower.kind)
    }

    /// How many soft rows a medium has.
    pub(crate) fn soft_rows(&self, model: &str, medium: &Medium) -> Result<usize, Error> {
        let (_, tower) = self.tower(model, medium)?;
        medium.features().map_or_else(|| tower.soft_rows(medium.rows()), |features| Ok(features.rows))
    }

    /// The program that encodes media of a kind.
    pub(crate) fn program(&self, kind: MediaKind) -> Option<&Checked> {
        self.0.iter().find(|tower| tower.kind == kind).map(|tower| &tower.program)
    }

    /// The tower of a medium and its place.
    fn tower(&self, model: &str, medium: &Medium) -> Result<(usize, &Tower), Error> {
        let kind = medium.kind();
        let tower = self.0.iter().enumerate().find(|(_, tower)| tower.kind == kind);
        let (place, tower) = tower.ok_or_else(|| Error::NotTaken { model: model.to_owned(), kind, takes: takes(self.kinds()) })?;
        match medium.is_for(&tower.front_end) {
            true => Ok((place, tower)),
            false => Err(Error::OtherFrontEnd { medium: medium.name().to_owned(), model: model.to_owned() }),
        }
    }
}

struct Loaded {
    executable: Box<dyn Executable>,
    max_rows: usize,
}

/// The most that encoded media may hold for use again; the latest one is kept in any case.
const MAX_MADE_BYTES: usize = 256 << 20;

impl Encoders {
    pub(crate) fn new(
        towers: Arc<Towers>,
        weights: Arc<dyn Weights>,
        candidates: Vec<Arc<dyn Device>>,
        artifacts: Option<PathBuf>,
        options: &LoadOptions,
    ) -> Self {
        let LoadOptions { device: choice, overcommit, .. } = *options;
        let loaded = towers.0.iter().map(|_| Mutex::default()).collect();
        let placements = towers.0.iter().map(|_| Mutex::default()).collect();
        let rules = options.placement.clone();
        let processor = options.cpu();
        Self {
            towers,
            loaded,
            placements,
            candidates,
            choice,
            rules,
            overcommit,
            timeline: options.timeline.clone(),
            processor,
            weights,
            artifacts,
            made: Mutex::default(),
        }
    }

    /// Where the stages of a tower run, once it is loaded. Does not wait for one that is at work.
    pub(crate) fn placement(&self, kind: MediaKind) -> Option<Placement> {
        let place = self.towers.0.iter().position(|tower| tower.kind == kind)?;
        lock(&self.placements[place]).clone()
    }

    /// Gives the stages of a tower this reason for being where they are.
    fn explain(&self, place: usize, reason: &Error) {
        if let Some(placement) = &mut *lock(&self.placements[place]) {
            placement.explain(&reason.to_string());
        }
    }

    /// The soft rows of a medium, and whether a tower had to be run for them.
    pub(crate) fn encode(&self, model: &str, medium: &Medium, cancel: &Cancel) -> Result<(Arc<Encoded>, bool), Error> {
        self.towers.tower(model, medium)?;
        if let Some(encoded) = self.find(medium) {
            return Ok((self.keep(encoded), false));
        }
        let encoded = Arc::new(self.run(model, medium, cancel, None)?);
        Ok((self.keep(encoded), true))
    }

    /// Whether a tower has to be run for one of these media, and can be beside a program that is placed so: together they have more devices than one.
    pub(crate) fn work_beside<'m>(&self, model: &str, media: impl Iterator<Item = &'m Medium>, text: &Placement) -> Result<bool, Error> {
        for medium in media.filter(|medium| medium.features().is_none() && self.find(medium).is_none()) {
            let (_, tower) = self.towers.tower(model, medium)?;
            // Not as it is loaded: a tower that is at work is not asked.
            let placed = placement::place_tower(&tower.program, self.choice, self.rules.as_ref(), &self.candidates);
            if placed.is_ok_and(|(_, tower)| tower.devices().chain(text.devices()).collect::<BTreeSet<_>>().len() > 1) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Runs the tower whatever was made before, and shows what every stage made.
    pub(crate) fn encode_traced(
        &self,
        model: &str,
        medium: &Medium,
        cancel: &Cancel,
        taps: &mut dyn FnMut(Tap<'_>),
    ) -> Result<Arc<Encoded>, Error> {
        let encoded = Arc::new(self.run(model, medium, cancel, Some(taps))?);
        Ok(self.keep(encoded))
    }

    fn find(&self, medium: &Medium) -> Option<Arc<Encoded>> {
        let same = |encoded: &&Arc<Encoded>| (encoded.kind(), encoded.digest()) == (medium.kind(), medium.digest());
        lock(&self.made).iter().find(same).cloned()
    }

    /// Puts it last among what was made, and makes room.
    fn keep(&self, encoded: Arc<Encoded>) -> Arc<Encoded> {
        let mut made = lock(&self.made);
        made.retain(|other| !other.is_same_content(&encoded));
        made.push(encoded.clone());
        let mut bytes: usize = made.iter().map(|encoded| encoded.bytes()).sum();
        while bytes > MAX_MADE_BYTES && made.len() > 1 {
            bytes -= made.remove(0).bytes();
        }
        encoded
    }

    fn run(&self, model: &str, medium: &Medium, cancel: &Cancel, taps: Option<&mut dyn FnMut(Tap<'_>)>) -> Result<Encoded, Error> {
        let (place, tower) = self.towers.tower(model, medium)?;
        if cancel.is_cancelled() {
            return Err(Error::Cancelled);
        }
        if let Some(features) = medium.features() {
            return tower.staged(medium, features);
        }
        let mut slot = lock(&self.loaded[place]);
        let mut shown = taps.map(|taps| move |tap: Tap<'_>| taps(tap));
        let mut run = |loaded: &mut Loaded| {
            let taps = shown.as_mut().map(|shown| shown as &mut dyn FnMut(Tap<'_>));
            tower.run(&mut *loaded.executable, medium, cancel, taps)
        };
        if let Err(error) = self.load(place, &mut slot, medium, &self.candidates) {
            let is_full = matches!(error, Error::MediumDoesNotFit { .. }) || left_device(&error);
            if self.choice != DeviceChoice::Auto || !is_full {
                return Err(error);
            }
            self.load(place, &mut slot, medium, &self.cpu()?)?;
            self.explain(place, &error);
        }
        match self.load(place, &mut slot, medium, &self.candidates).and_then(&mut run) {
            Err(error) if left_device(&error) => {
                *slot = None;
                let loaded = self.load(place, &mut slot, medium, &self.cpu()?)?;
                self.explain(place, &error);
                run(loaded)
            }
            encoded => encoded,
        }
    }

    /// The processor, which takes what other devices cannot go on with.
    fn cpu(&self) -> Result<Vec<Arc<dyn Device>>, Error> {
        registry::candidates_with(DeviceChoice::Cpu, self.processor, &NpuSettings::default(), &GpuSettings::default())
    }

    /// Gets the tower at a place ready for a call as large as the medium's.
    fn load<'a>(
        &self,
        place: usize,
        slot: &'a mut Option<Loaded>,
        medium: &Medium,
        devices: &[Arc<dyn Device>],
    ) -> Result<&'a mut Loaded, Error> {
        let (tower, rows) = (&self.towers.0[place], medium.rows());
        if slot.as_ref().is_none_or(|loaded| loaded.max_rows < rows) {
            // What is loaded holds memory for its largest call.
            *slot = None;
            let (device, placement) = placement::place_tower(&tower.program, self.choice, self.rules.as_ref(), devices)?;
            let needed = TowerNeed { program: &tower.program, rows }.bytes();
            let available = device.own_memory()?.or_else(available_bytes);
            if let Some(available) = available.filter(|&available| needed > available && !self.overcommit) {
                return Err(Error::MediumDoesNotFit { medium: medium.name().to_owned(), kind: tower.kind, needed, available });
            }
            let options = qhx_ir::LoadOptions {
                max_rows: rows,
                max_soft_rows: 0,
                max_wanted: 1,
                max_segments: 1,
                max_state_bytes: None,
                replaceable: Vec::new(),
                pauses: Vec::new(),
                scratch_group: None,
                history: None,
                artifacts: self.artifacts.clone(),
                progress: None,
                timeline: self.timeline.clone(),
            };
            let executable = device.load(&tower.program, &self.weights, &options)?;
            let executable = Recorded::of_device(executable, &*device, self.timeline.as_ref());
            *lock(&self.placements[place]) = Some(placement);
            *slot = Some(Loaded { executable, max_rows: rows });
        }
        slot.as_mut().ok_or_else(|| Error::Device(DeviceError::Call("the tower is not loaded".into())))
    }
}

impl Tower {
    fn new(front_end: FrontEnd, programs: &BTreeMap<String, Checked>, text: &Checked) -> Result<Self, Error> {
        let kind = front_end.kind();
        let name = front_end.program().to_owned();
        let wrong = |reason: String| Error::Tower { program: name.clone(), reason };
        let program = programs.get(&name).ok_or_else(|| wrong("the bundle has no such program".into()))?.clone();
        if !program.slots.is_empty() {
            return Err(wrong("it keeps state, and a tower has none".into()));
        }
        if let Some(input) = program.inputs.iter().find(|input| !front_end.makes(&input.generator)) {
            return Err(wrong(format!("its input `{}` is not made of {kind}s", input.name)));
        }
        let takes_places = text.inputs.iter().any(|input| input.generator == Generator::SoftRowsAt);
        let width = soft_row_width(text).filter(|_| takes_places);
        let width = width.ok_or_else(|| wrong("the text program takes no soft rows".into()))?;
        let tower = Self { kind, front_end, program, width, deepstack: deepstack_count(text) };
        let names = (0..tower.deepstack).map(deepstack_name).filter(|_| tower.kind == MediaKind::Image);
        for name in std::iter::once(SOFT_ROWS.to_owned()).chain(names) {
            let found = tower.output(&name).map(|shape| shape.to_vec());
            match found.as_deref() {
                Some([_, Dim::Fixed(found)]) if *found == width => {}
                Some(_) => {
                    return Err(wrong(format!("its output `{name}` must have rows of {width} numbers, as the text program takes them")));
                }
                None => return Err(wrong(format!("it has no output `{name}`"))),
            }
        }
        Ok(tower)
    }

    fn output(&self, name: &str) -> Option<&[Dim]> {
        let output = self.program.outputs.iter().find(|output| &*output.name == name)?;
        Some(&self.program.value_type(&output.value).shape)
    }

    /// How many soft rows a call of `rows` rows gives.
    fn soft_rows(&self, rows: usize) -> Result<usize, Error> {
        let bindings = Bindings { rows, soft_rows: 0, wanted: 0 };
        let first = self.output(SOFT_ROWS).and_then(|shape| shape.first().copied());
        let bound = first.map_or(Ok(0), |dim| dim.bind(&bindings));
        bound.map_err(|reason| Error::Tower { program: self.program.name.to_string(), reason })
    }

    /// What is known without running it.
    fn staged(&self, medium: &Medium, features: &Features) -> Result<Encoded, Error> {
        let wrong =
            |reason: String| Error::Tower { program: self.program.name.to_string(), reason: format!("{}: {reason}", medium.name()) };
        let shape = [features.rows, self.width];
        Encoded::of(medium, shape, self.deepstack, |name| match name.strip_prefix("deepstack.") {
            Some(number) => features.deepstack.get(number.parse::<usize>().ok()?).cloned(),
            None => Some(features.soft.clone()),
        })
        .map_err(wrong)
    }

    fn run(
        &self,
        executable: &mut dyn Executable,
        medium: &Medium,
        cancel: &Cancel,
        taps: Option<&mut dyn FnMut(Tap<'_>)>,
    ) -> Result<Encoded, Error> {
        let rows = medium.rows();
        let numbers = medium.numbers(self.program.inputs.iter().map(|input| &input.generator));
        let inputs: Vec<_> = numbers.iter().map(MediumNumbers::lend).collect();
        let mut segments = [Segment::new(None, 0, rows)];
        let bindings = Bindings { rows, soft_rows: 0, wanted: 0 };
        let mut outputs = Outputs::new();
        let mut tap;
        let mut call = Call::new(bindings, &inputs, &mut segments, &mut outputs);
        call.cancel = Some(cancel.flag());
        if let Some(show) = taps {
            tap = |it: Tap<'_>| show(it);
            call.taps = Some(&mut tap);
        }
        executable.run(&mut call)?;
        let wrong = |reason: String| Error::Tower { program: self.program.name.to_string(), reason };
        let output = |name: &str| outputs.value(name).map(<[f32]>::to_vec);
        Encoded::of(medium, [self.soft_rows(rows)?, self.width], self.deepstack, output).map_err(wrong)
    }
}

/// Whether a device cannot go on that another can take the place of.
fn left_device(error: &Error) -> bool {
    matches!(error, Error::Device(error) if error.left_device().is_some())
}

/// A device that panicked is used again: what it computes is checked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
