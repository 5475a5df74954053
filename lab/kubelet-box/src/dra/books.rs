//! The cache of claims: the pods that use each claim, its prepared devices, and the CDI devices that each container
//! gets.
//!
//! Pure. The checks of answers and their order are those of the kubelet's DRA manager (pkg/kubelet/cm/dra/manager.go,
//! claiminfo.go).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use linkwise_kubelet_api::dra::v1 as wire;
use linkwise_kubelet_api::podresources;

use super::state::ClaimState;
use super::{ClaimRef, DraError, PodClaims};

/// A claim in the cache: claiminfo.go's `ClaimInfo`.
#[derive(Debug, Default)]
struct ClaimInfo {
    claim: ClaimRef,
    pods: BTreeSet<String>,
    drivers: BTreeSet<String>,
    /// Every device that a driver ever answered for the claim, by driver name. Each answer is appended, even to devices
    /// that the checkpoint kept over a restart or a reboot (claiminfo.go, `addDevice`, `newClaimInfoFromState`).
    devices: BTreeMap<String, Vec<wire::Device>>,
    /// Set if all drivers have prepared all claims of a pod since the kubelet started.
    prepared: bool,
    calls: u64,
}

/// The cache of the kubelet.
#[derive(Debug, Default)]
pub(super) struct Books {
    /// The claims by UID.
    claims: BTreeMap<String, ClaimInfo>,
    /// The pods that the kubelet knows, by name.
    pods: BTreeMap<String, PodClaims>,
}

type Batches = BTreeMap<String, Vec<ClaimRef>>;

impl Books {
    /// Forgets which claims are prepared, because a kubelet that starts again prepares every claim of a new sandbox.
    pub fn restarted(&mut self) {
        self.claims.values_mut().for_each(|info| info.prepared = false);
    }

    /// Records that the pod uses its claims. Returns the claims that must be prepared, by driver.
    pub fn add(&mut self, pod: &PodClaims) -> Result<Batches, DraError> {
        let mut batches = Batches::new();
        self.pods.insert(pod.pod.clone(), pod.clone());
        for of_pod in &pod.claims {
            let claim = &of_pod.claim;
            let same_name =
                |info: &&ClaimInfo| (&info.claim.namespace, &info.claim.name) == (&claim.namespace, &claim.name);
            if let Some(old) = self.claims.values().filter(same_name).find(|info| info.claim.uid != claim.uid) {
                let name = format!("{}/{}", claim.namespace, claim.name);
                let old = &old.claim.uid;
                let why = format!("old ResourceClaim with same name {name} and different UID {old} still exists");
                return Err(DraError::Other(why));
            }
            let info = self.claims.entry(claim.uid.clone()).or_insert_with(|| ClaimInfo {
                claim: claim.clone(),
                drivers: of_pod.drivers.clone(),
                ..ClaimInfo::default()
            });
            info.pods.insert(pod.pod.clone());
            if info.prepared {
                continue;
            }
            info.calls += 1;
            for driver in &of_pod.drivers {
                batches.entry(driver.clone()).or_default().push(claim.clone());
            }
        }
        Ok(batches)
    }

    /// Records a driver's answer to Prepare. A kubelet reads its entries in the order of a Go map. Here all good
    /// entries come before the first error, so that their devices stay.
    pub fn answered(
        &mut self,
        driver: &str,
        asked: &[ClaimRef],
        answer: HashMap<String, wire::NodePrepareResourceResponse>,
    ) -> Result<(), DraError> {
        let is_asked = |uid: &str| asked.iter().any(|claim| claim.uid == uid);
        for (uid, entry) in answer.iter().filter(|(uid, entry)| is_asked(uid) && entry.error.is_empty()) {
            if let Some(info) = self.claims.get_mut(uid) {
                info.devices.entry(driver.to_owned()).or_default().extend(entry.devices.iter().cloned());
            }
        }
        check("NodePrepareResources", asked, answer.iter().map(|(uid, entry)| (uid, &entry.error)))
    }

    /// Records that all drivers of a pod have prepared these claims.
    pub fn prepared(&mut self, claims: &[ClaimRef]) {
        for claim in claims {
            if let Some(info) = self.claims.get_mut(&claim.uid) {
                info.prepared = true;
            }
        }
    }

