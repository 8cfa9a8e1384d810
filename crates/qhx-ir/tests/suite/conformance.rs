//! The suite itself: the reference passes it, and devices with one fault each do not.

use crate::faulty::{Fault, Faulty};
use qhx_ir::{
    conformance::{self, Options, Summary},
    reference::ReferenceDevice,
};

#[test]
fn the_reference_passes() {
    let summary = conformance::run(&ReferenceDevice, &Options::from_environment(), &mut |_| {});
    println!("{summary}");
    assert!(summary.failed.is_empty() && summary.refused.is_empty(), "{summary}");
    assert!(summary.passed.len() > 30 && summary.passed.values().all(|p| p.0 > 0), "{summary}");
}

fn hold(fault: Fault, only: &str) -> Summary {
    let options = Options { cases: 6, only: Some(only.into()), ..Options::default() };
    conformance::run(&Faulty(fault), &options, &mut |_| {})
}

#[test]
fn a_faithful_wrapper_passes() {
    for group in ["attend", "gated_delta", "model.decoder", "refusals"] {
        let summary = hold(Fault::None, group);
        assert!(summary.failed.is_empty(), "{summary}");
    }
}

#[test]
fn every_fault_is_found() {
    let faults = [
        (Fault::SlightlyOff, "linear", "of the row's scale"),
        (Fault::SlightlyOff, "hadamard", "of the row's scale"),
        (Fault::NotANumber, "linear", "found NaN"),
        (Fault::BiasesExchanged, "experts", "of the row's scale"),
        (Fault::PaddingCounts, "short_conv", ""),
        (Fault::FirstEpochOnly, "rope", "of the row's scale"),
        (Fault::EpochOfTheFirst, "rope", "of the row's scale"),
        (Fault::LargestIsSecond, "model.decoder", "does not follow from its logits"),
        (Fault::MasksIgnored, "model.decoder", "does not follow from its logits"),
        (Fault::LogProbsOff, "model.decoder", "does not follow from its logits"),
        (Fault::LogitsMoved, "model.decoder", "does not follow from its logits"),
        (Fault::CommitsAllOfAPart, "gated_delta", ""),
        (Fault::NoPartialCommits, "gated_delta", "cannot commit a part"),
        (Fault::IgnoresCancel, "attend", "run to its end"),
        (Fault::CommitsAtOnce, "attend", ""),
        (Fault::CommitsWhenCancelled, "gated_delta", ""),
        (Fault::CommitsTooFew, "attend", ""),
        (Fault::KeepsTruncated, "attend", "truncate("),
        (Fault::ForksNothing, "attend", ""),
        (Fault::ForksShare, "attend", ""),
        (Fault::ExportsZeros, "attend", ""),
        (Fault::ImportsNothing, "gated_delta", "the copy's export differs"),
        (Fault::TapsNothing, "model.decoder", "expected [\"tap of stage"),
        (Fault::Panics, "add", "panicked: a fault"),
        (Fault::NoChecks, "refusals", "the request succeeded"),
    ];
    for (fault, group, reason) in faults {
        let summary = hold(fault, group);
        assert!(summary.failed.iter().any(|f| f.to_string().contains(reason)), "{fault:?} in {group}: {summary}");
    }
}

/// The reference gives a row the same bits in any company; a device that says so without doing it is found, and so is one whose partial commits are wrong.
#[test]
fn company_changes_nothing() {
    let hold = |fault, only: Option<&str>| {
        let every = if crate::extended() { 1 } else { 5 };
        let options = Options { cases: 1, every, only: only.map(Into::into), ..Options::default() };
        conformance::same_bits_in_company(&Faulty(fault), &options, &mut |_| {})
    };
    let summary = hold(Fault::None, None);
    assert!(summary.failed.is_empty() && summary.passed.len() > 30, "{summary}");
    for (fault, group, reason) in [
        (Fault::CompanyShows, "linear", "2 rows at once: session 0 has other bits than alone in output"),
        (Fault::CompanyShows, "pool", "all in one call"),
        (Fault::CommitsAllOfAPart, "gated_delta", "of which 4 count"),
        (Fault::NoPartialCommits, "attend", "promises nothing"),
    ] {
        let summary = hold(fault, Some(group));
        assert!(summary.failed.iter().any(|f| f.to_string().contains(reason)), "{fault:?} in {group}: {summary}");
    }
}

#[test]
fn refusals_are_counted_or_strict() {
    let refusing = hold(Fault::Refuses, "add");
    assert!(refusing.failed.is_empty() && refusing.refused.values().sum::<usize>() > 0, "{refusing}");
    let options = Options { cases: 2, only: Some("add".into()), strict: true, ..Options::default() };
    assert!(!conformance::run(&Faulty(Fault::Refuses), &options, &mut |_| {}).failed.is_empty());
}

#[test]
fn a_case_can_be_run_again() {
    let failed = hold(Fault::SlightlyOff, "linear").failed.remove(0);
    let again = hold(Fault::SlightlyOff, &failed.name);
    assert_eq!(again.failed.len(), 1);
    assert_eq!(again.failed[0].to_string(), failed.to_string());
    assert!(failed.what.contains("activation") && failed.what.contains("calls "), "{failed}");
    let wide = Options { only: Some(failed.name), tolerance_factor: 1e4, ..Options::default() };
    assert!(conformance::run(&Faulty(Fault::SlightlyOff), &wide, &mut |_| {}).failed.is_empty());
}
