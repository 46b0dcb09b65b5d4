//! Container images made by hand, a real registry on loopback, and servers that answer as no registry would.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

pub(crate) use crate::support::registry::{Answer, LOGIN, Registry, http};

pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";

/// Returns `sha256:` and the digest of the bytes.
pub(crate) fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex::encode(Sha256::digest(bytes)))
}

/// A layer's archive, built from names and entry types.
#[derive(Default)]
pub(crate) struct Tar(pub(crate) Vec<u8>);

impl Tar {
    fn entry(
        mut self,
        name: &str,
        kind: tar::EntryType,
        mode: u32,
        link: &str,
        data: &[u8],
    ) -> Self {
        let mut header = tar::Header::new_ustar();
        // Written directly, because the crate's own setters refuse what attacks are made of.
        let bytes = header.as_mut_bytes();
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_600_000_000);
        header.set_size(data.len() as u64);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn file(self, name: &str, data: &str) -> Self {
        self.entry(name, tar::EntryType::Regular, 0o644, "", data.as_bytes())
    }

    pub(crate) fn bytes(self, name: &str, data: &[u8]) -> Self {
        self.entry(name, tar::EntryType::Regular, 0o644, "", data)
    }

    pub(crate) fn dir(self, name: &str) -> Self {
        self.entry(name, tar::EntryType::Directory, 0o755, "", b"")
    }

    pub(crate) fn link(self, name: &str, target: &str) -> Self {
        self.entry(name, tar::EntryType::Symlink, 0o777, target, b"")
    }

    pub(crate) fn hard(self, name: &str, target: &str) -> Self {
        self.entry(name, tar::EntryType::Link, 0o644, target, b"")
    }

    pub(crate) fn fifo(self, name: &str) -> Self {
        self.entry(name, tar::EntryType::Fifo, 0o644, "", b"")
    }

    /// Ends the archive.
    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

pub(crate) fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

pub(crate) fn zstd(data: &[u8]) -> Vec<u8> {
    zstd::encode_all(data, 3).unwrap()
}

/// An image: its blobs, its manifest of media type `kind`, its configuration, and each layer as an archive and
/// compressed.
#[derive(Clone)]
pub(crate) struct Image {
    pub(crate) blobs: Vec<Vec<u8>>,
    pub(crate) manifest: Vec<u8>,
    pub(crate) kind: &'static str,
    pub(crate) layers: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) config: Vec<u8>,
}

impl Image {
    /// Makes an image of layers given as archives, compressed in turn with gzip, with zstd, and not at all.
    pub(crate) fn new(archives: &[Vec<u8>]) -> Self {
        let layers = archives
            .iter()
            .enumerate()
            .map(|(index, archive)| {
                let compressed = match index % 3 {
                    0 => gzip(archive),
                    1 => zstd(archive),
                    _ => archive.clone(),
                };
                (archive.clone(), compressed)
            })
            .collect();
        Self::of(layers, "amd64", &json!({}), false)
    }

    /// Makes an image of layers given as archives together with their compressed form.
    pub(crate) fn of(
        layers: Vec<(Vec<u8>, Vec<u8>)>,
        architecture: &str,
        run: &Value,
        docker: bool,
    ) -> Self {
        let ids: Vec<String> = layers.iter().map(|(archive, _)| digest(archive)).collect();
        let config = json!({
            "os": "linux", "architecture": architecture, "config": run,
            "rootfs": { "type": "layers", "diff_ids": ids }
        });
        let config = config.to_string().into_bytes();
        let (kind, config_kind) = match docker {
            true => (
                DOCKER_MANIFEST,
                "application/vnd.docker.container.image.v1+json",
            ),
            false => (MANIFEST, "application/vnd.oci.image.config.v1+json"),
        };
        let layer_kind = |compressed: &[u8]| match (docker, compressed) {
            (true, _) => "application/vnd.docker.image.rootfs.diff.tar.gzip",
            (false, [0x1f, 0x8b, ..]) => "application/vnd.oci.image.layer.v1.tar+gzip",
            (false, [0x28, 0xb5, ..]) => "application/vnd.oci.image.layer.v1.tar+zstd",
            (false, _) => "application/vnd.oci.image.layer.v1.tar",
        };
        let described: Vec<Value> = layers
            .iter()
            .map(|(_, data)| descriptor(layer_kind(data), data))
            .collect();
        let manifest = json!({
            "schemaVersion": 2, "mediaType": kind,
            "config": descriptor(config_kind, &config), "layers": described
        });
        let mut blobs: Vec<Vec<u8>> = layers.iter().map(|(_, data)| data.clone()).collect();
        blobs.push(config.clone());
        Self {
            blobs,
            manifest: manifest.to_string().into_bytes(),
            kind,
            layers,
            config,
        }
    }

