//! Signatures of pushed snapshots: a pull requires the right one.

use std::process::Command;

use rockenv::testing::Store;
use serde_json::Value;

use super::liar::Forged;
use super::proxy::{Fault, Proxy};
use super::{MANIFEST, Two, sha256};
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::rootfs;
use crate::support::run::{Ran, finish};

const ONE: &str = "[[step]]\nname = 'one'\nrun = 'head -c 1M /dev/urandom > $HOME/one'\n";
/// The password of `one.key`.
const PASSWORD: &str = "se:cret";

fn key(name: &str) -> String {
    format!("{}/tests/it/share/keys/{name}", env!("CARGO_MANIFEST_DIR"))
}

impl Two {
    fn push_signed(&self, store: &TestStore, name: &str, repository: &str) -> Ran {
        self.push_with(store, name, repository, "one.key", Some(PASSWORD))
    }

    fn push_with(
        &self,
        store: &TestStore,
        name: &str,
        repository: &str,
        file: &str,
        password: Option<&str>,
    ) -> Ran {
        let mut command = store.command(&["push", name, repository, "--sign", &key(file)]);
        command.envs(password.map(|password| ("COSIGN_PASSWORD", password)));
        finish("push --sign".into(), command)
    }

    fn pull_verified(&self, reference: &str, file: &str) -> Ran {
        self.other
            .rockenv(&["pull", reference, "--verify", &key(file)])
    }

    /// Runs `up --pull`, which must find signatures of `one.key`.
    fn up_verified(&self, name: &str, repository: &str) -> Ran {
        let mut command = self.other.command(&["up", name, "--pull"]);
        command
            .env("ROCKENV_REGISTRY", repository)
            .env("ROCKENV_VERIFY_KEY", key("one.pub"));
        finish("up --pull".into(), command)
    }

    #[track_caller]
    fn assert_nothing_pulled(&self) {
        let store = Store::open_existing(self.other.home()).unwrap().unwrap();
        assert!(store.layers().unwrap().is_empty());
    }

    /// Imports a pushed env's snapshots on the other machine, and builds an env on them. Then rebuilds them on the
    /// first machine, with other bytes for the same keys, and pushes these signed. Returns the repository.
    fn signed_beside_imported(&self, name: &str) -> String {
        let file = self.one.work().join("snapshots.oci.tar");
        let file = file.to_str().unwrap();
        self.one
            .rockenv(&["export", name, "--snapshots", file])
            .ok();
        self.other.rockenv(&["import", file]).ok();
        self.other.rockenv(&["up", name]).ok();
        self.one.rockenv(&["--yes", "rm", name]).ok();
        self.one.rockenv(&["up", name]).ok();
        let signed = format!("{}/signed", self.registry.host);
        self.push_signed(&self.one, name, &signed).ok();
        signed
    }

    fn last(&self, name: &str) -> String {
        self.one.keys(name).pop().unwrap().1
    }
}

