//! Runs the fuzz targets' checks on their corpora and on every input that once failed.

use crate::fuzz_checks;
use std::fs;
use std::path::Path;

type Check = fn(&[u8]);

/// The fuzz targets with their checks.
const TARGETS: [(&str, Check); 8] = [
    ("request", fuzz_checks::request),
    ("node_file", fuzz_checks::node_file),
    ("nccl_xml", fuzz_checks::nccl_xml),
    ("nccl_tests", fuzz_checks::nccl_tests),
    ("config", fuzz_checks::config),
    ("claim", fuzz_checks::claim),
    ("checkpoint", fuzz_checks::checkpoint),
    ("agent_protocol", fuzz_checks::agent_protocol),
];

#[test]
fn every_input_of_each_target_passes() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    for (target, check) in TARGETS {
        let folders = ["corpus", "regressions"].map(|kind| fs::read_dir(fuzz.join(kind).join(target)));
        let files: Vec<_> = folders.into_iter().flatten().flatten().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty(), "no corpus for {target}");
        for file in files {
            // The last line that is printed before a failure names the input.
            eprintln!("{}", file.display());
            check(&fs::read(&file).unwrap());
        }
    }
}
