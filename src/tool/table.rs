//! Tables of text: columns as wide as their widest cell.

/// Between two columns.
const GAP: &str = "  ";

/// Lines of cells below `headings`; `paint` gives what is shown of a cell, which comes padded, by
/// its row and its column.
pub(super) fn render(
    headings: &[&str],
    rows: &[Vec<String>],
    paint: impl Fn(usize, usize, &str) -> String,
) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([headings[column].len()]).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..headings.len()).map(width).collect();
    let line = |cells: &[&str], paint: &dyn Fn(usize, &str) -> String| {
        let padded = cells.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            let is_last = column + 1 == widths.len();
            let shown = if is_last { (*cell).to_owned() } else { format!("{cell:width$}") };
            paint(column, &shown)
        });
        padded.collect::<Vec<_>>().join(GAP) + "\n"
    };
    let mut text = line(headings, &|_, shown| shown.to_owned());
    for (number, row) in rows.iter().enumerate() {
        let cells: Vec<_> = row.iter().map(String::as_str).collect();
        text += &line(&cells, &|column, shown| paint(number, column, shown));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_paint_does_not_count() {
        let rows = [["a", "long cell", "x"], ["bb", "c", "y"]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|cell| (*cell).to_owned()).collect()).collect();
        let text = render(&["ONE", "2", "3"], &rows, |row, column, shown| {
            if (row, column) == (1, 1) { format!("<{shown}>") } else { shown.to_owned() }
        });
        assert_eq!(text, "ONE  2          3\na    long cell  x\nbb   <c        >  y\n");
    }
}
