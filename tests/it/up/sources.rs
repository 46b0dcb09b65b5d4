//! Steps that are made from sources, which change, are not there, or are changed by the steps themselves.

use std::os::unix::fs::PermissionsExt as _;

use fs_err as fs;

use super::on_each;
use crate::support::env::TestStore;

#[test]
fn a_source_directory_that_is_not_there_is_named() {
    let store = TestStore::new();
    store.profile(
        "[[volume]]\nname = 'src'\nkind = 'source'\npath = '/nowhere/src'\ntarget = '/src'\n\
         [[step]]\nname = 'one'\ninputs = ['src']\nrun = 'true'\n",
    );
    let named = "source `src` is missing from `/nowhere/src`";
    for verb in ["up", "lock"] {
        let ran = store.rockenv(&[verb, store.env()]).exits(3);
        ran.says(&[named, "help: correct `path` of the volume"]);
    }
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert!(
        plan.contains(&format!("`up` would refuse\n  - {named}\n")),
        "{plan}"
    );
}

#[test]
fn a_source_that_changed_runs_its_steps_again_and_is_never_written() {
    on_each(|store, _| {
        let source = store.work().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("a"), "one").unwrap();
        let steps = format!(
            "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
             [[step]]\nname = \"before\"\nrun = \"true\"\n\
             [[step]]\nname = \"read\"\ninputs = [\"src\"]\nrun = \"cat /v/src/a > $HOME/a\"\n",
            source.display()
        );
        store.up_with(&steps);
        store.up().says(&["nothing to do"]);
        fs::write(source.join("a"), "two").unwrap();
        store.up().says(&["2 steps, 1 done before"]);
        store.sh("cat $HOME/a").ok().prints("two");
        fs::write(source.join("a"), "one").unwrap();
        store.up();
        store.sh("cat $HOME/a").ok().prints("one");
    });
}

#[test]
fn a_step_that_fetches_into_a_source_decides_what_later_steps_are_made_from() {
    on_each(|store, _| {
        let source = store.work().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("a"), "a").unwrap();
        fs::set_permissions(&source, std::fs::Permissions::from_mode(0o777)).unwrap();
        let fetching = format!(
            "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
             [[step]]\nname = \"fetch\"\nrun = \"echo new > /v/src/fetched\"\n\
             [[step]]\nname = \"build\"\ninputs = [\"src\"]\nrun = \"cat /v/src/* > $HOME/built\"\n\
             [[step]]\nname = \"last\"\ninputs = [\"src\"]\nrun = \"true\"\n",
            source.display()
        );
        store
            .up_with(&fetching)
            .says(&["step 1/3 fetch", "step 3/3 last"]);
        store.up().says(&["nothing to do"]);
        // What was built with the file is not what there is without it.
        fs::remove_file(source.join("fetched")).unwrap();
        store.up().says(&["step 2/3 build"]);
        store.sh("cat $HOME/built").ok().prints("a");
    });
}

#[test]
fn a_step_that_changes_what_it_is_made_from_is_named() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::set_permissions(&source, std::fs::Permissions::from_mode(0o777)).unwrap();
    let steps = format!(
        "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
         [[step]]\nname = \"one\"\ninputs = [\"src\"]\nrun = \"echo >> /v/src/log\"\n\
         [[step]]\nname = \"two\"\ninputs = [\"src\"]\nrun = \"true\"\n",
        source.display()
    );
    // It would go on for ever if each change began all over.
    let said = ["step 2/2 two", "`src` changed after step `one` began"];
    store.up_with(&steps).says(&said);
    store.up().says(&said);
    // Keys that are computed after a step are so each time, and never for good.
    let steps = steps.replace("echo >>", "date +%s%N >")
        + "[[volume]]\nname = \"build\"\nkind = \"build\"\ntarget = \"/v/build\"\n\
           [[step]]\nname = \"configure\"\ninputs = [\"src\"]\nfingerprints = \"/v/build\"\nrun = \"true\"\n\
           [[step]]\nname = \"last\"\nrun = \"true\"\n";
    store.profile(&steps);
    let said = "step `configure` ran 5 times, because a step before it changes its own source";
    store.rockenv(&["up", store.env()]).exits(5).says(&[said]);
}
