use super::*;

fn sampler(change: impl FnOnce(&mut SamplerConfig)) -> Sampler {
    let mut config = SamplerConfig { temperature: 1.0, ..SamplerConfig::default() };
    change(&mut config);
    Sampler::new(config).unwrap()
}

/// A row of distinct, spread logits in no order.
fn row(length: usize, seed: u64) -> Vec<f32> {
    (0..length as u64).map(|n| (random::uniform(seed, n) * 12.0 - 6.0) as f32).collect()
}

/// The filters written as their definitions: sort everything, then cut. Returns the surviving ids by rank.
fn survivors(row: &[f32], config: &SamplerConfig) -> Vec<u32> {
    let sharpness = 1.0 / f64::from(config.temperature);
    let mut ranked: Vec<(u32, f64)> = row.iter().enumerate().map(|(id, &logit)| (id as u32, f64::from(logit))).collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if config.top_k > 0 {
        ranked.truncate(config.top_k);
    }
    let largest = ranked[0].1;
    let total: f64 = ranked.iter().map(|(_, logit)| ((logit - largest) * sharpness).exp()).sum();
    let mut sum = 0.0;
    let mut kept = Vec::new();
    for (id, logit) in ranked {
        let weight = ((logit - largest) * sharpness).exp();
        if weight >= f64::from(config.min_p) {
            kept.push(id);
        }
        sum += weight;
        if config.top_p < 1.0 && sum >= f64::from(config.top_p) * total {
            break;
        }
    }
    kept
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_id_among_equals() {
    let mut greedy = Sampler::new(SamplerConfig::default()).unwrap();
    assert_eq!(greedy.sample(&[-1.0, 3.0, 3.0, 2.0], &[], 0), Ok(1));
    assert_eq!(greedy.sample(&[f32::NEG_INFINITY, f32::MIN], &[], 0), Ok(1));
    assert_eq!(greedy.sample(&[-0.0, 0.0], &[], 0), Ok(0));
}

#[test]
fn bad_rows_are_errors() {
    let mut greedy = Sampler::new(SamplerConfig::default()).unwrap();
    assert_eq!(greedy.sample(&[], &[], 0), Err(SampleError::NoLogits));
    assert!(matches!(greedy.sample(&[1.0, f32::NAN, 2.0], &[], 0), Err(SampleError::NotANumber { id: 1, .. })));
    assert!(matches!(greedy.sample(&[1.0, f32::INFINITY], &[], 0), Err(SampleError::NotANumber { id: 1, .. })));
    assert_eq!(greedy.sample(&[f32::NEG_INFINITY; 3], &[], 0), Err(SampleError::AllForbidden { rows: 3 }));
    assert!(matches!(sampler(|_| ()).sample(&[f32::NAN], &[], 0), Err(SampleError::NotANumber { id: 0, .. })));
}

#[test]
fn settings_outside_their_limits_are_named() {
    let wrong = |change: fn(&mut SamplerConfig)| {
        let mut config = SamplerConfig::default();
        change(&mut config);
        Sampler::new(config).unwrap_err().field
    };
    assert_eq!(wrong(|c| c.temperature = -0.1), "temperature");
    assert_eq!(wrong(|c| c.temperature = f32::NAN), "temperature");
    assert_eq!(wrong(|c| c.temperature = f32::INFINITY), "temperature");
    assert_eq!(wrong(|c| c.top_p = 0.0), "top_p");
    assert_eq!(wrong(|c| c.top_p = 1.1), "top_p");
    assert_eq!(wrong(|c| c.min_p = -0.5), "min_p");
    assert_eq!(wrong(|c| c.min_p = f32::NAN), "min_p");
    assert_eq!(wrong(|c| c.repetition_penalty = 0.0), "repetition_penalty");
    let message = Sampler::new(SamplerConfig { top_p: 2.0, ..Default::default() }).unwrap_err().to_string();
    assert_eq!(message, "sampling: top_p must be above 0 and at most 1, found 2");
}

#[test]
fn filters_keep_exactly_what_their_definitions_keep() {
    let settings: [fn(&mut SamplerConfig); 8] = [
        |_| (),
        |c| c.top_k = 1,
        |c| c.top_k = 7,
        |c| c.top_p = 0.6,
        |c| c.min_p = 0.2,
        |c| (c.top_k, c.top_p) = (20, 0.8),
        |c| (c.top_p, c.min_p) = (0.9, 0.05),
        |c| (c.temperature, c.top_p, c.min_p) = (2.5, 0.7, 0.1),
    ];
    for (number, change) in settings.into_iter().enumerate() {
        for (length, seed) in [(1, 3), (5, 4), (70, 5), (300, 6)] {
            let logits = row(length, seed);
            let mut sampler = sampler(change);
            let expected = survivors(&logits, sampler.config());
            let mut drawn = std::collections::BTreeSet::new();
            for position in 0..40 * length.max(50) {
                drawn.insert(sampler.sample(&logits, &[], position).unwrap());
            }
            let allowed: std::collections::BTreeSet<u32> = expected.iter().copied().collect();
            assert!(drawn.is_subset(&allowed), "setting {number}, {length} logits: drew outside the survivors");
            // The probable half must all turn up; the improbable tail may not in so few draws.
            assert!(expected[..expected.len().div_ceil(4)].iter().all(|id| drawn.contains(id)), "setting {number}, {length} logits");
        }
    }
}

#[test]
fn top_k_takes_lower_ids_among_equals() {
    let mut sampler = sampler(|c| c.top_k = 3);
    let logits = [vec![1.0; 5], vec![2.0], vec![1.0; 200]].concat();
    let drawn: std::collections::BTreeSet<u32> = (0..500).map(|n| sampler.sample(&logits, &[], n).unwrap()).collect();
    assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [0, 1, 5]);
}