    /// The CDI devices of each container of a pod: those of the request that the container names, or of the whole
    /// claim.
    pub fn cdi_devices(&mut self, pod: &PodClaims) -> Result<BTreeMap<String, Vec<String>>, DraError> {
        let mut all = BTreeMap::new();
        for (container, uses) in &pod.containers {
            let mut devices = Vec::new();
            for used in uses {
                let named = pod.claims.iter().find(|claim| claim.name == used.claim);
                let info = named.and_then(|named| self.claims.get(&named.claim.uid));
                let info = info.ok_or_else(|| {
                    let claim = &used.claim;
                    DraError::Other(format!(
                        "container {container} uses the claim {claim}, which its pod or the kubelet lacks"
                    ))
                })?;
                let is_used = |device: &&wire::Device| {
                    let names = &device.request_names;
                    used.request.as_ref().is_none_or(|request| names.is_empty() || names.contains(request))
                };
                let found = info.devices.values().flatten().filter(is_used);
                devices.extend(found.flat_map(|device| device.cdi_device_ids.iter().cloned()));
            }
            all.insert(container.clone(), devices);
        }
        Ok(all)
    }

    /// The pod's claims that no other pod uses, by driver.
    pub fn last_uses(&mut self, pod: &str) -> Batches {
        let mut batches = Batches::new();
        for info in self.claims.values().filter(|info| info.pods.len() == 1 && info.pods.contains(pod)) {
            for driver in &info.drivers {
                batches.entry(driver.clone()).or_default().push(info.claim.clone());
            }
        }
        batches
    }

    /// Records that the pod no longer uses any claim, and forgets claims that no pod uses.
    pub fn remove(&mut self, pod: &str) {
        self.forget_pod(pod);
        for info in self.claims.values_mut() {
            info.pods.remove(pod);
        }
        self.claims.retain(|_, info| !info.pods.is_empty());
    }

    /// Drops the pod from the list of pods. Its claims stay.
    pub fn forget_pod(&mut self, pod: &str) {
        self.pods.remove(pod);
    }

    /// The claims of containers, with the devices that drivers answered, as PodResources lists them. A pod whose claims
    /// could not be unprepared stays listed until a later attempt succeeds or the pod is deleted by force.
    pub fn listed(&self) -> Vec<podresources::PodResources> {
        let container = |pod: &PodClaims, name: &String, uses: &Vec<super::ClaimUse>| {
            let claims = uses.iter().filter_map(|used| {
                let named = pod.claims.iter().find(|claim| claim.name == used.claim)?;
                let info = self.claims.get(&named.claim.uid)?;
                let devices = info.devices.iter().flat_map(|(driver, devices)| {
                    devices.iter().map(move |device| podresources::ClaimResource {
                        cdi_devices: device.cdi_device_ids.iter().cloned().map(cdi).collect(),
                        driver_name: driver.clone(),
                        pool_name: device.pool_name.clone(),
                        device_name: device.device_name.clone(),
                    })
                });
                Some(podresources::DynamicResource {
                    claim_name: info.claim.name.clone(),
                    claim_namespace: info.claim.namespace.clone(),
                    claim_resources: devices.collect(),
                })
            });
            let dynamic_resources = claims.collect();
            podresources::ContainerResources { name: name.clone(), dynamic_resources, ..Default::default() }
        };
        let pod = |pod: &PodClaims| podresources::PodResources {
            name: pod.pod.clone(),
            namespace: "default".to_owned(),
            containers: pod.containers.iter().map(|(name, uses)| container(pod, name, uses)).collect(),
        };
        self.pods.values().map(pod).collect()
    }

    /// The claims as tests see them, by UID.
    pub fn seen(&self) -> BTreeMap<String, ClaimState> {
        let seen = |info: &ClaimInfo| ClaimState {
            name: format!("{}/{}", info.claim.namespace, info.claim.name),
            pods: info.pods.clone(),
            prepared: info.prepared,
            calls: info.calls,
            cdi: info.devices.values().flatten().flat_map(|device| device.cdi_device_ids.iter().cloned()).collect(),
            resource_ids: info.devices.values().flatten().rev().filter_map(resource_id).collect(),
        };
        self.claims.iter().map(|(uid, info)| (uid.clone(), seen(info))).collect()
    }
}

/// The id of a device in the status of pods, with the device's pool and name.
fn resource_id(device: &wire::Device) -> Option<(String, (String, String))> {
    Some((device.cdi_device_ids.first()?.clone(), (device.pool_name.clone(), device.device_name.clone())))
}

fn cdi(name: String) -> podresources::CdiDevice {
    podresources::CdiDevice { name }
}

