//! A test's own server on loopback, whose command takes a port.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command};

use super::run::wait_until;

/// A running server, killed when dropped.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) port: u16,
    child: Child,
}

impl Server {
    /// Starts the command that `command` makes for a port, and waits until it listens. These servers cannot choose and
    /// report a port themselves. If another process takes the port meanwhile, the server ends, and gets another port.
    #[track_caller]
    pub(crate) fn start(command: impl Fn(u16) -> Command) -> Self {
        for _ in 0..5 {
            let port = {
                let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
                listener.local_addr().expect("its number").port()
            };
            let child = command(port).spawn().expect("a server");
            let mut server = Self { port, child };
            let mut runs = true;
            wait_until("the server listens", || {
                let listens = TcpStream::connect(("127.0.0.1", port)).is_ok();
                runs = server.child.try_wait().expect("a child").is_none();
                listens || !runs
            });
            if runs {
                return server;
            }
        }
        panic!("the server always ends: {:?}", command(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