/// The ids that are ever drawn.
fn drawn(sampler: &mut Sampler, logits: &[f32]) -> Vec<u32> {
    let drawn: std::collections::BTreeSet<u32> = (0..500).map(|n| sampler.sample(logits, &[], n).unwrap()).collect();
    drawn.into_iter().collect()
}

/// The set that reaches `p` exactly is large enough, and of equal tokens those with lower ids are in it.
#[test]
fn top_p_stops_where_it_is_reached_and_takes_lower_ids_among_equals() {
    let equals = [1.0; 8];
    for (top_p, expected) in [(0.125, 1), (0.25, 2), (0.26, 3), (0.5, 4), (0.875, 7), (0.88, 8)] {
        let mut of_all = sampler(|c| c.top_p = top_p);
        assert_eq!(drawn(&mut of_all, &equals), (0..expected).collect::<Vec<u32>>(), "top-p {top_p}");
        let mut of_eight = sampler(|c| (c.top_p, c.top_k) = (top_p, 8));
        let top: Vec<(u32, f32)> = (0..8).map(|id| (id, 1.0)).collect();
        let drawn: std::collections::BTreeSet<u32> = (0..500).map(|n| of_eight.sample_top(&top, n).unwrap()).collect();
        assert_eq!(drawn.len(), expected as usize, "top-p {top_p}");
    }
}

