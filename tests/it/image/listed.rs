//! The list of `image ls`.

use fs_err as fs;

use crate::support::env::TestStore;

#[test]
fn a_recipe_with_a_mistake_hides_no_other_image() {
    let store = TestStore::new();
    let images = store.work().join("images");
    fs::write(images.join("bad.toml"), "schema = 1\nprovider = 'none'\n").unwrap();
    // Emacs makes such a link beside a file that is being edited.
    std::os::unix::fs::symlink("user@host.1:2", images.join(".#base.toml")).unwrap();
    let ran = store.rockenv(&["image", "ls"]).ok();
    assert!(ran.text().contains("\nbase "), "{}", ran.text());
    assert!(!ran.err.contains('#'), "{}", ran.err);
    ran.says(&["bad.toml", "unknown provider `none`"]);
}
