//! Owns which variables a profile may set in the shell of a user who evaluates `rockenv env`.

use super::structure::shorten;
use super::value::Refused;

/// Variables that make a shell, the loader, an interpreter, a compiler driver or a pager run a program of the profile's
/// choice. The last ones lead programs to a configuration that does so.
const RUN_PROGRAMS: &str = "AR AS BASHOPTS BROWSER CC CDPATH CFLAGS CLASSPATH CMAKE_TOOLCHAIN_FILE COMPILER_PATH CPP \
    CPPFLAGS CUDACXX CVS_RSH CXX CXXFLAGS EMACSLOADPATH ENV EXINIT FC FCEDIT FIGNORE FPATH GCC_EXEC_PREFIX GCONV_PATH \
    GEM_HOME GEM_PATH GETCONF_DIR GIO_EXTRA_MODULES GIO_MODULE_DIR GLIBC_TUNABLES GNUMAKEFLAGS GOFLAGS \
    GST_PLUGIN_PATH GTK_MODULES GTK_PATH HIPCXX HIP_CLANG_PATH HISTFILE HOSTALIASES HSA_TOOLS_LIB IFS INPUTRC \
    JAVA_TOOL_OPTIONS JDK_JAVA_OPTIONS KUBECONFIG LD LDFLAGS LESS LESSCLOSE LESSEDIT LESSOPEN LIBGL_DRIVERS_PATH \
    LOCPATH MAILPATH MAKEFILES MAKEFLAGS MANOPT MFLAGS MODULE_PATH NLSPATH NODE_OPTIONS NODE_PATH NULLCMD \
    OPENSSL_CONF OPENSSL_ENGINES OPENSSL_MODULES PATH PERL5DB PERL5LIB PERL5OPT PERLLIB PHPRC PS0 PS1 PS2 PS3 PS4 \
    READNULLCMD RSYNC_RSH RUBYLIB RUBYOPT RUSTC RUSTDOC RUSTFLAGS SHELL SHELLOPTS SPROMPT TAR_OPTIONS TERMCAP \
    TERMINFO TERMINFO_DIRS TERMPATH VIM VIMINIT VIMRUNTIME VISUAL _JAVA_OPTIONS CURL_HOME HOME RIPGREP_CONFIG_PATH \
    WGETRC ZDOTDIR";
/// Integers of a shell, which evaluates their values, also commands in them: `a[$(command)]`.
const EVALUATED: &str = "COLUMNS EPOCHREALTIME EPOCHSECONDS HISTCMD HISTSIZE LINENO LINES MAILCHECK OPTIND RANDOM \
    SECONDS SRANDOM TMOUT";
/// Prefixes of further such variables.
const BEGINNINGS: &str = "BASH_ CARGO_ CCACHE_ DOCKER_ GIT_ GROFF_ LD_ LUA_ NPM_CONFIG_ OCL_ICD_ PIP_ PROMPT PYTHON \
    QT_ ROCP RPROMPT RPS SSH_ SUDO_ VK_ XDG_";
/// Suffixes of further such variables.
const ENDS: &str = "ASKPASS EDITOR PAGER _LAUNCHER _RSH _WRAPPER";

/// Refuses a variable that makes the host run programs.
pub(crate) fn check(name: &str) -> Result<(), Refused> {
    let upper = name.to_ascii_uppercase();
    let runs_programs = BEGINNINGS.split(' ').any(|begin| upper.starts_with(begin))
        || ENDS.split(' ').any(|end| upper.ends_with(end))
        || [RUN_PROGRAMS, EVALUATED]
            .iter()
            .any(|names| names.split(' ').any(|known| known == upper));
    if runs_programs && name != "LD_LIBRARY_PATH" {
        let message = format!("`{}` cannot be a runtime variable", shorten(name));
        return Err(Refused::new(message).help(
            "on the host it would run programs; set it in [env], for the steps, or in the command that needs it",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_runs_nothing_because_of_a_profile() {
        for good in
            "HSA_OVERRIDE_GFX_VERSION LD_LIBRARY_PATH GITHUB ROCM_PATH CMAKE_PREFIX_PATH PYTORCH_ROCM_ARCH"
                .split_ascii_whitespace()
        {
            check(good).unwrap();
        }
        for bad in "PATH LD_PRELOAD PROMPT_COMMAND PS4 GIT_SSH MAKEFLAGS LESSOPEN SUDO_ASKPASS RUSTC_WRAPPER MANPAGER \
                    npm_config_script_shell HSA_TOOLS_LIB CC CCACHE_PREFIX VK_ICD_FILENAMES PYTHONHOME PYTHONPATH \
                    LUA_INIT LUA_PATH_5_4 ROCPROFILER_LIBRARY CCACHE_DIR MAILPATH CMAKE_CXX_COMPILER_LAUNCHER"
            .split_ascii_whitespace()
        {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_variable_that_bash_evaluates_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let script =
            r#"for name in $(compgen -v); do (export "$name=a[\$(echo $name >>ran)0]"); done"#;
        let mut bash = std::process::Command::new("bash");
        bash.args(["-c", script]).current_dir(place.path());
        bash.output().unwrap();
        let ran = fs_err::read_to_string(place.path().join("ran")).unwrap();
        assert!(ran.lines().any(|name| name == "RANDOM"), "{ran}");
        for name in ran.lines() {
            assert!(check(name).is_err(), "{name}");
        }
    }
}
