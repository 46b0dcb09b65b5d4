//! Owns PAX extended headers: parsing their key-value records, and interpreting the known keys.

use crate::image::tar::{broken, lossy};
use crate::sys::error::Result;

#[derive(Debug, Default)]
pub(crate) struct Pax {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) uid: Option<u64>,
    pub(crate) gid: Option<u64>,
    pub(crate) mtime: Option<(i64, u32)>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) sparse: Sparse,
    pub(crate) ignored: Vec<&'static str>,
}

#[derive(Debug, Default)]
pub(crate) struct Sparse {
    pub(crate) is_used: bool,
    pub(crate) major: Option<u64>,
    pub(crate) minor: Option<u64>,
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) real_size: Option<u64>,
    pub(crate) numbers: Vec<u64>,
}

impl Pax {
    pub(crate) fn parse(data: &[u8]) -> Result<Self> {
        let mut pax = Self::default();
        for record in Records(data) {
            let (key, value) = record?;
            pax.set(key, value)?;
        }
        Ok(pax)
    }

    /// Parses a global header, which may set defaults. A name, size or attribute for every entry can only be an attack.
    pub(crate) fn parse_global(&mut self, data: &[u8]) -> Result<()> {
        for record in Records(data) {
            let (key, value) = record?;
            match key {
                b"mtime" | b"uid" | b"gid" => self.set(key, value)?,
                _ if [b"path".as_slice(), b"linkpath", b"size"].contains(&key)
                    || key.starts_with(ATTRIBUTE)
                    || key.starts_with(b"GNU.sparse.") =>
                {
                    return Err(broken!(
                        "a global header sets `{}` for all entries",
                        lossy(key)
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<()> {
        let sparse = &mut self.sparse;
        match key {
            b"path" => self.path = Some(name(value)),
            b"linkpath" => self.link = Some(name(value)),
            b"size" => self.size = Some(decimal(key, value)?),
            b"uid" => self.uid = Some(decimal(key, value)?),
            b"gid" => self.gid = Some(decimal(key, value)?),
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.major" => sparse.major = Some(decimal(key, value)?),
            b"GNU.sparse.minor" => sparse.minor = Some(decimal(key, value)?),
            b"GNU.sparse.name" => sparse.name = Some(value.to_vec()),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => {
                sparse.real_size = Some(decimal(key, value)?);
            }
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                sparse.numbers.push(decimal(key, value)?);
            }
            b"GNU.sparse.map" => {
                for part in value.split(|byte| *byte == b',') {
                    sparse.numbers.push(decimal(key, part)?);
                }
            }
            b"SCHILY.acl.access" | b"SCHILY.acl.default" => self.ignored.push("acl as text"),
            b"RHT.security.selinux" => self.ignored.push("xattr security.selinux"),
            _ => {
                if let Some(name) = key.strip_prefix(ATTRIBUTE) {
                    self.xattrs.push((attribute_name(name), value.to_vec()));
                } else if key.starts_with(b"LIBARCHIVE.xattr.") && self.xattrs.is_empty() {
                    // By default libarchive writes each attribute in both spellings.
                    self.ignored.push("xattr in libarchive's spelling");
                }
            }
        }
        sparse.is_used |= key.starts_with(b"GNU.sparse.");
        Ok(())
    }
}

const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";
/// GNU tar's escapes for characters that would end the key.
const ESCAPED: [(u8, &[u8]); 2] = [(b'=', b"%3D"), (b'%', b"%25")];

pub(super) fn attribute_key(name: &[u8]) -> Vec<u8> {
    let mut key = ATTRIBUTE.to_vec();
    for byte in name {
        match ESCAPED.iter().find(|(plain, _)| plain == byte) {
            Some((_, escaped)) => key.extend_from_slice(escaped),
            None => key.push(*byte),
        }
    }
    key
}

/// Returns the attribute name that a key contains in escaped form.
fn attribute_name(mut written: &[u8]) -> Vec<u8> {
    let mut name = Vec::new();
    while let Some((first, rest)) = written.split_first() {
        let mut escapes = ESCAPED.into_iter();
        let found =
            escapes.find_map(|(plain, escaped)| Some((plain, written.strip_prefix(escaped)?)));
        let (byte, rest) = found.unwrap_or((*first, rest));
        name.push(byte);
        written = rest;
    }
    name
}

/// The records of a PAX header: `<length> <key>=<value>\n`; the length counts itself.
struct Records<'a>(&'a [u8]);

impl<'a> Iterator for Records<'a> {
    type Item = Result<(&'a [u8], &'a [u8])>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let record = (|| {
            let blank = self.0.iter().take(20).position(|byte| *byte == b' ')?;
            let length = usize::try_from(decimal(b"length", &self.0[..blank]).ok()?).ok()?;
            let record = self
                .0
                .get(..length)?
                .get(blank + 1..)?
                .strip_suffix(b"\n")?;
            let equals = record
                .iter()
                .position(|byte| *byte == b'=')
                .filter(|at| *at > 0 && !record[..*at].contains(&0))?;
            self.0 = &self.0[length..];
            Some((&record[..equals], &record[equals + 1..]))
        })();
        if record.is_none() {
            self.0 = &[];
        }
        Some(record.ok_or_else(|| broken!("an extended header is malformed")))
    }
}

fn decimal(key: &[u8], value: &[u8]) -> Result<u64> {
    let text = std::str::from_utf8(value)
        .ok()
        .filter(|text| !text.starts_with('+'));
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| broken!("an extended header's `{}` is not a number", lossy(key)))
}

/// Removes trailing NUL bytes, which some writers include. Any other NUL stays and is refused: readers that stop at it
/// would see a different name than others.
fn name(value: &[u8]) -> Vec<u8> {
    let end = value.iter().rposition(|byte| *byte != 0);
    value[..end.map_or(0, |end| end + 1)].to_vec()
}

/// Parses `[-]seconds[.fraction]`. The fraction of a negative time counts down, too.
///
/// Anything else is refused. GNU tar uses the leading digits: it reads `999xxx9324` as 999, while other readers see 0,
/// and neither is right.
fn time(value: &[u8]) -> Result<(i64, u32)> {
    let fail = || broken!("an extended header's `mtime` is not a time");
    let text = std::str::from_utf8(value).map_err(|_| fail())?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) || whole.starts_with('+') {
        return Err(fail());
    }
    let seconds: i64 = whole.parse().map_err(|_| fail())?;
    let nanoseconds: u32 = format!("{fraction:0<9}")[..9].parse().map_err(|_| fail())?;
    match (whole.starts_with('-'), nanoseconds) {
        (true, 1..) => Ok((
            seconds.checked_sub(1).ok_or_else(fail)?,
            1_000_000_000 - nanoseconds,
        )),
        _ => Ok((seconds, nanoseconds)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pax_times() {
        assert_eq!(
            time(b"1700000000.123456789").unwrap(),
            (1_700_000_000, 123_456_789)
        );
        assert_eq!(time(b"1.5").unwrap(), (1, 500_000_000));
        assert_eq!(time(b"-1.25").unwrap(), (-2, 750_000_000));
        for bad in ["", "1.x", "+1", "nan", "1e3"] {
            assert!(time(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn names_of_attributes_are_written_as_gnu_tar_does() {
        for (name, key) in [
            ("user.note", "SCHILY.xattr.user.note"),
            ("user.a=b", "SCHILY.xattr.user.a%3Db"),
            ("user.50%", "SCHILY.xattr.user.50%25"),
            ("user.%3D", "SCHILY.xattr.user.%253D"),
        ] {
            assert_eq!(attribute_key(name.as_bytes()), key.as_bytes());
            let length = key.len() + "=x\n00 ".len();
            let pax = Pax::parse(format!("{length} {key}=x\n").as_bytes()).unwrap();
            assert_eq!(pax.xattrs, [(name.as_bytes().to_vec(), b"x".to_vec())]);
        }
        assert_eq!(attribute_name(b"user.100%"), b"user.100%");
    }

    #[test]
    fn pax_records() {
        let all = |data: &[u8]| {
            Records(data)
                .collect::<Result<Vec<_>>>()
                .map(|list| list.len())
        };
        assert_eq!(all(b"6 a=b\n9 cc=dd\n").ok(), None);
        assert_eq!(all(b"6 a=b\n7 cc=d\n").unwrap(), 2);
        for bad in [
            &b"7 a=b\n"[..],
            b"6 a=bx",
            b"0 a=b\n",
            b"99999999999999999999 a=b\n",
            b"6 =ab\n",
            b"5 ab\n",
            b"x",
        ] {
            assert!(all(bad).is_err(), "{}", lossy(bad));
        }
    }
}
