//! Owns showing a command's output repeatedly and in place, until Ctrl-C.

use std::os::fd::AsFd as _;
use std::time::Duration;

use crate::sys::error::Result;
use crate::sys::readable::readable;
use crate::sys::signals::Signals;
use crate::ui::{Recording, Ui};
use crate::up::context::Context;

const PERIOD: Duration = Duration::from_secs(1);

/// Shows the output of `show` once a second, until Ctrl-C or an error of `show`.
pub(super) fn watch(cx: &Context, show: impl Fn(&Context) -> Result<u8>) -> Result<u8> {
    let settings = cx.ui.settings();
    if !settings.terminals.stdout || settings.dumb || cx.json {
        let error = match cx.json {
            true => usage!("`--watch` cannot be combined with `--json`"),
            false if settings.terminals.stdout => {
                usage!("`--watch` cannot redraw this terminal: `TERM` is `dumb` or unset")
            }
            false => usage!("`--watch` needs a terminal"),
        };
        return Err(error.help("leave out --watch"));
    }
    let signals = Signals::take()?;
    let mut before = 0;
    loop {
        let screen = Recording::default();
        let ui = Ui::with_writers(
            cx.ui.settings().clone(),
            Box::new(screen.clone()),
            Box::new(screen.clone()),
        );
        let inner = Context {
            config: cx.config.clone(),
            ui,
            names_home: cx.names_home,
            json: false,
        };
        let code = show(&inner)?;
        inner.ui.finish()?;
        let text = screen.bytes();
        before = cx.ui.redraw(&String::from_utf8_lossy(&text), before);
        if cx.ui.closed() {
            return Ok(code);
        }
        readable([Some(signals.as_fd())], Some(PERIOD))?;
        if signals.pending()?.is_some() {
            return Ok(code);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;

    use super::*;
    use crate::store::config::Config;
    use crate::ui::{Terminals, UiSettings};

    #[test]
    fn a_terminal_that_moves_no_cursor_is_refused() {
        let settings = UiSettings {
            dumb: true,
            terminals: Terminals {
                stdout: true,
                ..Terminals::default()
            },
            ..UiSettings::default()
        };
        let ui = Ui::with_writers(settings, Box::new(io::sink()), Box::new(io::sink()));
        let (config, _) = Config::of(BTreeMap::new(), None).unwrap();
        let cx = Context {
            config,
            ui,
            names_home: false,
            json: false,
        };
        let error = watch(&cx, |_| Err(usage!("shown"))).unwrap_err();
        assert_has!(error.message(), "`--watch` cannot redraw this terminal");
    }
}
