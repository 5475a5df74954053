//! Texts for people, as golden files in tests/snapshots. After an intended change run
//! `INSTA_UPDATE=always cargo test --test all cli::` and read the difference.

use crate::cli::{MACHINES, linkwise, text};
use crate::dra::published::golden::assert_golden;

/// Replaces the duration of the choice, which differs at each run.
fn timeless(text: &str) -> String {
    let is_time = |word: &str| {
        let word = word.trim_end_matches([',', ';', ')']);
        let number = ["ns", "µs", "ms", "s"].iter().find_map(|unit| word.strip_suffix(unit)?.parse::<f64>().ok());
        number.is_some()
    };
    let line = |line: &str| {
        line.split(' ').map(|word| if is_time(word) { "TIME" } else { word }).collect::<Vec<_>>().join(" ")
    };
    text.lines().map(|text| line(text) + "\n").collect()
}

#[test]
fn machines_keep_their_topology_text() {
    for machine in MACHINES {
        assert_golden(&format!("topology-{machine}"), &text(&mut linkwise(&["topology", "--node", machine])));
    }
    assert_golden("topology-list", &text(&mut linkwise(&["topology", "--list"])));
}

#[test]
fn choices_keep_their_text() {
    for (machine, size, available) in
        [("dgx1-v100", "4", "0,1,2,3,4,5"), ("dgx-h100", "2", "0,1,2,3,4,5"), ("pcie-8x-pix-pairs", "2", "0,2,3,5,6")]
    {
        let args = ["allocate", "--node", machine, "--size", size, "--available", available];
        let shown = text(&mut linkwise(&args));
        let timeless = timeless(&shown);
        assert_eq!(timeless.matches("TIME").count(), 1, "{shown}");
        assert_golden(&format!("allocate-{machine}"), &timeless);
        let explained = text(&mut linkwise(&[args.as_slice(), &["--explain"]].concat()));
        assert_golden(&format!("explain-{machine}"), &explained);
    }
    let few = ["allocate", "--node", "dgx1-v100", "--size", "2", "--available", "0,1,4", "--explain"];
    assert_golden("explain-0-and-4", &text(&mut linkwise(&few)));
    let all = text(&mut linkwise(&["allocate", "--node", "dgx-h100", "--size", "8"]));
    assert_golden("allocate-all", &timeless(&all));
}
