//! Drafts without a model: what followed when the text was last as it is now.

use super::Draft;
use crate::Error;
use std::collections::HashMap;

/// Tokens that must be alike before what followed is a guess.
const LEAST_ALIKE: usize = 3;
/// Shorter and shorter endings whose latest place is brought up to date with each token. Those beyond have an earlier place, which is as true.
const MOST_ENDINGS: usize = 16;

/// Finds the longest ending of a text that stood in it before, by a suffix automaton: a state for each set of places at which the same texts end, so one step for each token, however
/// long the text is.
pub struct Lookup {
    ids: Vec<u32>,
    states: Vec<State>,
    /// By state and id.
    next: HashMap<(u32, u32), u32>,
    edges: Vec<Edge>,
    /// The whole text so far.
    last: u32,
    /// How much of the end stood there before, and where what followed begins.
    found: Option<(usize, usize)>,
}

/// Texts that end at the same places.
#[derive(Clone, Copy)]
struct State {
    /// The longest of them.
    length: u32,
    /// The longest ending of them that has more places.
    ending: Option<u32>,
    /// The latest place behind them.
    behind: u32,
    /// The first of its edges.
    edge: Option<u32>,
}

/// An id that follows a state; a list for each state.
struct Edge {
    id: u32,
    next: Option<u32>,
}

impl Lookup {
    /// For a text of about so many tokens.
    pub fn with_capacity(tokens: usize) -> Self {
        let mut states = Vec::with_capacity(2 * tokens + 1);
        states.push(State { length: 0, ending: None, behind: 0, edge: None });
        Self {
            ids: Vec::with_capacity(tokens),
            states,
            next: HashMap::with_capacity(3 * tokens),
            edges: Vec::with_capacity(3 * tokens),
            last: 0,
            found: None,
        }
    }

    fn set_next(&mut self, state: u32, id: u32, to: u32) {
        if self.next.insert((state, id), to).is_none() {
            let edge = self.states[state as usize].edge.replace(self.edges.len() as u32);
            self.edges.push(Edge { id, next: edge });
        }
    }

    fn push(&mut self, id: u32) {
        self.ids.push(id);
        let behind = self.ids.len() as u32;
        let whole = self.states.len() as u32;
        let length = self.states[self.last as usize].length + 1;
        self.states.push(State { length, ending: None, behind, edge: None });
        let mut at = Some(self.last);
        while let Some(state) = at.filter(|&state| !self.next.contains_key(&(state, id))) {
            self.set_next(state, id, whole);
            at = self.states[state as usize].ending;
        }
        let ending = match at {
            None => 0,
            Some(state) => self.split(state, id),
        };
        self.states[whole as usize].ending = Some(ending);
        self.last = whole;
        let State { length, behind: before, .. } = self.states[ending as usize];
        self.found = (length > 0).then_some((length as usize, before as usize));
        let mut at = Some(ending);
        for _ in 0..MOST_ENDINGS {
            let Some(state) = at.filter(|&state| state != 0) else { break };
            self.states[state as usize].behind = behind;
            at = self.states[state as usize].ending;
        }
    }

    /// The state of the text of `state` and `id` alone: longer texts of the same state, which end at fewer places from now on, keep their own.
    fn split(&mut self, state: u32, id: u32) -> u32 {
        let long = self.next[&(state, id)];
        let length = self.states[state as usize].length + 1;
        if self.states[long as usize].length == length {
            return long;
        }
        let short = self.states.len() as u32;
        self.states.push(State { length, edge: None, ..self.states[long as usize] });
        let mut edge = self.states[long as usize].edge;
        while let Some(at) = edge {
            let Edge { id, next } = self.edges[at as usize];
            edge = next;
            self.set_next(short, id, self.next[&(long, id)]);
        }
        let mut at = Some(state);
        while let Some(state) = at.filter(|&state| self.next.get(&(state, id)) == Some(&long)) {
            self.next.insert((state, id), short);
            at = self.states[state as usize].ending;
        }
        self.states[long as usize].ending = Some(short);
        short
    }
}

impl Draft for Lookup {
    fn propose(&mut self, ids: &[u32], most: usize) -> Result<Vec<u32>, Error> {
        for &id in ids.get(self.ids.len()..).unwrap_or_default() {
            self.push(id);
        }
        Ok(match self.found {
            Some((alike, behind)) if alike >= LEAST_ALIKE => self.ids[behind..].iter().take(most).copied().collect(),
            _ => Vec::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::random;

    /// The longest ending that stood there before, by looking at all of them.
    fn longest(ids: &[u32]) -> usize {
        (1..ids.len()).rev().find(|&n| (0..ids.len() - n).any(|at| ids[at..at + n] == ids[ids.len() - n..])).unwrap_or(0)
    }

    #[test]
    fn finds_the_longest_ending_of_any_text() {
        for seed in 0..60 {
            let letters = 1 + seed % 5;
            let mut lookup = Lookup::with_capacity(4);
            let mut ids = Vec::new();
            for at in 0..120 {
                ids.push((random::uniform(seed, at) * letters as f64) as u32);
                lookup.push(ids[ids.len() - 1]);
                let (alike, behind) = lookup.found.unwrap_or_default();
                assert_eq!(alike, longest(&ids), "{ids:?}");
                assert!(behind < ids.len().max(1) && ids[..behind].ends_with(&ids[ids.len() - alike..]), "{ids:?}: {alike} at {behind}");
            }
        }
    }

    #[test]
    fn proposes_what_followed_the_last_time() {
        let mut lookup = Lookup::with_capacity(16);
        assert_eq!(lookup.propose(&[1, 2, 3, 4, 5, 9], 4).unwrap(), [0u32; 0]);
        assert_eq!(lookup.propose(&[1, 2, 3, 4, 5, 9, 2, 3, 4], 4).unwrap(), [5, 9, 2, 3]);
        assert_eq!(lookup.propose(&[1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 2, 3, 4], 2).unwrap(), [6, 7], "the latest");
        assert_eq!(lookup.propose(&[1, 2, 3, 4, 5, 9, 2, 3, 4, 6, 7, 2, 3, 4, 8, 9], 2).unwrap(), [0u32; 0], "too little in common");
    }
}
