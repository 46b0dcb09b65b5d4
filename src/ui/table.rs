//! Owns aligned columns.

use unicode_width::UnicodeWidthStr as _;

use super::text::escape;

/// Rows of cells under a header; cells are escaped.
#[derive(Clone, Debug)]
pub struct Table {
    header: Vec<String>,
    right: Vec<bool>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table. A column whose title starts with `>` is aligned to the right, for numbers.
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self {
            header: header
                .iter()
                .map(|title| title.trim_start_matches('>').to_owned())
                .collect(),
            right: header.iter().map(|title| title.starts_with('>')).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row; cells beyond the header are dropped, missing ones are empty.
    pub fn row<S: AsRef<str>>(&mut self, cells: impl IntoIterator<Item = S>) -> &mut Self {
        let mut row: Vec<String> = cells
            .into_iter()
            .map(|cell| escape(cell.as_ref()).into_owned())
            .collect();
        row.resize(self.header.len(), String::new());
        self.rows.push(row);
        self
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the lines, each with its newline and without trailing spaces.
    pub fn render(&self) -> String {
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let widths: Vec<usize> = (0..self.header.len())
            .map(|at| lines().map(|line| line[at].width()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in lines() {
            let start = text.len();
            for (at, cell) in line.iter().enumerate() {
                // An empty column takes no room.
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
}
