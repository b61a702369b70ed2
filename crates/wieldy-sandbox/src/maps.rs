//! Reading `/proc/self/maps` after a `fork`, when nothing may allocate: which memory is private and anonymous.

use std::ops::Range;

/// Mappings below this size are left alone: they are worth nothing, and among them are the zeroed statics of
/// the program and its libraries, which the C library may still look at.
const WORTHWHILE_BYTES: usize = 1 << 20;

/// The addresses of the mapping that `line` describes, if it is writable, private and backed by no file: the heap,
/// or the stack of a thread.
pub(crate) fn private_memory(line: &[u8]) -> Option<Range<usize>> {
    let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
    let mut bounds = fields.next()?.split(|byte| *byte == b'-');
    let range = hexadecimal(bounds.next()?)?..hexadecimal(bounds.next()?)?;
    let (rights, _offset, _device, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    if rights != b"rw-p" || inode != b"0" {
        return None;
    }
    let worthwhile = range.end.saturating_sub(range.start) >= WORTHWHILE_BYTES;
    match fields.next() {
        Some(b"[heap]") => Some(range),
        None => worthwhile.then_some(range),
        Some(name) => (worthwhile && name.starts_with(b"[anon")).then_some(range),
    }
}

/// Calls `visit` with each part of `range` that lies outside both of the `kept` ranges.
pub(crate) fn outside(range: Range<usize>, kept: [Range<usize>; 2], mut visit: impl FnMut(Range<usize>)) {
    let [first, second] = if kept[0].start <= kept[1].start { kept } else { [kept[1].clone(), kept[0].clone()] };
    let mut from = range.start;
    for keep in [first, second] {
        if keep.end <= from || keep.start >= range.end {
            continue;
        }
        if keep.start > from {
            visit(from..keep.start);
        }
        from = keep.end;
    }
    if from < range.end {
        visit(from..range.end);
    }
}

fn hexadecimal(digits: &[u8]) -> Option<usize> {
    digits.iter().try_fold(0_usize, |number, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        Some(number.checked_mul(16)?.wrapping_add(digit as usize))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_heap_and_large_anonymous_memory_is_found() {
        let found = |line: &str| private_memory(line.as_bytes());
        assert_eq!(found("1000-2000 rw-p 00000000 00:00 0                  [heap]"), Some(0x1000..0x2000));
        assert_eq!(found("7f0000000000-7f0000200000 rw-p 00000000 00:00 0"), Some(0x7f00_0000_0000..0x7f00_0020_0000));
        assert_eq!(found("100000-200000 rw-p 00000000 00:00 0 [anon: glibc: malloc]"), Some(0x10_0000..0x20_0000));
        for other in [
            "1000-2000 rw-p 00000000 00:00 0",                       // small: perhaps statics
            "100000-200000 r--p 00000000 00:00 0",                   // what the supervisor reads from
            "100000-200000 rw-s 00000000 00:00 0",                   // shared with others
            "100000-200000 rw-p 00000000 fe:01 77 /usr/lib/libc.so", // a file's
            "100000-200000 rw-p 00000000 00:00 0 [stack]",
            "ten-twenty rw-p",
            "",
        ] {
            assert_eq!(found(other), None, "{other:?}");
        }
    }

    #[test]
    fn what_is_kept_is_cut_out_wherever_it_lies() {
        let parts = |kept| {
            let mut parts = Vec::new();
            outside(10..20, kept, |part| parts.push((part.start, part.end)));
            parts
        };
        assert_eq!(parts([0..5, 25..30]), [(10, 20)]);
        assert_eq!(parts([15..16, 12..13]), [(10, 12), (13, 15), (16, 20)]);
        assert_eq!(parts([5..12, 18..25]), [(12, 18)]);
        assert_eq!(parts([12..16, 14..18]), [(10, 12), (18, 20)]);
        assert_eq!(parts([0..30, 0..30]), []);
    }
}
