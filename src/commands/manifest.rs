//! Kubernetes objects as text that `kubectl apply` takes.

use anyhow::{Context, Result};
use serde::Serialize;

use crate::config::ManifestFormat;

/// A list of objects as one object.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct List<T> {
    api_version: &'static str,
    kind: &'static str,
    items: Vec<T>,
}

impl<T> List<T> {
    pub fn new(items: Vec<T>) -> Self {
        Self { api_version: "v1", kind: "List", items }
    }
}

/// The text of an object or a list of them.
pub(super) fn text(object: &impl Serialize, format: ManifestFormat) -> Result<String> {
    let text = match format {
        ManifestFormat::Json => serde_json::to_string_pretty(object).context("cannot write JSON")?,
        ManifestFormat::Yaml => serde_saphyr::to_string(object).context("cannot write YAML")?,
    };
    Ok(format!("{}\n", text.trim_end()))
}
