//! Text in columns for people: tables under a header, in the form that Markdown reads too, and lists of facts.

/// The width that wrapped text keeps to.
const WIDTH: usize = 80;

use crate::foreign::shown_in_line;

/// How a column stands.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Texts.
    Left,
    /// Numbers.
    Right,
}

/// A table that is filled row by row.
pub(crate) struct Table {
    columns: Vec<(Align, usize)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub(crate) fn new<const N: usize>(header: [(&str, Align); N]) -> Self {
        let columns = header.map(|(_, align)| (align, 0)).to_vec();
        let mut table = Self { columns, rows: Vec::new() };
        table.row(header.map(|(name, _)| name.to_owned()));
        table
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        let cells = cells.map(|cell| shown_in_line(&cell).replace('|', "\\|"));
        for ((_, width), cell) in self.columns.iter_mut().zip(&cells) {
            *width = (*width).max(cell.chars().count());
        }
        self.rows.push(cells.to_vec());
    }

    /// `| a | b |` lines, the header with its rule first.
    pub(crate) fn render(&self) -> String {
        let line = |cells: &[String]| {
            let cells = self.columns.iter().zip(cells).map(|((align, width), cell)| {
                let fill = " ".repeat(width.saturating_sub(cell.chars().count()));
                if *align == Align::Left { format!(" {cell}{fill} ") } else { format!(" {fill}{cell} ") }
            });
            format!("|{}|\n", cells.collect::<Vec<_>>().join("|"))
        };
        let rule = self.columns.iter().map(|(align, width)| {
            let dashes = "-".repeat(*width + 1);
            if *align == Align::Left { format!("{dashes}-") } else { format!("{dashes}:") }
        });
        let rule = format!("|{}|\n", rule.collect::<Vec<_>>().join("|"));
        let mut lines = self.rows.iter().map(|row| line(row));
        let header = lines.next().unwrap_or_default();
        header + &rule + &lines.collect::<String>()
    }
}

/// Two columns without a frame: a name and what it is.
pub(crate) fn facts(facts: &[(&str, String)]) -> String {
    let width = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    facts.iter().map(|(name, value)| format!("{name:width$}  {}\n", shown_in_line(value))).collect()
}

/// A title and, indented below it, facts whose values are wrapped.
pub(crate) fn block(title: &str, facts: &[(String, String)]) -> String {
    let names = facts.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let indent = names + 4;
    let fact = |(name, value): &(String, String)| {
        let value = wrap(value, WIDTH.saturating_sub(indent)).join(&format!("\n{}", " ".repeat(indent)));
        format!("  {name:names$}  {value}\n")
    };
    format!("{}\n{}", wrap(title, WIDTH).join("\n"), facts.iter().map(fact).collect::<String>())
}

/// Breaks a text between words, so that no line is longer than `width` unless a word is.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_cells_cannot_break_out() {
        let mut table = Table::new([("name", Align::Left), ("t/s", Align::Right)]);
        table.row(["a|\n".into(), "1".into()]);
        table.row(["longer é".into(), "1000".into()]);
        let expected = "| name     |  t/s |\n|----------|-----:|\n| a\\|\\u{a} |    1 |\n| longer é | 1000 |\n";
        assert_eq!(table.render(), expected);
        assert_eq!(facts(&[("a", "1".into()), ("bcd", "2\n3".into())]), "a    1\nbcd  2\\u{a}3\n");
    }

    #[test]
    fn long_facts_are_wrapped() {
        let long = "word ".repeat(40);
        let shown = block("cpu: a processor", &[("threads".into(), "2".into()), ("why".into(), long.clone())]);
        assert!(shown.starts_with("cpu: a processor\n  threads  2\n  why      word word"), "{shown}");
        assert!(shown.lines().all(|line| line.chars().count() <= WIDTH) && shown.lines().count() > 4, "{shown}");
        assert!(shown.lines().skip(3).all(|line| line.starts_with("           word")), "{shown}");
        assert_eq!(shown.matches("word").count(), 40);
        assert_eq!(wrap("unbreakable", 3), ["unbreakable"]);
    }
}
