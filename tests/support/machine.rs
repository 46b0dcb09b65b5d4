//! Another machine's GPUs, from the files in `tests/gpu`.

use std::path::Path;

use fs_err as fs;

/// Lays out `sys` and `dev` below `root`; a device node is an empty file.
pub(crate) fn lay_out(root: &Path, text: &str) {
    for file in text.split(">>> ").skip(1) {
        let (path, content) = file.split_once('\n').expect("a path and a text");
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
        fs::write(path, content).expect("a file");
    }
}
