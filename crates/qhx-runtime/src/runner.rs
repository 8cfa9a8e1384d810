//! Runs the text program: rows of one or many sequences in, what is wanted of them out.
//!
//! The one place where calls are made. Whoever has the [`Runner`] has the device.

use crate::{
    Error,
    inputs::{Inputs, Placeholders, RowSpan},
    row_costs::RowCosts,
    sequence::{Sequence, Wanted},
};
use qhx_ir::{Call, Checked, DeviceError, Executable, ExpertCache, IdMask, Outputs, Phase, RowResult, Segment, Tap, Want};
use std::{
    iter::repeat_n,
    ops::Range,
    sync::{OnceLock, atomic::AtomicBool},
    time::Instant,
};

/// The loaded text program with the buffers of its calls.
pub(crate) struct Runner {
    pub(crate) executable: Box<dyn Executable>,
    program: Checked,
    placeholders: Placeholders,
    /// Numbers in a row of logits.
    width: usize,
    inputs: Inputs,
    outputs: Outputs,
    /// The stage whose rows feed the model's own drafts, and the numbers of a row.
    hidden_stage: Option<(String, usize)>,
    /// What it made in the last call, where that was wanted.
    hidden: Vec<f32>,
    /// How often the program was loaded again because its device was lost: states of an earlier time are of no use.
    pub(crate) loads: u64,
    /// What happened then.
    pub(crate) moved: Option<String>,
    /// What decode steps take.
    pub(crate) costs: RowCosts,
    /// What had become of chosen experts before the last call.
    experts_before: ExpertCache,
}

/// Rows of a sequence that a call computes. Those of which something is wanted are the last ones.
pub(crate) struct Span<'a> {
    pub(crate) sequence: &'a mut Sequence,
    pub(crate) rows: Range<usize>,
    pub(crate) wanted: usize,
    /// The ids from which the next token may be chosen, where the largest logit decides.
    pub(crate) mask: Option<&'a OnceLock<IdMask>>,
}

impl<'a> Span<'a> {
    fn row_span(&self) -> RowSpan<'_> {
        RowSpan { rows: &self.sequence.rows, span: self.rows.clone(), wanted: self.wanted }
    }

    /// What a call should give of a wanted row.
    fn want(&self, all_logits: bool) -> Want<'a> {
        match (self.sequence.wanted, self.mask) {
            _ if all_logits => Want::Logits,
            (Wanted::Logits, _) => Want::Logits,
            (Wanted::Largest, Some(mask)) => Want::LargestAllowed(mask),
            (Wanted::Largest, None) => Want::Largest,
            (Wanted::Top(count), _) => Want::Top(count),
        }
    }

    /// The segment of a call whose first row is row `first` of the call, where drafts can be made or not.
    fn segment(&mut self, first: usize, can_draft: bool) -> Segment<'_> {
        let Sequence { state, epoch, drafts, chosen_from, .. } = &mut *self.sequence;
        // Tokens that had to follow a chosen one come out as they would as drafts.
        let could_be_drafts = can_draft && Some(self.rows.start) == *chosen_from && self.rows.len() > 1;
        let partial = *drafts > 0 || could_be_drafts;
        Segment { epoch: *epoch, partial, ..Segment::new(Some(&mut **state), first, self.rows.len()) }
    }
}

/// What a call is made for.
pub(crate) struct Purpose<'a> {
    pub(crate) phase: Phase,
    pub(crate) cancel: Option<&'a AtomicBool>,
}

/// Takes the logits of a row, and the row's number.
pub type ShowLogits<'a> = dyn FnMut(usize, &[f32]) + 'a;
/// Takes what a stage made in a call, and the number of the call's first row.
pub type ShowTap<'a> = dyn FnMut(usize, Tap<'_>) + 'a;

/// What a step reports while it runs.
#[derive(Default)]
pub(crate) struct Watch<'a> {
    /// Gets the logits of each wanted row with the row's number.
    pub(crate) logits: Option<&'a mut ShowLogits<'a>>,
    /// Gets each stage's tap with the number of the call's first row.
    pub(crate) taps: Option<&'a mut ShowTap<'a>>,
}

impl Runner {
    pub(crate) fn new(executable: Box<dyn Executable>, program: Checked, placeholders: Placeholders, width: usize) -> Self {
        Self {
            executable,
            program,
            placeholders,
            width,
            inputs: Inputs::default(),
            outputs: Outputs::new(),
            hidden_stage: None,
            hidden: Vec::new(),
            loads: 0,
            moved: None,
            costs: RowCosts::default(),
            experts_before: ExpertCache::default(),
        }
    }

    /// The same for sequences that want to see what a stage makes of their rows: so many numbers each.
    pub(crate) fn showing(self, stage: &str, width: usize) -> Self {
        Self { hidden_stage: Some((stage.to_owned(), width)), ..self }
    }

    /// Beside so many rows drafts change nothing: see [`Executable::invariant_rows`].
    pub(crate) fn invariant_rows(&self) -> usize {
        if self.executable.commits_partly() { self.executable.invariant_rows() } else { 0 }
    }

    /// From now on calls go to a program that was loaded anew.
    pub(crate) fn replace(&mut self, executable: Box<dyn Executable>, why: String) {
        (self.executable, self.outputs) = (executable, Outputs::new());
        (self.loads, self.costs, self.experts_before) = (self.loads + 1, RowCosts::default(), ExpertCache::default());
        self.moved = Some(why);
    }

