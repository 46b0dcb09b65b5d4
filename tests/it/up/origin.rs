//! An env stays with the profile file that it was made from.

use fs_err as fs;

use super::on_overlay_and_btrfs;
use crate::support::env::TestStore;

/// Writes a profile whose second step fails until its build volume has the file `go`.
fn project(store: &TestStore, name: &str) -> String {
    let directory = store.work().join(name);
    fs::create_dir_all(&directory).unwrap();
    let text = format!(
        "schema = 1\nimage = 'base'\n[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
         [[step]]\nname = 'one'\nrun = 'true # {name}'\n\
         [[step]]\nname = 'two'\nincremental = true\n\
         run = 'echo {name} >> /v/build/objects; cat /v/build/objects; test -e /v/build/go'\n"
    );
    fs::write(directory.join(format!("{}.toml", store.env())), text).unwrap();
    format!("{name}/{}.toml", store.env())
}

#[test]
fn another_file_of_that_name_does_not_continue_with_an_env() {
    on_overlay_and_btrfs(|store, method| {
        let (one, two) = (project(store, "c1"), project(store, "c2"));
        let env = store.env();
        store.rockenv(&["up", &one]).exits(5);
        for command in [
            "up c2/ENV.toml",
            "plan c2/ENV.toml",
            "up c2/ENV.toml --name ENV",
        ] {
            insta::allow_duplicates! {
                insta::assert_snapshot!(store.shows(command), @"
                error: env `ENV` was made from `WORK/c1/ENV.toml`
                help: rockenv up c2/ENV.toml --name NAME, or remove the env first: rockenv rm ENV
                exit code 2
                ");
            }
        }
        let objects = "cat /v/build/objects";
        store.sh(objects).ok().prints("c1");
        // Through a link it is the same file.
        std::os::unix::fs::symlink(store.work().join("c1"), store.work().join("link")).unwrap();
        store.sh("touch /v/build/go").ok();
        let link = format!("link/{env}.toml");
        store.rockenv(&["up", &link]).ok();
        store.sh(objects).ok().prints("c1\nc1");
        // Once that file is gone, another file may become the env's profile.
        fs::remove_file(store.work().join(&one)).unwrap();
        store.rockenv(&["plan", &two]).ok();
        assert_eq!(
            store.rockenv(&["up", &two, "--until", "one"]).code,
            0,
            "{method}"
        );
    });
}