fn a_key_that_cannot_be_used_stops_before_anything_is_sent(two: &Two, name: &str) {
    let repository = two.repository();
    let push = |file, password| two.push_with(&two.one, name, &repository, file, password);
    let refused = [
        push("one.key", None),
        push("one.key", Some("wrong")),
        push("one.pub", Some("")),
        push("p384.key", Some("x")),
        push("absent.key", Some("")),
        two.pull_verified(&format!("{repository}:x"), "one.key"),
    ];
    assert_eq!(two.uploads(), 0);
    insta::assert_snapshot!(refused.map(|ran| two.one.shown(&ran)).concat(), @"
    error: no password for the key `CHECKOUT/tests/it/share/keys/one.key`
    help: set COSIGN_PASSWORD; sudo --preserve-env=COSIGN_PASSWORD passes it on
    exit code 2
    error: the password of `CHECKOUT/tests/it/share/keys/one.key` is wrong
    help: set COSIGN_PASSWORD to the one of `cosign generate-key-pair`
    exit code 3
    error: `CHECKOUT/tests/it/share/keys/one.pub` is not a private key of cosign
    help: cosign generate-key-pair makes `cosign.key` and `cosign.pub`
    exit code 3
    error: `CHECKOUT/tests/it/share/keys/p384.key` is not an ECDSA key on P-256
    help: cosign generate-key-pair makes `cosign.key` and `cosign.pub`
    exit code 3
    error: cannot read the key `CHECKOUT/tests/it/share/keys/absent.key`
      caused by: `CHECKOUT/tests/it/share/keys/absent.key` does not exist
    help: cosign generate-key-pair makes `cosign.key` and `cosign.pub`
    exit code 7
    error: `CHECKOUT/tests/it/share/keys/one.key` is not a public ECDSA key on P-256
    help: cosign generate-key-pair makes `cosign.key` and `cosign.pub`
    exit code 3
    ");
}

#[test]
fn what_is_signed_is_pulled_and_a_key_that_cannot_be_used_signs_nothing() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(ONE);
    two.one.rockenv(&["up", name]).ok();
    a_key_that_cannot_be_used_stops_before_anything_is_sent(&two, name);
    let repository = two.repository();
    two.push_signed(&two.one, name, &repository)
        .ok()
        .says(&["1 snapshot at"]);
    // Pushing again sends nothing and adds no signature.
    let sent = two.uploads();
    two.push_signed(&two.one, name, &repository).ok();
    assert_eq!(two.uploads(), sent);
    two.up_verified(name, &repository)
        .ok()
        .says(&["pulled one from", "1 done before"]);
    two.assert_same(name);
    let reference = format!("{repository}:{}", two.last(name));
    two.pull_verified(&reference, "one.pub").ok();
    // A second key signs beside the first, and each is enough.
    two.push_with(&two.one, name, &repository, "other.key", Some(""))
        .ok();
    for file in ["one.pub", "other.pub"] {
        two.pull_verified(&reference, file).ok();
    }
    // Signs by configuration, as `up --push` does.
    two.one
        .configure(&format!("sign-key = '{}'\npush = true", key("one.key")));
    two.one.profile(&ONE.replace("/one", "/other"));
    let mut command = two.one.command(&["up", name]);
    command
        .env("ROCKENV_REGISTRY", &repository)
        .env("COSIGN_PASSWORD", PASSWORD);
    finish("up".into(), command).ok().says(&["1 snapshot at"]);
    two.other
        .configure(&format!("verify-key = '{}'", key("one.pub")));
    two.other
        .profile_named(name, &ONE.replace("/one", "/other"));
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one from"]);
}

/// Prepares a cosign command, in the directory of the keys that it makes.
fn cosign(store: &TestStore, words: &[&str]) -> Command {
    let mut command = rootfs::cosign();
    command
        .args(words)
        .env("HOME", store.work())
        .env("COSIGN_PASSWORD", PASSWORD)
        .current_dir(store.work());
    command
}

#[test]
fn cosign_and_rockenv_verify_each_other_s_signatures() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    run(&mut cosign(&two.one, &["generate-key-pair"]));
    let made = |file: &str| two.one.work().join(file).display().to_string();
    let (secret, public) = (made("cosign.key"), made("cosign.pub"));
    let reference = format!("{}:{}", two.repository(), two.last(name));
    let verify = |public: &str, reference: &str| {
        let words = ["verify", "--insecure-ignore-tlog", "--key", public];
        let mut command = cosign(&two.one, &words);
        command.args(["--allow-insecure-registry", reference]);
        command.output().unwrap().status.success()
    };
    let sign = |secret: &str| {
        let words = ["sign", "--yes", "--tlog-upload=false", "--key", secret];
        let mut command = cosign(&two.one, &words);
        run(command.args(["--allow-insecure-registry", &reference]));
    };
    let pull = |public: &str| {
        let words = ["pull", &reference, "--verify", public];
        two.other.rockenv(&words)
    };
    pull(&public).exits(8).says(&["it is not signed"]);
    sign(&secret);
    // Adds a signature with a key that cosign did not make.
    sign(&key("one.key"));
    pull(&key("other.pub"))
        .exits(8)
        .says(&["it is not signed with the key that belongs to"]);
    pull(&public).ok().says(&["pulled one from"]);
    pull(&key("one.pub")).ok();

    assert!(!verify(&key("other.pub"), &reference));
    two.push_with(&two.one, name, &two.repository(), "other.key", Some(""))
        .ok();
    assert!(verify(&key("other.pub"), &reference));
    // rockenv signs with cosign's key, where cosign has signed nothing.
    let other = format!("{}/again", two.registry.host);
    let mut command = two.one.command(&["push", name, &other, "--sign", &secret]);
    command.env("COSIGN_PASSWORD", PASSWORD);
    finish("push --sign".into(), command).ok();
    assert!(verify(&public, &format!("{other}:{}", two.last(name))));
}

