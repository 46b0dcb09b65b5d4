//! Owns building base images with distributions' tools: one file per provider.

pub(crate) mod mmdebstrap;
pub(crate) mod pacstrap;
