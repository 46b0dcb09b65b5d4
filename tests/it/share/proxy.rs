//! A proxy before a registry that makes requests fail.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What happens to a request.
pub(super) enum Fault {
    None,
    /// Answers without the registry: status, header lines with their line ends, and body.
    Says(u16, String, String),
    /// Breaks the connection after this many bytes of the answer.
    Dies(u64),
    /// Forwards this many bytes of the request, and then hangs.
    Hangs(u64),
    /// Sends the answer byte by byte until the flag is set.
    Crawls(Arc<AtomicBool>),
    /// Sends an answer without end, without the registry.
    Endless,
    /// Sends this many bytes of the answer, and keeps the connection open.
    Stops(u64),
    /// Sends the head of the answer, and then a few bytes a second.
    Drips,
}

impl Fault {
    /// Returns the fault if the condition holds, and `None` otherwise.
    pub(super) fn when(self, holds: bool) -> Self {
        match holds {
            true => self,
            false => Self::None,
        }
    }
}

/// Returns whether a request is for a layer or another blob.
pub(super) fn is_layer(head: &str) -> bool {
    head.starts_with("GET ") && head.contains("/blobs/")
}

/// Forwards requests to a registry until the test ends.
pub(super) struct Proxy {
    host: String,
    /// Set once a request hangs.
    pub(super) hangs: Arc<AtomicBool>,
}

impl Proxy {
    /// Starts a proxy that asks `judge` about the head of each request.
    pub(super) fn start(to: &str, judge: impl Fn(&str) -> Fault + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let hangs = Arc::new(AtomicBool::new(false));
        let (to, judge, flag) = (to.to_owned(), Arc::new(judge), Arc::clone(&hangs));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (to, judge, flag) = (to.clone(), Arc::clone(&judge), Arc::clone(&flag));
                // These tests are about connections that break.
                std::thread::spawn(move || drop(answer(&client, &to, &*judge, &flag)));
            }
        });
        Self { host, hangs }
    }

    pub(super) fn repository(&self) -> String {
        format!("{}/team/rocm", self.host)
    }
}

fn answer(
    mut client: &TcpStream,
    to: &str,
    judge: &dyn Fn(&str) -> Fault,
    hangs: &AtomicBool,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let text = String::from_utf8_lossy(&head).into_owned();
    let fault = judge(&text);
    if let Fault::Says(status, line, body) = fault {
        let text = format!(
            "HTTP/1.1 {status} so\r\ncontent-length: {}\r\nconnection: close\r\n{line}\r\n{body}",
            body.len()
        );
        client.write_all(text.as_bytes())?;
        client.shutdown(Shutdown::Write)?;
        // If a connection is closed with unread data, the other side may not get the answer.
        client.set_read_timeout(Some(std::time::Duration::from_secs(5)))?;
        return std::io::copy(&mut client, &mut std::io::sink()).map(drop);
    }
    if let Fault::Endless = fault {
        client.write_all(b"HTTP/1.1 200 so\r\nconnection: close\r\n\r\n")?;
        // Ends when the client closes the connection.
        loop {
            client.write_all(&[b' '; 64 << 10])?;
        }
    }
    let mut registry = TcpStream::connect(to)?;
    // The registry gets one request per connection.
    let kept = text
        .trim_end()
        .lines()
        .filter(|line| !line.to_ascii_lowercase().starts_with("connection:"));
    let kept: Vec<&str> = kept.collect();
    registry.write_all(format!("{}\r\nconnection: close\r\n\r\n", kept.join("\r\n")).as_bytes())?;
    let (from, mut into) = (client.try_clone()?, registry.try_clone()?);
    if let Fault::Hangs(bytes) = fault {
        std::io::copy(&mut from.take(bytes), &mut into)?;
        hangs.store(true, Ordering::Relaxed);
        loop {
            std::thread::park();
        }
    }
    std::thread::spawn(move || {
        let mut from = from;
        drop(std::io::copy(&mut from, &mut into));
    });
    if let Fault::Crawls(go) = &fault {
        // The head comes at once: byte by byte it would take a minute.
        let mut some = 4 << 10;
        while !go.load(Ordering::Relaxed) {
            std::io::copy(&mut registry.try_clone()?.take(some), &mut client)?;
            some = 1;
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
    if let Fault::Drips = fault {
        let mut answer = Vec::new();
        registry.try_clone()?.read_to_end(&mut answer)?;
        let head = answer.windows(4).position(|four| four == b"\r\n\r\n");
        let (head, body) = answer.split_at(head.map_or(answer.len(), |at| at + 4));
        client.write_all(head)?;
        for byte in body {
            client.write_all(&[*byte])?;
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
    }
    if let Fault::Stops(bytes) = fault {
        std::io::copy(&mut registry.try_clone()?.take(bytes), &mut client)?;
        loop {
            std::thread::park();
        }
    }
    let bytes = match fault {
        Fault::Dies(bytes) => bytes,
        _ => u64::MAX,
    };
    std::io::copy(&mut registry.try_clone()?.take(bytes), &mut client)?;
    registry.shutdown(Shutdown::Both)?;
    client.shutdown(Shutdown::Both)
}