#[test]
fn what_is_not_signed_or_wrongly_is_refused() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let repository = two.repository();
    let tag = two.last(name);
    let reference = format!("{repository}:{tag}");
    let refused = |why: &str| {
        let pull = two.pull_verified(&reference, "one.pub");
        let pull = pull.exits(8).says(&["cannot pull", "is refused", why]);
        // `up` neither takes it as a cache nor builds instead.
        let up = two.up_verified(name, &repository);
        assert!(!up.err.contains("building it here"), "{}", up.err);
        up.exits(8).says(&["is refused", why]);
        two.assert_nothing_pulled();
        two.one.shown(&pull)
    };
    insta::assert_snapshot!(refused("it is not signed"), @"
    pull from 127.0.0.1:PORT/team/rocm … 0 B
    error: cannot pull `ID` from `127.0.0.1:PORT/team/rocm`
      caused by: manifest sha256:ID is refused: it is not signed
    help: rockenv push ENV --sign KEY, on the machine that built it; to accept unsigned snapshots, leave out `--verify` and `verify-key`
    exit code 8
    ");
    two.push_with(&two.one, name, &repository, "other.key", Some(""))
        .ok();
    refused("it is not signed with the key that belongs to");
    // A signature with the right key, for another manifest.
    two.push_signed(&two.one, name, &repository).ok();
    let right = two.manifest(&tag);
    let signatures = format!("sha256-{}.sig", sha256(&right));
    let signature = two.manifest(&signatures);
    let mut changed: Value = serde_json::from_slice(&right).unwrap();
    changed["annotations"]["rockenv.profile"] = "another".into();
    let changed = changed.to_string();
    two.put_manifest(&tag, changed.as_bytes());
    refused("it is not signed");
    two.put_manifest(
        &format!("sha256-{}.sig", sha256(changed.as_bytes())),
        &signature,
    );
    let why = format!("its signature is for sha256:{}", sha256(&right));
    two.pull_verified(&reference, "one.pub")
        .exits(8)
        .says(&[&why]);
    two.assert_nothing_pulled();
    // A signature that does not fit its payload.
    let mut forged: Value = serde_json::from_slice(&signature).unwrap();
    let layers = forged["layers"].as_array_mut().unwrap();
    layers[0]["annotations"]["dev.cosignproject.cosign/signature"] = "MEUCIQ==".into();
    // More than a reader looks at.
    *layers = vec![layers[0].clone(); 64];
    two.put_manifest(&tag, &right);
    two.put_manifest(&signatures, forged.to_string().as_bytes());
    refused("it is not signed with the key that belongs to");
    two.push_signed(&two.one, name, &repository).ok();
    two.up_verified(name, &repository)
        .ok()
        .says(&["1 done before"]);
    two.assert_same(name);
}

#[test]
fn what_came_without_a_signature_is_not_signed() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let (repository, tag) = (two.repository(), two.last(name));
    let up = two.run(&two.other, &["up", name, "--pull"]);
    up.ok().says(&["pulled one from"]);
    let elsewhere = format!("{}/again", two.registry.host);
    let push = |store: &TestStore, env: &str| {
        let ran = two.push_signed(store, env, &elsewhere);
        store.shown(&ran)
    };
    let refused = push(&two.other, name);
    insta::assert_snapshot!(refused, @"
    error: cannot sign snapshot `one`: it was pulled or imported without a verified signature
    help: rockenv pull REF --verify KEY, or push with `--sign-unverified`
    exit code 2
    ");
    // An unsigned push does not make the snapshot count as verified.
    two.run(&two.other, &["push", name, &elsewhere]).ok();
    insta::assert_snapshot!(two.shows("other: push ENV --sign-unverified"), @"
    other$ rockenv push ENV --sign-unverified
    error: `--sign-unverified` needs a key to sign with
    help: add `--sign KEY`, or set `sign-key` in the configuration
    exit code 2
    ");
    assert_eq!(push(&two.other, name), refused);
    let mut command = two
        .other
        .command(&["push", name, &elsewhere, "--sign-unverified"]);
    command
        .args(["--sign", &key("one.key")])
        .env("COSIGN_PASSWORD", PASSWORD);
    finish("push --sign-unverified".into(), command).ok();
    assert_eq!(push(&two.other, name), refused);
    // The publisher's signature of the same bytes makes it count as verified.
    two.push_signed(&two.one, name, &repository).ok();
    two.pull_verified(&format!("{repository}:{tag}"), "one.pub")
        .ok()
        .says(&["the store already has all of it"]);
    two.push_signed(&two.other, name, &elsewhere).ok();
    // Files carry no signatures.
    let third = TestStore::new();
    let file = two.one.work().join("demo.oci.tar");
    let file = file.to_str().unwrap();
    two.one.rockenv(&["export", name, "--snapshots", file]).ok();
    third.profile_named(third.env(), ONE);
    third.rockenv(&["import", file]).ok();
    third.rockenv(&["up", third.env()]).ok();
    assert_eq!(push(&third, third.env()), refused);
}

#[test]
fn what_another_machine_pushed_is_not_signed_but_replaced() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    two.other.rockenv(&["up", name]).ok();
    let repository = two.repository();
    let tag = two.last(name);
    let unsigned = two.manifest(&tag);
    // `push` warns if the registry does not let tags move.
    let proxy = Proxy::start(&two.registry.host, {
        let tag = tag.clone();
        move |head| match head.starts_with("PUT ") && head.contains(&format!("/manifests/{tag} ")) {
            true => Fault::Says(
                412,
                String::new(),
                r#"{"errors":[{"code":"PRECONDITION","message":"configured as immutable"}]}"#
                    .to_owned(),
            ),
            false => Fault::None,
        }
    });
    two.push_signed(&two.other, name, &proxy.repository())
        .ok()
        .says(&["warning: 1 tag stays as it was: the registry does not let it move"]);
    assert_eq!(two.manifest(&tag), unsigned);
    two.push_signed(&two.other, name, &repository).ok();
    let signed = two.manifest(&tag);
    assert_ne!(signed, unsigned);
    // An unsigned push leaves the signed manifest, and a push signed with another key replaces it.
    two.run(&two.one, &["push", name]).ok();
    assert_eq!(two.manifest(&tag), signed);
    two.push_with(&two.one, name, &repository, "other.key", Some(""))
        .ok();
    assert_ne!(two.manifest(&tag), signed);
}

