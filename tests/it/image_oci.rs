//! Container images: layers, layouts and archives, registries and their faults. Needs root, `docker-registry` and
//! `umoci`.

mod environment;
mod files;
mod inside;
mod layers;
pub(crate) mod make;
mod mirrors;
mod names;
pub(crate) mod place;
mod registry;
