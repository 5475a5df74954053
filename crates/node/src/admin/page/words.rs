//! Values in people's words: rates, shares, times, and the reasons for a choice of GPUs.

use linkwise_core::allocation::{AllocationReport, FallbackReason, Value};
use linkwise_host::picture::ranges;

/// MB/s as `370.8 GB/s`.
pub(super) fn rate(mbps: u64) -> String {
    format!("{}.{} GB/s", mbps / 1000, mbps % 1000 / 100)
}

/// The value in hundredths of the best, at most 100; `None` if there is no best.
pub(super) fn percent(value: u64, best: u64) -> Option<u64> {
    value.min(best).saturating_mul(100).checked_div(best)
}

/// NVML's indices: `GPU 0-3, 6`.
pub(super) fn gpus(indices: impl IntoIterator<Item = u32>) -> String {
    let mut indices: Vec<u32> = indices.into_iter().collect();
    indices.sort_unstable();
    match indices.as_slice() {
        [] => "no GPU".to_owned(),
        [one] => format!("GPU {one}"),
        several => format!("GPUs {}", ranges(several)),
    }
}

/// Seconds since 1970 as `2026-11-23 00:41:22 UTC`, and as an HTML `datetime`.
///
/// Days to a date in the Gregorian calendar, in eras of 400 years that begin with March (Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
pub(super) fn time(seconds: u64) -> (String, String) {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let written =
        |between, zone| format!("{year:04}-{month:02}-{day:02}{between}{hour:02}:{minute:02}:{second:02}{zone}");
    (written(" ", " UTC"), written("T", "Z"))
}

/// The reason why a container has less than the machine's best, from the word in `GET /state`.
pub(super) fn shortfall(word: &str) -> &str {
    match word {
        "narrowed" => "the kubelet narrowed the choice",
        "scheduler" => "the scheduler chose",
        "fragmented" => "other pods held better GPUs",
        "sick" => "better GPUs were unhealthy",
        other => other,
    }
}

/// The subject of a value; `None` for addresses, which only decide between equal sets.
fn subject(value: Value) -> Option<&'static str> {
    match value {
        Value::Collective => Some("bandwidth together"),
        Value::Remaining => Some("what stays free for others"),
        Value::Pairs => Some("bandwidth between pairs"),
        Value::Closeness => Some("closeness"),
        Value::Room => Some("whole groups that still fit a package"),
        Value::RemainingCloseness => Some("closeness of what stays free"),
        Value::Nics => Some("network cards nearby"),
        Value::PciAddresses => None,
    }
}

/// The reasons for these GPUs.
pub(super) fn why(report: &AllocationReport, narrowed: bool) -> String {
    let mut why = String::new();
    match report.fallback {
        Some(FallbackReason::UnknownDevice) => why += "In sorted order: the request names a device that is not here.",
        Some(FallbackReason::Size) => why += "In sorted order: no set of that size holds what must be in it.",
        None => {
            if let Some(values) = report.values.filter(|_| report.devices.len() > 1) {
                why += &format!("{} together, by rings. ", rate(values.collective));
            }
            why += &match (report.exact, report.compared) {
                (_, 0 | 1) => "The only set there was".to_owned(),
                (true, sets) => format!("The best of {sets} sets"),
                (false, sets) => format!("The best found of {sets} sets"),
            };
            if let Some(second) = &report.runner_up {
                let theirs = gpus(second.devices.iter().map(|gpu| gpu.index));
                why += &match subject(second.lost_at) {
                    Some(subject) => format!("; before {theirs} by {subject}"),
                    None => format!("; as good as {theirs}, and first by PCI addresses"),
                };
                if let (Some(ours), Value::Collective | Value::Pairs) = (report.values, second.lost_at) {
                    let mbps = |value: i64| rate(u64::try_from(value).unwrap_or_default());
                    let [ours, theirs] = [ours, second.values].map(|values| mbps(values.get(second.lost_at)));
                    why += &format!(" ({ours} to {theirs})");
                }
            }
            why.push('.');
        }
    }
    if narrowed {
        why += " The kubelet offered fewer GPUs than were free.";
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_dates_in_utc() {
        for (seconds, written) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_700_000_000, "2023-11-14 22:13:20 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(time(seconds).0, written);
        }
        assert_eq!(time(1_700_000_000).1, "2023-11-14T22:13:20Z");
        // Any number gives a text.
        assert!(time(u64::MAX - 86_400 * 719_468).0.ends_with("UTC"));
    }

    #[test]
    fn shares_and_rates_are_rounded_down() {
        assert_eq!((rate(370_899), rate(0)), ("370.8 GB/s".to_owned(), "0.0 GB/s".to_owned()));
        assert_eq!((percent(999, 1000), percent(2, 1), percent(1, 0)), (Some(99), Some(100), None));
        assert_eq!(gpus([6, 0, 1, 2]), "GPUs 0-2, 6");
    }
}
