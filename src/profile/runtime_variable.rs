//! Owns which variables a profile may set in the shell of a user who evaluates `rockenv env`.

use super::structure::shorten;
use super::value::Refused;

/// Variables that make a shell, the loader, an interpreter, a compiler driver or a pager run a program of the profile's
/// choice. The last ones lead programs to a configuration that does so.
const RUN_PROGRAMS: &str = "BASHOPTS BASH_ENV BROWSER CC CCACHE_COMPILER CCACHE_PREFIX CDPATH CLASSPATH \
    CMAKE_TOOLCHAIN_FILE COMPILER_PATH CVS_RSH CXX ENV EXINIT FIGNORE FPATH GCC_EXEC_PREFIX GCONV_PATH GEM_HOME \
    GEM_PATH GETCONF_DIR GIO_EXTRA_MODULES GIO_MODULE_DIR GLIBC_TUNABLES GNUMAKEFLAGS GOFLAGS GST_PLUGIN_PATH \
    GTK_MODULES GTK_PATH HIP_CLANG_PATH HISTFILE HOSTALIASES HSA_TOOLS_LIB IFS INPUTRC JAVA_TOOL_OPTIONS \
    JDK_JAVA_OPTIONS KUBECONFIG LESS LESSCLOSE LESSEDIT LESSOPEN LIBGL_DRIVERS_PATH LOCPATH MAKEFILES MAKEFLAGS \
    MFLAGS NLSPATH NODE_OPTIONS NODE_PATH NULLCMD OPENSSL_CONF OPENSSL_ENGINES OPENSSL_MODULES PATH PERL5DB PERL5LIB \
    PERL5OPT PERLLIB PHPRC PROMPT PROMPT_COMMAND PS0 PS1 PS2 PS3 PS4 READNULLCMD RPROMPT RPS1 RSYNC_RSH RUBYLIB \
    RUBYOPT RUSTC RUSTDOC RUSTFLAGS SHELL SHELLOPTS TAR_OPTIONS TERMCAP TERMINFO TERMINFO_DIRS TERMPATH VIMINIT \
    VISUAL _JAVA_OPTIONS CURL_HOME HOME WGETRC ZDOTDIR";
/// Prefixes of further such variables.
const BEGINNINGS: &str = "BASH_FUNC_ CARGO_ DOCKER_ GIT_ LD_ LUA_ NPM_CONFIG_ OCL_ICD_ PIP_ PYTHON QT_ ROCP SSH_ \
    SUDO_ VK_ XDG_";
/// Suffixes of further such variables.
const ENDS: &str = "ASKPASS EDITOR PAGER _RSH _WRAPPER";

/// Refuses a variable that makes the host run programs.
pub(crate) fn check(name: &str) -> Result<(), Refused> {
    let upper = name.to_ascii_uppercase();
    let runs_programs = BEGINNINGS.split(' ').any(|begin| upper.starts_with(begin))
        || ENDS.split(' ').any(|end| upper.ends_with(end))
        || RUN_PROGRAMS.split(' ').any(|known| known == upper);
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
            "HSA_OVERRIDE_GFX_VERSION LD_LIBRARY_PATH GITHUB ROCM_PATH CCACHE_DIR PYTORCH_ROCM_ARCH"
                .split_ascii_whitespace()
        {
            check(good).unwrap();
        }
        for bad in "PATH LD_PRELOAD PROMPT_COMMAND PS4 GIT_SSH MAKEFLAGS LESSOPEN SUDO_ASKPASS RUSTC_WRAPPER MANPAGER \
                    npm_config_script_shell HSA_TOOLS_LIB CC CCACHE_PREFIX VK_ICD_FILENAMES PYTHONHOME PYTHONPATH \
                    LUA_INIT LUA_PATH_5_4 ROCPROFILER_LIBRARY"
            .split_ascii_whitespace()
        {
            assert!(check(bad).is_err(), "{bad:?}");
        }
    }
}
