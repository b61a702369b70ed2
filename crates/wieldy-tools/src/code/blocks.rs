//! Blocks: the pieces of a file that ranked search compares, as large as a definition.

/// Files without definitions are cut into pieces of so many lines.
const PIECE_LINES: u32 = 40;
/// Longer definitions are cut.
const BLOCK_LINES_MAX: u32 = 400;

/// A definition, by its lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Block {
    /// The name with its container, such as `Walk::next`.
    pub(crate) symbol: String,
    pub(crate) kind: &'static str,
    /// The first line, of its documentation if it has any.
    pub(crate) line: u32,
    pub(crate) end_line: u32,
}

/// A piece of a file: a definition without those inside it, or lines between definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) line: u32,
    pub(super) end_line: u32,
    /// The place of the definition in the list of blocks.
    pub(super) block: Option<usize>,
}

/// Returns the innermost of these definitions that has the line.
pub(super) fn around(blocks: &[Block], line: u32) -> Option<usize> {
    let holding = blocks.iter().enumerate().filter(|(_, block)| block.line <= line && line <= block.end_line);
    holding.min_by_key(|(place, block)| (block.end_line - block.line, *place)).map(|(place, _)| place)
}

/// Cuts a file of so many lines into pieces: each line is in one piece, that of the innermost definition around it.
pub(super) fn pieces(blocks: &[Block], lines: u32) -> Vec<Piece> {
    let mut owner: Vec<Option<usize>> = vec![None; lines as usize];
    let mut order: Vec<usize> = (0..blocks.len()).collect();
    // Inner definitions come later and take their lines from those around them.
    order.sort_by_key(|place| std::cmp::Reverse(blocks[*place].end_line.saturating_sub(blocks[*place].line)));
    for place in order {
        let (from, to) = (blocks[place].line.max(1) as usize - 1, blocks[place].end_line.min(lines) as usize);
        if from < to && blocks[place].is_large() {
            owner[from..to].fill(Some(place));
        }
    }
    let mut pieces: Vec<Piece> = Vec::new();
    for (at, block) in owner.into_iter().enumerate() {
        let line = at as u32 + 1;
        let lines_max = if block.is_some() { BLOCK_LINES_MAX } else { PIECE_LINES };
        match pieces.last_mut() {
            Some(last) if last.block == block && line - last.line < lines_max => last.end_line = line,
            _ => pieces.push(Piece { line, end_line: line, block }),
        }
    }
    pieces
}

impl Block {
    /// Returns true if it is a piece of its own: fields and variants belong to the definition around them.
    fn is_large(&self) -> bool {
        !matches!(self.kind, "field" | "variant" | "variable") || self.end_line > self.line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(symbol: &str, kind: &'static str, line: u32, end_line: u32) -> Block {
        Block { symbol: symbol.into(), kind, line, end_line }
    }

    #[test]
    fn each_line_belongs_to_the_innermost_definition() {
        let blocks = [
            block("A", "class", 3, 10),
            block("A.x", "field", 4, 4),
            block("A.f", "method", 5, 7),
            block("g", "function", 12, 12),
        ];
        let found: Vec<_> =
            pieces(&blocks, 13).into_iter().map(|piece| (piece.line, piece.end_line, piece.block)).collect();
        assert_eq!(
            found,
            [
                (1, 2, None),
                (3, 4, Some(0)),
                (5, 7, Some(2)),
                (8, 10, Some(0)),
                (11, 11, None),
                (12, 12, Some(3)),
                (13, 13, None)
            ]
        );
        assert_eq!([4, 6, 11].map(|line| around(&blocks, line)), [Some(1), Some(2), None]);
    }

    #[test]
    fn lines_without_definitions_are_cut_into_equal_pieces() {
        let found: Vec<_> = pieces(&[], 90).into_iter().map(|piece| (piece.line, piece.end_line)).collect();
        assert_eq!(found, [(1, 40), (41, 80), (81, 90)]);
        let wild = [block("a", "function", 7, 2), block("b", "function", 0, 90), block("c", "function", 80, 99)];
        assert_eq!(pieces(&wild, 3).len(), 1);
        assert_eq!(pieces(&wild, 0), []);
    }
}
