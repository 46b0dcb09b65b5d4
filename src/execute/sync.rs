//! Owns syncing finished steps to disk in parallel with later steps, so that a reset of the machine loses no finished
//! step.

use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::plan::ids::LayerId;
use crate::store::Store;
use crate::sys::error::Result;
use crate::sys::thread;

/// How long layers are collected for one sync. A sync delays the next step, and short steps need no sync of their own.
const GATHER: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(super) struct Durable {
    layers: Sender<LayerId>,
    thread: JoinHandle<Result<()>>,
}

impl Durable {
    /// Starts with nothing to write.
    pub(super) fn start(store: &Store) -> Result<Self> {
        let (layers, incoming) = channel::<LayerId>();
        let store = store.clone();
        let thread = thread::start(move || {
            while let Ok(first) = incoming.recv() {
                let mut gathered = vec![first];
                while let Ok(layer) = incoming.recv_timeout(GATHER) {
                    gathered.push(layer);
                }
                store.make_durable(&gathered)?;
            }
            Ok(())
        })?;
        Ok(Self { layers, thread })
    }

    /// Queues a layer to be written soon.
    pub(super) fn add(&self, layer: LayerId) {
        // A thread that failed reports why at the end.
        drop(self.layers.send(layer));
    }

    /// Waits until every layer is on disk.
    pub(super) fn finish(self) -> Result<()> {
        drop(self.layers);
        thread::joined(self.thread.join())
    }
}
