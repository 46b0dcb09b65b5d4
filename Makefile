# The single entry point for building, testing and installing: `make help`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

PREFIX ?= /usr/local
DESTDIR ?=
# Given to cargo, because a user's own configuration may set another one. An empty one would be the checkout.
ifeq ($(CARGO_TARGET_DIR),)
override CARGO_TARGET_DIR := target
endif
# A variable of the user would replace that of .cargo/config.toml.
export CARGO_BUILD_TARGET := x86_64-unknown-linux-gnu
ROCKENV := $(CARGO_TARGET_DIR)/$(CARGO_BUILD_TARGET)/release/rockenv

need-root = [ "$$(id -u)" = 0 ] || { echo 'make $@ needs root: sudo -E env "HOME=$$HOME" "PATH=$$PATH" make $@' >&2; exit 1; }

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

.PHONY: demo
demo: ## build, install what the host lacks, compile a HIP program for gfx1103 in an env, show it (root)
	@$(need-root)
	@tests/host build
	cargo build --release --locked --target-dir "$(CARGO_TARGET_DIR)"
	"$(ROCKENV)" setup --yes
	"$(ROCKENV)" up hip-smoke --target gfx1103
	"$(ROCKENV)" ls
	"$(ROCKENV)" snapshot ls hip-smoke-gfx1103
	"$(ROCKENV)" du

.PHONY: test
test: ## install what the tests need and run all of them (root)
	@$(need-root)
	@tests/host test
	@tests/all

.PHONY: soak
soak: ## 10,000 kills on stores of each kind; stopped, it goes on where it was (root, an hour)
	@$(need-root)
	@tests/host test
	nice cargo test --locked --test soak -- --nocapture

FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?= $(notdir $(wildcard fuzz/corpus/*))

# Stable cargo suffices: the instrumentation is no nightly option, and hardly any unsafe code needs a sanitizer.
.PHONY: fuzz
fuzz: ## hostile files for every reader of files, FUZZ_SECONDS (60) for each; findings in fuzz/artifacts
	@tests/host fuzz
	@type -P cargo-fuzz >/dev/null || cargo install --locked --version 0.13.2 cargo-fuzz
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	export TMPDIR=$$scratch RUSTFLAGS=-Ccodegen-units=16; \
	for target in $(FUZZ_TARGETS); do \
	    echo "== $$target"; mkdir -p "fuzz/target/corpus/$$target"; \
	    built_in=; [ "$$target" != profile ] || built_in='profiles images'; \
	    RUSTC_BOOTSTRAP=1 nice cargo fuzz run --sanitizer none "$$target" "fuzz/target/corpus/$$target" "fuzz/corpus/$$target" $$built_in -- \
	        -max_total_time=$(FUZZ_SECONDS) -timeout=20 -rss_limit_mb=1024 -max_len=65536 -print_final_stats=1 -verbosity=0; \
	done

.PHONY: check
check: fmt clippy doc deny ## formatting, lints, documentation, dependencies

.PHONY: fmt
fmt: ## is everything formatted?
	cargo fmt --check

.PHONY: clippy
clippy: ## lints; a warning is an error
	cargo clippy --locked --all-targets -- -D warnings
	cargo clippy --locked --test services --test soak --test vm -- -D warnings

.PHONY: doc
doc: ## the library's documentation; a warning is an error
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --document-private-items

.PHONY: docs
docs: ## the book of docs/ in target/book, with search; its links are checked
	tests/mdbook
	tests/book "$(CARGO_TARGET_DIR)/book"

PICTURES := $(CARGO_TARGET_DIR)/pictures

.PHONY: pictures
pictures: build ## docs/pictures, from real runs in an empty store (root)
	@$(need-root)
	@type -P chromium >/dev/null || tests/host test
	@[ -d "$(PICTURES)" ] || { python3 -m venv "$(PICTURES).part" && "$(PICTURES).part/bin/pip" install --quiet pyte==0.8.2 rich==15.0.0 && \
	    mv "$(PICTURES).part" "$(PICTURES)"; }
	"$(PICTURES)/bin/python" docs/pictures/record.py "$(ROCKENV)"

.PHONY: deny
deny: ## licences, advisories and sources of dependencies, where cargo-deny is installed
	@if type -P cargo-deny >/dev/null; then cargo deny --locked check; \
	else echo 'cargo-deny is not installed: dependencies not checked'; fi

.PHONY: build
build: ## the release binary
	@tests/host build
	cargo build --release --locked --target-dir "$(CARGO_TARGET_DIR)"

.PHONY: bench
bench: ## measure, against the peers; BENCH=--in-memory leaves the disk out, and needs 20 GiB of memory (root)
	@$(need-root)
	@tests/host test
	@tests/host bench
	cargo build --locked --profile dist --config packaging/dist.toml --target-dir "$(CARGO_TARGET_DIR)"
	ROCKENV="$(CARGO_TARGET_DIR)/$(CARGO_BUILD_TARGET)/dist/rockenv" tests/bench/run $(BENCH)

.PHONY: gen
gen: ## docs/reference/cli.md, from the arguments
	ROCKENV_UPDATE=1 cargo test --locked --quiet --test cli_reference

.PHONY: install
install: build ## into PREFIX (/usr/local), below DESTDIR
	packaging/stage "$(ROCKENV)" "$(DESTDIR)" "$(PREFIX)"

PACKAGES := $(CARGO_TARGET_DIR)/packages
# `export` writes as the user behind sudo, pkexec or doas, who may not write in a target directory that root made.
package = $(need-root); "$(ROCKENV)" setup --yes; "$(ROCKENV)" up ./packaging/rockenv.toml --until $(1); \
	rm -rf "$(PACKAGES)"; install -d -o "$${SUDO_UID:-$${PKEXEC_UID:-$${DOAS_USER:-0}}}" "$(PACKAGES)"; \
	"$(ROCKENV)" export rockenv "$(PACKAGES)"

.PHONY: dist
dist: build ## a static binary as tar.zst, its SBOM and checksums, built in an env, in target/packages (root)
	@$(call package,sbom)

.PHONY: deb
deb: build ## the same, and a package for Debian and Ubuntu (root)
	@$(call package,deb)

.PHONY: rpm
rpm: build ## the same, and a package for Fedora and its like (root)
	@$(call package,rpm)

.PHONY: arch
arch: build ## the same, and a package for Arch Linux (root)
	@$(call package,arch)

.PHONY: clean
clean: ## remove what was built; environments are kept
	cargo clean --target-dir "$(CARGO_TARGET_DIR)"
