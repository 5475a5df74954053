//! `linkwise-lab simulate`: a trace gives figures, and a bad trace is refused in one line.

use serde_json::Value;

use crate::simulate_cluster::check_snapshot;
use crate::{lab, run_with_input, stdout};

const SIMULATE: [&str; 5] = ["simulate", "--node", "dgx1-v100", "--trace", "-"];

#[test]
fn trace_from_stdin_gives_figures_for_each_policy() {
    let args = [&SIMULATE[..], &["--policy", "first-fit,best-effort,random", "--seed", "7", "--format", "json"]];
    let output = run_with_input(&mut lab(&args.concat()), b"size,duration_seconds\n2,3600\n2,3600\n9,1\n");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    // First fit takes GPUs 0 and 1, which one NVLink joins, then 2 and 3, which two NVLinks join.
    check_snapshot("snapshots", "simulate-json", &serde_json::to_string_pretty(&answer).unwrap());
}

#[test]
fn bad_trace_is_refused_in_one_line() {
    let cases: [(&[u8], &str); 5] = [
        (b"", "no header"),
        (b"size,duration_seconds\n2,10\n2,ten\n", "line 3: duration_seconds 'ten' is not a whole number"),
        (b"size,duration_seconds\n0,10\n", "line 2: size '0'"),
        (b"size,duration_seconds\n16,10\n", "trace -: no job fits this machine (it has 8 GPUs)"),
        (b"size,duration_seconds\n\xff,1\n", "not UTF-8"),
    ];
    for (trace, expected) in cases {
        let output = run_with_input(&mut lab(&SIMULATE), trace);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{error}");
        assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
    }
    let output = lab(&["simulate", "--node", "dgx1-v100", "--trace", "/nowhere.csv"]).output().unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("cannot open /nowhere.csv"));
}

#[test]
fn figures_of_the_sample_trace_are_golden() {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/traces/sample.csv");
    for machine in ["dgx1-v100", "pcie-8x-pix-pairs"] {
        let args = ["simulate", "--node", machine, "--trace", trace];
        check_snapshot("snapshots", &format!("simulate-{machine}"), &stdout(&mut lab(&args)));
    }
}
