//! Complete output of commands, for snapshots. Masks only what differs between runs.

use std::sync::LazyLock;

use regex::Regex;

use super::env::TestStore;
use super::run::Ran;

/// Texts, each with the placeholder that replaces it.
pub(crate) type Masks<'a> = [(&'a str, &'a str)];

impl TestStore {
    /// Runs commands, one per line, and returns their output. `ENV` stands for the test's env, `WORK` and `STORE` for
    /// its directories, `CHECKOUT` for rockenv's source.
    pub(crate) fn shows(&self, commands: &str) -> String {
        self.masks(|masks| transcript(commands, masks, |words| self.rockenv(words)))
    }

    /// Returns the masked output of a command.
    pub(crate) fn shown(&self, ran: &Ran) -> String {
        self.masks(|masks| masked(&ran.shown(), masks))
    }

    fn masks<T>(&self, with: impl FnOnce(&Masks<'_>) -> T) -> T {
        let [home, work] = [self.home(), self.work()].map(|path| path.display().to_string());
        with(&[
            (&home, "STORE"),
            (&work, "WORK"),
            // The stores may be below it.
            (env!("CARGO_MANIFEST_DIR"), "CHECKOUT"),
            (self.env(), "ENV"),
        ])
    }
}

impl Ran {
    /// Returns standard output, standard error, and the exit code if it is not 0.
    pub(crate) fn shown(&self) -> String {
        let code = match self.code {
            0 => String::new(),
            code => format!("exit code {code}\n"),
        };
        format!("{}{}{code}", self.text(), self.err)
    }
}

/// Runs commands, one per line, and returns their output, each after its command if there are several.
pub(crate) fn transcript(
    commands: &str,
    masks: &Masks<'_>,
    run: impl Fn(&[String]) -> Ran,
) -> String {
    let lines: Vec<&str> = commands.lines().map(str::trim).collect();
    let mut all = String::new();
    for line in &lines {
        let named = |word: String| {
            masks
                .iter()
                .fold(word, |word, (text, name)| word.replace(name, text))
        };
        let words = shlex::split(line).expect("words").into_iter().map(named);
        if lines.len() > 1 {
            all.extend(["$ rockenv ", line, "\n"]);
        }
        all += &run(&words.collect::<Vec<_>>()).shown();
    }
    masked(&all, masks)
}

/// Masks texts, and everything that differs between runs: durations, ages, dates, digests, ids, ports and the number of
/// packages of a distribution. Removes the reports of locks that a busy machine holds for more than a second.
pub(crate) fn masked(text: &str, masks: &Masks<'_>) -> String {
    static FILTERS: LazyLock<Filters> = LazyLock::new(|| {
        filters(&[
            (r"\b([0-9]+ min )?[0-9]+(\.[0-9])? m?s\b", "TIME"),
            (r"\bjust now\b|\b[0-9]+ (min|h) ago\b", "AGE"),
            (r"\b20[0-9]{2}-?[0-9]{2}-?[0-9]{2}[T ][0-9:.]+Z?\b", "DATE"),
            (r"\b[0-9a-f]{12,}\b", "ID"),
            (r"\b(127\.0\.0\.1|localhost):[0-9]{4,5}\b", "$1:PORT"),
            (r"\b[1-9][0-9]+ packages\b", "N packages"),
            (r"(?m)^waiting for .*, held by .*\n", ""),
            (r"(?m) +$", ""),
        ])
    });
    let named = masks
        .iter()
        .fold(text.to_owned(), |all, (text, name)| all.replace(text, name));
    replaced(named, &FILTERS)
}

/// Masks sizes as well, for measurements, and sets columns two spaces apart, whatever their width.
pub(crate) fn measured(text: String) -> String {
    static FILTERS: LazyLock<Filters> = LazyLock::new(|| {
        filters(&[
            (r"\b[0-9]+(\.[0-9])? ([KMGT]i)?B\b", "SIZE"),
            (r"(\S)  +", "$1  "),
        ])
    });
    replaced(text, &FILTERS)
}

type Filters = Vec<(Regex, &'static str)>;

fn filters(patterns: &[(&str, &'static str)]) -> Filters {
    let all = patterns.iter();
    all.map(|(pattern, name)| (Regex::new(pattern).expect("a pattern"), *name))
        .collect()
}

fn replaced(text: String, filters: &Filters) -> String {
    filters.iter().fold(text, |text, (pattern, name)| {
        pattern.replace_all(&text, *name).into_owned()
    })
}
