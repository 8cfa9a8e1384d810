//! Compiles grammars on threads of their own, with stacks for what recurses, and keeps what was compiled last.

use super::{Follower, guarded, wrong};
use crate::Error;
use llguidance::{ParserFactory, api::TopLevelGrammar};
use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::Duration,
};

/// Enough for the largest grammar that is read. Memory is taken only where the stack is used.
const STACK: usize = 256 << 20;
/// A grammar that takes longer is refused.
const TIME: Duration = Duration::from_secs(10);
/// Grammars that are compiled at a time, those included that took too long.
const AT_ONCE: usize = 4;
/// How long a grammar waits for its turn.
const PATIENCE: Duration = Duration::from_secs(1);
/// How many are kept, and how long a text is kept with what it was compiled to.
const KEPT: usize = 16;
const LONGEST_KEPT: usize = 256 << 10;

/// What was compiled last.
#[derive(Default)]
pub(super) struct Compiled {
    /// The latest last.
    kept: Mutex<Vec<(String, Arc<Mutex<Follower>>)>>,
    places: Arc<Places>,
}

/// Threads that compile.
#[derive(Default)]
struct Places {
    taken: Mutex<usize>,
    freed: Condvar,
}

/// One of them.
struct Place(Arc<Places>);

impl Compiled {
    /// What follows a grammar that is compiled from `text`.
    pub(super) fn get(
        &self,
        factory: &Arc<ParserFactory>,
        text: String,
        grammar: impl FnOnce() -> TopLevelGrammar + Send + 'static,
    ) -> Result<Follower, Error> {
        if let Some(kept) = self.find(&text) {
            return Ok(kept);
        }
        let place = Places::take(&self.places)?;
        // Several ask for the same one when many requests come at once.
        if let Some(kept) = self.find(&text) {
            return Ok(kept);
        }
        let follower = compile(factory, grammar, place, TIME)?;
        if text.len() <= LONGEST_KEPT {
            let mut kept = lock(&self.kept);
            if kept.len() == KEPT {
                kept.remove(0);
            }
            kept.push((text, Arc::new(Mutex::new(follower.fork()))));
        }
        Ok(follower)
    }

    fn find(&self, text: &str) -> Option<Follower> {
        let mut kept = lock(&self.kept);
        let place = kept.iter().position(|(known, _)| known == text)?;
        let found = kept.remove(place);
        let follower = found.1.clone();
        kept.push(found);
        drop(kept);
        let follower = lock(&follower);
        Some(follower.fork())
    }
}

fn compile(
    factory: &Arc<ParserFactory>,
    grammar: impl FnOnce() -> TopLevelGrammar + Send + 'static,
    place: Place,
    time: Duration,
) -> Result<Follower, Error> {
    let (factory, (to, done)) = (factory.clone(), mpsc::sync_channel(1));
    let work = move || {
        let compiled = guarded(|| Follower::new(factory.create_parser(grammar()).map_err(wrong)?));
        drop(place);
        let _ = to.send(compiled);
    };
    let thread = thread::Builder::new().name("qhx-grammar".to_owned()).stack_size(STACK);
    thread.spawn(work).map_err(|e| wrong(format!("no thread for it can be started: {e}")))?;
    done.recv_timeout(time).unwrap_or_else(|_| Err(wrong(format!("compiling it takes longer than {} s", TIME.as_secs()))))
}

impl Places {
    fn take(places: &Arc<Self>) -> Result<Place, Error> {
        let waited = places.freed.wait_timeout_while(lock(&places.taken), PATIENCE, |taken| *taken >= AT_ONCE);
        let (mut taken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            return Err(Error::GrammarsBusy { compiling: *taken });
        }
        *taken += 1;
        Ok(Place(places.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *lock(&self.0.taken) -= 1;
        self.0.freed.notify_one();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use llguidance::{ParserFactory, toktrie::ApproximateTokEnv};

    fn factory() -> Arc<ParserFactory> {
        let environment = ApproximateTokEnv::single_byte_env();
        Arc::new(ParserFactory::new_simple(&environment).unwrap())
    }

    fn word() -> TopLevelGrammar {
        TopLevelGrammar::from_lark("start: \"word\"".to_owned())
    }

    #[test]
    fn the_same_text_is_compiled_once() {
        let (factory, compiled) = (factory(), Compiled::default());
        assert!(compiled.get(&factory, "word".to_owned(), word).is_ok());
        assert!(compiled.get(&factory, "word".to_owned(), || unreachable!()).is_ok());
        for n in 0..KEPT {
            assert!(compiled.get(&factory, n.to_string(), word).is_ok());
        }
        assert!(compiled.get(&factory, "word".to_owned(), || panic!("compiled again: it was the oldest")).is_err());
    }

    #[test]
    fn a_grammar_that_takes_too_long_is_refused_and_keeps_its_place() {
        let (factory, compiled) = (factory(), Compiled::default());
        let (end, wait) = mpsc::channel::<()>();
        let place = Places::take(&compiled.places).unwrap();
        let slow = move || {
            let _ = wait.recv();
            word()
        };
        let refused = compile(&factory, slow, place, Duration::from_millis(1)).err().unwrap().to_string();
        assert!(refused.contains("takes longer than"), "{refused}");
        let others: Vec<Place> = (1..AT_ONCE).map(|_| Places::take(&compiled.places).unwrap()).collect();
        let refused = compiled.get(&factory, "word".to_owned(), word).err().unwrap();
        assert!(matches!(refused, Error::GrammarsBusy { compiling: AT_ONCE }), "{refused}");
        // It ends, and makes room.
        drop(end);
        assert!(compiled.get(&factory, "word".to_owned(), word).is_ok());
        drop(others);
    }
}
