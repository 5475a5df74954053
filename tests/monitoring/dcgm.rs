//! Tests by promtool the query for DCGM exporter's metrics in docs/monitoring.md, with tests/monitoring/dcgm.yaml.

use crate::chart::helm::repository;
use crate::monitoring::{assert_passes, list, read, text};

const CASES: &str = "tests/monitoring/dcgm.yaml";

#[test]
#[cfg_attr(not(has_promtool), ignore = "no promtool here: make tools brings it")]
fn documented_query_is_the_one_that_promtool_tests() {
    let cases = read(CASES);
    let mut queries = list(&cases, "tests").flat_map(|case| list(case, "promql_expr_test"));
    let tested = queries.next().unwrap()["expr"].as_str().unwrap();
    let page = text("docs/monitoring.md");
    let section = page.split_once("\n## With DCGM exporter\n").unwrap().1;
    let shown = section.lines().filter(|line| line.starts_with("    ")).flat_map(str::split_whitespace);
    assert_eq!(shown.collect::<Vec<_>>(), tested.split_whitespace().collect::<Vec<_>>());
    assert_passes("test", &repository(CASES));
}
