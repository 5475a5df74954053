#!/usr/bin/env python3
"""Writes release/hot.ld: hot.py PROGRAM STAGE=FOLDER... > release/hot.ld.

PROGRAM is one built for release, with its symbols. FOLDER has logs of qemu's user mode (`-d in_asm`): each block of code is
in them once, under the name of its function, when it first runs. Functions of an earlier stage come first: a process that
needs no later stage maps no page of it.

Names of the compiler differ from build to build, so the script has globs: of a module, where most of it runs, else of a
function. Of all ways to cover the functions that ran it takes the one that costs least.
"""

import os
import re
import subprocess
import sys

# What a pattern costs, in bytes of code that does not run; and a byte that a later stage runs.
PATTERN, LATER = 1000, 0.9

HEADER = """\
/* Code that runs lies together. The kernel maps 64 KiB around each page of the program that is touched, and counts them for
 * both processes of a node; spread over the program, what runs would have most of it mapped.
 *
 * Given to the linker as -T (the Dockerfile's RUSTFLAGS, release/build.sh): the section comes before .text. lld, which Rust
 * brings for x86-64, takes a moment; GNU ld takes minutes, so that arm64 goes without. A plain `cargo build --release` goes without, and differs in nothing but the order of functions. A pattern that
 * names nothing does no harm; make test-image says when more than a tenth do, as after an update of Rust or of tokio. Cargo
 * does not see a change here: touch src/main.rs.
 *
 * Made by hot.py from what ran on x86-64. To make it anew, with Debian's qemu-user:
 *
 *   1. Build as the Dockerfile does. QEMU_LOG=in_asm QEMU_LOG_FILENAME=FOLDER/%d qemu-x86_64 PROGRAM run ... writes a log of
 *      each process. The NVML agent starts by qemu with tests/tools/exec_by_qemu.c, compiled for x86-64 (EM_X86_64 in the
 *      place of EM_AARCH64), as tests/tools/arm64.sh has it. A script that does all this is LINKWISE_BENCH_PROGRAM.
 *   2. Stage idle: a node without GPUs, 45 seconds. Stage gpus: the benchmark footprint, with /metrics, /healthz and /readyz
 *      asked for all the while. Stage claims: the benchmark dra. Copies of the agents' logs are stage agent, which is first.
 *   3. release/hot.py PROGRAM agent=FOLDER idle=FOLDER gpus=FOLDER claims=FOLDER > release/hot.ld
 */
"""


def globs(symbol):
    """The patterns that name a function, from its crate's to its own."""
    if symbol.startswith("_ZN"):
        at, parts = 3, []
        while number := re.match(r"\d+", symbol[at:]):
            end = at + number.end() + int(number[0])
            parts.append(symbol[at:end])
            at = end
        if parts and re.fullmatch("17h[0-9a-f]{16}", parts[-1]):
            parts.pop()
        # Of an `impl`, of drop_in_place: the type's modules, then the whole.
        for place, mark, start in ((0, "_$LT$", "_ZN*_$LT$"), (2, "drop_in_place$LT$", "_ZN4core3ptr*drop_in_place$LT$")):
            holder = re.sub(r"^\d+", "", (parts + [""] * 3)[place])
            if holder.startswith(mark):
                words = re.split(r"(\.\.|\$\w+\$)", holder[len(mark) :])
                ends = [i + 1 for i, word in enumerate(words) if re.fullmatch(r"\w+", word)][:5]
                wide = [start + "".join(words[:end]) + "*" for end in ends]
                return wide + ["_ZN" + "".join(parts) + "17h*"]
        wide = ["_ZN" + "".join(parts[: i + 1]) + "*" for i in range(len(parts) - 1)]
        return wide + ["_ZN" + "".join(parts) + "17h*"]
    if symbol.startswith("_R"):
        # Rust's own library. A crate's name has a hash before it.
        own = re.sub(r"Cs[0-9A-Za-z]+_(?=\d)", "Cs*_", re.sub(r"\.[0-9]+$", "*", symbol))
        wide, (_, _, rest) = [], own.partition("Cs*_")
        name = "_R*"
        while number := re.match(r"(\d+)_?", rest):
            end = number.end() + int(number[1])
            name, rest = name + ("_" if name == "_R*" else "") + rest[:end], rest[end:]
            wide.append(name + "*")
        return wide + [own]
    return [symbol]


class Node:
    """A pattern, with the bytes of the functions that it names by the stage that ran them (None: no stage)."""

    def __init__(self):
        self.kids, self.bytes = {}, {}

    def best(self, pattern):
        """The least cost of covering what ran, and the patterns for it, each with its stage."""
        ran = [stage for stage in self.bytes if stage is not None]
        if not ran:
            return 0, []
        later = sum(self.bytes[stage] for stage in ran if stage != min(ran))
        whole = self.bytes.get(None, 0) + LATER * later + PATTERN, [(min(ran), pattern)]
        if not self.kids:
            return whole
        parts = [kid.best(name) for name, kid in sorted(self.kids.items())]
        apart = sum(cost for cost, _ in parts)
        return whole if whole[0] <= apart else (apart, [each for _, patterns in parts for each in patterns])


def main(program, stages):
    sizes = {}
    for line in subprocess.run(["nm", "-S", program], capture_output=True, text=True, check=True).stdout.splitlines():
        match line.split():
            case [_, size, "t" | "T" | "w" | "W", name]:
                sizes[name] = int(size, 16)
    ran = {}
    for number, (_, folder) in enumerate(stages):
        for log in os.scandir(folder):
            with open(log.path, errors="replace") as lines:
                names = {line[4:].strip() for line in lines if line.startswith("IN: ")}
            for name in names & sizes.keys():
                ran.setdefault(name, number)
    root = Node()
    for symbol, size in sizes.items():
        node, stage = root, ran.get(symbol)
        for pattern in globs(symbol):
            node = node.kids.setdefault(pattern, Node())
            node.bytes[stage] = node.bytes.get(stage, 0) + size
    chosen = [each for name, kid in sorted(root.kids.items()) for each in kid.best(name)[1]]
    print(HEADER + "SECTIONS {\n  .text.hot_linkwise : {")
    for number, (name, _) in enumerate(stages):
        print(f"    /* {name} */\n    *(")
        line = "     "
        for pattern in sorted(f".text.{pattern}" for stage, pattern in chosen if stage == number):
            if len(line) + len(pattern) > 118 and line.strip():
                print(line)
                line = "     "
            line += " " + pattern
        print(line + "\n    )")
    print("  }\n} INSERT BEFORE .text;")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], [argument.split("=", 1) for argument in sys.argv[2:]])