    /// Makes an image with one file, named after the architecture that the image is for.
    pub(crate) fn of_architecture(architecture: &str, docker: bool) -> Self {
        let archive = Tar::default().file(architecture, "").end();
        let layers = vec![(archive.clone(), gzip(&archive))];
        Self::of(layers, architecture, &json!({}), docker)
    }

    /// Makes an image of one incompressible layer, and returns that layer's archive too.
    pub(crate) fn big() -> (Vec<u8>, Self) {
        let archive = Tar::default().bytes("big", &noise(3_000_000)).end();
        let layers = vec![(archive.clone(), archive.clone())];
        let image = Self::of(layers, "amd64", &json!({}), false);
        (archive, image)
    }

    pub(crate) fn digest(&self) -> String {
        digest(&self.manifest)
    }

    pub(crate) fn descriptor(&self) -> Value {
        descriptor(self.kind, &self.manifest)
    }

    /// Returns the image's descriptor for an index of several platforms.
    pub(crate) fn for_platform(&self, platform: &str) -> Value {
        let (os, architecture) = platform.split_once('/').unwrap();
        let mut described = self.descriptor();
        described["platform"] = json!({ "os": os, "architecture": architecture });
        described
    }

    /// Writes the image's blobs into an OCI layout.
    pub(crate) fn store(&self, layout: &Path) {
        let blobs = layout.join("blobs/sha256");
        fs_err::create_dir_all(&blobs).unwrap();
        for data in self.blobs.iter().chain([&self.manifest]) {
            fs_err::write(blobs.join(&digest(data)[7..]), data).unwrap();
        }
    }

    /// Writes an OCI layout that has only this image.
    pub(crate) fn layout(&self, layout: &Path) {
        self.store(layout);
        write_index(layout, &[self.descriptor()]);
    }

    /// Packs the image as `docker save` does, with links for equal layers as older versions wrote them.
    pub(crate) fn docker_save(&self, tag: &str) -> Vec<u8> {
        let mut archive = Tar::default();
        let mut names = Vec::new();
        for (index, (layer, _)) in self.layers.iter().enumerate() {
            let name = format!("l{index}/layer.tar");
            archive = archive.dir(&format!("l{index}/"));
            archive = match self.layers[..index]
                .iter()
                .position(|(other, _)| other == layer)
            {
                Some(same) => archive.link(&name, &format!("../l{same}/layer.tar")),
                None => archive.bytes(&name, layer),
            };
            names.push(name);
        }
        let config = format!("{}.json", &digest(&self.config)[7..]);
        let list = json!([{ "Config": config, "RepoTags": [tag], "Layers": names }]);
        archive
            .bytes(&config, &self.config)
            .file("manifest.json", &list.to_string())
            .end()
    }
}

pub(crate) fn descriptor(kind: &str, data: &[u8]) -> Value {
    json!({ "mediaType": kind, "digest": digest(data), "size": data.len() })
}

pub(crate) fn index(entries: &[Value]) -> Vec<u8> {
    json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries })
        .to_string()
        .into_bytes()
}

pub(crate) fn write_index(layout: &Path, entries: &[Value]) {
    fs_err::write(
        layout.join("oci-layout"),
        "{\"imageLayoutVersion\":\"1.0.0\"}",
    )
    .unwrap();
    fs_err::write(layout.join("index.json"), index(entries)).unwrap();
}

