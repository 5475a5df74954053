//! The model against an enumeration of all allocations of small pools: if there is one, the model finds the first of
//! them.

use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{claim, cluster, slice};
use linkwise_scheduler_box::Failure;

/// A device: its values of two attributes, and its group of counters, one of two.
#[derive(Clone, Debug)]
struct Device {
    values: [Option<u8>; 2],
    kind: u8,
    counters: [bool; 3],
    is_used: bool,
}

/// An alternative: the number and the kind of devices (3: each).
#[derive(Clone, Debug)]
struct Ask {
    kind: u8,
    count: usize,
}

/// An attribute; requests, or alternatives of them.
type Constraint = (usize, Vec<(usize, Option<usize>)>);

#[derive(Clone, Debug)]
struct Problem {
    devices: Vec<Device>,
    /// Requests with one alternative or more.
    requests: Vec<Vec<Ask>>,
    constraints: Vec<Constraint>,
    with_counters: bool,
}

fn problems() -> impl Strategy<Value = Problem> {
    let device = (any::<[bool; 2]>(), any::<[bool; 2]>(), 0..3_u8, any::<[bool; 3]>(), 0..4_u8);
    let device = device.prop_map(|(has, values, kind, counters, used)| Device {
        values: [has[0].then_some(u8::from(values[0])), Some(u8::from(values[1] && has[1]))],
        kind,
        counters,
        is_used: used == 0,
    });
    let ask = (0..4_u8, 1..3_usize).prop_map(|(kind, count)| Ask { kind, count });
    let requests = prop::collection::vec(prop::collection::vec(ask, 1..3), 1..3);
    let member = (0..2_usize, prop::option::of(0..2_usize));
    let constraints = prop::collection::vec((0..2_usize, prop::collection::vec(member, 1..3)), 0..3);
    (prop::collection::vec(device, 1..6), requests, constraints, any::<bool>()).prop_map(
        |(devices, requests, constraints, with_counters)| {
            // A constraint names only existing requests and alternatives.
            let there = |(request, alternative): &(usize, Option<usize>)| {
                let asks = requests.get(*request).map_or(0, Vec::len);
                asks > 0 && alternative.is_none_or(|place| asks > 1 && place < asks)
            };
            let constraints: Vec<_> = constraints
                .iter()
                .map(|(attribute, members)| (*attribute, members.iter().copied().filter(there).collect::<Vec<_>>()))
                .filter(|(_, members)| !members.is_empty())
                .collect();
            Problem { devices, requests, constraints, with_counters }
        },
    )
}

/// Finds the first way to serve the requests, in lexicographic order: alternatives first, then combinations of devices.
/// It does not search: all ways are listed, and then judged as a whole.
fn first_solution(problem: &Problem) -> Option<Vec<(usize, usize, usize)>> {
    let mut partial: Vec<Vec<(usize, usize, usize)>> = vec![Vec::new()];
    for (request, asks) in problem.requests.iter().enumerate() {
        let mut longer = Vec::new();
        for begin in &partial {
            for (alternative, ask) in asks.iter().enumerate() {
                for members in combinations(problem.devices.len(), ask.count) {
                    let chosen = members.into_iter().map(|device| (request, alternative, device));
                    longer.push(begin.iter().copied().chain(chosen).collect());
                }
            }
        }
        partial = longer;
    }
    partial.into_iter().find(|solution| is_valid(problem, solution))
}

/// Subsets of a size, by the bits of a number, sorted.
fn combinations(of: usize, size: usize) -> Vec<Vec<usize>> {
    let members = |bits: u32| (0..of).filter(|place| bits & (1 << place) != 0).collect::<Vec<_>>();
    let mut all: Vec<Vec<usize>> = (0..1_u32 << of).map(members).filter(|members| members.len() == size).collect();
    all.sort_unstable();
    all
}

