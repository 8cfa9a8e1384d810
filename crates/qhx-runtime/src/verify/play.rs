//! One prompt and its answer on a session, with everything shown on the way.

use crate::{Cancel, Error, Prompt, Session, ShowTap, sample::argmax};

/// Where the tokens of an answer come from.
#[derive(Clone, Copy, Debug)]
pub enum Answer<'a> {
    /// Chosen greedily, this many; end-of-answer ids are as any other.
    Greedy(usize),
    /// Chosen greedily, at most `most`, the last of them the first that is among `ends`.
    Until {
        /// The longest answer.
        most: usize,
        /// Ids that end it.
        ends: &'a [u32],
    },
    /// Given, whatever the model would choose.
    Given(&'a [u32]),
}

/// Reads `prompt` on the session, its media included, forgetting what it held, then puts in the answer token by token, as decoding does. The logits of each token's step go to
/// `logits`, what stages made to `taps`. Gives the answer.
pub fn play(
    session: &mut Session,
    prompt: &Prompt,
    answer: Answer<'_>,
    cancel: &Cancel,
    logits: &mut dyn FnMut(usize, &[f32]),
    taps: &mut ShowTap<'_>,
) -> Result<Vec<u32>, Error> {
    play_showing(session, prompt, 0, answer, cancel, &mut |_| {}, logits, taps)
}

/// The same, and the logits of `shown` rows of the prompt, those before its last, go to `read` first, in order.
#[allow(clippy::too_many_arguments)] // what it reads, and who listens
pub fn play_showing(
    session: &mut Session,
    prompt: &Prompt,
    shown: usize,
    answer: Answer<'_>,
    cancel: &Cancel,
    read: &mut dyn FnMut(&[f32]),
    logits: &mut dyn FnMut(usize, &[f32]),
    taps: &mut ShowTap<'_>,
) -> Result<Vec<u32>, Error> {
    session.reset();
    let count = match answer {
        Answer::Greedy(count) | Answer::Until { most: count, .. } => count,
        Answer::Given(ids) => ids.len(),
    };
    let mut ids: Vec<u32> = Vec::with_capacity(count);
    while ids.len() < count {
        let mut taps = |first: usize, tap: qhx_ir::Tap<'_>| taps(first, tap);
        match ids.last() {
            None => {
                let last = prompt.ids().len().saturating_sub(1);
                let mut show = |row: usize, logits: &[f32]| {
                    if row < last {
                        read(logits)
                    }
                };
                session.append_prompt_traced(prompt, shown + 1, cancel, &mut show, &mut taps)?;
            }
            Some(&last) => session.append_traced(&[last], 1, cancel, &mut |_, _| {}, &mut taps)?,
        }
        let row = session.logits().unwrap_or_default();
        logits(ids.len(), row);
        ids.push(match answer {
            Answer::Greedy(_) | Answer::Until { .. } => argmax(row)? as u32,
            Answer::Given(given) => given[ids.len()],
        });
        if let (Answer::Until { ends, .. }, Some(last)) = (answer, ids.last())
            && ends.contains(last)
        {
            break;
        }
    }
    Ok(ids)
}

/// The `count` largest of `logits`, falling, the lowest id first at a tie.
pub fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut best: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
    for (id, &logit) in logits.iter().enumerate() {
        if best.len() < count || best.last().is_some_and(|&(_, least)| logit > least) {
            let place = best.iter().position(|&(_, other)| logit > other).unwrap_or(best.len());
            best.insert(place, (id as u32, logit));
            best.truncate(count);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_logits_in_order() {
        assert_eq!(top(&[1.0, 3.0, 2.0, 3.0, -1.0], 3), [(1, 3.0), (3, 3.0), (2, 2.0)]);
        assert_eq!(top(&[1.0], 3), [(0, 1.0)]);
    }
}
