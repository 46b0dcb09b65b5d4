//! Owns aligned columns.

use unicode_width::UnicodeWidthStr as _;

use super::text::{escape, wrap};

/// Rows of cells under a header; cells are escaped.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    header: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
    /// Maximum width; the last column is wrapped to fit.
    within: Option<usize>,
}

/// Minimum width of a wrapped column.
const NARROW: usize = 20;

impl Table {
    /// Creates a table. A title that starts with `>` aligns its column to the right, for numbers.
    pub(crate) fn new<const N: usize>(header: [&str; N]) -> Self {
        Self {
            header: header
                .iter()
                .map(|title| title.trim_start_matches('>').to_owned())
                .collect(),
            right: header.iter().map(|title| title.starts_with('>')).collect(),
            rows: Vec::new(),
            within: None,
        }
    }

    /// Wraps the last column to this width, whatever the width of the screen.
    #[must_use]
    pub(crate) fn within(mut self, columns: usize) -> Self {
        self.within = Some(columns);
        self
    }

    /// Returns the table for a screen of this width.
    pub(super) fn on_screen(&self, columns: usize) -> Self {
        let within = self.within.unwrap_or(columns);
        self.clone().within(within)
    }

    /// Adds a row. Cells beyond the header are dropped, missing ones are empty.
    pub(crate) fn row<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut row: Vec<String> = cells
            .into_iter()
            .map(|cell| escape(cell.as_ref()).into_owned())
            .collect();
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
    }

    /// Creates a table with one row for each of `rows`.
    pub(crate) fn of<R, const N: usize>(
        header: [&str; N],
        rows: impl IntoIterator<Item = R>,
        cells: impl Fn(R) -> [String; N],
    ) -> Self {
        let mut table = Self::new(header);
        for row in rows {
            table.row(cells(row));
        }
        table
    }

    /// Returns the rows, with the last column split over several rows where it does not fit.
    fn wrapped(&self) -> Vec<Vec<String>> {
        let Some((within, last)) = self.within.zip(self.header.len().checked_sub(1)) else {
            return self.rows.clone();
        };
        let width = |at: usize| {
            let lines = std::iter::once(&self.header).chain(&self.rows);
            lines.map(|line| line[at].width()).max().unwrap_or(0)
        };
        let before: usize = (0..last)
            .map(width)
            .filter(|&width| width > 0)
            .map(|width| width + 2)
            .sum();
        let columns = within.saturating_sub(before).max(NARROW);
        let mut rows = Vec::new();
        for row in &self.rows {
            for (number, line) in wrap(&row[last], columns).into_iter().enumerate() {
                let mut cells = match number {
                    0 => row.clone(),
                    _ => vec![String::new(); last + 1],
                };
                cells[last] = line;
                rows.push(cells);
            }
        }
        rows
    }

    /// Returns the lines, each with its newline and without trailing spaces.
    pub(crate) fn render(&self) -> String {
        let wrapped = self.wrapped();
        let lines = || std::iter::once(&self.header).chain(&wrapped);
        let widths: Vec<usize> = (0..self.header.len())
            .map(|at| lines().map(|line| line[at].width()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in lines() {
            let start = text.len();
            for (at, cell) in line.iter().enumerate() {
                // An empty column takes no space.
                let gap = if at == 0 || widths[at] == 0 { "" } else { "  " };
                let pad = " ".repeat(widths[at] - cell.width());
                text.push_str(gap);
                if self.right[at] {
                    text.push_str(&pad);
                    text.push_str(cell);
                } else {
                    text.push_str(cell);
                    text.push_str(&pad);
                }
            }
            text.truncate(start + text[start..].trim_end_matches(' ').len());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align_by_width_on_the_screen() {
        let mut table = Table::new(["NAME", ">SIZE", "STATE"]);
        table.row(["gfx1103", "1.5 GiB", "ready"]);
        table.row(["日本", "12 B", "a\x1b[2Jb"]);
        table.row(["short"]);
        insta::assert_snapshot!(table.render(), @r"
        NAME        SIZE  STATE
        gfx1103  1.5 GiB  ready
        日本        12 B  a\x1b[2Jb
        short
        ");
    }

    #[test]
    fn the_last_column_is_wrapped() {
        let mut table = Table::new(["step", "why"]).within(30);
        table.row(["configure", "the input `src` and the script changed"]);
        table.row(["test", "new"]);
        insta::assert_snapshot!(table.render(), @r"
        step       why
        configure  the input `src` and
                   the script changed
        test       new
        ");
        assert_eq!(table.on_screen(200).render(), table.render());
        // An empty column takes no space.
        let mut table = Table::new(["what", "", "why"]);
        table.row(["env a", "", "`rockenv rm a` frees 600.0 KiB"]);
        insta::assert_snapshot!(table.on_screen(29).render(), @r"
        what   why
        env a  `rockenv rm a` frees
               600.0 KiB
        ");
    }
}
