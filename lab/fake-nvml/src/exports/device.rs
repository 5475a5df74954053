//! The facts of a GPU, and its place in the topology of the machine.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_ulonglong};
use std::mem::size_of;

use nvml_wrapper_sys::bindings::*;

use super::links::link_state;
use super::{INVALID, UNSUPPORTED, exports, facts, pci_info, put, put_text, version};
use crate::machine::{Gpu, Machine};
use crate::state::{self, Answer, enter_gpu, enter_mig, enter_with};

fn gpu(machine: &Machine, position: usize) -> Answer<&Gpu> {
    machine.gpus.get(position).ok_or(INVALID)
}

fn memory_bytes(gpu: &Gpu) -> Option<u64> {
    gpu.memory_mib.map(|mib| mib << 20)
}

fn pcie_generation(gpu: &Gpu) -> Option<c_uint> {
    let rates = [2500, 5000, 8000, 16000, 32000, 64000];
    let link = gpu.pcie?;
    rates.iter().position(|rate| *rate == link.mts).map(|at| at as c_uint + 1)
}

/// NVML's number of a brand; 99 stands for a brand that no list knows yet.
fn brand(brand: &str) -> nvmlBrandType_t {
    match brand {
        "Tesla" => nvmlBrandType_enum_NVML_BRAND_TESLA,
        "Nvidia" => nvmlBrandType_enum_NVML_BRAND_NVIDIA,
        "NvidiaRTX" => nvmlBrandType_enum_NVML_BRAND_NVIDIA_RTX,
        _ => 99,
    }
}

/// NVML's number of an architecture; 99 stands for an architecture that no list knows yet.
fn architecture(architecture: &str) -> nvmlDeviceArchitecture_t {
    match architecture {
        "Volta" => NVML_DEVICE_ARCH_VOLTA,
        "Ampere" => NVML_DEVICE_ARCH_AMPERE,
        "Hopper" => NVML_DEVICE_ARCH_HOPPER,
        "Blackwell" => NVML_DEVICE_ARCH_BLACKWELL,
        _ => 99,
    }
}

facts! {
    nvmlDeviceGetMinorNumber(c_uint) = |gpu| gpu.minor;
    nvmlDeviceGetDisplayActive(nvmlEnableState_t) = |gpu| gpu.display.map(Into::into);
    nvmlDeviceGetC2cModeInfoV(nvmlC2cModeInfo_v1_t) =
        |gpu| gpu.c2c.map(|c2c| nvmlC2cModeInfo_v1_t { isC2cEnabled: c2c.into() });
    nvmlDeviceGetBrand(nvmlBrandType_t) = |gpu| gpu.brand.as_deref().map(brand);
    nvmlDeviceGetArchitecture(nvmlDeviceArchitecture_t) = |gpu| gpu.architecture.as_deref().map(architecture);
    nvmlDeviceGetMemoryInfo(nvmlMemory_t) =
        |gpu| memory_bytes(gpu).map(|total| nvmlMemory_t { total, free: total, used: 0 });
    nvmlDeviceGetMaxPcieLinkGeneration(c_uint) = |gpu| pcie_generation(gpu);
    nvmlDeviceGetGpuMaxPcieLinkGeneration(c_uint) = |gpu| pcie_generation(gpu);
    nvmlDeviceGetCurrPcieLinkWidth(c_uint) = |gpu| gpu.pcie.map(|link| link.width);
    nvmlDeviceGetMaxPcieLinkWidth(c_uint) = |gpu| gpu.pcie.map(|link| link.width);
}