    /// One call over rows of several sequences. The rows are committed, unless there are drafts among them; the last row's logits, and those of drafts, are kept where a span
    /// ends with its sequence's last row.
    pub(crate) fn call(&mut self, spans: &mut [Span<'_>], purpose: &Purpose<'_>, watch: &mut Watch<'_>) -> Result<(), Error> {
        let started = Instant::now();
        self.compute(spans, purpose, watch)?;
        if purpose.phase == Phase::Decode {
            self.costs.learn(spans.iter().map(|span| span.rows.len()).sum(), started.elapsed());
        }
        self.deliver(spans, purpose, watch)
    }

    fn compute(&mut self, spans: &mut [Span<'_>], purpose: &Purpose<'_>, watch: &mut Watch<'_>) -> Result<(), Error> {
        let can_draft = self.invariant_rows() > 0;
        let Self { executable, program, placeholders, inputs, outputs, hidden_stage, hidden, .. } = self;
        hidden.clear();
        let is_hidden_wanted = spans.iter().any(|span| span.sequence.hidden.is_some());
        inputs.fill(program, placeholders, spans.iter().map(Span::row_span));
        let all_logits = watch.logits.is_some();
        let first = spans.first().map_or(0, |span| span.rows.start);
        // Decoding alone allocates nothing.
        let (one_want, many_wants);
        let wants = match &*spans {
            [span] if span.wanted <= 1 => {
                one_want = [span.want(all_logits)];
                &one_want[..span.wanted]
            }
            spans => {
                many_wants = spans.iter().flat_map(|span| repeat_n(span.want(all_logits), span.wanted)).collect::<Vec<_>>();
                &many_wants[..]
            }
        };
        inputs.lend(program, |bindings, inputs| {
            let (mut one_segment, mut many_segments);
            let segments = match &mut *spans {
                [span] => {
                    one_segment = [span.segment(0, can_draft)];
                    &mut one_segment[..]
                }
                spans => {
                    let mut next = 0;
                    let segment = |span| {
                        let segment = Span::segment(span, next, can_draft);
                        next += segment.valid_rows;
                        segment
                    };
                    many_segments = spans.iter_mut().map(segment).collect::<Vec<_>>();
                    &mut many_segments[..]
                }
            };
            let (mut tap, mut keep);
            let mut call = Call::new(bindings, inputs, segments, outputs);
            (call.wants, call.phase, call.cancel) = (wants, purpose.phase, purpose.cancel);
            if let Some(show) = &mut watch.taps {
                tap = |it: Tap<'_>| show(first, it);
                call.taps = Some(&mut tap);
            } else if let Some((stage, _)) = hidden_stage.as_ref().filter(|_| is_hidden_wanted) {
                keep = |it: Tap<'_>| {
                    if it.stage == *stage {
                        hidden.extend_from_slice(it.values);
                    }
                };
                call.taps = Some(&mut keep);
                call.tapped = Some(stage);
            }
            executable.run(&mut call)
        })?;
        Ok(())
    }

    /// Hands out what a call gave, and commits its rows.
    fn deliver(&mut self, spans: &mut [Span<'_>], purpose: &Purpose<'_>, watch: &mut Watch<'_>) -> Result<(), Error> {
        let width = self.width;
        let experts = self.executable.expert_cache().unwrap_or_default();
        let chosen = experts.since(&std::mem::replace(&mut self.experts_before, experts));
        let logits = self.outputs.value("logits").unwrap_or_default();
        let mut results = self.outputs.rows().iter();
        let last_stage = self.executable.last_stage_time().unwrap_or_default();
        let width_hidden = self.hidden_stage.as_ref().map_or(0, |(_, width)| *width);
        let mut first = 0;
        for Span { sequence, rows, wanted, .. } in spans {
            let own = first * width_hidden..(first + rows.len()) * width_hidden;
            first += rows.len();
            if let (Some(kept), Some(hidden)) = (&mut sequence.hidden, self.hidden.get(own)) {
                kept.put(rows.start, hidden);
            }
            if sequence.drafts == 0 {
                sequence.state.commit(rows.len())?;
            }
            sequence.chosen_from = None;
            sequence.work.add(purpose.phase, rows.len(), last_stage, chosen);
            if rows.end == sequence.rows.len() && *wanted > 0 {
                sequence.forget_logits();
            }
            for number in 0..*wanted {
                let row = rows.end - *wanted + number;
                // Only the last row of all is kept, and the drafts before it: until then the step may still fail.
                let is_kept = row + 1 + sequence.drafts >= sequence.rows.len();
                match results.next() {
                    Some(RowResult::Logits(at)) if logits.len() >= (at + 1) * width => {
                        let logits = &logits[at * width..][..width];
                        if is_kept {
                            sequence.logits.extend_from_slice(logits);
                        }
                        if let Some(show) = &mut watch.logits {
                            show(row, logits);
                        }
                    }
                    Some(RowResult::Largest { id, value }) if is_kept => sequence.largest.push((*id, *value)),
                    Some(RowResult::Top(top)) if is_kept => sequence.largest.extend_from_slice(top),
                    Some(RowResult::Largest { .. } | RowResult::Top(_)) => {}
                    _ => return Err(self.wrong_output(*wanted)),
                }
            }
        }
        Ok(())
    }

    fn wrong_output(&self, rows: usize) -> Error {
        let width = self.width;
        Error::Device(DeviceError::Call(match self.outputs.value("logits") {
            Some(found) => format!("the device gave {} logits for {rows} rows of {width}", found.len()),
            None => "the device gave no output `logits`".into(),
        }))
    }
}
