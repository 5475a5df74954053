//! A driver root in a temporary folder: libraries, programs, firmware, sockets, device nodes and the kernel's /sys.
//! Device nodes are links to /dev/null, a character device, because only root can make device nodes.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

pub const VERSION: &str = "550.54.15";

/// The folder of the libraries, below the root.
pub const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

pub struct Root {
    pub path: PathBuf,
}

impl Root {
    pub fn empty(path: &Path) -> Self {
        fs::create_dir_all(path).unwrap();
        Self { path: path.to_owned() }
    }

    /// A root with a driver and the files of a node with two GPUs, GDRCopy, GDS and two RDMA NICs.
    pub fn full(path: &Path) -> Self {
        let root = Self::empty(path);
        root.driver(VERSION);
        root.link(&format!("{LIBRARIES}/libnvidia-egl-gbm.so.1"), "libnvidia-egl-gbm.so.1.1.1");
        root.file(&format!("{LIBRARIES}/libnvidia-egl-gbm.so.1.1.1"));
        root.file(&format!("{LIBRARIES}/libc.so.6"));
        for name in ["nvidia-smi", "nvidia-persistenced", "nvidia-debugdump"] {
            root.program(&format!("usr/bin/{name}"));
        }
        // Not executable, so not a program.
        root.file("usr/bin/nvidia-cuda-mps-control");
        root.file(&format!("lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"));
        root.file("lib/firmware/nvidia/470.1/gsp.bin");
        root.file("usr/share/glvnd/egl_vendor.d/10_nvidia.json");
        root.file("etc/cufile.json");
        fs::create_dir_all(path.join("run/nvidia-persistenced")).unwrap();
        // The socket's file stays when the listener is dropped.
        drop(UnixListener::bind(path.join("run/nvidia-persistenced/socket")).unwrap());
        for node in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1", "gdrdrv"] {
            root.node(node);
        }
        for node in ["nvidia-fs0", "nvidia-fs1", "infiniband/uverbs0", "infiniband/uverbs1", "infiniband/rdma_cm"] {
            root.node(node);
        }
        for node in ["dri/card1", "dri/renderD128", "dri/card2"] {
            root.node(node);
        }
        // A regular file is not a device.
        root.file("dev/nvidia-modeset");
        root
    }

    /// Writes the libraries of a driver.
    pub fn driver(&self, version: &str) {
        for name in ["libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler"] {
            self.file(&format!("{LIBRARIES}/{name}.so.{version}"));
            self.link(&format!("{LIBRARIES}/{name}.so.1"), &format!("{name}.so.{version}"));
        }
        self.link(&format!("{LIBRARIES}/libcuda.so"), "libcuda.so.1");
    }

    /// Writes the hook program of the toolkit's first release with hooks.
    pub fn hook(&self) {
        self.hook_with(&[]);
    }

    /// Writes a hook program that also has the hooks `names`.
    pub fn hook_with(&self, names: &[&str]) {
        self.program("usr/bin/nvidia-cdi-hook");
        let text = format!("\x7fELF create-symlinks update-ldcache {}", names.join("\0"));
        fs::write(self.path.join("usr/bin/nvidia-cdi-hook"), text).unwrap();
    }

    /// Writes the version of the loaded driver, as the kernel reports it.
    pub fn loaded(&self, version: &str) {
        self.file("sys/module/nvidia/version");
        fs::write(self.path.join("sys/module/nvidia/version"), format!("{version}\n")).unwrap();
    }

    /// Writes a GPU's DRM nodes, as the kernel lists them in /sys.
    pub fn drm(&self, pci: &str, names: &[&str]) {
        for name in names {
            fs::create_dir_all(self.path.join(format!("sys/bus/pci/devices/{pci}/drm/{name}"))).unwrap();
        }
    }

    pub fn file(&self, path: &str) {
        let path = self.path.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    pub fn program(&self, path: &str) {
        self.file(path);
        fs::set_permissions(self.path.join(path), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Makes a symbolic link; replaces an existing one.
    pub fn link(&self, path: &str, target: &str) {
        let path = self.path.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(target, path).unwrap();
    }

    pub fn node(&self, name: &str) {
        self.link(&format!("dev/{name}"), "/dev/null");
    }
}
