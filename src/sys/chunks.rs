//! Owns reading the chunks that another thread sends as one stream.

use std::io::{self, BufRead, Read};
use std::sync::mpsc::Receiver;

use bytes::{Buf as _, Bytes};

/// The stream ends when the sender is dropped.
pub(crate) struct Chunks {
    incoming: Receiver<io::Result<Bytes>>,
    current: Bytes,
}

impl Chunks {
    pub(crate) fn new(incoming: Receiver<io::Result<Bytes>>) -> Self {
        let current = Bytes::new();
        Self { incoming, current }
    }
}

impl Read for Chunks {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let amount = self.fill_buf()?.read(buffer)?;
        self.consume(amount);
        Ok(amount)
    }
}

impl BufRead for Chunks {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.current.is_empty()
            && let Ok(next) = self.incoming.recv()
        {
            self.current = next?;
        }
        Ok(&self.current)
    }

    fn consume(&mut self, amount: usize) {
        self.current.advance(amount.min(self.current.len()));
    }
}
