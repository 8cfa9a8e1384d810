//! A line at the bottom of the terminal that says how far something is. Where stderr is no terminal, there is none.

use std::{
    io::{self, IsTerminal, Write},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};
use terminal_size::{Width, terminal_size_of};

/// How often the line is drawn at most.
const EVERY: Duration = Duration::from_millis(100);
const SPINNER: [char; 10] = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
/// How many characters a bar has.
const CELLS: u64 = 30;

/// How far something is.
pub(crate) struct State {
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) message: String,
    /// Since when, for speed and time left, and how far it was then.
    pub(crate) since: Instant,
    from: u64,
}

impl State {
    fn new() -> Self {
        Self { done: 0, total: 0, message: String::new(), since: Instant::now(), from: 0 }
    }

    /// Forgets how fast it was.
    pub(crate) fn restart(&mut self) {
        (self.since, self.from) = (Instant::now(), self.done);
    }

    /// Units per second up to now.
    pub(crate) fn rate(&self) -> f64 {
        self.done.saturating_sub(self.from) as f64 / self.since.elapsed().as_secs_f64().max(1e-3)
    }

    /// How long the rest takes at that rate.
    pub(crate) fn left(&self) -> Duration {
        let seconds = self.total.saturating_sub(self.done) as f64 / self.rate();
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    /// `  42 % ████████████░░░░░░░░░░░░░░░░░░`
    pub(crate) fn bar(&self) -> String {
        let share = |of: u64| (u128::from(of) * u128::from(self.done.min(self.total)) / u128::from(self.total.max(1))) as u64;
        let cells = |number: u64, of: &str| of.repeat(number as usize);
        format!("{:>3} % {}{}", share(100), cells(share(CELLS), "█"), cells(CELLS - share(CELLS), "░"))
    }
}

/// What is written behind the spinner.
type Show = dyn Fn(&State) -> String + Send + Sync;

struct Drawn {
    state: State,
    /// When the line was drawn last; `None`: it is not there.
    at: Option<Instant>,
    frame: usize,
    ended: bool,
}

/// The line. It goes when this is dropped; all clones are the same one.
#[derive(Clone)]
pub(crate) struct Bar(Arc<Shared>);

struct Shared {
    drawn: Mutex<Drawn>,
    ends: Condvar,
    show: Box<Show>,
    is_terminal: bool,
}

impl Bar {
    pub(crate) fn new(show: impl Fn(&State) -> String + Send + Sync + 'static) -> Self {
        let drawn = Mutex::new(Drawn { state: State::new(), at: None, frame: 0, ended: false });
        Self(Arc::new(Shared { drawn, ends: Condvar::new(), show: Box::new(show), is_terminal: io::stderr().is_terminal() }))
    }

    /// Changes how far it is, and shows that unless something was shown a moment ago.
    pub(crate) fn update(&self, change: impl FnOnce(&mut State)) {
        let mut drawn = self.0.lock();
        change(&mut drawn.state);
        self.0.draw(&mut drawn);
    }

    /// Draws it from time to time though nothing changes.
    pub(crate) fn tick(&self) {
        let shared = self.0.clone();
        if !shared.is_terminal {
            return;
        }
        thread::spawn(move || {
            let mut drawn = shared.lock();
            while !drawn.ended {
                shared.draw(&mut drawn);
                drawn = shared.ends.wait_timeout(drawn, EVERY).unwrap_or_else(PoisonError::into_inner).0;
            }
        });
    }

    /// Does something that writes to the terminal, above the line.
    pub(crate) fn above(&self, write: impl FnOnce()) {
        let mut drawn = self.0.lock();
        Shared::clear(&mut drawn);
        write();
        self.0.draw(&mut drawn);
    }

    /// Takes the line away for good.
    pub(crate) fn end(&self) {
        let mut drawn = self.0.lock();
        drawn.ended = true;
        Shared::clear(&mut drawn);
        self.0.ends.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Drawn> {
        self.drawn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn draw(&self, drawn: &mut Drawn) {
        if !self.is_terminal || drawn.ended || drawn.at.is_some_and(|at| at.elapsed() < EVERY) {
            return;
        }
        drawn.frame = (drawn.frame + 1) % SPINNER.len();
        let columns = terminal_size_of(io::stderr()).map_or(80, |(Width(columns), _)| columns);
        let line = format!("{} {}", SPINNER[drawn.frame], (self.show)(&drawn.state));
        let line = within(&line, usize::from(columns).saturating_sub(1));
        let mut err = io::stderr().lock();
        let _ = write!(err, "\r\x1b[2K{line}").and_then(|()| err.flush());
        drawn.at = Some(Instant::now());
    }

    fn clear(drawn: &mut Drawn) {
        if drawn.at.take().is_some() {
            let mut err = io::stderr().lock();
            let _ = write!(err, "\r\x1b[2K").and_then(|()| err.flush());
        }
    }
}

/// As much of a line as fits: one that wraps could not be drawn over.
fn within(line: &str, columns: usize) -> &str {
    // Most of what is neither European nor a symbol is twice as wide.
    let width = |c: char| if c >= '\u{1100}' && !('\u{2000}'..'\u{2c00}').contains(&c) { 2 } else { 1 };
    let mut used = 0;
    let end = line.char_indices().find(|(_, c)| {
        used += width(*c);
        used > columns
    });
    &line[..end.map_or(line.len(), |(at, _)| at)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars() {
        let state = |done, total| State { done, total, ..State::new() };
        assert_eq!(state(0, 0).bar(), format!("  0 % {}", "░".repeat(30)));
        assert_eq!(state(1, 2).bar(), format!(" 50 % {}{}", "█".repeat(15), "░".repeat(15)));
        assert_eq!(state(u64::MAX, u64::MAX).bar(), format!("100 % {}", "█".repeat(30)));
        assert_eq!(state(9, 2).bar(), state(2, 2).bar());
        assert_eq!((state(0, 0).left(), state(3, 2).left()), (Duration::ZERO, Duration::ZERO));
    }

    #[test]
    fn lines_fit() {
        assert_eq!((within("⠋ ░é", 4), within("⠋ ░é", 3), within("", 0)), ("⠋ ░é", "⠋ ░", ""));
        assert_eq!((within("a漢字", 5), within("a漢字", 4), within("a漢字", 2)), ("a漢字", "a漢", "a"));
    }
}
