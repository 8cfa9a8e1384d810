//! Measures the engine on a bundle: `engine throughput|gap|prefix|soak BUNDLE [NUMBER]`.
//!
//! * `throughput`: tokens per second of 1 and of NUMBER (8) answers at once, prompts of 64 tokens and 64 new ones, alternating.
//! * `gap`: the time between two tokens of a running answer while another request computes a prompt of NUMBER (4,000) tokens, and without it.
//! * `prefix`: NUMBER (20) requests with a beginning of 4,000 tokens in common: rows computed and bytes of state.
//! * `soak`: NUMBER (60) seconds of random arrivals, lengths, cancellations and shared beginnings, every answer checked against the one that it gives alone.

use qhx_runtime::{
    Cancel, DeviceChoice, GenerateOptions, LoadOptions, Model, Prompt,
    engine::{Answer, Engine, EngineOptions, EngineStats, Request},
    generate,
    memory::peak_rss_bytes,
    sample::{SamplerConfig, random::uniform},
};
use std::{
    error::Error,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, bundle, rest @ ..] = &arguments[..] else { return Err("usage: engine throughput|gap|prefix|soak BUNDLE [NUMBER]".into()) };
    let number = |default: usize| rest.first().map_or(Ok(default), |text| text.parse());
    match what.as_str() {
        "throughput" => throughput(bundle, number(8)?),
        "gap" => gap(bundle, number(4000)?),
        "prefix" => prefix(bundle, number(20)?),
        "soak" => soak(bundle, Duration::from_secs(number(60)? as u64)),
        other => Err(format!("`{other}` is not one of throughput, gap, prefix and soak").into()),
    }
}

fn load(bundle: &str, context: usize, sessions: usize) -> Result<Model, Box<dyn Error>> {
    let options = LoadOptions { device: DeviceChoice::Cpu, context: Some(context), sessions, ..LoadOptions::default() };
    Ok(Model::open(bundle, &options)?)
}

fn some_ids(model: &Model, seed: u64, count: usize) -> Vec<u32> {
    let vocabulary = model.vocabulary().ids as f64;
    (0..count as u64).map(|n| (uniform(seed, n) * vocabulary) as u32).collect()
}

fn request(ids: Vec<u32>, max_new: usize) -> Request {
    Request::new(Prompt::from_ids(ids)).with_options(GenerateOptions { max_new, ignore_eos: true, ..GenerateOptions::default() })
}

fn throughput(bundle: &str, many: usize) -> Result<(), Box<dyn Error>> {
    let model = load(bundle, 256, many)?;
    let mut best = [0f64; 2];
    for round in 0..4 {
        for (place, sessions) in [1, many].into_iter().enumerate() {
            let engine = Engine::start(model.clone(), EngineOptions::default())?;
            let ask = |session: usize| engine.submit(request(some_ids(&model, (round * 100 + session) as u64, 64), 64));
            let answers = (0..sessions).map(ask).collect::<Result<Vec<Answer>, _>>()?;
            // From the first token of the last one on, all are decoding.
            let ends = answers.into_iter().map(Answer::finish).collect::<Result<Vec<_>, _>>()?;
            let longest = ends.iter().map(|end| end.timing.decode_ms).fold(0.0, f64::max);
            let rate = 1e3 * ends.iter().map(|end| end.ids.len() - 1).sum::<usize>() as f64 / longest;
            best[place] = best[place].max(rate);
        }
    }
    println!("1 answer: {:.1} tok/s; {many} at once: {:.1} tok/s ({:.2}x)", best[0], best[1], best[1] / best[0]);
    Ok(())
}

/// Gaps between the tokens of an answer, sorted.
fn gaps(answer: Answer) -> Result<Vec<Duration>, Box<dyn Error>> {
    let (mut gaps, mut last) = (Vec::new(), None);
    for piece in answer {
        piece?;
        let now = Instant::now();
        gaps.extend(last.map(|last| now - last));
        last = Some(now);
    }
    gaps.sort();
    Ok(gaps)
}

fn gap(bundle: &str, rows: usize) -> Result<(), Box<dyn Error>> {
    let model = load(bundle, rows + 64, 4)?;
    let engine = Engine::start(model.clone(), EngineOptions::default())?;
    let show = |what: &str, gaps: &[Duration]| {
        let at = |share: f64| gaps[((gaps.len() - 1) as f64 * share) as usize];
        println!("{what}: {} gaps, median {:.1?}, p99 {:.1?}, longest {:.1?}", gaps.len(), at(0.5), at(0.99), at(1.0));
    };
    show("alone", &gaps(engine.submit(request(some_ids(&model, 1, 16), 100))?)?);
    let running = engine.submit(request(some_ids(&model, 2, 16), rows))?;
    let began = Instant::now();
    let prompt = engine.submit(request(some_ids(&model, 3, rows), 1))?;
    let reader = thread::spawn(move || prompt.finish().map(|_| began.elapsed()).map_err(|error| error.to_string()));
    let (mut last, mut found) = (Instant::now(), Vec::new());
    for piece in running {
        piece?;
        found.push(last.elapsed());
        last = Instant::now();
        if reader.is_finished() {
            break;
        }
    }
    let prefill = reader.join().map_err(|_| "the reader failed")??;
    found.sort();
    show(&format!("while {rows} tokens were computed ({prefill:.1?})"), &found);
    Ok(())
}