impl Registry {
    /// Uploads an image under a tag.
    pub(crate) fn push(&self, name: &str, tag: &str, image: &Image) {
        for data in &image.blobs {
            let path = format!("/v2/{name}/blobs/uploads/");
            let answer = http(&self.host, "POST", &path, self.head, b"");
            assert_eq!(answer.status, 202, "{}", answer.head);
            let location = answer
                .head
                .lines()
                .find_map(|line| line.strip_prefix("Location: "))
                .unwrap();
            let path = &location[location.find("/v2/").unwrap()..];
            let path = format!("{path}&digest={}", digest(data));
            let answer = http(&self.host, "PUT", &path, self.head, data);
            assert_eq!(answer.status, 201, "{}", answer.head);
        }
        self.push_manifest(name, tag, image.kind, &image.manifest);
    }

    pub(crate) fn push_manifest(&self, name: &str, tag: &str, kind: &str, manifest: &[u8]) {
        let head = format!("{}content-type: {kind}\r\n", self.head);
        let answer = http(
            &self.host,
            "PUT",
            &format!("/v2/{name}/manifests/{tag}"),
            &head,
            manifest,
        );
        assert_eq!(
            answer.status,
            201,
            "{}",
            String::from_utf8_lossy(&answer.body)
        );
    }
}

/// A server that answers one request for each connection and records the requests.
pub(crate) struct Server {
    pub(crate) host: String,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Starts a server. `answer` gets the request's head in lower case, and returns the whole response.
    pub(crate) fn start(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = listener.local_addr().unwrap().to_string();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (list, answer) = (Arc::clone(&asked), Arc::new(answer));
        // The thread ends with the test program.
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, list, answer) =
                    (stream.unwrap(), Arc::clone(&list), Arc::clone(&answer));
                std::thread::spawn(move || {
                    let mut head = String::new();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    while !head.ends_with("\r\n\r\n") {
                        if reader.read_line(&mut head).unwrap_or(0) == 0 {
                            return;
                        }
                    }
                    let head = head.to_lowercase();
                    list.lock().unwrap().push(head.clone());
                    let answer = answer(&head);
                    // The write fails if the client has hung up.
                    drop(stream.write_all(&answer));
                    if answer
                        .windows(HOLD.len())
                        .any(|part| part == HOLD.as_bytes())
                    {
                        std::thread::sleep(std::time::Duration::from_secs(60));
                    }
                });
            }
        });
        Self { host, asked }
    }

    /// Returns the requests so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

/// A header after which the server sends no more but does not hang up.
pub(crate) const HOLD: &str = "x-hold: 1\r\n";

/// Returns a whole response.
pub(crate) fn response(status: &str, head: &str, body: &[u8]) -> Vec<u8> {
    let lines = format!(
        "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n{head}\r\n",
        body.len()
    );
    [lines.as_bytes(), body].concat()
}

/// Answers as a registry with this image would.
pub(crate) fn serve(image: &Image, head: &str) -> Vec<u8> {
    let path = head.split(' ').nth(1).unwrap_or_default();
    if path.contains("/manifests/") {
        return response(
            "200 OK",
            &format!("content-type: {}\r\n", image.kind),
            &image.manifest,
        );
    }
    match image
        .blobs
        .iter()
        .find(|data| path.ends_with(&digest(data)))
    {
        Some(data) => response("200 OK", "", data),
        None => response("404 Not Found", "", b""),
    }
}

/// Returns the start of the range that a request asks for.
pub(crate) fn range_of(head: &str) -> Option<usize> {
    let (_, rest) = head.split_once("range: bytes=")?;
    rest.split('-').next()?.parse().ok()
}

/// Returns incompressible bytes.
pub(crate) fn noise(amount: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(amount + 8);
    while bytes.len() < amount {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(amount);
    bytes
}

/// Writes the file of logins that `podman login` would write.
pub(crate) fn auth_file(directory: &Path, host: &str, auth: &str) -> PathBuf {
    let path = directory.join("auth.json");
    let text = json!({ "auths": { host: { "auth": auth } } }).to_string();
    fs_err::write(&path, text).unwrap();
    path
}
