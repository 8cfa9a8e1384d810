//! Prompts and their answers on sessions, with everything shown on the way.

use crate::{Cancel, Error, Prompt, Session, ShowTap, sample::argmax};
use qhx_ir::Tap;
use std::cell::RefCell;

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

/// Hears what happens while a prompt is read and answered.
pub trait Listener {
    /// The logits of a row of the prompt, before its last.
    fn prompt_row(&mut self, _logits: &[f32]) {}

    /// The logits from which this token of the answer follows.
    fn step(&mut self, step: usize, logits: &[f32]);

    /// What a stage made, and the number of its first row.
    fn tap(&mut self, first: usize, tap: Tap<'_>);
}

/// A prompt that a session answers.
pub struct Player<'a> {
    session: &'a mut Session,
    prompt: &'a Prompt,
    /// Rows of the prompt, those before its last, whose logits are shown.
    shown: usize,
    answer: Answer<'a>,
    listener: &'a mut dyn Listener,
    ids: Vec<u32>,
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
    let mut listener = Two { logits, taps };
    let mut players = [Player::new(session, prompt, 0, answer, &mut listener)];
    play_together(&mut players, cancel)?;
    let [player] = players;
    Ok(player.ids)
}

/// Reads the prompts one after the other, then puts in the answers, a token of each in every call: each as if it were alone. All sessions are of one model, which was loaded for as many.
pub fn play_together(players: &mut [Player<'_>], cancel: &Cancel) -> Result<(), Error> {
    for player in &mut *players {
        player.read(cancel)?;
    }
    loop {
        let (alone, together): (Vec<&mut Player<'_>>, Vec<_>) =
            players.iter_mut().filter(|player| player.goes_on()).partition(|player| player.starts_again());
        if alone.is_empty() && together.is_empty() {
            return Ok(());
        }
        alone.into_iter().try_for_each(|player| player.step(cancel))?;
        step_together(together, cancel)?;
    }
}

fn step_together(players: Vec<&mut Player<'_>>, cancel: &Cancel) -> Result<(), Error> {
    let mut players = players;
    if let [player] = &mut players[..] {
        return player.step(cancel);
    }
    let ids: Vec<u32> = players.iter().filter_map(|player| player.ids.last().copied()).collect();
    let (mut sessions, mut listeners): (Vec<&mut Session>, Vec<_>) =
        players.iter_mut().map(|player| (&mut *player.session, &mut *player.listener)).unzip();
    Session::append_together(&mut sessions, &ids, cancel, Some(&mut |place, row, tap| listeners[place].tap(row, tap)))?;
    players.into_iter().try_for_each(Player::choose)
}

impl<'a> Player<'a> {
    /// Of a session that forgets what it held.
    pub fn new(session: &'a mut Session, prompt: &'a Prompt, shown: usize, answer: Answer<'a>, listener: &'a mut dyn Listener) -> Self {
        Self { session, prompt, shown, answer, listener, ids: Vec::new() }
    }

    /// The answer so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    fn most(&self) -> usize {
        match self.answer {
            Answer::Greedy(count) | Answer::Until { most: count, .. } => count,
            Answer::Given(ids) => ids.len(),
        }
    }

    fn goes_on(&self) -> bool {
        let ended = match (self.answer, self.ids.last()) {
            (Answer::Until { ends, .. }, Some(last)) => ends.contains(last),
            _ => false,
        };
        self.ids.len() < self.most() && !ended
    }

    /// Whether the next row changes constants of the program, so that all rows are computed again.
    fn starts_again(&self) -> bool {
        let program = self.session.model().program();
        program.epoch(self.session.len()) != program.epoch(self.session.len() + 1)
    }

    /// Reads the prompt, and chooses the first token.
    fn read(&mut self, cancel: &Cancel) -> Result<(), Error> {
        self.session.reset();
        if self.most() == 0 {
            return Ok(());
        }
        let last = self.prompt.ids().len().saturating_sub(1);
        let listener = RefCell::new(&mut *self.listener);
        let mut show = |row: usize, logits: &[f32]| {
            if row < last {
                listener.borrow_mut().prompt_row(logits);
            }
        };
        let mut taps = |first: usize, tap: Tap<'_>| listener.borrow_mut().tap(first, tap);
        self.session.append_prompt_traced(self.prompt, self.shown + 1, cancel, &mut show, &mut taps)?;
        self.choose()
    }

    /// Puts the last token in, and chooses the next.
    fn step(&mut self, cancel: &Cancel) -> Result<(), Error> {
        let Some(&last) = self.ids.last() else { return Ok(()) };
        let listener = &mut *self.listener;
        self.session.append_traced(&[last], 1, cancel, &mut |_, _| {}, &mut |first, tap| listener.tap(first, tap))?;
        self.choose()
    }

    fn choose(&mut self) -> Result<(), Error> {
        let (step, row) = (self.ids.len(), self.session.logits().unwrap_or_default());
        self.listener.step(step, row);
        self.ids.push(match self.answer {
            Answer::Greedy(_) | Answer::Until { .. } => argmax(row)? as u32,
            Answer::Given(given) => given[step],
        });
        Ok(())
    }
}

/// Two functions as a listener.
struct Two<'f, 't> {
    logits: &'f mut dyn FnMut(usize, &[f32]),
    taps: &'f mut ShowTap<'t>,
}

impl Listener for Two<'_, '_> {
    fn step(&mut self, step: usize, logits: &[f32]) {
        (self.logits)(step, logits);
    }

    fn tap(&mut self, first: usize, tap: Tap<'_>) {
        (self.taps)(first, tap);
    }
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