#[test]
fn what_is_asked_for_by_a_digest_has_it() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let right = two.manifest(&two.last(name));
    let digest = format!("sha256:{}", sha256(&right));
    let mut other: Value = serde_json::from_slice(&right).unwrap();
    other["annotations"]["rockenv.profile"] = "another".into();
    let other = other.to_string();
    // The registry names no digest, or that of what it sends.
    let own = sha256(other.as_bytes());
    for own in [
        String::new(),
        format!("docker-content-digest: sha256:{own}\r\n"),
    ] {
        let head = format!("content-type: {MANIFEST}\r\n{own}");
        let body = other.clone();
        let proxy = Proxy::start(&two.registry.host, move |asked| {
            let is_manifest = asked.contains("/manifests/sha256:");
            Fault::Says(200, head.clone(), body.clone()).when(is_manifest)
        });
        let reference = format!("{}@{digest}", proxy.repository());
        two.other.rockenv(&["pull", &reference]).exits(8).says(&[
            &format!("the manifest of `{reference}`"),
            "has SHA-256",
            &digest["sha256:".len()..],
        ]);
        two.assert_nothing_pulled();
    }
    let reference = format!("{}@{digest}", two.repository());
    two.other.rockenv(&["pull", &reference]).ok();
    // A push has its own digest, so its destination cannot be one.
    let sent = two.uploads();
    let refused = two.one.rockenv(&["push", name, &reference]);
    insta::assert_snapshot!(two.one.shown(&refused), @"
    error: cannot push to a digest: `127.0.0.1:PORT/team/rocm@sha256:ID`
    help: 127.0.0.1:PORT/team/rocm, or 127.0.0.1:PORT/team/rocm:TAG
    exit code 2
    ");
    assert_eq!(two.uploads(), sent);
}

#[test]
fn a_signed_snapshot_takes_the_place_of_an_unsigned_one() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(ONE);
    let import = |store: &TestStore, file: &str| {
        let file = store.work().join(file);
        let file = file.to_str().unwrap();
        store.rockenv(&["up", name]).ok();
        store.rockenv(&["export", name, "--snapshots", file]).ok();
        two.other.rockenv(&["import", file]).ok();
    };
    // Builds the same step twice, which gives other bytes.
    let third = TestStore::new();
    third.profile_named(name, ONE);
    import(&third, "third.oci.tar");
    two.one.rockenv(&["up", name]).ok();
    let repository = two.repository();
    two.push_signed(&two.one, name, &repository).ok();
    let reference = format!("{repository}:{}", two.last(name));
    two.pull_verified(&reference, "one.pub")
        .ok()
        .says(&["pulled one from"]);
    two.other
        .rockenv(&["up", name])
        .ok()
        .says(&["1 done before"]);
    two.assert_same(name);
    let elsewhere = format!("{}/again", two.registry.host);
    two.push_signed(&two.other, name, &elsewhere).ok();
}