/// What the engine has done when it is done with everything.
fn settled(engine: &Engine) -> EngineStats {
    loop {
        let stats = engine.stats();
        if stats.active + stats.waiting == 0 {
            return stats;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

fn prefix(bundle: &str, sessions: usize) -> Result<(), Box<dyn Error>> {
    const SHARED: usize = 4000;
    const OWN: usize = 32;
    let model = load(bundle, SHARED + 2 * OWN, sessions)?;
    let engine = Engine::start(model.clone(), EngineOptions::default())?;
    let beginning = some_ids(&model, 1, SHARED);
    let ask = |session: usize| {
        let own = some_ids(&model, 10 + session as u64, OWN - 1);
        engine.submit(request([&beginning[..], &[session as u32], &own].concat(), 2))
    };
    let began = Instant::now();
    let answers = (0..sessions).map(ask).collect::<Result<Vec<Answer>, _>>()?;
    for answer in answers {
        answer.finish()?;
    }
    let stats = settled(&engine);
    let row: u64 = model.program().slots.values().filter(|slot| !slot.is_recurrent()).map(|slot| slot.bytes(1)).sum();
    println!(
        "{sessions} requests of {SHARED} + {OWN} rows in {:.1?}: {} rows computed (at least {}), {} reused; keys and values {:.1} MB, as many as {:.0} rows; recurrent {:.1} MB",
        began.elapsed(),
        stats.rows,
        SHARED + sessions * (OWN + 1),
        stats.reused_rows,
        stats.kv_bytes as f64 / 1e6,
        stats.kv_bytes as f64 / row.max(1) as f64,
        stats.recurrent_bytes as f64 / 1e6
    );
    Ok(())
}

fn soak(bundle: &str, time: Duration) -> Result<(), Box<dyn Error>> {
    const KINDS: usize = 40;
    let model = load(bundle, 512, 8)?;
    let shared = some_ids(&model, 999, 120);
    let kinds: Vec<(Vec<u32>, GenerateOptions)> = (0..KINDS)
        .map(|number| {
            let draw = |n: u64| uniform(number as u64, 500 + n);
            let own = some_ids(&model, number as u64, 1 + (draw(0) * 250.0) as usize);
            let ids = if draw(1) < 0.5 { [&shared[..1 + (draw(2) * 119.0) as usize], &own].concat() } else { own };
            let temperature = if draw(3) < 0.5 { 0.0 } else { 0.8 };
            let sampler = SamplerConfig { temperature, seed: number as u64, ..SamplerConfig::default() };
            (ids, GenerateOptions { max_new: 1 + (draw(4) * 40.0) as usize, ignore_eos: true, sampler, ..GenerateOptions::default() })
        })
        .collect();
    let alone = |(ids, options): &(Vec<u32>, GenerateOptions)| {
        let mut session = model.session()?;
        Ok(generate(&mut session, &Prompt::from_ids(ids.clone()), options, &Cancel::new(), &mut |_| {})?.ids)
    };
    let expected = kinds.iter().map(alone).collect::<Result<Vec<Vec<u32>>, qhx_runtime::Error>>()?;
    let engine = Engine::start(model.clone(), EngineOptions::default())?;
    let (answers, cancelled, wrong) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let began = Instant::now();
    let mut after_a_tenth = 0;
    thread::scope(|scope| {
        for client in 0..12u64 {
            let (engine, kinds, expected) = (engine.clone(), &kinds, &expected);
            let (answers, cancelled, wrong) = (&answers, &cancelled, &wrong);
            scope.spawn(move || {
                for turn in 0u64.. {
                    if began.elapsed() > time {
                        break;
                    }
                    let draw = |n| uniform(client * 1_000_003 + turn, n);
                    let kind = (draw(0) * KINDS as f64) as usize;
                    let (ids, options) = &kinds[kind];
                    let Ok(mut answer) = engine.submit(Request::new(Prompt::from_ids(ids.clone())).with_options(options.clone())) else {
                        continue;
                    };
                    if draw(1) < 0.2 {
                        (0..(draw(2) * 5.0) as usize).for_each(|_| drop(answer.next_piece()));
                        if draw(3) < 0.5 {
                            answer.cancel();
                            let found = answer.finish().map(|end| end.ids).unwrap_or_default();
                            wrong.fetch_add(usize::from(!expected[kind].starts_with(&found)), Ordering::Relaxed);
                        }
                        cancelled.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    let found = answer.finish().map(|end| end.ids);
                    wrong.fetch_add(usize::from(!found.is_ok_and(|found| found == expected[kind])), Ordering::Relaxed);
                    answers.fetch_add(1, Ordering::Relaxed);
                    if draw(4) < 0.1 {
                        thread::sleep(Duration::from_millis((draw(5) * 50.0) as u64));
                    }
                }
            });
        }
        thread::sleep(time / 10);
        after_a_tenth = peak_rss_bytes();
    });
    let stats = settled(&engine);
    println!(
        "{:.0?}: {} answers, {} cancelled, {} wrong; peak memory {:.1} MB after a tenth of it, {:.1} MB at the end; {stats:?}",
        began.elapsed(),
        answers.into_inner(),
        cancelled.into_inner(),
        wrong.load(Ordering::Relaxed),
        after_a_tenth as f64 / 1e6,
        peak_rss_bytes() as f64 / 1e6
    );
    if wrong.into_inner() > 0 { Err("answers differ from those given alone".into()) } else { Ok(()) }
}
