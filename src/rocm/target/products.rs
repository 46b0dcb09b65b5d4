//! Owns the retail names of products with each target, and matching what a person types.
//!
//! The names are from LLVM's `AMDGPUUsage`, AMD's "GPU hardware specifications" and TheRock's table. These differ in
//! one point: TheRock lists the RX 5500 under gfx1011, LLVM and Linux under gfx1012. Mobile products without an entry
//! there have the chip of a listed desktop product.

use std::sync::LazyLock;

use super::{Target, all};
use crate::sys::error::Result;

/// Targets with their products, best known first.
static PRODUCTS: LazyLock<Vec<(&str, Vec<&str>)>> = LazyLock::new(|| {
    let lines = include_str!("products.txt").lines();
    let rows = lines.filter_map(|line| line.split_once(": "));
    rows.map(|(target, products)| (target, products.split(", ").collect()))
        .collect()
});

/// Words that people add or leave out.
const BRANDS: [&str; 8] = [
    "amd", "radeon", "rx", "instinct", "pro", "ryzen", "graphics", "tm",
];

/// Returns the products with a target, best known first.
pub(super) fn of(target: Target) -> &'static [&'static str] {
    let mut rows = PRODUCTS.iter();
    let row = rows.find(|(name, _)| *name == target.name());
    row.map_or(&[], |(_, products)| products)
}

/// Returns the targets of a product, each with the product's full name. `780m` or `AMD Radeon RX 7900 XTX` has one, a
/// name such as `strix` has several.
fn by_product(text: &str) -> Vec<(Target, &'static str)> {
    let typed = words(text);
    if typed.is_empty() || text.len() > 80 {
        return Vec::new();
    }
    let find = |fits: &dyn Fn(&[String]) -> bool| {
        let mut found: Vec<(Target, &'static str)> = Vec::new();
        for target in all() {
            let mut products = of(target).iter();
            if let Some(product) = products.find(|product| fits(&words(product))) {
                found.push((target, product));
            }
        }
        found
    };
    match find(&|words| words == typed) {
        exact if !exact.is_empty() => exact,
        _ => find(&|words| words.starts_with(&typed)),
    }
}

/// Returns the product's target. If it has several, the error lists them.
pub(super) fn only(text: &str) -> Result<Option<Target>> {
    match by_product(text)[..] {
        [] => Ok(None),
        [(target, _)] => Ok(Some(target)),
        ref several => {
            let shown = text.escape_debug();
            let list = several.iter();
            let list = list.map(|(target, product)| format!("{target} ({product})"));
            let list = list.collect::<Vec<_>>().join(", ");
            let message = format!("`{shown}` fits several targets: {list}");
            let help = format!("name one of them, such as `{}`", several[0].0);
            Err(usage!("{message}").help(help))
        }
    }
}

/// Returns the distinctive parts of a product's name: lower-case words and numbers, without brands.
fn words(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut before = ' ';
    for letter in text.chars().flat_map(char::to_lowercase) {
        if letter.is_alphanumeric() {
            // `7900xtx` becomes `7900 xtx`.
            let same =
                before.is_alphanumeric() && before.is_ascii_digit() == letter.is_ascii_digit();
            match words.last_mut().filter(|_| same) {
                Some(word) => word.push(letter),
                None => words.push(letter.to_string()),
            }
        }
        before = letter;
    }
    words.retain(|word| !BRANDS.contains(&word.as_str()));
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::error::Kind;

    #[test]
    fn every_target_has_products_and_every_product_one_target() {
        for target in all() {
            assert!(!of(target).is_empty(), "{target}");
            for product in of(target) {
                let found = by_product(product).into_iter().map(|(one, _)| one);
                assert!(found.eq([target]), "{product}");
            }
        }
        for (name, _) in PRODUCTS.iter() {
            Target::parse(name).unwrap();
        }
    }

    /// TheRock names some products too. People do not type memory sizes.
    #[test]
    fn therock_agrees() {
        let table: serde_json::Value =
            serde_json::from_str(include_str!("gpu_targets.json")).unwrap();
        for row in table["targets"].as_array().unwrap() {
            let target = Target::parse(row["name"].as_str().unwrap()).unwrap();
            for name in row["marketing_names"].as_array().unwrap() {
                let name = name.as_str().unwrap();
                let name = name.trim_end_matches(" 8GB").trim_end_matches(" 4GB");
                let found = by_product(name).into_iter().map(|(one, _)| one);
                let is_other = target.name() == "gfx1011" && name.contains("RX 5500");
                assert!(found.eq([target]) != is_other, "{target}: {name}");
            }
        }
    }

    #[test]
    fn what_people_type() {
        for row in [
            "gfx1103: 780m, 780M, Radeon 740M, AMD Radeon(TM) 760M Graphics",
            // `7900` stands for several cards with the same target.
            "gfx1100: RX 7900 XTX, rx7900xtx, rx-7900-gre, 7900, W7900",
            "gfx1101: 7800 XT, 7700",
            "gfx1102: 7700S, 7600",
            "gfx1150: 890M",
            "gfx1151: 8060s, strix-halo, Ryzen AI Max+ 395",
            "gfx1152: 860m",
            "gfx1200: 9060xt",
            "gfx1201: 9070",
            "gfx1030: RX 6800, 6900",
            "gfx1031: 6800M",
            "gfx1012: 5500 xt",
            "gfx942: mi300x, MI300A, mi300, MI-325X",
            "gfx950: mi355x",
            "gfx90a: mi210",
            "gfx906: Radeon VII",
        ] {
            let (want, typed) = row.split_once(": ").unwrap();
            for text in typed.split(", ") {
                let found = by_product(text).into_iter().map(|(one, _)| one.name());
                assert_eq!(found.collect::<Vec<_>>(), [want], "{text}");
            }
        }
    }

    #[test]
    fn several_and_none() {
        let error = only("strix").unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert_eq!(
            error.message(),
            "`strix` fits several targets: gfx1150 (Strix Point), gfx1151 (Strix Halo)"
        );
        assert!(by_product("mi").len() > 3);
        // Part of a word, or a brand alone, does not match.
        for text in "|radeon|AMD RX|78|790|xtx|gfx1103|hip-smoke|800".split('|') {
            assert_eq!(only(text).unwrap(), None, "{text}");
        }
        assert_eq!(only(&"9070 ".repeat(1000)).unwrap(), None);
    }
}
