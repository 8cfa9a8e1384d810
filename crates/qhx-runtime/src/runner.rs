//! Runs the text program: rows of one or many sessions in, what is wanted of them out.
//!
//! The one place where calls are made. Whoever has the [`Runner`] has the device.

use crate::{
    Error, Model, Session,
    inputs::{Inputs, RowSpan},
    session::Watch,
};
use qhx_ir::{Call, Executable, IdMask, Outputs, Phase, RowResult, Segment, Tap, Want};
use std::{
    ops::Range,
    sync::{OnceLock, atomic::AtomicBool},
};

/// The loaded text program with the buffers of its calls.
pub(crate) struct Runner {
    pub(crate) executable: Box<dyn Executable>,
    inputs: Inputs,
    outputs: Outputs,
    /// How often the program was loaded again because its device was lost: states of an earlier time are of no use.
    pub(crate) loads: u64,
    /// What happened then.
    pub(crate) moved: Option<String>,
}

/// Rows of a session that a call computes. Those of which something is wanted are the last ones.
pub(crate) struct Span<'a> {
    pub(crate) session: &'a mut Session,
    pub(crate) rows: Range<usize>,
    pub(crate) wanted: usize,
    /// The ids from which the next token may be chosen, where the largest logit decides.
    pub(crate) mask: Option<&'a OnceLock<IdMask>>,
}

/// What a call is made for.
pub(crate) struct Purpose<'a> {
    pub(crate) phase: Phase,
    pub(crate) cancel: Option<&'a AtomicBool>,
}

impl Runner {
    pub(crate) fn new(executable: Box<dyn Executable>) -> Self {
        Self { executable, inputs: Inputs::default(), outputs: Outputs::new(), loads: 0, moved: None }
    }

    /// From now on calls go to a program that was loaded anew.
    pub(crate) fn replace(&mut self, executable: Box<dyn Executable>, why: String) {
        *self = Self { loads: self.loads + 1, moved: Some(why), ..Self::new(executable) };
    }

    /// One call over rows of several sessions. Each session's rows are committed; the last row's logits are kept where a session's span ends with its last row.
    pub(crate) fn call(
        &mut self,
        model: &Model,
        spans: &mut [Span<'_>],
        purpose: &Purpose<'_>,
        watch: &mut Watch<'_>,
    ) -> Result<(), Error> {
        let Self { executable, inputs, outputs, .. } = self;
        let all_logits = watch.logits.is_some();
        match spans {
            // Decoding alone allocates nothing.
            [Span { session, rows, wanted, mask }] if *wanted <= 1 => {
                let want = [session.want(all_logits, *mask)];
                let first = rows.start;
                let Session { rows: own, state, epoch, .. } = &mut **session;
                let span = RowSpan { rows: own, span: rows.clone(), wanted: *wanted };
                inputs.lend(model.program(), model.placeholders(), std::iter::once(span), |bindings, inputs| {
                    let mut segments = [Segment { epoch: *epoch, ..Segment::new(Some(&mut **state), 0, rows.len()) }];
                    let mut tap;
                    let mut call = Call::new(bindings, inputs, &mut segments, outputs);
                    (call.wants, call.phase, call.cancel) = (&want[..*wanted], purpose.phase, purpose.cancel);
                    if let Some(show) = &mut watch.taps {
                        tap = |it: Tap<'_>| show(first, it);
                        call.taps = Some(&mut tap);
                    }
                    executable.run(&mut call)
                })?;
            }
            _ => {
                let wants: Vec<Want<'_>> =
                    spans.iter().flat_map(|span| std::iter::repeat_n(span.session.want(all_logits, span.mask), span.wanted)).collect();
                let mut states = Vec::with_capacity(spans.len());
                let mut rows = Vec::with_capacity(spans.len());
                let first = spans.first().map_or(0, |span| span.rows.start);
                for Span { session, rows: span, wanted, .. } in spans.iter_mut() {
                    let Session { rows: own, state, epoch, .. } = &mut **session;
                    states.push((state, *epoch, span.len()));
                    rows.push(RowSpan { rows: own, span: span.clone(), wanted: *wanted });
                }
                inputs.lend(model.program(), model.placeholders(), rows.into_iter(), |bindings, inputs| {
                    let mut next = 0;
                    let segments = states.iter_mut().map(|(state, epoch, count)| {
                        let first_row = next;
                        next += *count;
                        Segment { epoch: *epoch, ..Segment::new(Some(&mut ***state), first_row, *count) }
                    });
                    let mut segments: Vec<Segment<'_>> = segments.collect();
                    let mut tap;
                    let mut call = Call::new(bindings, inputs, &mut segments, outputs);
                    (call.wants, call.phase, call.cancel) = (&wants, purpose.phase, purpose.cancel);
                    if let Some(show) = &mut watch.taps {
                        tap = |it: Tap<'_>| show(first, it);
                        call.taps = Some(&mut tap);
                    }
                    executable.run(&mut call)
                })?;
            }
        }
        self.deliver(model, spans, purpose, watch)
    }

    /// Hands out what a call gave, and commits its rows.
    fn deliver(&self, model: &Model, spans: &mut [Span<'_>], purpose: &Purpose<'_>, watch: &mut Watch<'_>) -> Result<(), Error> {
        let width = model.vocabulary().logits;
        let logits = self.outputs.value("logits").unwrap_or_default();
        let mut results = self.outputs.rows().iter();
        let last_stage = self.executable.last_stage_time().unwrap_or_default();
        for Span { session, rows, wanted, .. } in spans {
            session.state.commit(rows.len())?;
            session.work.add(purpose.phase, rows.len(), last_stage);
            for number in 0..*wanted {
                let row = rows.end - *wanted + number;
                // Only the last row of all is kept: until then the step may still fail.
                let is_last = row + 1 == session.rows.len();
                match results.next() {
                    Some(RowResult::Logits(at)) if logits.len() >= (at + 1) * width => {
                        let logits = &logits[at * width..][..width];
                        if is_last {
                            session.set_logits(logits);
                        }
                        if let Some(show) = &mut watch.logits {
                            show(row, logits);
                        }
                    }
                    Some(RowResult::Largest { id, value }) if is_last => session.set_largest(*id, *value),
                    Some(RowResult::Largest { .. }) => {}
                    _ => return Err(model.wrong_output(*wanted, self.outputs.value("logits").map(<[f32]>::len))),
                }
            }
        }
        Ok(())
    }
}
