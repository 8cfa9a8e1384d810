"""Lets the PyPI build of torch be imported without the CUDA libraries it links to.

There is no CPU-only torch on PyPI, and its CUDA packages are several gigabytes. The oracle never calls them, so this makes
small shared libraries that satisfy the dynamic linker: every missing function exists and returns 0 (and the count of devices
an error, so that torch sees no GPU). Needs gcc and readelf.

    python oracle/stub_cuda.py SITE_PACKAGES/torch/lib
"""

import collections
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CUDA_LIBRARY = re.compile(r"^lib(cu|nv|nccl)[\w.]*\.so")
MARK = "stands in for a CUDA library"
NO_DEVICE = {"cudaGetDeviceCount": 100}
"""Return values other than 0: here cudaErrorNoDevice."""


@dataclass
class Links:
    """What the libraries of a folder ask of others."""

    needed: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    """Library to the symbol versions that it must define."""
    undefined: set[tuple[str, str]] = field(default_factory=set)
    """(symbol, version) that must come from elsewhere; version may be empty."""
    defined: set[str] = field(default_factory=set)


def main(folder: Path) -> None:
    stubs = {path.name for path in folder.glob("lib*.so*") if is_stub(path)}
    links = Links()
    for library in sorted(folder.glob("*.so*")):
        if library.name not in stubs:
            read_links(library, links)
    missing = sorted(name for name in links.needed if CUDA_LIBRARY.match(name)
                     and (name in stubs or not (folder / name).exists()))
    if not missing:
        print("no CUDA library is missing")
        return
    owner = {version: name for name in missing for version in links.versions[name]}
    symbols = {name: collections.defaultdict(set) for name in missing}
    for symbol, version in links.undefined:
        if version in owner:
            symbols[owner[version]][version].add(symbol)
        elif not version and symbol not in links.defined:
            symbols[missing[0]][""].add(symbol)  # without a version, any loaded library may define it
    for name in missing:
        for version in links.versions[name]:
            symbols[name][version].add("stub_" + re.sub(r"\W", "_", version))
        build(folder / name, symbols[name])
        print(f"{name}: {sum(map(len, symbols[name].values()))} symbols")


def read_links(library: Path, links: Links) -> None:
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("-d", library)):
        links.needed.add(name)
    current = None
    for line in readelf("-V", library).splitlines():
        if found := re.search(r"File: (\S+)", line):
            current = found[1]
        elif current and (found := re.search(r"Name: (\S+)\s+Flags", line)):
            links.versions[current].add(found[1])
    for line in readelf("--dyn-syms", library).splitlines():
        columns = line.split()
        if len(columns) < 8 or not columns[0].endswith(":"):
            continue
        symbol, _, version = columns[7].partition("@")
        if columns[6] != "UND":
            links.defined.add(symbol)
        elif columns[4] != "WEAK":
            links.undefined.add((symbol, version.lstrip("@")))


def build(target: Path, symbols: dict[str, set[str]]) -> None:
    """Compile one stand-in with its symbols under their versions."""
    functions = [f"long {symbol}(void) {{ return {NO_DEVICE.get(symbol, 0)}; }}"
                 for names in symbols.values() for symbol in sorted(names) if symbol.isidentifier()]
    versions = ["%s { global: %s };" % (version, " ".join(f"{symbol};" for symbol in sorted(names)))
                for version, names in sorted(symbols.items()) if version]
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text("\n".join([f'const char stub_mark[] = "{MARK}";'] + functions) + "\n")
        script.write_text("\n".join(versions) + "\n")
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", target, source]
        subprocess.run(command + ([f"-Wl,--version-script={script}"] if versions else []), check=True)


def is_stub(library: Path) -> bool:
    return library.stat().st_size < 10_000_000 and MARK.encode() in library.read_bytes()


def readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", "--wide", option, library], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
