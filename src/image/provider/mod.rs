//! Owns building base images by the tools of distributions: one file a provider.

pub(crate) mod mmdebstrap;
pub(crate) mod pacstrap;
