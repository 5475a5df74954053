//! Finds registration sockets, registers the plugins behind them, and keeps the connections to registered plugins.
//!
//! A kubelet follows its folder with inotify and reconciles every second. Here the folder is walked again and again.
//! Names that begin with a dot are skipped, and so are files that are not sockets.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use linkwise_kubelet_api::pluginregistration as wire;
use linkwise_kubelet_api::pluginregistration::registration_client::RegistrationClient;
use linkwise_kubelet_api::{dra, dra_health};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::super::errors::chain;
use super::super::socket::{dial, localhost};
use super::endpoint::{Driver, dial_registration};
use super::state::DeviceHealth;
use super::{Life, lock};

/// The default time between two walks through the folder. Also the delay after a first failed registration, which
/// doubles each time (500 ms in a kubelet), and the delay before an ended connection or health stream is opened again
/// (5 s in a kubelet).
pub(super) const RETRY_DELAY: Duration = Duration::from_millis(5);

/// The number of times that the delay after a failed registration doubles.
const MAX_DOUBLINGS: u32 = 8;

const INFO_TIMEOUT: Duration = Duration::from_secs(1);
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);

/// The identity of a file: a new file at the same path is another plugin.
type FileId = (u64, u64, Option<SystemTime>);

/// Adds the sockets in a folder and its sub-folders.
fn find_sockets(folder: &Path, found: &mut BTreeMap<PathBuf, FileId>) {
    for entry in fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok) {
        let is_hidden = entry.file_name().to_str().is_none_or(|name| name.starts_with('.'));
        let Some(metadata) = fs::symlink_metadata(entry.path()).ok().filter(|_| !is_hidden) else { continue };
        if metadata.is_dir() {
            find_sockets(&entry.path(), found);
        } else if metadata.file_type().is_socket() {
            found.insert(entry.path(), (metadata.dev(), metadata.ino(), metadata.created().ok()));
        }
    }
}

/// Registers and deregisters plugins while the kubelet runs.
pub(super) async fn watch(life: Arc<Life>) {
    let mut known: BTreeMap<PathBuf, (FileId, CancellationToken)> = BTreeMap::new();
    let mut away = BTreeMap::new();
    loop {
        let mut found = BTreeMap::new();
        find_sockets(&life.core.options.registry, &mut found);
        known.retain(|path, (id, end)| {
            let stays = found.get(path) == Some(id);
            if !stays {
                end.cancel();
                life.deregister(path);
            }
            stays
        });
        for (path, id) in found {
            if !known.contains_key(&path) {
                let (end, clone) = (life.end.child_token(), Arc::clone(&life));
                known.insert(path.clone(), (id, end.clone()));
                life.spawn(async move {
                    end.clone().run_until_cancelled(follow(clone, path, end)).await.unwrap_or_default();
                });
            }
        }
        wipe(&life, &mut away);
        sleep(life.core.options.reconcile).await;
    }
}

/// Deletes the slices of drivers that have had no connection for too long. `away` has an entry for each unconnected
/// driver: the start of its absence, or `None` after its slices were deleted.
fn wipe(life: &Life, away: &mut BTreeMap<String, Option<Instant>>) {
    let drivers = life.core.state.borrow().drivers.clone();
    for (name, state) in drivers {
        if state.connected > 0 {
            away.remove(&name);
            continue;
        }
        let since = away.entry(name.clone()).or_insert_with(|| Some(Instant::now()));
        if since.take_if(|since| since.elapsed() >= life.core.options.wipe_after).is_some() {
            life.core.driver(&name, |state| state.wiped += 1);
            if let Some(wipe) = &life.core.options.wipe {
                wipe(Some(&name));
            }
        }
    }
}

/// Registers the plugin behind a socket, and keeps it connected.
async fn follow(life: Arc<Life>, path: PathBuf, end: CancellationToken) {
    let mut failures = 0;
    let (name, driver) = loop {
        match register(&life, &path).await {
            Ok(registered) => break registered,
            Err(why) => {
                life.core.state.send_modify(|state| state.refused.push((path.display().to_string(), why)));
                let delay = RETRY_DELAY.saturating_mul(1 << failures);
                failures = MAX_DOUBLINGS.min(failures + 1);
                sleep(delay).await;
            }
        }
    };
    let following = follow_health(Arc::clone(&life), name.clone(), driver.clone());
    life.spawn(async move { end.run_until_cancelled(following).await.unwrap_or_default() });
    keep_connected(&life, &name, &driver).await;
}

