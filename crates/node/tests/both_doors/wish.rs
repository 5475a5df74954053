//! What an operator wants of the node, and may change at any time; the door only with another process.

use linkwise_core::state::{
    Door, Filter, GpuSelector, MigStrategy, ResourcePlan, SharedDevices, SharedResource, Sharing, SharingKind,
};

use super::books::Part;

/// What an operator wants.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    pub door: Door,
    pub by_mig: bool,
    pub shared: bool,
    pub left_out: Option<u8>,
}

impl Wish {
    pub fn plan(self) -> ResourcePlan {
        let selector = |gpu: u8| GpuSelector::Uuid(Part { gpu, mig: None }.uuid().parse().unwrap());
        let whole = SharedResource {
            name: "nvidia.com/gpu".parse().unwrap(),
            rename: None,
            devices: SharedDevices::All,
            replicas: 2,
        };
        ResourcePlan {
            door: self.door,
            mig_strategy: if self.by_mig { MigStrategy::Mixed } else { MigStrategy::None },
            sharing: self.shared.then(|| Sharing::new(SharingKind::TimeSlicing, vec![whole])),
            filter: Filter { exclude: self.left_out.map(selector).into_iter().collect(), exclude_displays: false },
            ..ResourcePlan::default()
        }
    }
}