/// Checks an answer for errors and for claims that the call did not name, then for missing claims.
pub(super) fn check<'a>(
    method: &'static str,
    asked: &[ClaimRef],
    entries: impl Iterator<Item = (&'a String, &'a String)>,
) -> Result<(), DraError> {
    let mut missing: BTreeSet<&str> = asked.iter().map(|claim| claim.uid.as_str()).collect();
    let entries: BTreeMap<&String, &String> = entries.collect();
    for (uid, error) in entries {
        if !error.is_empty() {
            return Err(DraError::Claim { method, claim: uid.clone(), error: error.clone() });
        }
        if !missing.remove(uid.as_str()) {
            return Err(DraError::Other(format!("{method}: unexpected claim {uid} in the answer")));
        }
    }
    match missing.len() {
        0 => Ok(()),
        count => Err(DraError::Other(format!("{method} skipped {count} ResourceClaims"))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    fn claim(uid: &str) -> ClaimRef {
        ClaimRef { namespace: "default".to_owned(), name: format!("claim-{uid}"), uid: uid.to_owned() }
    }

    fn answer(entries: &[(&str, &str)]) -> HashMap<String, wire::NodePrepareResourceResponse> {
        let entry =
            |error: &&str| wire::NodePrepareResourceResponse { devices: Vec::new(), error: (*error).to_owned() };
        entries.iter().map(|(uid, error)| ((*uid).to_owned(), entry(error))).collect()
    }

    #[test]
    fn answer_has_an_entry_for_each_claim_and_no_other() {
        let mut books = Books::default();
        let asked = [claim("a"), claim("b")];
        let mut said =
            |entries: &[(&str, &str)]| books.answered("d", &asked, answer(entries)).map_err(|error| error.to_string());
        assert_eq!(said(&[("a", ""), ("b", "")]), Ok(()));
        assert_eq!(said(&[("a", "")]).unwrap_err(), "NodePrepareResources skipped 1 ResourceClaims");
        let foreign = "NodePrepareResources: unexpected claim c in the answer";
        assert_eq!(said(&[("a", ""), ("b", ""), ("c", "")]).unwrap_err(), foreign);
        let failed = "NodePrepareResources failed for claim b: no";
        assert_eq!(said(&[("a", ""), ("b", "no")]).unwrap_err(), failed);
    }

    #[test]
    fn containers_get_the_devices_of_their_requests() {
        let mut books = Books::default();
        let mut pod = PodClaims::single("p", claim("a"), "d");
        let uses = |request: &str| {
            vec![super::super::ClaimUse { claim: "gpus".to_owned(), request: Some(request.to_owned()) }]
        };
        pod.containers.insert("one".to_owned(), uses("x"));
        assert_eq!(books.add(&pod).unwrap().get("d").map(Vec::len), Some(1));
        let device = |request: &str, cdi: &str| wire::Device {
            request_names: vec![request.to_owned()],
            cdi_device_ids: vec![cdi.to_owned()],
            ..wire::Device::default()
        };
        let devices = vec![device("x", "k=1"), device("y", "k=2")];
        let entry = wire::NodePrepareResourceResponse { devices, error: String::new() };
        let answer = HashMap::from([("a".to_owned(), entry)]);
        books.answered("d", &[claim("a")], answer.clone()).unwrap();
        books.prepared(&[claim("a")]);
        let devices = books.cdi_devices(&pod).unwrap();
        assert_eq!(
            (devices["main"].as_slice(), devices["one"].as_slice()),
            (&["k=1".to_owned(), "k=2".to_owned()][..], &["k=1".to_owned()][..])
        );
        assert!(books.add(&pod).unwrap().is_empty(), "the prepared claim is prepared again");
        let other = ClaimRef { uid: "z".to_owned(), ..claim("a") };
        let error = books.add(&PodClaims::single("q", other, "d")).unwrap_err().to_string();
        assert!(error.starts_with("old ResourceClaim with same name default/claim-a"), "{error}");
        books.restarted();
        assert_eq!(books.add(&pod).unwrap().len(), 1, "after a restart the claim is not prepared again");
        books.answered("d", &[claim("a")], answer).unwrap();
        assert_eq!(books.cdi_devices(&pod).unwrap()["one"], ["k=1", "k=1"], "the new answer is not appended");
        assert_eq!(books.add(&pod).unwrap().len(), 1, "an answer alone marks the claim as prepared");
    }
}