/// Makes one registration: GetInfo, the kubelet's checks, NotifyRegistrationStatus.
async fn register(life: &Arc<Life>, path: &Path) -> Result<(String, Driver), String> {
    let channel = dial_registration(path, &life.connections).await.map_err(|error| chain(&error))?;
    let mut client = RegistrationClient::new(channel);
    let info = timeout(INFO_TIMEOUT, client.get_info(wire::InfoRequest {})).await;
    let info = info.map_err(|_| format!("GetInfo had no answer after {INFO_TIMEOUT:?}"))?;
    let info = info.map_err(|status| format!("GetInfo failed: {status}"))?.into_inner();
    let refusal = life.core.refusal.borrow().clone();
    let checked = refusal.map_or_else(|| life.check(path, &info), Err);
    let status = wire::RegistrationStatus {
        plugin_registered: checked.is_ok(),
        error: checked.as_ref().err().cloned().unwrap_or_default(),
    };
    // A kubelet registers the plugin before it notifies the plugin.
    if let Ok(driver) = &checked {
        lock(&life.drivers).entry(info.name.clone()).or_default().push(driver.clone());
    }
    let told = timeout(NOTIFY_TIMEOUT, client.notify_registration_status(status)).await;
    let driver = checked?;
    if !matches!(told, Ok(Ok(_))) {
        life.deregister(path);
        return Err("NotifyRegistrationStatus failed".to_owned());
    }
    life.core.driver(&info.name, |state| {
        state.endpoints.push(driver.endpoint.display().to_string());
        state.registrations += 1;
    });
    Ok((info.name, driver))
}

impl Life {
    /// Makes the checks of a kubelet on a plugin's GetInfo.
    fn check(&self, path: &Path, info: &wire::PluginInfo) -> Result<Driver, String> {
        if info.r#type != wire::DRA_PLUGIN {
            return Err(format!("no handler registered for plugin type: {}", info.r#type));
        }
        let offered = |service| info.supported_versions.iter().any(|version| version == service).then_some(service);
        offered(dra::v1::SERVICE).ok_or_else(|| {
            format!("none of the supported services {:?} of driver {} is known", info.supported_versions, info.name)
        })?;
        let health = match self.core.options.advertised_health {
            true => offered(dra_health::v1::SERVICE).or_else(|| offered(dra_health::v1alpha1::SERVICE)),
            false => Some(dra_health::v1alpha1::SERVICE),
        };
        let endpoint = match info.endpoint.as_str() {
            "" => path.to_owned(),
            endpoint => self.core.options.host_root.join(endpoint.trim_start_matches('/')),
        };
        let is_same = |driver: &Driver| driver.endpoint == endpoint;
        if lock(&self.drivers).get(&info.name).is_some_and(|of_name| of_name.iter().any(is_same)) {
            return Err(format!("endpoint {} is already registered for driver {}", endpoint.display(), info.name));
        }
        let (channel, open, closed) = Default::default();
        Ok(Driver { registration: path.to_owned(), endpoint, health, channel, open, closed })
    }

    fn deregister(&self, registration: &Path) {
        let mut drivers = lock(&self.drivers);
        for (name, of_name) in drivers.iter_mut() {
            let gone: Vec<_> = of_name.extract_if(.., |driver| driver.registration == registration).collect();
            for driver in gone {
                driver.closed.cancel();
                let endpoint = driver.endpoint.display().to_string();
                let was_connected = driver.channel.send_replace(None).is_some();
                self.core.driver(name, |state| {
                    state.endpoints.retain(|known| *known != endpoint);
                    state.connected = state.connected.saturating_sub(usize::from(was_connected));
                });
            }
        }
    }
}

/// Keeps a connection to a driver's services.
async fn keep_connected(life: &Arc<Life>, name: &str, driver: &Driver) {
    loop {
        let mut closed = driver.open.subscribe();
        if let Ok(channel) = dial(&driver.endpoint, localhost(), &life.connections, driver.open.clone()).await {
            driver.channel.send_replace(Some(channel));
            life.core.driver(name, |state| state.connected += 1);
            // Ends when the driver closes the connection or dies.
            drop(closed.wait_for(|open| *open == 0).await);
            if driver.channel.send_replace(None).is_some() {
                life.core.driver(name, |state| state.connected = state.connected.saturating_sub(1));
            }
        }
        sleep(RETRY_DELAY).await;
    }
}

/// Follows the health stream of a driver, and opens it again when it ends.
async fn follow_health(life: Arc<Life>, name: String, driver: Driver) {
    let mut channels = driver.channel.subscribe();
    loop {
        let Ok(channel) = channels.wait_for(Option::is_some).await.map(|channel| channel.clone()) else { return };
        let Some(channel) = channel else { continue };
        let Some(opened) = driver.watch_health(channel).await else { return };
        if let Ok(mut lists) = opened {
            life.core.driver(&name, |state| state.health_streams += 1);
            while let Ok(Some(list)) = lists.message().await {
                let devices = list.devices.into_iter().filter_map(|device| {
                    let id = device.device?;
                    let health = DeviceHealth { health: device.health, message: device.message };
                    Some(((id.pool_name, id.device_name), health))
                });
                let health = devices.collect();
                life.core.driver(&name, |state| {
                    state.health = health;
                    state.health_lists += 1;
                });
            }
            life.core.driver(&name, |state| state.health_streams = state.health_streams.saturating_sub(1));
        }
        sleep(RETRY_DELAY).await;
    }
}