exports! {
    fn nvmlDeviceGetUUID(device: nvmlDevice_t, uuid: *mut c_char, length: c_uint) {
        if state::mig_position(device).is_some() {
            let (state, at, index) = enter_mig("nvmlDeviceGetUUID", device)?;
            let mig = gpu(&state.machine, at)?.mig.as_ref().and_then(|mig| mig.device(index));
            return put_text(uuid, length, &mig.ok_or(nvmlReturn_enum_NVML_ERROR_NOT_FOUND)?.uuid);
        }
        let (state, at) = enter_gpu("nvmlDeviceGetUUID", device)?;
        put_text(uuid, length, &gpu(&state.machine, at)?.uuid)
    }

    fn nvmlDeviceGetName([device => state, at], name: *mut c_char, length: c_uint) {
        put_text(name, length, gpu(&state.machine, at)?.model.as_deref().ok_or(UNSUPPORTED)?)
    }

    fn nvmlDeviceGetSerial([device => state, at], serial: *mut c_char, length: c_uint) {
        put_text(serial, length, gpu(&state.machine, at)?.serial.as_deref().ok_or(UNSUPPORTED)?)
    }

    fn nvmlDeviceGetPciInfo_v3([device => state, at], pci: *mut nvmlPciInfo_t) {
        put(pci, pci_info(Some(gpu(&state.machine, at)?.pci)))
    }

    fn nvmlDeviceGetCudaComputeCapability([device => state, at], major: *mut c_int, minor: *mut c_int) {
        let capability = gpu(&state.machine, at)?.compute_capability.as_deref().ok_or(UNSUPPORTED)?;
        let parts = capability.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let (a, b) = parts.ok_or(nvmlReturn_enum_NVML_ERROR_UNKNOWN)?;
        put(major, a)?;
        put(minor, b)
    }

    fn nvmlDeviceGetAddressingMode([device => state, at], mode: *mut nvmlDeviceAddressingMode_v1_t) {
        let value = match gpu(&state.machine, at)?.addressing_mode.as_deref().ok_or(UNSUPPORTED)? {
            "None" => nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_NONE,
            "HMM" => nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM,
            _ => nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS,
        };
        let version = version(mode, &[(size_of::<nvmlDeviceAddressingMode_v1_t>(), 1)])?;
        put(mode, nvmlDeviceAddressingMode_v1_t { version, value })
    }

    fn nvmlDeviceGetMemoryInfo_v2([device => state, at], memory: *mut nvmlMemory_v2_t) {
        let total = memory_bytes(gpu(&state.machine, at)?).ok_or(UNSUPPORTED)?;
        let version = version(memory, &[(size_of::<nvmlMemory_v2_t>(), 2)])?;
        put(memory, nvmlMemory_v2_t { version, total, reserved: 0, free: total, used: 0 })
    }

    fn nvmlDeviceGetMemoryAffinity(
        [device => state, at],
        words: c_uint,
        nodes: *mut c_ulong,
        _scope: nvmlAffinityScope_t,
    ) {
        let numa = gpu(&state.machine, at)?.numa;
        let bits = c_ulong::BITS;
        if nodes.is_null() || words == 0 {
            return Err(INVALID);
        }
        if numa.is_some_and(|node| node / bits >= words) {
            return Err(nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for word in 0..words {
            let value = numa.filter(|node| node / bits == word).map_or(0, |node| 1 << (node % bits));
            // SAFETY: not null, and the caller promises `words` words.
            unsafe { nodes.add(word as usize).write(value) };
        }
        Ok(())
    }

    fn nvmlDeviceGetTopologyCommonAncestor(
        one: nvmlDevice_t,
        two: nvmlDevice_t,
        level: *mut nvmlGpuTopologyLevel_t,
    ) {
        let (a, b) = (state::position(one)?, state::position(two)?);
        let state = enter_with("nvmlDeviceGetTopologyCommonAncestor", |_| Ok(vec![a, b]))?;
        put(level, state.machine.common_ancestor(a, b).ok_or(UNSUPPORTED)? as nvmlGpuTopologyLevel_t)
    }

    fn nvmlDeviceGetP2PStatus(
        one: nvmlDevice_t,
        two: nvmlDevice_t,
        capability: nvmlGpuP2PCapsIndex_t,
        status: *mut nvmlGpuP2PStatus_t,
    ) {
        let (a, b) = (state::position(one)?, state::position(two)?);
        let state = enter_with("nvmlDeviceGetP2PStatus", |_| Ok(vec![a, b]))?;
        let (one, two) = (gpu(&state.machine, a)?, gpu(&state.machine, b)?);
        let refusal = one.p2p_refused.get(&two.index).or_else(|| two.p2p_refused.get(&one.index));
        // Only writes are refused, because a driver may refuse one capability and allow another.
        let is_write = capability == nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE;
        put(status, refusal.filter(|_| is_write).map_or(0, |refusal| *refusal as nvmlGpuP2PStatus_t))
    }

    fn nvmlDeviceGetTemperature([device => _state, _], _sensor: nvmlTemperatureSensors_t, celsius: *mut c_uint) {
        put(celsius, 35)
    }

    fn nvmlDeviceGetTemperatureV([device => _state, _], reading: *mut nvmlTemperature_t) {
        let version = version(reading, &[(size_of::<nvmlTemperature_v1_t>(), 1)])?;
        let sensor = nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        put(reading, nvmlTemperature_v1_t { version, sensorType: sensor, temperature: 35 })
    }

    fn nvmlDeviceGetUtilizationRates([device => _state, _], rates: *mut nvmlUtilization_t) {
        put(rates, nvmlUtilization_t { gpu: 0, memory: 0 })
    }

    fn nvmlDeviceGetRemappedRows(
        [device => state, at],
        corrected: *mut c_uint,
        uncorrected: *mut c_uint,
        pending: *mut c_uint,
        failed: *mut c_uint,
    ) {
        let (is_pending, has_failed) = *state.rows.get(&at).ok_or(UNSUPPORTED)?;
        put(corrected, 0)?;
        put(uncorrected, 1)?;
        put(pending, is_pending.into())?;
        put(failed, has_failed.into())
    }

    fn nvmlDeviceGetTotalEccErrors(
        [device => state, at],
        kind: nvmlMemoryErrorType_t,
        counter: nvmlEccCounterType_t,
        count: *mut c_ulonglong,
    ) {
        let uncorrected = kind == nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
        let volatile = counter == nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
        let errors = *state.uncorrectable.get(&at).ok_or(UNSUPPORTED)?;
        put(count, if uncorrected && volatile { errors } else { 1_000_000 })
    }

    fn nvmlDeviceGetFieldValues([device => state, at], count: c_int, values: *mut nvmlFieldValue_t) {
        let count = usize::try_from(count).map_err(|_| INVALID)?;
        if values.is_null() {
            return Err(INVALID);
        }
        for index in 0..count {
            // SAFETY: not null, and the caller promises `count` structures.
            let value = unsafe { &mut *values.add(index) };
            let answer = match value.fieldId {
                field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION => state.recovery.get(&at).copied().ok_or(UNSUPPORTED),
                field_id::NVML_FI_DEV_NVLINK_GET_STATE => link_state(&state, at, value.scopeId),
                _ => Err(UNSUPPORTED),
            };
            value.nvmlReturn = answer.err().unwrap_or(nvmlReturn_enum_NVML_SUCCESS);
            value.valueType = nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
            value.value = nvmlValue_t { uiVal: answer.unwrap_or(0) };
        }
        Ok(())
    }
}