fn is_valid(problem: &Problem, solution: &[(usize, usize, usize)]) -> bool {
    let device = |place: usize| &problem.devices[place];
    let once = solution.iter().all(|(.., place)| solution.iter().filter(|(.., other)| other == place).count() == 1);
    let fit = solution.iter().all(|(request, alternative, place)| {
        let ask = &problem.requests[*request][*alternative];
        !device(*place).is_used && (ask.kind == 3 || device(*place).kind == ask.kind)
    });
    let aligned = problem.constraints.iter().all(|(attribute, members)| {
        let bears = |request: usize, alternative: usize| {
            members.iter().any(|(of, place)| *of == request && place.is_none_or(|place| place == alternative))
        };
        let values: Vec<Option<u8>> = solution
            .iter()
            .filter(|(request, alternative, _)| bears(*request, *alternative))
            .map(|(.., place)| device(*place).values[*attribute])
            .collect();
        values.iter().all(|value| value.is_some() && *value == values[0])
    });
    let counted = !problem.with_counters
        || (0..3).all(|counter| {
            let used = problem.devices.iter().filter(|device| device.is_used && device.counters[counter]).count();
            let chosen = solution.iter().filter(|(.., place)| device(*place).counters[counter]).count();
            used + chosen <= 2 || chosen == 0
        });
    once && fit && aligned && counted
}

fn name(request: usize, asks: &[Ask], alternative: usize) -> String {
    if asks.len() == 1 { format!("r{request}") } else { format!("r{request}/a{alternative}") }
}

fn slices(problem: &Problem) -> Vec<Value> {
    let device = |(place, device): (usize, &Device)| {
        let mut attributes = json!({"kind": {"int": device.kind}});
        for (attribute, value) in device.values.iter().enumerate() {
            if let Some(value) = value {
                attributes[format!("example.com/a{attribute}")] = json!({"int": value});
            }
        }
        let mut made = json!({"name": format!("d{place}"), "attributes": attributes});
        let counters: serde_json::Map<_, _> = (0..3)
            .filter(|counter| device.counters[*counter])
            .map(|counter| (format!("c{counter}"), json!({"value": "1"})))
            .collect();
        if problem.with_counters && !counters.is_empty() {
            made["consumesCounters"] = json!([{"counterSet": "s", "counters": counters}]);
        }
        made
    };
    let mut slice = slice("a", problem.devices.iter().enumerate().map(device).collect());
    let counters: serde_json::Map<_, _> =
        (0..3).map(|counter| (format!("c{counter}"), json!({"value": "2"}))).collect();
    slice["spec"]["sharedCounters"] = json!([{"name": "s", "counters": counters}]);
    vec![slice]
}

fn claim_of(problem: &Problem) -> Value {
    let ask = |ask: &Ask| {
        let mut made = json!({"deviceClassName": "all", "count": ask.count});
        if ask.kind < 3 {
            let expression = format!("device.attributes['gpu.example.com'].kind == {}", ask.kind);
            made["selectors"] = json!([{"cel": {"expression": expression}}]);
        }
        made
    };
    let request = |(place, asks): (usize, &Vec<Ask>)| match asks.as_slice() {
        [one] => json!({"name": format!("r{place}"), "exactly": ask(one)}),
        asks => {
            let alternative = |(alternative, of): (usize, &Ask)| {
                let mut made = ask(of);
                made["name"] = json!(format!("a{alternative}"));
                made
            };
            let alternatives: Vec<Value> = asks.iter().enumerate().map(alternative).collect();
            json!({"name": format!("r{place}"), "firstAvailable": alternatives})
        }
    };
    let constraint = |(attribute, members): &Constraint| {
        let names: Vec<String> = members
            .iter()
            .map(|(request, alternative)| match alternative {
                Some(alternative) => name(*request, &problem.requests[*request], *alternative),
                None => format!("r{request}"),
            })
            .collect();
        json!({"requests": names, "matchAttribute": format!("example.com/a{attribute}")})
    };
    claim(
        problem.requests.iter().enumerate().map(request).collect(),
        problem.constraints.iter().map(constraint).collect(),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn allocation_is_the_first_of_all_that_there_are(problem in problems()) {
        let mut cluster = cluster(&slices(&problem));
        let used = problem.devices.iter().enumerate().filter(|(_, device)| device.is_used).map(|(place, _)| {
            json!({"request": "r", "driver": "gpu.example.com", "pool": "n", "device": format!("d{place}")})
        });
        cluster.occupy(&json!({"devices": {"results": used.collect::<Vec<_>>()}})).unwrap();
        let outcome = cluster.allocate("n", &[claim_of(&problem)]);
        match first_solution(&problem) {
            Some(expected) => {
                let expected: Vec<String> = expected
                    .into_iter()
                    .map(|(request, alternative, device)| {
                        format!("{} d{device}", name(request, &problem.requests[request], alternative))
                    })
                    .collect();
                prop_assert_eq!(crate::support::got(&outcome.unwrap(), 0), expected);
            }
            None => prop_assert!(matches!(outcome, Err(Failure::Refused(_)))),
        }
    }
}
