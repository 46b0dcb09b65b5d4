//! Containers as users see them: real systemd-nspawn, real control groups, real signals. Needs root.

mod commands;
mod devices;
mod ending;
mod ephemeral;
mod idle;
mod isolation;
mod limits;
mod logs;
mod steps;
mod terminal;
mod verify;
