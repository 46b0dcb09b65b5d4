//! Owns the time axis that all plots of a report share. Idle time between runs, such as a night or a month, is cut out
//! to keep the runs visible.

/// A span with activity, in milliseconds since 1970, and its position on the axis in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    from: i64,
    to: i64,
    at: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Axis {
    pieces: Vec<Piece>,
    length: i64,
}

/// Idle time takes at most this fraction of the busy time: a hundredth.
const GAP: i64 = 100;

impl Axis {
    /// Creates the axis from spans in any order.
    pub(super) fn new(spans: impl IntoIterator<Item = (i64, i64)>) -> Self {
        let mut spans: Vec<_> = spans.into_iter().collect();
        spans.sort_unstable();
        let mut pieces: Vec<Piece> = Vec::new();
        for (from, to) in spans {
            let to = to.max(from);
            match pieces.last_mut() {
                Some(last) if from <= last.to => last.to = last.to.max(to),
                _ => pieces.push(Piece { from, to, at: 0 }),
            }
        }
        let busy: i64 = pieces.iter().map(|piece| piece.to - piece.from).sum();
        let most = busy / GAP;
        let mut axis = Self::default();
        let mut before: Option<Piece> = None;
        for mut piece in pieces {
            axis.length += before.map_or(0, |last| (piece.from - last.to).min(most));
            piece.at = axis.length;
            axis.length += piece.to - piece.from;
            axis.pieces.push(piece);
            before = Some(piece);
        }
        axis
    }

    /// Returns the position of a time on the axis, from 0 to 1.
    pub(super) fn place(&self, time: i64) -> f64 {
        let piece = self.pieces.iter().rev().find(|piece| piece.from <= time);
        let at = piece.map_or(0, |piece| piece.at + (time.min(piece.to) - piece.from));
        at as f64 / self.length.max(1) as f64
    }

    /// Returns the positions of the cuts, from 0 to 1.
    pub(super) fn cuts(&self) -> Vec<f64> {
        let pairs = self.pieces.windows(2);
        let cut = pairs.filter(|pair| {
            let shown = pair[1].at - (pair[0].at + pair[0].to - pair[0].from);
            pair[1].from - pair[0].to > shown
        });
        cut.map(|pair| pair[1].at as f64 / self.length.max(1) as f64)
            .collect()
    }

    /// Returns round tick marks: the position from 0 to 1, and the milliseconds on the axis.
    pub(super) fn ticks(&self) -> Vec<(f64, i64)> {
        const SECOND: i64 = 1000;
        const MINUTE: i64 = 60 * SECOND;
        const HOUR: i64 = 60 * MINUTE;
        const UNITS: [(i64, &[i64]); 4] = [
            (1, &[10, 20, 50, 100, 200, 500]),
            (SECOND, &[1, 2, 5, 10, 30]),
            (MINUTE, &[1, 2, 5, 10, 30]),
            (HOUR, &[1, 2, 4, 8, 24, 7 * 24]),
        ];
        let units = UNITS.into_iter();
        let mut steps =
            units.flat_map(|(unit, counts)| counts.iter().map(move |count| count * unit));
        let step = steps.find(|step| self.length / step <= 6);
        let step = step.unwrap_or_else(|| (self.length / 6).max(1));
        (0..=self.length / step)
            .map(|count| {
                let at = count * step;
                (at as f64 / self.length.max(1) as f64, at)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_between_two_runs_is_a_hundredth() {
        let month = 30 * 86_400_000;
        let axis = Axis::new([(month, month + 6000), (0, 3000), (3000, 4000)]);
        assert_eq!(axis.length, 10_100);
        assert!(axis.place(-5).abs() < 1e-9);
        assert!((axis.place(2000) - 2000.0 / 10_100.0).abs() < 1e-9);
        // A time inside a gap maps to the end of the run before it.
        assert!((axis.place(month / 2) - 4000.0 / 10_100.0).abs() < 1e-9);
        assert!((axis.place(month + 6000) - 1.0).abs() < 1e-9);
        assert_eq!(axis.cuts(), [4100.0 / 10_100.0]);
        let ticks = axis.ticks();
        assert_eq!(ticks.len(), 6);
        assert_eq!(ticks[5].1, 10_000);
    }

    #[test]
    fn nothing_and_no_time_at_all_are_fine() {
        assert_eq!(Axis::new([]).ticks(), [(0.0, 0)]);
        let still = Axis::new([(5, 5), (5, 3)]);
        assert_eq!(still.length, 0);
        assert!(still.place(5).abs() < 1e-9);
        assert!(still.cuts().is_empty());
    }

    #[test]
    fn a_short_pause_is_as_long_as_it_was() {
        let axis = Axis::new([(0, 100_000), (100_500, 200_000)]);
        assert_eq!(axis.length, 200_000);
        assert!(axis.cuts().is_empty());
    }
}
