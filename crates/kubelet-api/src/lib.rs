//! The wire types of the kubelet's APIs, generated from `proto/` by the build script.
//!
//! `crates/kubelet` uses them on the plugin's side, the kubelet in the box
//! (`lab/kubelet-box`) on the kubelet's side, tests and benches on both.

/// Device plugin API v1beta1 (`proto/deviceplugin/v1beta1/api.proto`).
#[allow(clippy::all, clippy::pedantic, clippy::restriction, missing_docs, reason = "generated")]
pub mod v1beta1 {
    include!(concat!(env!("OUT_DIR"), "/deviceplugin/v1beta1.rs"));

    /// The API version that `RegisterRequest::version` must name.
    pub const VERSION: &str = "v1beta1";
    /// The value of `Device::health` for a device that may be given to a pod.
    pub const HEALTHY: &str = "Healthy";
    /// The value of `Device::health` for a device that may not.
    pub const UNHEALTHY: &str = "Unhealthy";
    /// The file name of the kubelet's registration socket in its device-plugins folder.
    pub const KUBELET_SOCKET: &str = "kubelet.sock";
}

/// PodResources API v1 (`proto/podresources/v1/api.proto`), as far as it is read here.
#[allow(clippy::all, clippy::pedantic, clippy::restriction, missing_docs, reason = "generated")]
pub mod podresources {
    include!(concat!(env!("OUT_DIR"), "/podresources/v1.rs"));
}

/// Plugin registration API v1 (`proto/pluginregistration/v1/api.proto`).
#[allow(clippy::all, clippy::pedantic, clippy::restriction, missing_docs, reason = "generated")]
pub mod pluginregistration {
    include!(concat!(env!("OUT_DIR"), "/pluginregistration/pluginregistration.rs"));

    /// The value of `PluginInfo::type` of a DRA driver.
    pub const DRA_PLUGIN: &str = "DRAPlugin";
}

/// The DRA plugin API.
pub mod dra {
    /// Version v1, of kubelets from 1.34 on (`proto/dra/v1/api.proto`).
    #[allow(clippy::all, clippy::pedantic, clippy::restriction, missing_docs, reason = "generated")]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/dra/k8s.io.kubelet.pkg.apis.dra.v1.rs"));

        /// Its name among `PluginInfo::supported_versions`.
        pub const SERVICE: &str = "v1.DRAPlugin";
    }
}

/// The DRA health API. Both versions have the messages of [`dra_health::v1alpha1`].
pub mod dra_health {
    /// Version v1alpha1, of kubelets from 1.34 on (`proto/dra-health/v1alpha1/api.proto`).
    #[allow(clippy::all, clippy::pedantic, clippy::restriction, missing_docs, reason = "generated")]
    pub mod v1alpha1 {
        include!(concat!(env!("OUT_DIR"), "/dra-health/v1alpha1.rs"));

        /// Its name among `PluginInfo::supported_versions`.
        pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";
    }

    /// Version v1, of kubelets from 1.37 on (`proto/dra-health/v1/api.proto`).
    #[allow(clippy::all, clippy::pedantic, clippy::restriction, missing_docs, reason = "generated")]
    pub mod v1 {
        include!(concat!(env!("OUT_DIR"), "/dra-health/v1.rs"));

        /// Its name among `PluginInfo::supported_versions`.
        pub const SERVICE: &str = "v1.DRAResourceHealth";
    }
}