/// Each of the filters has its say, whichever others are set.
#[test]
fn min_p_holds_beside_the_other_filters() {
    // 1, 1/2, 1/4, 1/8 and 1/16 times as probable as the first.
    let logits: Vec<f32> = (0..5).map(|n| -(n as f32) * std::f32::consts::LN_2).collect();
    let top: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    for (top_k, top_p, min_p, expected) in [
        (0, 1.0, 0.2, 3),
        (4, 1.0, 0.2, 3),
        (2, 1.0, 0.2, 2),
        (4, 0.95, 0.2, 3),
        (4, 0.5, 0.2, 1),
        (4, 0.95, 0.1, 4),
        (0, 0.95, 0.3, 2),
        (4, 1.0, 1.0, 1),
    ] {
        let mut sampler = sampler(|c| (c.top_k, c.top_p, c.min_p) = (top_k, top_p, min_p));
        let name = format!("top-k {top_k}, top-p {top_p}, min-p {min_p}");
        assert_eq!(drawn(&mut sampler, &logits), (0..expected).collect::<Vec<u32>>(), "{name}");
        if top_k > 0 {
            let drawn: std::collections::BTreeSet<u32> = (0..500).map(|n| sampler.sample_top(&top[..top_k], n).unwrap()).collect();
            assert_eq!(drawn.len(), expected as usize, "{name}, of the largest alone");
        }
    }
}

#[test]
fn frequencies_follow_the_probabilities() {
    let logits: Vec<f32> = [0.5f32, 0.3, 0.15, 0.05].iter().map(|p| p.ln()).collect();
    for change in [(|_| ()) as fn(&mut SamplerConfig), |c| c.top_p = 0.999_999, |c| c.top_k = 4] {
        let mut sampler = sampler(change);
        let mut counts = [0f64; 4];
        for position in 0..100_000 {
            counts[sampler.sample(&logits, &[], position).unwrap() as usize] += 1.0 / 100_000.0;
        }
        for (count, p) in counts.iter().zip([0.5, 0.3, 0.15, 0.05]) {
            assert!((count - p).abs() < 0.01, "{counts:?}");
        }
    }
}

/// What users' seeds reproduce depends on it.
#[test]
fn without_filters_draws_fall_on_ids_in_their_order() {
    let mut sampler = sampler(|c| c.seed = 3);
    let logits = [0.1f32, 0.6, 0.3].map(f32::ln);
    for position in 0..200 {
        let draw = random::uniform(3, position as u64);
        let expected = [0.1, 0.7].into_iter().filter(|end| draw >= *end).count() as u32;
        assert_eq!(sampler.sample(&logits, &[], position), Ok(expected), "{draw}");
    }
}

/// A draw of 1 stands for one that rounding carries to the end.
#[test]
fn draws_on_an_edge_fall_on_the_next_and_at_the_end_on_the_last() {
    let config = SamplerConfig { temperature: 1.0, ..SamplerConfig::default() };
    let choose = |draw| Filter::default().choose(&[0.0, 0.0, f32::NEG_INFINITY], 0, &config, draw);
    assert_eq!([0.0, 0.5, 1.0].map(choose), [0, 1, 1]);
    let top = [(5, 0.0), (6, 0.0), (7, f32::NEG_INFINITY)];
    assert_eq!([0.0, 0.5, 1.0].map(|draw| Filter::default().choose_of_top(&top, &config, draw)), [5, 6, 6]);
}

#[test]
fn temperature_sharpens_before_the_filters() {
    let logits = [1.0, 0.0];
    let share_of_first = |change: fn(&mut SamplerConfig)| {
        let mut sampler = sampler(change);
        (0..20_000).filter(|&n| sampler.sample(&logits, &[], n).unwrap() == 0).count() as f64 / 20_000.0
    };
    assert!((share_of_first(|_| ()) - 0.731).abs() < 0.02);
    assert!((share_of_first(|c| c.temperature = 0.5) - 0.881).abs() < 0.02);
    assert_eq!(share_of_first(|c| c.temperature = 1e-30), 1.0);
    // p of the first is 0.731 untempered, 0.525 at temperature 10: so top-p 0.7 lets the second in.
    assert!(share_of_first(|c| (c.temperature, c.top_p) = (10.0, 0.7)) < 0.6);
}