#[test]
fn an_unsigned_snapshot_that_an_env_is_based_on_stays_and_is_named() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let signed = two.signed_beside_imported(name);
    let reference = format!("{signed}:{}", two.last(name));
    // An env's name is not that of its profile.
    let up = ["up", name, "--name", "copy"];
    two.other.rockenv(&up).ok();
    two.other.rockenv(&["--yes", "rm", name]).ok();
    let refused = two.pull_verified(&reference, "one.pub");
    insta::assert_snapshot!(two.one.shown(&refused), @"
    pull from 127.0.0.1:PORT/signed … 0 B
    error: cannot pull `ID` from `127.0.0.1:PORT/signed`
      caused by: snapshot `one` of env `copy` came without a verified signature, and differs from the signed one
    help: rockenv up ENV --name copy --rerun one, or rockenv rm copy
    exit code 8
    ");
    two.other
        .rockenv(&[&up[..], &["--rerun", "one"]].concat())
        .ok();
    two.push_signed(&two.other, "copy", &format!("{}/again", two.registry.host))
        .ok();
}

#[test]
fn the_image_that_another_machine_pushed_is_not_signed_later() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    // The layer that the first machine pushed under the image's key.
    let image = two.manifest(&two.last(name));
    let image: Value = serde_json::from_slice(&image).unwrap();
    let image = image["layers"][0]["digest"].as_str().unwrap();
    two.other.rockenv(&["up", name]).ok();
    two.run(&two.other, &["push", name]).ok();
    let shared = two.other.home().join("images");
    let remembered = fs_err::read_dir(shared).unwrap().any(|entry| {
        let file = entry.unwrap().path().join("shared.json");
        fs_err::read_to_string(file).is_ok_and(|text| text.contains(&image["sha256:".len()..]))
    });
    assert!(!remembered);
}

/// The digest of a layer's content does not cover its description.
#[test]
fn a_forged_description_is_not_taken_for_the_signed_one() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let (repository, tag) = (two.repository(), two.last(name));
    two.push_signed(&two.one, name, &format!("{}/signed", two.registry.host))
        .ok();
    let mut forged = Forged::of(&two.registry.host, &tag);
    forged.config["rockenv"]["steps"][0]["created"] = "2020-01-01T00:00:00Z".into();
    forged.config["rockenv"]["image"]["distribution"] = "forged".into();
    forged.publish();
    let reference = format!("{repository}:{tag}");
    let pull = two.other.rockenv(&["pull", &reference, "--json"]);
    assert_eq!(pull.ok().json()["schema"], "rockenv/pull/1");
    let description = |of: &str| {
        let place = two.other.home().join(of);
        let place = fs_err::read_dir(place)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let file = place.map(|place| match of {
            "layers" => place.join("layer.json"),
            _ => place.join("image.json"),
        });
        let file = file.filter(|file| file.exists()).collect::<Vec<_>>();
        fs_err::read_to_string(&file[0]).unwrap()
    };
    assert!(description("layers").contains("2020-01-01"));
    let signed = format!("{}/signed:{tag}", two.registry.host);
    two.pull_verified(&signed, "one.pub")
        .ok()
        .says(&["pulled one from"]);
    assert!(!description("layers").contains("2020-01-01"));
    assert!(!description("images").contains("forged"));
}

#[test]
fn an_unsigned_step_below_does_not_hide_that_the_signed_one_is_missing() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let body = format!("{ONE}[[step]]\nname = 'two'\nrun = 'echo two > $HOME/two'\n");
    let name = two.pushed(&body);
    let signed = two.signed_beside_imported(name);
    let lower = two.one.keys(name).remove(0).1;
    for _ in 0..2 {
        two.pull_verified(&format!("{signed}:{lower}"), "one.pub")
            .exits(8)
            .says(&["snapshot `one` of env", "without a verified signature"]);
    }
}

#[test]
fn a_damaged_description_does_not_make_a_pulled_snapshot_this_machine_s() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let (repository, tag) = (two.repository(), two.last(name));
    two.run(&two.other, &["up", name, "--pull"]).ok();
    let shared = two
        .other
        .home()
        .join("layers")
        .join(&tag)
        .join("shared.json");
    let refused = || {
        two.push_signed(&two.other, name, &repository)
            .exits(2)
            .says(&["cannot sign snapshot `one`", "--sign-unverified"]);
    };
    // Version 0.1.0 did not record whether a signature was verified.
    let text = fs_err::read_to_string(&shared).unwrap();
    let mut earlier: Value = serde_json::from_str(&text).unwrap();
    let field = earlier.as_object_mut().unwrap().remove("unverified");
    assert_eq!(field, Some(Value::Bool(true)));
    for text in [earlier.to_string().as_str(), "{"] {
        fs_err::write(&shared, text).unwrap();
        refused();
    }
    two.run(&two.other, &["push", name]).ok();
    refused();
}
