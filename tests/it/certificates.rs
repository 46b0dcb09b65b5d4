//! Certificate authorities of the configuration: a server on loopback whose certificate only they make valid, and the
//! real pip, Python and git in the container. Also with `tests/service docker|podman cargo test --test it
//! certificates::`.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::archive::service::{Archive, SUITE};
use crate::image::arch_repository;
use crate::support::env::TestStore;
use crate::support::loopfs::{LoopFs, Mount, bind, run};
use crate::support::run::{Ran, finish, sha256};
use fs_err as fs;

/// Makes an authority, its certificate for localhost, a repository, and an index with one wheel.
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
    let store = TestStore::with_builder();
    let server = Server::start(&store.work().join("server"));
    let (name, authority) = (store.env(), server.authority());
    let tree = crate::support::rootfs::builder();
    let at = format!("https://localhost:{}", server.port);
    let look = format!("import urllib.request as r; print(r.urlopen('{at}/simple/demo/').status)");
    let profile = format!(
        r#"schema = 1
image = "builder"
[[step]]
name = "venv"
run = "python3 -m venv $HOME/venv"
[[step]]
name = "variables"
run = '''
$HOME/venv/bin/pip install --disable-pip-version-check --retries 1 --no-cache-dir --no-deps --index-url {at}/simple demo
$HOME/venv/bin/python -c 'import demo; print(demo.text)'
git clone -q {at}/repo.git $HOME/repo
'''
[[step]]
name = "place"
user = "root"
run = '''env -i python3 -c "{look}"'''
"#
    );
    let path = format!("profiles/{name}.toml");
    fs::write(store.work().join(path), profile).unwrap();
    store.rockenv(&["up", name]).exits(5);
    let log = store.rockenv(&["logs", name, "variables"]).ok().text();
    assert!(log.contains("CERTIFICATE_VERIFY_FAILED"), "{log}");
    // The configuration of the current directory cannot add authorities.
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
    // The authorities are neither in a key nor in a tree.
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
    if !crate::support::env::is_service() {
        // The administrator adds the authority to the host's own ones.
        let added = bind(Path::new(&authority), &Path::new("/").join(list));
        store.rockenv(&run).exits(1);
        with(&store, "host", &run).ok().prints("200");
        drop(added);
        assert_ne!(with(&store, "host", &run).code, 0);
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
    let untrusted = store.rockenv(&build).exits(4);
    untrusted.says(&["UnknownIssuer", "in config.toml: ca-certificates = ["]);
    let key = server.directory.join("ca.key").display().to_string();
    let refused = [&*key, "/nowhere.pem"].map(|authorities| with(&store, authorities, &build));
    insta::assert_snapshot!(refused.map(|ran| store.shown(&ran)).concat(), @r#"
    image far … 0 B
    error: cannot build image `far`
      caused by: `WORK/server/ca.key` has no certificate in PEM form
    help: openssl x509 -inform der -in WORK/server/ca.key -out WORK/server/ca.key.pem
    exit code 3
    image far … 0 B
    error: cannot build image `far`
      caused by: cannot read `/nowhere.pem`, which `ca-certificates` in the configuration names
      caused by: `/nowhere.pem` does not exist
    help: ca-certificates = "host", or a list of PEM files
    exit code 3
    "#);
    with(&store, &server.authority(), &build).ok();
}

/// Returns a store with a recipe `far` that takes packages from the server, and with the server as the configured
/// mirror.
fn store_of(disk: &LoopFs, recipe: &str, mirror: &str) -> TestStore {
    let store = TestStore::at(&disk.join("store"));
    let recipe = format!("schema = 1\n{recipe}");
    fs::write(store.work().join("images/far.toml"), recipe).unwrap();
    store.configure(&format!("disk-floor = '0'\n[mirror]\n{mirror}"));
    store
}

/// Builds the image without and with the authority, and expects that the image contains nothing of it.
fn builds_only_with(store: &TestStore, server: &Server, refusal: &str) {
    let build = ["image", "build", "far"];
    let refused = store.rockenv(&build);
    assert_ne!(refused.code, 0);
    refused.says(&[refusal]);
    with(store, &server.authority(), &build).ok();
    let images = fs::read_dir(store.home().join("images")).unwrap();
    let mut roots = images.map(|entry| entry.unwrap().path().join("root"));
    let root = roots.find(|root| root.is_dir()).unwrap();
    let authority = fs::read_to_string(server.authority()).unwrap();
    let line = authority.lines().nth(3).unwrap();
    let found = Command::new("grep")
        .args(["-rlFe", line, "-e", "rockenv-authorities"])
        .arg(root.join("etc"))
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&found.stdout), "");
}

#[test]
fn debian_packages_come_from_a_mirror_of_the_company() {
    if crate::support::env::is_service() {
        return;
    }
    let moment = "20240801T000000Z";
    let archive = Archive::start();
    archive.publish(moment, "1.0", false);
    let disk = LoopFs::in_memory(3 << 30);
    let server = Server::start(&disk.join("server"));
    symlink(archive.at(moment), server.directory.join("www/debian")).unwrap();
    let store = store_of(
        &disk,
        &format!(
            "provider = \"mmdebstrap\"\n[mmdebstrap]\ndistribution = \"debian\"\nsuite = \"{SUITE}\"\n\
             variant = \"apt\"\npackages = [\"greeting\"]\n"
        ),
        &format!(
            "debian = 'https://localhost:{}/debian'\ndebian-signed-by = '{}'\n",
            server.port,
            archive.key("ours").display()
        ),
    );
    builds_only_with(&store, &server, "ertificate");
}

#[test]
fn arch_packages_come_from_a_mirror_of_the_company() {
    if crate::support::env::is_service() {
        return;
    }
    let disk = LoopFs::in_memory(1 << 30);
    let place = disk.join("arch");
    fs::create_dir(&place).unwrap();
    arch_repository(&place);
    // Only this test's mount namespace sees that the host's pacman trusts the signing key.
    fs::create_dir_all(disk.join("etc/upper")).unwrap();
    fs::create_dir_all(disk.join("etc/work")).unwrap();
    let script = r#"
        mount -t overlay -o "lowerdir=/etc,upperdir=$0/etc/upper,workdir=$0/etc/work" overlay /etc
        mkdir -p /etc/pacman.d/gnupg
        chmod 700 /etc/pacman.d/gnupg
        touch /etc/pacman.d/gnupg/pubring.gpg
        gpg() { command gpg --homedir /etc/pacman.d/gnupg --batch --quiet --pinentry-mode loopback --passphrase '' "$@"; }
        gpg --quick-generate-key 'Company <a@example.org>' ed25519 sign 0
        cd "$0/arch/mirror/core/os/x86_64"
        for package in *.pkg.tar.zst; do gpg --detach-sign --no-armor --output $package.sig $package; done
        # As Arch's own: the signatures are in the database.
        repo-add -q $(repo-add --help | grep -o -m 1 -e --include-sigs) core.db.tar.gz *.pkg.tar.zst
        gpgconf --homedir /etc/pacman.d/gnupg --kill all"#;
    run(Command::new("sh").args(["-euc", script]).arg(disk.path()));
    let _etc = Mount(PathBuf::from("/etc"));
    let server = Server::start(&disk.join("server"));
    symlink(place.join("mirror"), server.directory.join("www/arch")).unwrap();
    let store = store_of(
        &disk,
        "provider = \"pacstrap\"\n[pacstrap]\n",
        &format!("arch = 'https://localhost:{}/arch'\n", server.port),
    );
    builds_only_with(&store, &server, "ertificate");
}
