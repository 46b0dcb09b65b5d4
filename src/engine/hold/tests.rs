//! Tests of holders: what their records name, and what is left of a killed one.

use super::*;

#[test]
fn a_container_record_in_a_copied_store_belongs_to_the_first_store() {
    let directory = tempfile::tempdir().unwrap();
    let at = |store: &str| directory.path().join(store);
    let run = |store: &str| at(store).join("envs/a/run");
    for store in ["first", "copy"] {
        fs::create_dir_all(run(store)).unwrap();
    }
    fs::os::unix::fs::symlink(at("first"), at("link")).unwrap();
    let is_of = |recorded: &Path, store: &str| {
        let state = ContainerRecord {
            id: "rockenv-a-0".to_owned(),
            run: recorded.to_owned(),
            ..ContainerRecord::default()
        };
        let text = serde_json::to_vec(&state).unwrap();
        ContainerRecord::parse(&run(store), &text).is_some()
    };
    assert!(!is_of(&run("first"), "copy"));
    // Another path to the same store, as through a bind mount.
    assert!(is_of(&run("first"), "link"));
    // The recorded path is missing because the store was moved, or because an older version recorded none.
    assert!(is_of(&run("missing"), "copy"));
    assert!(is_of(Path::new(""), "copy"));
}

#[test]
fn a_record_names_no_file_but_a_lock_of_nspawn() {
    for (lock, fits) in [
        ("/run/systemd/nspawn/locks/inode-1:2", true),
        ("/run/systemd/nspawn/locks/inode-01:2", false),
        ("/run/systemd/nspawn/locks/inode-1:2/", false),
        ("/run/systemd/nspawn/locks/../inode-1:2", false),
        ("/etc/passwd", false),
    ] {
        let text = serde_json::to_vec(&ContainerRecord {
            id: "rockenv-a-0".to_owned(),
            lock: Some(lock.into()),
            ..ContainerRecord::default()
        });
        let found = ContainerRecord::parse(Path::new("/s/envs/a/run"), &text.unwrap());
        assert_eq!(found.is_some(), fits, "{lock}");
    }
}

#[test]
fn the_record_of_another_container_stays() {
    let directory = tempfile::tempdir().unwrap();
    let run = directory.path().join("envs/a/run");
    fs::create_dir_all(&run).unwrap();
    let state = |id: &str| ContainerRecord {
        id: id.to_owned(),
        ..ContainerRecord::default()
    };
    state("rockenv-a-1").save(&run).unwrap();
    for (id, stays) in [("rockenv-a-0", true), ("rockenv-a-1", false)] {
        state(id).forget(&run).unwrap();
        assert_eq!(ContainerRecord::path(&run).exists(), stays, "{id}");
    }
}

#[test]
fn nothing_of_a_killed_nspawn_stays() {
    let nspawn = tempfile::tempdir().unwrap();
    let of = |id: &str| {
        let names = [
            "propagate/ID",
            "unix-export/ID",
            "ID/unix-export",
            "ID/root",
            "ID",
        ];
        names.map(|name| nspawn.path().join(name.replace("ID", id)))
    };
    let (own, other) = (of("rockenv-a-0"), of("rockenv-a-1"));
    for path in own.iter().chain(&other) {
        fs::create_dir_all(path).unwrap();
    }
    remove_left(nspawn.path(), "rockenv-a-0");
    assert!(own.iter().all(|path| !path.exists()));
    assert!(other.iter().all(|path| path.exists()));
}

#[test]
fn a_service_that_was_uninstalled_does_not_keep_an_env() {
    let text = r#"{"id": "rockenv-a-0", "cgroup": {"directories": []}, "place": {"socket": "/nobody-answers",
        "image": "", "name": "", "store": "", "env": "", "tree": "0123456789abcdef", "key": ""}}"#;
    let mut state: ContainerRecord = serde_json::from_str(text).unwrap();
    // The container's processes may still run, and only the service knows them.
    assert_eq!(state.clear().unwrap_err().kind(), Kind::Unavailable);
    let group = (String::new(), "/sys/fs/cgroup/gone".into());
    state.cgroup.directories.push(group);
    state.clear().unwrap();
    // If the service answers, only the service ends the container, even if its requests fail.
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let answers = [("/_ping", "200 OK", ""), ("/containers/", "500 Failed", "")];
    docker::tests::serve(&socket, answers);
    state.place.as_mut().unwrap().socket = socket;
    let error = state.clear().unwrap_err();
    assert_has!(error.chain().join(": "), "cannot look at a container");
}

#[test]
fn a_starter_of_another_version_gets_an_answer() {
    let (starter, holder) = UnixStream::pair().unwrap();
    frames::send(&starter, &["a request of another version"], &[]).unwrap();
    let Some(FromHolder::Failed { reason }) = serve(&holder) else {
        panic!("the holder understood the request");
    };
    let error = Error::from(reason);
    assert_eq!(error.kind(), Kind::Unavailable);
    assert_has!(error.help_text().unwrap(), "run the command again");
    drop(starter);
    assert!(serve(&holder).is_none());
}

#[test]
fn a_lock_of_another_tree_stays() {
    let directory = tempfile::tempdir().unwrap();
    let [held, free] = ["inode-1:2", "inode-1:3"].map(|name| directory.path().join(name));
    fs::write(&free, "").unwrap();
    let other = fs::File::create(&held).unwrap();
    assert!(job_slots::lock(&other, 0).unwrap());
    for path in [&held, &free] {
        remove_lock(path).unwrap();
    }
    assert!(held.exists() && !free.exists());
}

#[test]
fn a_gpus_nodes_are_known_by_name() {
    for node in ["/dev/kfd", "/dev/dri/renderD128"] {
        assert!(is_gpu(node.as_ref()), "{node}");
    }
    for node in [
        "/dev/null",
        "/dev/dri/card0",
        "/dev/kfd.old",
        "/srv/dev/kfd",
    ] {
        assert!(!is_gpu(node.as_ref()), "{node}");
    }
}

#[test]
fn a_command_that_began_before_an_upgrade_may_name_the_layers_of_an_overlay_otherwise() {
    let text = r#"{"Overlay": {"lowers": ["/b", "/a"], "upper": "/u", "work": "/w"}}"#;
    let Ok(Root::Overlay(view)) = serde_json::from_str(text) else {
        panic!("{text}");
    };
    assert_eq!(view.layers, [Path::new("/b"), Path::new("/a")]);
}
