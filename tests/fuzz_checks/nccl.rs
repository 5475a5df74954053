//! Output of nccl-tests: any text is refused in one line or gives consistent rows.

use std::sync::OnceLock;

use linkwise_core::benchmark::{Comparison, NcclReport};
use linkwise_core::topology::NodeObservation;
use linkwise_host::machines;

use super::machine::assert_one_line;

/// Checks a text, and compares its rows with machines of four kinds.
pub fn nccl_tests(bytes: &[u8]) {
    static MACHINES: OnceLock<Vec<NodeObservation>> = OnceLock::new();
    let text = String::from_utf8_lossy(bytes);
    let report = match NcclReport::read(&text) {
        Ok(report) => report,
        Err(error) => return assert_one_line(&error.to_string()),
    };
    assert!(!report.rows.is_empty(), "a report without a row");
    for row in &report.rows {
        for run in [Some(row.out_of_place), row.in_place].into_iter().flatten() {
            // In an all-reduce the bus bandwidth is below twice the algorithm bandwidth; each is rounded to 10 MB/s.
            assert!(run.bus <= 2 * run.algorithm + 20, "{row:?}");
            let carried = u128::from(run.algorithm) * u128::from(run.nanoseconds) / 1_000;
            let off = carried.abs_diff(u128::from(row.bytes));
            assert!(run.algorithm < 1_000 || off <= u128::from(row.bytes) / 50 + 1, "{row:?}");
        }
    }
    // A prefix before each line, as mpirun and kubectl write it, changes nothing.
    let prefixed: String = text.lines().map(|line| format!("[1,0]<stdout>: {line}\n")).collect();
    let again = NcclReport::read(&prefixed).expect("a prefix does not matter");
    assert_eq!((&again.rows, &again.devices), (&report.rows, &report.devices), "a prefix changes the rows or devices");
    let names = ["dgx-h100", "dgx1-v100", "nvlink-bridge-pairs", "gb200-nvl72-node"];
    let machines = MACHINES.get_or_init(|| {
        names.into_iter().map(|name| machines::load(name).expect("a built-in machine").observed).collect()
    });
    for machine in machines {
        for named in [None, Some(&[0, 1][..])] {
            match Comparison::of(&report, machine, named) {
                Ok(comparison) => comparison.causes.iter().for_each(|cause| assert_one_line(&cause.to_string())),
                Err(error) => assert_one_line(&error.to_string()),
            }
        }
    }
}