#[test]
fn draws_follow_from_seed_and_position() {
    let logits = row(1000, 1);
    let run = |seed| {
        let mut sampler = sampler(|c| (c.seed, c.top_p) = (seed, 0.95));
        (0..50).map(|n| sampler.sample(&logits, &[], n).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(run(9), run(9));
    assert_ne!(run(9), run(10));
    let mut again = sampler(|c| (c.seed, c.top_p) = (9, 0.95));
    assert_eq!(
        (30..50).rev().map(|n| again.sample(&logits, &[], n).unwrap()).collect::<Vec<_>>(),
        run(9)[30..].iter().rev().copied().collect::<Vec<_>>()
    );
    // A fixed choice: whoever changes this changes what users' seeds reproduce.
    assert_eq!(run(9)[..4], FIXED);
}

const FIXED: [u32; 4] = [512, 490, 646, 901];

#[test]
fn repetition_penalty_counts_an_id_once_and_only_in_the_window() {
    let mut config = SamplerConfig { repetition_penalty: 2.0, ..SamplerConfig::default() };
    let mut whole = Sampler::new(config.clone()).unwrap();
    // 3.0 falls to 1.5 however often 0 occurs; a negative logit falls too.
    assert_eq!(whole.sample(&[3.0, 1.4], &[0, 0, 0], 0), Ok(0));
    assert_eq!(whole.sample(&[3.0, 1.6], &[0, 0, 0], 0), Ok(1));
    assert_eq!(whole.sample(&[-1.0, -1.5], &[0], 0), Ok(1));
    assert_eq!(whole.sample(&[3.0, 1.6], &[7, u32::MAX], 0), Ok(0));
    config.repetition_window = Some(2);
    let mut windowed = Sampler::new(config).unwrap();
    assert_eq!(windowed.sample(&[3.0, 1.6, 0.0], &[0, 2, 2], 0), Ok(0));
    assert_eq!(windowed.sample(&[3.0, 1.6, 0.0], &[0, 2], 0), Ok(1));
}

#[test]
fn forbidden_tokens_are_never_drawn() {
    let mut logits = row(64, 2);
    logits.iter_mut().step_by(2).for_each(|logit| *logit = f32::NEG_INFINITY);
    for change in [(|_| ()) as fn(&mut SamplerConfig), |c| c.top_k = 60, |c| c.top_p = 0.999_9, |c| c.temperature = 1e30] {
        let mut sampler = sampler(change);
        assert!((0..3000).all(|n| sampler.sample(&logits, &[], n).unwrap() % 2 == 1));
    }
}

/// The largest logits alone give what all of them give.
#[test]
fn the_largest_are_enough_for_top_k() {
    for length in [3, 50, 3000] {
        let row = row(length, 11);
        let mut ranked: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        for (top_k, top_p, min_p, temperature) in
            [(1, 1.0, 0.0, 1.0), (2, 1.0, 0.0, 0.7), (40, 0.9, 0.0, 1.3), (64, 1.0, 0.05, 1.0), (40, 1.0, 0.0, 0.0)]
        {
            let mut sampler = sampler(|c| (c.top_k, c.top_p, c.min_p, c.temperature) = (top_k, top_p, min_p, temperature));
            let count = sampler.config().candidates().unwrap().min(length);
            for position in 0..40 {
                let expected = sampler.sample(&row, &[], position).unwrap();
                // With as many candidates as logits there is no top-k, and sums have another order.
                if count < length {
                    assert_eq!(sampler.sample_top(&ranked[..count], position), Ok(expected), "{length} {top_k} {position}");
                }
            }
        }
    }
    let mut sampler = sampler(|c| c.top_k = 2);
    assert_eq!(sampler.sample_top(&[], 0), Err(SampleError::NoLogits));
    assert_eq!(sampler.sample_top(&[(7, f32::INFINITY), (1, 2.0)], 0), Err(SampleError::NotANumber { id: 7, value: f32::INFINITY }));
    assert_eq!(sampler.sample_top(&[(0, f32::NEG_INFINITY); 2], 0), Err(SampleError::AllForbidden { rows: 2 }));
    assert_eq!(SamplerConfig { repetition_penalty: 1.1, top_k: 5, temperature: 1.0, ..Default::default() }.candidates(), None);
}
