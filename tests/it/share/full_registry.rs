//! A registry that refuses a layer during its upload, as with a full disk: it answers and stops reading.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use crate::support::env::TestStore;
use crate::support::transcript::measured;

/// Answers requests like an empty registry, and refuses each layer after a part of it.
fn answer(stream: TcpStream) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let mut header = String::new();
        while reader.read_line(&mut header).ok()? > 2 {
            header.clear();
        }
        let text = match line.split(' ').next()? {
            "POST" => "202 Accepted\r\nLocation: /v2/team/rocm/blobs/uploads/1",
            "PATCH" => {
                reader.read_exact(&mut [0; 4096]).ok()?;
                "507 Insufficient Storage"
            }
            "" => return None,
            _ => "404 Not Found",
        };
        let text = format!("HTTP/1.1 {text}\r\nContent-Length: 0\r\n\r\n");
        (&stream).write_all(text.as_bytes()).ok()?;
        if line.starts_with("PATCH") {
            // Keeps the connection open without reading.
            loop {
                std::thread::park();
            }
        }
    }
}

#[test]
fn a_layer_that_is_refused_while_it_is_sent_ends_the_push() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 'one'\nrun = 'head -c 40M /dev/urandom > ~/one'\n");
    store.rockenv(&["up", store.env()]).ok();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let host = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            std::thread::spawn(move || answer(client));
        }
    });
    let push = store.command(&["push", store.env(), &format!("{host}/team/rocm")]);
    let push = crate::support::run::finish("push".into(), push);
    insta::assert_snapshot!(measured(store.shown(&push)), @"
    push to 127.0.0.1:PORT/team/rocm … SIZE
    error: cannot push to `127.0.0.1:PORT/team/rocm`
      caused by: cannot push image `base`
      caused by: cannot send to `127.0.0.1:PORT/team/rocm`
      caused by: the registry answered 507 Insufficient Storage
    help: run the command again later, or use another registry
    exit code 4
    ");
}
