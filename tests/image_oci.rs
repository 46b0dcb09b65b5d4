//! Container images: layers, layouts and archives, registries and their faults. Needs root, `docker-registry` and `umoci`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

#[path = "image_oci/environment.rs"]
mod environment;
#[path = "image_oci/files.rs"]
mod files;
#[path = "image_oci/inside.rs"]
mod inside;
#[path = "image_oci/layers.rs"]
mod layers;
#[path = "image_oci/make.rs"]
mod make;
#[path = "image_oci/place.rs"]
mod place;
#[path = "image_oci/registry.rs"]
mod registry;
