//! Owns reading a program's standard output, to the program's end rather than to the end of the pipe.

use std::io::{self, Read};
use std::os::fd::AsFd as _;
use std::process::ChildStdout;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::POLL;
use crate::sys::readable::readable;

/// A program's standard output.
#[derive(Debug)]
pub(crate) struct Output {
    pipe: ChildStdout,
    /// Whether the program has ended. The pipe may stay open: a daemon that the program left behind may have it.
    ended: Arc<AtomicBool>,
}

impl Output {
    pub(super) fn new(pipe: ChildStdout, ended: Arc<AtomicBool>) -> Self {
        Self { pipe, ended }
    }
}

impl Read for Output {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let ended = self.ended.load(Ordering::Acquire);
            // The last output of an ended program is in the pipe already.
            let limit = if ended { Duration::ZERO } else { POLL };
            let ready = readable([Some(self.pipe.as_fd())], Some(limit))? == [true];
            if ready {
                return self.pipe.read(buffer);
            }
            if ended {
                return Ok(0);
            }
        }
    }
}
