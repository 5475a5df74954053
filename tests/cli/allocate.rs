//! `linkwise allocate`: the choice and the fields of its answer.

use serde_json::{Value, json};

use crate::cli::{MACHINES, json as run, linkwise, text, this_is};

fn indices(answer: &Value) -> Vec<u64> {
    answer["devices"].as_array().unwrap().iter().map(|gpu| gpu["index"].as_u64().unwrap()).collect()
}

fn allocate(machine: &str, size: &str, more: &[&str]) -> Value {
    let args = ["allocate", "--node", machine, "--size", size, "--format", "json"];
    run(&[&args, more].concat())
}

#[test]
fn documented_cases_are_chosen() {
    let cases: [(&str, &str, &str, &[u64]); 3] = [
        ("dgx1-v100", "4", "0,1,2,3,4,5", &[0, 1, 2, 3]),
        ("dgx1-v100", "2", "0,1,4", &[0, 4]),
        ("dgx-h100", "2", "0,1,2,3,4,5", &[4, 5]),
    ];
    for (machine, size, available, expected) in cases {
        let answer = allocate(machine, size, &["--available", available]);
        assert_eq!(indices(&answer), expected, "{answer}");
        assert_eq!((&answer["exact"], &answer["fallback"]), (&json!(true), &Value::Null));
    }
}

#[test]
fn json_answer_has_all_fields() {
    for machine in MACHINES {
        let answer = allocate(machine, "2", &[]);
        for gpu in answer["devices"].as_array().unwrap() {
            assert!(gpu["index"].is_u64() && gpu["uuid"].is_string() && gpu["pci"].is_string(), "{gpu}");
        }
        let values =
            ["collective", "remaining", "pairs", "closeness", "room", "remaining_closeness", "nics", "remaining_pairs"];
        for place in [&answer["values"], &answer["runner_up"]["values"]] {
            assert_eq!(place.as_object().unwrap().len(), values.len());
            assert!(values.iter().all(|value| place[value].is_i64()), "{place}");
        }
        assert_eq!(answer["runner_up"]["devices"].as_array().unwrap().len(), 2);
        assert!(answer["runner_up"]["lost_at"].is_string());
        assert_eq!(answer["compared"], 28);
        assert!(answer["elapsed_ns"].is_u64() && answer["exact"] == true);
    }
    // A request with one possible set has no runner-up.
    assert_eq!(allocate("dgx-h100", "8", &[])["runner_up"], Value::Null);
}

#[test]
fn lists_take_uuids_and_indices_in_any_order() {
    let by_index = allocate("dgx1-v100", "4", &["--available", "5,4,3,2,1,0", "--must-include", "4"]);
    assert!(indices(&by_index).contains(&4), "{by_index}");
    let uuid = |index: u32| format!("GPU-00000001-0000-4000-8000-{index:012}");
    let list = format!("{},1,{},3,4,5", uuid(0), uuid(2));
    let by_uuid = allocate("dgx1-v100", "4", &["--available", &list, "--must-include", &uuid(4)]);
    assert_eq!(indices(&by_uuid), indices(&by_index));
    // A GPU of --must-include may be missing from --available.
    assert_eq!(indices(&allocate("dgx1-v100", "2", &["--available", "0,1", "--must-include", "7,6"])), [6, 7]);
}

#[test]
fn live_machine_is_read_through_nvml() {
    let mut command = linkwise(&["allocate", "--size", "2", "--available", "0,1,4", "--format", "json"]);
    this_is(&mut command, "dgx1-v100");
    assert_eq!(indices(&serde_json::from_str(&text(&mut command)).unwrap()), [0, 4]);
}

#[test]
fn shared_gpu_slots_are_chosen() {
    let slots = |answer: &Value| -> Vec<String> {
        answer["slots"].as_array().unwrap().iter().map(|slot| slot["id"].as_str().unwrap().to_owned()).collect()
    };
    let id = |gpu: u32, slot: u32| format!("GPU-00000001-0000-4000-8000-{gpu:012}::{slot}");
    // GPUs 0 and 4 have four free slots, each other GPU has one.
    let free = "0,4,1::0,2::1,3::2,5::3,6::0,7::0";
    let spread = allocate("dgx1-v100", "2", &["--replicas", "4", "--available", free]);
    assert_eq!((slots(&spread), indices(&spread)), (vec![id(0, 0), id(4, 0)], vec![0, 4]), "{spread}");
    assert_eq!((&spread["policy"], &spread["slots"][1]["index"]), (&json!("distributed"), &json!(4)));
    let three = format!("{},0::3,{}", id(0, 2), id(5, 1));
    let packed = allocate("dgx1-v100", "2", &["--replicas", "4", "--policy", "packed", "--available", &three]);
    // GPU 5 has three of its four slots in use, GPU 0 has two.
    assert_eq!(slots(&packed), [id(0, 2), id(5, 1)]);
    assert!(allocate("dgx1-v100", "2", &[])["slots"].is_null());
    let shown = text(&mut linkwise(&["allocate", "--node", "dgx1-v100", "--size", "1", "--replicas", "2"]));
    assert!(shown.lines().next().unwrap().ends_with("::0"), "{shown}");
    for (more, expected) in [
        (&["--available", "0::1"][..], "cannot choose slot 0::1: GPUs are not shared; add --replicas"),
        (&["--available", "0::4", "--replicas", "4"], "GPU 0 has no slot 4: it has 4 slots, from 0"),
        (&["--available", "0", "--replicas", "1"], "cannot choose 2 slots: 1 are available"),
    ] {
        let args = [&["allocate", "--node", "dgx1-v100", "--size", "2"], more].concat();
        let error = String::from_utf8(linkwise(&args).output().unwrap().stderr).unwrap();
        assert!(error.contains(expected) && error.lines().count() == 1, "{error}");
    }
}
