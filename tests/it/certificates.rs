//! Certificate authorities of the configuration: with a server on loopback whose certificate only they make good, and the real pip,
//! Python and git in the container. Also with `tests/service docker|podman cargo test --test it certificates::`.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::support::env::TestStore;
use crate::support::run::{Ran, finish, sha256};
use fs_err as fs;

/// Makes an authority, a certificate of it for localhost, a repository and an index with one wheel.
const MAKE: &str = r#"
cd "$0"
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj '/CN=A company' -keyout ca.key -out ca.pem \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign 2>/dev/null
openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr 2>/dev/null
printf 'subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' > extensions
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -days 2 -extfile extensions -out server.pem 2>/dev/null
mkdir -p www/simple/demo
git init -q work && cd work && echo text > file && git add file
git -c user.name=t -c user.email=t@example.org commit -qm one
git clone -q --bare . ../www/repo.git && git -C ../www/repo.git update-server-info
cd ../www
tar -cf tree.tar -C ../work file
python3 - <<END
import zipfile
name = 'demo-1.0-py3-none-any.whl'
with zipfile.ZipFile('simple/demo/' + name, 'w') as wheel:
    wheel.writestr('demo.py', 'text = "installed"\n')
    info = 'demo-1.0.dist-info/'
    wheel.writestr(info + 'METADATA', 'Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n')
    wheel.writestr(info + 'WHEEL', 'Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
    wheel.writestr(info + 'RECORD', '')
open('simple/demo/index.html', 'w').write(f'<a href="{name}">{name}</a>')
END
"#;

const SERVE: &str = r"
import functools, http.server, ssl, sys
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=sys.argv[1] + '/www')
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[1] + '/server.pem', sys.argv[1] + '/server.key')
server.socket = context.wrap_socket(server.socket, server_side=True)
print(server.server_address[1], flush=True)
server.serve_forever()
";

struct Server {
    process: Child,
    directory: PathBuf,
    port: String,
}

impl Server {
    fn start(directory: &Path) -> Self {
        fs::create_dir_all(directory).unwrap();
        let made = Command::new("bash")
            .args(["-euc", MAKE])
            .arg(directory)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let mut process = Command::new("python3")
            .args(["-c", SERVE])
            .arg(directory)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut port = String::new();
        let output = process.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut port).unwrap();
        Self {
            process,
            directory: directory.to_owned(),
            port: port.trim().to_owned(),
        }
    }

    fn authority(&self) -> String {
        self.directory.join("ca.pem").display().to_string()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

fn with(store: &TestStore, authorities: &str, words: &[&str]) -> Ran {
    let mut command = store.command(words);
    command.env("ROCKENV_CA_CERTIFICATES", authorities);
    finish(words.join(" "), command)
}

#[test]
fn steps_trust_the_configured_authorities() {
    let store = TestStore::new();
    let server = Server::start(&store.work().join("server"));
    let (name, authority) = (store.env(), server.authority());
    let tree = crate::support::rootfs::builder();
    let recipe = format!(
        "schema = 1\nprovider = \"directory\"\n[directory]\npath = \"{}\"\n",
        tree.display()
    );
    fs::write(store.work().join("images/base.toml"), recipe).unwrap();
    let at = format!("https://localhost:{}", server.port);
    let look = format!("import urllib.request as r; print(r.urlopen('{at}/simple/demo/').status)");
    store.profile(&format!(
        r#"
[[step]]
name = "variables"
run = '''
python3 -m venv $HOME/venv
$HOME/venv/bin/pip install --disable-pip-version-check --no-cache-dir --no-deps --index-url {at}/simple demo
$HOME/venv/bin/python -c 'import demo; print(demo.text)'
git clone -q {at}/repo.git $HOME/repo
'''
[[step]]
name = "place"
user = "root"
run = '''env -i python3 -c "{look}"'''
"#
    ));
    store.rockenv(&["up", name]).exits(5);
    let log = store.rockenv(&["logs", name, "variables"]).ok().text();
    assert!(log.contains("CERTIFICATE_VERIFY_FAILED"), "{log}");
    // Whose directory this is has no say.
    let local = store.work().join("rockenv.toml");
    let before = fs::read_to_string(&local).unwrap_or_default();
    fs::write(
        &local,
        format!("ca-certificates = [\"{authority}\"]\n{before}"),
    )
    .unwrap();
    store.rockenv(&["up", name]).exits(5);
    fs::write(&local, before).unwrap();

    with(&store, &authority, &["up", name]).ok();
    let log = store.rockenv(&["logs", name, "variables"]).ok().text();
    assert!(log.contains("\ninstalled\n"), "{log}");
    let log = store.rockenv(&["logs", name, "place"]).ok().text();
    assert!(log.contains("200\n"), "{log}");
    // In no key, nor in a tree.
    store.rockenv(&["up", name]).ok();
    let list = "etc/ssl/certs/ca-certificates.crt";
    let check = ["exec", name, "--", "sha256sum", &format!("/{list}")].map(str::to_owned);
    let own = store.rockenv(&check).ok().text();
    assert!(own.starts_with(&sha256(&tree.join(list))), "{own}");

    let run = ["exec", name, "--", "python3", "-c", &look];
    store.rockenv(&run).exits(1);
    if !crate::support::env::is_service() {
        with(&store, &authority, &run).ok().prints("200");
    }
    let write = format!("echo > /{list}");
    let read_only = ["exec", "--root", name, "--", "sh", "-c", &write];
    if !crate::support::env::is_service() {
        assert_ne!(with(&store, &authority, &read_only).code, 0);
    }
    store.rockenv(&["--yes", "rm", name]).ok();
    store.assert_clean();
}

#[test]
fn git_on_the_host_trusts_the_configured_authorities() {
    let store = TestStore::new();
    let server = Server::start(&store.work().join("server"));
    let (name, authority) = (store.env(), server.authority());
    let repository = format!("https://localhost:{}/repo.git", server.port);
    store.profile(&format!(
        "[[volume]]\nname = 'src'\nkind = 'source'\ngit = '{repository}'\nrev = 'HEAD'\ntarget = '/src'\n\
         [[step]]\nname = 'a'\nrun = 'cat /src/file > ~/file'\n"
    ));
    store.rockenv(&["up", name]).says(&["cannot clone source"]);
    assert!(!store.env_dir().join("record.json").exists());
    with(&store, "/nowhere.pem", &["up", name]).says(&["`ca-certificates` in the configuration"]);
    with(&store, &authority, &["up", name]).ok();
    store
        .rockenv(&["exec", name, "--", "cat", "file"])
        .ok()
        .prints("text");
    store.rockenv(&["--yes", "rm", name]).ok();
    store.assert_clean();
}

#[test]
fn downloads_trust_the_configured_authorities() {
    let store = TestStore::new();
    let server = Server::start(&store.work().join("server"));
    let archive = server.directory.join("www/tree.tar");
    let recipe = format!(
        "schema = 1\nprovider = \"tarball\"\n[tarball]\nurl = \"https://localhost:{}/tree.tar\"\nsha256 = \"{}\"\n",
        server.port,
        sha256(&archive)
    );
    fs::write(store.work().join("images/far.toml"), recipe).unwrap();
    let build = ["image", "build", "far"];
    assert_ne!(store.rockenv(&build).code, 0);
    let key = server.directory.join("ca.key").display().to_string();
    with(&store, &key, &build)
        .exits(3)
        .says(&["ca.key` has no certificate in PEM form"]);
    with(&store, "/nowhere.pem", &build).says(&["`ca-certificates` in the configuration"]);
    with(&store, &server.authority(), &build).ok();
}
