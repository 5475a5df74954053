//! Claims that ask for MPS.

use super::shares::{share, shared};
use super::*;

/// NVIDIA's object for MPS on a GPU, with these fields of `mpsConfig`.
fn mps(fields: &str) -> String {
    let sharing = format!(r#"{{"strategy":"MPS","mpsConfig":{{{fields}}}}}"#);
    format!(r#"{{"apiVersion":"resource.nvidia.com/v1beta1","kind":"GpuConfig","sharing":{sharing}}}"#)
}

/// Two GPUs, the first with 80 GiB and these fields.
fn with(first: serde_json::Value) -> NodeState {
    let mut fields = serde_json::json!({"memory_mib": 81_920});
    fields.as_object_mut().unwrap().extend(first.as_object().unwrap().clone());
    state_with(Door::Dra, &fields)
}

fn plan_on(state: &NodeState, claim: Claim, configs: &[(&[&str], &str)]) -> Result<Prepared, String> {
    let configs: Vec<_> = configs.iter().map(|(requests, text)| ("FromClaim", *requests, *text)).collect();
    planned_on(state, &HostDevices::default(), &configured(claim, &configs), "u", &[])
}

/// The daemon's GPUs with their memory limits, the percentage of threads, and true if the GPUs are exclusive.
fn order(prepared: &Prepared) -> (Vec<(&str, Option<u64>)>, u32, bool) {
    let MpsOrder { gpus, thread_percentage, exclusive } = &prepared.mps.as_ref().unwrap().order;
    (gpus.iter().map(|gpu| (gpu.gpu.as_str(), gpu.mib)).collect(), *thread_percentage, *exclusive)
}

#[test]
fn whole_gpus_get_one_daemon_with_the_claims_limits() {
    let state = with(serde_json::json!({}));
    let both = || claim("u", &[("a", "gpu-0"), ("b", "gpu-1")]);
    let plain = plan_on(&state, both(), &[(&[], &mps(""))]).unwrap();
    assert_eq!(order(&plain), (vec![("GPU-0", None), ("GPU-1", None)], 100, true));
    let limits = r#""defaultActiveThreadPercentage":30,"defaultPinnedDeviceMemoryLimit":"10Gi",
        "defaultPerDevicePinnedMemoryLimit":{"GPU-0":"1.5Gi"}"#;
    let limited = plan_on(&state, both(), &[(&[], &mps(limits))]).unwrap();
    assert_eq!(order(&limited), (vec![("GPU-0", Some(1536)), ("GPU-1", Some(10_240))], 30, true));
    // Each request has its configuration. The key 0 is its first GPU, and bytes are rounded down to whole MiB.
    let one = mps(r#""defaultPerDevicePinnedMemoryLimit":{"0":3145727}"#);
    let split = plan_on(&state, both(), &[(&["a"], &mps("")), (&["b"], &one)]).unwrap();
    assert_eq!(order(&split), (vec![("GPU-0", None), ("GPU-1", Some(2))], 100, true));
    // Containers of both requests reach the daemon, and the checkpoint reads back equal.
    for request in ["a", "b"] {
        let edits = &contents(&state, &HostDevices::default(), &limited)[request].own;
        assert_eq!(
            edits.env.clone().into_iter().collect::<Vec<_>>(),
            [("CUDA_MPS_PIPE_DIRECTORY".to_owned(), "/mps/dra.linkwise.dev/GPU-0/pipe".to_owned())]
        );
        let mounts: Vec<_> = edits.mounts.iter().map(|mount| (&*mount.host, &*mount.container)).collect();
        let pipe = ("/run/nvidia/mps/dra.linkwise.dev/GPU-0/pipe", "/mps/dra.linkwise.dev/GPU-0/pipe");
        assert_eq!(mounts, [pipe, ("/run/nvidia/mps/dra.linkwise.dev/GPU-0/shm", "/dev/shm")]);
    }
    let text = serde_json::to_string(&limited).unwrap();
    assert_eq!(serde_json::from_str::<Prepared>(&text).unwrap(), limited);
    let only_a = plan_on(&state, both(), &[(&["a"], &mps(""))]).unwrap();
    assert_eq!(order(&only_a).0, [("GPU-0", None)]);
    let contents = contents(&state, &HostDevices::default(), &only_a);
    let is_client = ["a", "b"].map(|request| !contents[request].own.mounts.is_empty());
    assert_eq!(is_client, [true, false], "the other request's containers are not clients");
}

#[test]
fn shares_of_a_gpu_get_one_daemon_and_own_limits() {
    let state = shared(4, false);
    let of = |claim: Claim, fields: &str| plan_on(&state, claim, &[(&[], &mps(fields))]);
    let env = |prepared: &Prepared| {
        let contents = contents(&state, &HostDevices::default(), prepared);
        let limits = ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"];
        limits.map(|name| contents["a"].own.env.get(name).cloned().unwrap_or_default())
    };
    let half = of(share("u", "1", "2", "40Gi"), "").unwrap();
    assert_eq!(order(&half), (vec![("GPU-0", None)], 100, false));
    assert_eq!(env(&half), ["50", "0=40960M"]);
    let quarter = of(share("u", "2", "1", "1Gi"), "").unwrap();
    assert_eq!((order(&quarter), env(&quarter)), (order(&half), ["25".into(), "0=1024M".into()]));
    let less = r#""defaultActiveThreadPercentage":20,"defaultPinnedDeviceMemoryLimit":"512Mi""#;
    assert_eq!(env(&of(share("u", "3", "1", "1Gi"), less).unwrap()), ["20", "0=512M"]);
    // If a claim may have one share only, the daemon itself enforces the limit of threads.
    let one_each = shared(3, true);
    let prepared = plan_on(&one_each, share("u", "1", "1", "1Gi"), &[(&[], &mps(""))]).unwrap();
    assert_eq!((order(&prepared).1, env(&prepared)), (33, [String::new(), "0=1024M".into()]));
    // A claim may have all of a GPU that is published in shares.
    let whole = plan_on(&state, claim("u", &[("a", "gpu-0")]), &[(&[], &mps(""))]).unwrap();
    assert!(order(&whole).2);
}

#[test]
fn invalid_mps_is_refused_by_name() {
    let (state, parts) = (with(serde_json::json!({})), shared(4, false));
    let refused =
        |state: &NodeState, claim: Claim, configs: &[(&[&str], &str)]| plan_on(state, claim, configs).unwrap_err();
    let one = || claim("u", &[("a", "gpu-0")]);
    for (fields, words) in [
        (r#""defaultActiveThreadPercentage":0"#, "mpsConfig.defaultActiveThreadPercentage is 0, not 1 to 100"),
        (r#""defaultActiveThreadPercentage":101"#, "mpsConfig.defaultActiveThreadPercentage is 101, not 1 to 100"),
        (r#""defaultActiveThreadPercentage":-1"#, "invalid value: integer `-1`, expected u32"),
        (r#""defaultActiveThreadPercentage":1.5"#, "invalid type: floating point `1.5`, expected u32"),
        (r#""defaultPinnedDeviceMemoryLimit":"0""#, "mpsConfig.defaultPinnedDeviceMemoryLimit is '0', not an"),
        (r#""defaultPinnedDeviceMemoryLimit":"1023Ki""#, "is '1023Ki', not an amount of at least 1Mi"),
        (r#""defaultPinnedDeviceMemoryLimit":"10 GB""#, "is '10 GB', not an amount of at least 1Mi"),
        (r#""defaultPinnedDeviceMemoryLimit":-5"#, "is '-5', not an amount of at least 1Mi"),
        (r#""defaultPinnedDeviceMemoryLimit":{}"#, "is '{}', not an amount of at least 1Mi"),
        (r#""defaultPinnedDeviceMemoryLimit":"81Gi""#, "mpsConfig: 82944 MiB of memory exceed the 81920 of the GPU"),
        (r#""defaultPerDevicePinnedMemoryLimit":{"GPU-1":"1Gi"}"#, "names 'GPU-1', neither the UUID of a GPU that the"),
        (r#""defaultPerDevicePinnedMemoryLimit":{"1":"1Gi"}"#, "names '1', neither the UUID of a GPU that the confi"),
        (r#""defaultPerDevicePinnedMemoryLimit":{"0":"x"}"#, "defaultPerDevicePinnedMemoryLimit is 'x', not an"),
        (r#""multiUser":true"#, "mpsConfig.multiUser is not supported"),
    ] {
        let why = refused(&state, one(), &[(&[], &mps(fields))]);
        assert!(why.contains(words), "{fields}: {why}");
    }
    let mut admin = one();
    admin.status.allocation.as_mut().unwrap().devices.results[0].admin_access = Some(true);
    assert!(refused(&state, admin, &[(&[], &mps(""))]).ends_with("with adminAccess is not shared by MPS"));
    let pascal = with(serde_json::json!({"compute_capability": "6.1"}));
    let why = refused(&pascal, one(), &[(&[], &mps(""))]);
    assert_eq!(why, "device gpu-0 (GPU-0): MPS for claims needs compute capability 7.0 (Volta), this GPU has 6.1");
    // A claim has one control daemon.
    let both = claim("u", &[("a", "gpu-0"), ("b", "gpu-1")]);
    let thirty = mps(r#""defaultActiveThreadPercentage":30"#);
    let why = refused(&state, both, &[(&["a"], &thirty), (&["b"], &mps(""))]);
    assert!(why.contains("Percentage is 100 for this device and 30 for another device of the claim"), "{why}");
    let mut mixed = share("u", "1", "1", "1Gi");
    let whole = claim("u", &[("b", "gpu-1")]).status.allocation.unwrap().devices.results.remove(0);
    mixed.status.allocation.as_mut().unwrap().devices.results.push(whole);
    let why = refused(&parts, mixed, &[(&[], &mps(""))]);
    assert!(why.contains("device gpu-1 (GPU-1): a container reaches one MPS control daemon"), "{why}");
    assert!(why.contains("another one than gpu-0 (GPU-0)"), "{why}");
    // A limit is at most the claim's share.
    for (fields, words) in [
        (r#""defaultActiveThreadPercentage":26"#, "26 percent of the threads exceed the 25 of the claim's share"),
        (r#""defaultPinnedDeviceMemoryLimit":"2Gi""#, "2048 MiB of memory exceed the 1024 of the claim's share"),
    ] {
        let why = refused(&parts, share("u", "1", "1", "1Gi"), &[(&[], &mps(fields))]);
        assert!(why.contains(words), "{fields}: {why}");
    }
    let why = refused(&shared(101, false), share("u", "1", "1", "1Gi"), &[(&[], &mps(""))]);
    assert!(why.ends_with("the claim has 1 of 101 shares, less than 1 percent of the threads"), "{why}");
}

#[test]
fn claims_that_disagree_on_a_gpus_daemon_are_refused() {
    let state = shared(4, false);
    let config = mps("");
    let of = |uid: &str, id: &str| configured(share(uid, id, "1", "1Gi"), &[("FromClaim", &[], &config)]);
    let plan = |claim: &Claim, others: &[(ClaimName, Prepared)]| {
        planned_on(&state, &HostDevices::default(), claim, &claim.metadata.uid, others)
    };
    let first = plan(&of("u", "1"), &[]).unwrap();
    assert!(plan(&of("v", "2"), &[(name("u"), first.clone())]).is_ok());
    // An earlier linkwise, or an earlier sharing of the GPU, may have left an order with other limits.
    let mut old = first;
    old.mps.as_mut().unwrap().order.thread_percentage = 50;
    let why = plan(&of("v", "2"), &[(name("u"), old.clone())]).unwrap_err();
    let words = "the claim ml/claim-u (UID u) has an MPS control daemon with other limits on this GPU";
    assert_eq!(why, format!("device gpu-0 (GPU-0): {words}"));
    // The claim's own checkpoint does not count as another claim.
    assert!(plan(&of("u", "1"), &[(name("u"), old)]).is_ok());
}
